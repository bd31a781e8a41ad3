"""The command line as tests use it: in a process of its own, or in this one, which takes a tenth of the time."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

from selfcon.cli.main import main


def run(*arguments: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a user runs it."""
    return subprocess.run(
        [sys.executable, "-m", "selfcon", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def call(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The same without a process: what it prints, and the code that it would exit with."""
    words, out, err = list(map(str, arguments)), io.StringIO(), io.StringIO()
    code: object = 0
    with (
        warnings.catch_warnings(),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            warnings.simplefilter("default")  # the tests' own make them errors
            main(words)
        except SystemExit as left:
            code = left.code
    return subprocess.CompletedProcess(words, int(str(code or 0)), out.getvalue(), err.getvalue())
