"""What is on images: the likeliest classes of a trained run, with their probabilities and the exit that answered.

example: selfcon predict runs/birds holiday/ --top 3
         selfcon predict runs/birds "holiday/**/*.jpg" --exit early --format csv --output holiday.csv
         find holiday -name "*.jpg" | selfcon predict runs/birds - --budget 0.6
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from selfcon.cli.parsing import Parser
from selfcon.errors import DataError, SelfconError, StorageError, UsageError, printable

if TYPE_CHECKING:
    from selfcon.deploy.predictor import Prediction
    from selfcon.errors import BadImageError

    Answered = Iterable[tuple[Path, Prediction | BadImageError]]


def add_arguments(parser: Parser) -> None:
    parser.add_argument("run", type=Path, help="the folder of a trained run")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="images, folders, patterns, or - for a list on stdin")
    parser.add_argument("--top", type=int, default=1, metavar="K", help="likeliest classes to tell (default: 1)")
    parser.add_argument(
        "--exit", default="ensemble", metavar="NAME", help="ensemble, early, backbone or an exit (default: ensemble)"
    )
    parser.add_argument("--budget", type=float, help="mean part of the whole cost to spend, such as 0.6")
    parser.add_argument("--batch-size", type=int, default=64, help="(default: 64)")
    parser.add_argument("--format", choices=_FORMATS, help="(default: by the ending of --output, or table)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default: standard output)")
    parser.add_argument("--device", default="auto", metavar="STR", help="cpu, cuda, ... (default: auto)")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON document")


def run(options: argparse.Namespace) -> int:
    from selfcon.workflows import inference

    form = options.format or ("json" if options.json else _format_of(options.output))
    if options.json and form != "json":
        raise UsageError(f"--json is one JSON document, and --format {form} something else: leave one of them out.")
    answered = inference.predict(
        options.run,
        options.paths,
        exit=options.exit,
        budget=options.budget,
        top=options.top,
        batch_size=options.batch_size,
        device=options.device,
    )
    failed: list[str] = []
    with _open(options.output) as file:
        if form == "json":
            rows = [_as_row(path, answer) for path, answer in _without(answered, failed)]
            file.write(json.dumps({"predictions": rows, "failed": failed}, indent=1, ensure_ascii=False) + "\n")
        else:
            _WRITERS[form](_without(answered, failed), file, options.top)
    if failed:
        for sentence in failed:
            sys.stderr.write(f"selfcon: {printable(sentence)}\n")
        count = "1 image" if len(failed) == 1 else f"{len(failed)} images"
        raise DataError(f"{count} could not be read.")
    return 0


def _without(answered: Answered, failed: list[str]) -> Iterator[tuple[Path, Prediction]]:
    """The answers; what could not be read is noted."""
    from selfcon.errors import BadImageError

    for path, answer in answered:
        if isinstance(answer, BadImageError):
            failed.append(str(answer))
        else:
            yield path, answer


def _format_of(output: Path | None) -> str:
    """By its ending."""
    ending = "" if output is None else output.suffix[1:].lower()
    if ending in ("", "txt"):
        return "table"
    if ending not in _ENDINGS:
        raise UsageError(
            f"Answers are written to .{', .'.join(_ENDINGS)} or .txt, not to {output}; "
            f"--format says which it is to be whatever the name."
        )
    return ending


@contextmanager
def _open(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # names may be no text
        yield sys.stdout
        return
    part = output.with_name(output.name + ".part")
    try:
        with part.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            yield file
        part.replace(output)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError) and not isinstance(error, SelfconError):
            raise StorageError(f"{output} cannot be written ({error.strerror}).") from error
        raise


def _as_row(path: Path, answer: Prediction) -> dict[str, Any]:
    return {"file": str(path), **answer.to_dict()}


def _write_table(answers: Iterator[tuple[Path, Prediction]], file: TextIO, top: int) -> None:
    for path, answer in answers:
        told = ", ".join(
            f"{printable(name)} {100 * part:.1f} %"
            for name, part in zip(answer.classes, answer.probabilities, strict=True)
        )
        unknown = "unknown; perhaps " if answer.unknown else ""
        file.write(f"{printable(str(path))}: {unknown}{told} ({answer.exit})\n")


def _write_csv(answers: Iterator[tuple[Path, Prediction]], file: TextIO, top: int) -> None:
    writer = csv.writer(file, lineterminator="\n")
    columns = [f"{what}{number}" for number in range(1, top + 1) for what in ("class", "probability")]
    writer.writerow(["file", "label", "exit", "unknown", *columns])
    for path, answer in answers:
        pairs = zip(answer.classes, answer.probabilities, strict=True)
        cells = (each for name, part in pairs for each in (_as_text(name), part))
        unknown = "yes" if answer.unknown else "no"  # a class may be called so, too
        file_name = str(path) if _as_text(str(path)) == str(path) else f"{os.curdir}{os.sep}{path}"
        writer.writerow([file_name, _as_text(answer.label), answer.exit, unknown, *cells])


def _as_text(name: str) -> str:
    """A name that no spreadsheet takes for a formula; numbers are none."""
    is_formula = name.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(name)
    return f"'{name}" if is_formula else name


def _write_lines(answers: Iterator[tuple[Path, Prediction]], file: TextIO, top: int) -> None:
    file.writelines(json.dumps(_as_row(path, answer), ensure_ascii=False) + "\n" for path, answer in answers)


_WRITERS = {"table": _write_table, "csv": _write_csv, "jsonl": _write_lines}
_FORMATS = (*_WRITERS, "json")
_ENDINGS = tuple(form for form in _FORMATS if form != "table")
_NUMBER = re.compile(r"[+-]?\d+([.,]\d+)?")
