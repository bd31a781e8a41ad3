"""docs/reliability.md names a test for each fault, and those tests are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_row_has_its_tests() -> None:
    rows = re.findall(r"^\| (\d+) \|.*\| (`test_.*) \|$", (ROOT / "docs" / "reliability.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 26))
    there = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    for number, tests in rows:
        named = re.findall(r"`(\w+)`", tests)
        assert named
        assert there.issuperset(named), (number, set(named) - there)
