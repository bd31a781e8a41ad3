"""Every number in our tables has its folder, and the pages say what the folders say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.medium
def test_pages_and_index_are_made_from_the_folders() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "results" / "make.py", "--check"], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_number_has_its_folder() -> None:
    index = json.loads((ROOT / "results" / "index.json").read_text())
    experiments = {line["folder"]: line["experiment"] for line in index}
    linked = 0
    for page in (ROOT / "README.md", ROOT / "docs" / "results.md"):
        for number, folder in re.findall(r"\[([\d.]+[^\]]*)\]\((?:\.\./)?results/([^/)]+)\)", page.read_text()):
            assert folder in experiments
            # A number with a spread is the mean over the seeds of that experiment.
            same = (
                [name for name in experiments if experiments[name] == experiments[folder]]
                if "±" in number
                else [folder]
            )
            found = [json.loads((ROOT / "results" / name / "results.json").read_text())["accuracy"] for name in same]
            means = {f"{fmean(each[name]['top1'] for each in found):.1f}" for name in found[0]}
            assert number.split(" ±")[0] in means
            linked += 1
    assert linked > 0
