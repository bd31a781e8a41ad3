"""Claim: killed at any moment, also while it saves, a run goes on with the same command and ends with the same bytes.

Short runs of the digits, each killed (SIGKILL) several times: half the times after a random wait, half the times while
a checkpoint is being written, which a slowed-down disk makes long enough to hit. Then the command again, to its end.
    python benchmarks/kill_soak.py [runs] [kills of each]
A JSON line for each run, and in the end how many were equal to the run that nobody killed; exit code 1 if not all.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = ["fit", "--data", "digits", "--width", "0.125", "--epochs", "4", "--batch-size", "128", "--device", "cpu"]
COMMAND += ["--probe.epochs", "4"]
# Saves often, so that there is much to hit, and takes its time before what was written is on the disk.
SLOW = """
import os, sys, time
from selfcon.training import loop
synchronise = os.fsync
def slow(handle):
    time.sleep(float(sys.argv[1]))
    synchronise(handle)
os.fsync = slow
loop._MOST_TIME_SAVING = 1.0
train = loop.train
import selfcon.workflows.pipeline as pipeline
pipeline.train_stage = lambda *stage, **options: train(*stage, **options, minutes_between_saves=0.01)
from selfcon.cli import main
main(sys.argv[2:])
"""


def start(out: Path, pause: float) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", SLOW, str(pause), *COMMAND, "--out", str(out)]
    return subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def is_saving(out: Path, since: float) -> bool:
    """Whether a checkpoint is half written, by the process that began then: an earlier one may have left some."""
    try:
        return any(path.stat().st_mtime > since for path in out.glob("checkpoints/*/.*.part"))
    except FileNotFoundError:  # it has just been renamed
        return False


def kill_somewhere(out: Path, rng: random.Random, *, saving: bool) -> str:
    """Begin or go on, and kill it; what it was doing then."""
    process, since = start(out, 0.06), time.time()
    wait = rng.uniform(0.0, 3.0)
    begun = time.monotonic()
    seen = False
    while process.poll() is None and time.monotonic() - begun < 60:
        busy = is_saving(out, since)
        if saving and busy and (seen or rng.random() < 0.02):
            seen = True
        if (saving and seen and busy) or (not saving and time.monotonic() - begun > 4 + wait):
            break
        time.sleep(0.001)
    if process.poll() is not None:
        return "done"
    busy = is_saving(out, since)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return "saving" if busy else "training"


def main() -> int:
    runs, kills = (int(value) for value in (*sys.argv[1:], *("20", "10")[len(sys.argv) - 1 :]))
    equal = 0
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole"
        if start(whole, 0.0).wait():
            raise SystemExit("the command itself fails")
        expected = (whole / "model.safetensors").read_bytes()
        for number in range(runs):
            rng, out = random.Random(number), Path(folder) / f"run{number}"
            hits = [kill_somewhere(out, rng, saving=kill % 2 == 0 or kill > kills // 2) for kill in range(kills)]
            code = start(out, 0.0).wait()
            same = code == 0 and (out / "model.safetensors").read_bytes() == expected
            same = same and not list(out.glob("checkpoints/*/.*.part"))
            equal += same
            counts = {what: hits.count(what) for what in ("saving", "training", "done")}
            print(json.dumps({"run": number, **counts, "equal": same}), flush=True)
    print(f"{equal} of {runs} runs ended with the bytes of the run that was not killed", flush=True)
    return 0 if equal == runs else 1


if __name__ == "__main__":
    sys.exit(main())
