"""The application, and the one place where errors become messages and exit codes."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated, TextIO, cast

import typer

import selfcon
from selfcon.cli import data
from selfcon.errors import SelfconError, SelfconWarning, UsageError

app = typer.Typer(
    name="selfcon",
    help="Supervised contrastive learning of images from a single view.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data.app, name="data")

# Typer raises these for everything a user can mistype and does not export their common class.
_CommandLineError = cast(
    "type[typer.BadParameter]",
    next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"),
)


def _show_version(value: bool) -> None:
    if value:
        typer.echo(selfcon.__version__)
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Run a command and exit with its code: 0 done, 64 wrong usage, 65 bad data, and so on as `selfcon.errors` says."""
    arguments = sys.argv[1:] if arguments is None else arguments
    debug = "--debug" in arguments
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            sys.exit(_run([argument for argument in arguments if argument != "--debug"]))
        except SelfconError as error:
            if debug:
                raise
            _say(str(error))
            sys.exit(error.exit_code)


def _run(arguments: list[str]) -> int:
    try:
        code = app(arguments, standalone_mode=False)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except typer.Abort:
        return 130
    except _CommandLineError as error:
        raise UsageError(error.format_message()) from error
    return code if isinstance(code, int) else 0


def _say(sentence: str) -> None:
    sys.stderr.write(f"selfcon: {sentence}\n")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Warnings as sentences, without a place in code that the reader of a command's output did not write."""
    label = "note" if issubclass(category, SelfconWarning) else category.__name__
    _say(f"{label}: {message}")
