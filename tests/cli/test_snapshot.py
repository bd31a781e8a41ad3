"""What the command line shows is what it showed: a change is seen, and meant.

`SELFCON_UPDATE_GOLDEN=1 pytest tests/cli/test_snapshot.py` writes snapshot.txt anew.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest

from selfcon.cli.main import VERBS, run

KEPT = Path(__file__).parent / "snapshot.txt"


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse writes it otherwise")
def test_help_of_every_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    said = io.StringIO()
    for words in ([], *(verb.split() for verb in VERBS)):
        said.write(f"$ selfcon {' '.join(words)} --help\n")
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            run([*words, "--help"])
    said.write("$ selfcon fit --help-all\n")
    with contextlib.redirect_stdout(said):
        run(["fit", "--help-all"])
    shown = "\n".join(line.rstrip() for line in said.getvalue().splitlines()) + "\n"
    if os.environ.get("SELFCON_UPDATE_GOLDEN"):
        KEPT.write_text(shown)
    assert shown == KEPT.read_text()
