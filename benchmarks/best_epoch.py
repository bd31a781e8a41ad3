"""Question: how much does it add to report the best test epoch of a probe, for each exit, instead of the last one?

Reads the metrics.jsonl of runs made with `--watch.test_in_probe true`; a JSON line a run and exit.
    python benchmarks/best_epoch.py runs/a runs/b
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        probe = [line for line in lines if line["stage"] == "probe"]
        for key in (key for key in probe[0] if key.startswith("test_")):
            values = [line[key] for line in probe]
            best = max(values)
            print(
                json.dumps(
                    {
                        "run": folder.name,
                        "exit": key.removeprefix("test_"),
                        "last": values[-1],
                        "best": best,
                        "best_epoch": values.index(best) + 1,
                        "gain": round(best - values[-1], 2),
                    }
                )
            )


if __name__ == "__main__":
    main()
