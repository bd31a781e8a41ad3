"""What the guides show works as they show it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import selfcon
from selfcon.data.source import ArrayImages, Source
from selfcon.errors import UsageError
from selfcon.losses import Term

ROOT = Path(__file__).parents[1]
METHOD, NETWORK, DATA, ANALYSIS, LAST = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "guides" / "research.md").read_text(), flags=re.DOTALL
)


def run(place: Path, *words: str) -> str:
    done = subprocess.run([sys.executable, *words], cwd=place, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_takes_less_than_thirty_lines() -> None:
    for block in (METHOD, NETWORK, DATA, ANALYSIS):
        assert len([line for line in block.splitlines() if line.strip()]) < 30


def test_a_method_and_an_analysis_of_it(tmp_path: Path) -> None:
    (tmp_path / "method.py").write_text(METHOD)
    (tmp_path / "analysis.py").write_text(ANALYSIS)
    assert "top1" in run(tmp_path, "method.py")
    assert "% agree" in run(tmp_path, "analysis.py")


def test_a_network_and_a_data_set_with_all_verbs(tmp_path: Path) -> None:
    shown = DATA.split("if __name__")[0]
    (tmp_path / "mine.py").write_text(NETWORK + "\n\n" + shown + "\n\n" + LAST)
    small = ("--epochs", "2", "--batch-size", "50", "--probe.epochs", "2", "--device", "cpu")
    words = ("--model", "plain", "--exits", "2:fc,3:fc", "--data", "noise", "--out", "run", *small)
    assert "exit3" in run(tmp_path, "mine.py", "fit", *words)
    assert "exit3" in run(tmp_path, "mine.py", "evaluate", "run")
    (tmp_path / "data.py").write_text(DATA)
    assert "top1" in run(tmp_path, "data.py")


def test_names_that_are_taken() -> None:
    with pytest.raises(UsageError, match="a method 'selfcon' already"):
        selfcon.add_method(selfcon.Method(name="selfcon", paper="", uses_exits=True, terms=(Term("F", "F", "F"),)))
    with pytest.raises(UsageError, match="a data set 'digits' already"):
        selfcon.data.add_source("digits", lambda root: Source("x", ("a", "b"), *[_nothing()] * 2))


def _nothing() -> ArrayImages:
    return ArrayImages(np.zeros((0, 4, 4, 3), np.uint8), np.zeros(0, np.int64), "nothing")
