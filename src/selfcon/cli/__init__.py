"""The command line: `selfcon VERB ...`. Errors are one sentence on stderr and an exit code; `--debug` shows where."""

from selfcon.cli.main import main

__all__ = ["main"]
