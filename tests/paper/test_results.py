"""Every number in our tables has its folder, and the pages say what the folders say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pages_and_index_are_made_from_the_folders() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "results" / "make.py", "--check"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_number_has_its_folder() -> None:
    index = json.loads((ROOT / "results" / "index.json").read_text())
    folders = {line["folder"] for line in index}
    linked = 0
    for page in (ROOT / "README.md", ROOT / "docs" / "results.md"):
        for number, folder in re.findall(r"\[([\d.]+[^\]]*)\]\((?:\.\./)?results/([^/)]+)\)", page.read_text()):
            assert folder in folders
            accuracy = json.loads((ROOT / "results" / folder / "results.json").read_text())["accuracy"]
            if "±" not in number:
                assert number in {f"{values['top1']:.1f}" for values in accuracy.values()}
            linked += 1
    assert linked > 0
