"""The model of docs/scale.md says what the page says, and agrees with what one GPU does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_model() -> None:
    script = ROOT / "benchmarks" / "scale_model.py"
    done = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True)
    rows = {row["gpus"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert list(rows) == [2**power for power in range(11)]
    measured = json.loads((ROOT / "results" / "bench-h200.json").read_text())["rows"]
    step = next(row for row in measured if row["what"] == "step" and row["method"] == "selfcon")
    assert abs(rows[1]["images_per_second"] / step["images_per_second"] - 1) < 0.02
    assert rows[1]["gather_ms"] == rows[1]["gradients_ms"] == 0
    page = (ROOT / "docs" / "scale.md").read_text()
    for gpus in (8, 64):
        low, high = (int(100 * rows[gpus][key]) for key in ("efficiency", "efficiency_hidden"))
        assert f"{low} to {high} %" in page
    assert rows[1024]["ring_MB"] == rows[2]["ring_MB"] < rows[1024]["gathered_MB"]
