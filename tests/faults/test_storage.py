"""Disks that fill up, folders that cannot be written: nothing is lost, and the exit code says what it was."""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import selfcon
from selfcon.errors import StorageError
from selfcon.training import checkpoint as checkpoints
from selfcon.training.checkpoint import Checkpoint, load_newest, save
from tests.cli.calling import run
from tests.workflows.conftest import write_stripes

SMALL = ["--width", "0.125", "--epochs", "2", "--batch-size", "32", "--probe.epochs", "2", "--device", "cpu"]


def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, "step-000000001", Checkpoint({"x": torch.ones(3)}, {"epoch": 1}))
    for file in ("state.safetensors", "state.json"):

        def full(path: Path, data: bytes, file: str = file) -> None:
            if path.name == file:
                path.write_bytes(data[: len(data) // 2])
                raise OSError(errno.ENOSPC, "No space left on device")
            path.write_bytes(data)

        monkeypatch.setattr(checkpoints, "write_whole", full)
        with pytest.raises(
            StorageError, match=r"No space left on device\): it needs [\d,]+ bytes, and [\d,]+ are free"
        ):
            save(tmp_path, "step-000000002", Checkpoint({"x": torch.zeros(3)}, {"epoch": 2}))
        monkeypatch.undo()
        assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]
        found = load_newest(tmp_path)
        assert found is not None
        assert found.facts["epoch"] == 1


_FULL = """
import errno, sys
from selfcon.training import checkpoint, folder
write, written, limit = checkpoint.write_whole, [0], int(sys.argv.pop(1))
def full(path, data):
    written[0] += 1
    if written[0] > limit:
        raise OSError(errno.ENOSPC, "No space left on device")
    write(path, data)
checkpoint.write_whole = folder.write_whole = full
from selfcon.cli import main
main()
"""


def test_a_disk_that_fills_during_training(tmp_path: Path) -> None:
    """Whichever write it is that fails: exit 74, and once there is room the same command ends with the same bytes."""
    write_stripes(tmp_path / "stripes.npz")
    (tmp_path / "full.py").write_text(_FULL)
    command = ["fit", "--data", "stripes.npz", *SMALL, "--out"]
    for limit in (3, 5):
        full = subprocess.run(
            [sys.executable, "full.py", str(limit), *command, "run"],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
        )
        assert full.returncode == 74, full.stderr
        assert "No space left on device" in full.stderr
        assert "Traceback" not in full.stderr
    for out in ("run", "whole"):
        assert run(*command, out, cwd=tmp_path).returncode == 0
    same = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("run", "whole")]
    assert same[0] == same[1]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can only be mounted by root")
def test_a_small_file_system_fills_up(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(small)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        write_stripes(tmp_path / "stripes.npz")
        command = ["fit", "--data", "stripes.npz", *SMALL, "--width", "0.25", "--out"]
        full = run(*command, small / "run", cwd=tmp_path)
        assert full.returncode == 74, full.stderr
        assert "No space left on device" in full.stderr
        subprocess.run(["mount", "-o", "remount,size=200m", str(small)], check=True)
        for out in (small / "run", tmp_path / "whole"):
            assert run(*command, out, cwd=tmp_path).returncode == 0
        same = [(out / "model.safetensors").read_bytes() for out in (small / "run", tmp_path / "whole")]
        assert same[0] == same[1]
    finally:
        subprocess.run(["umount", str(small)], check=False)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in ("/proc/nowhere/run", tmp_path / "file" / "run"):
        done = run("fit", "--data", "digits", "--out", out, cwd=tmp_path)
        assert done.returncode == 74, done.stderr
        assert "cannot be written" in done.stderr


def test_saving_takes_its_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that takes long is followed by a pause in which it is one part in fifty."""
    loop: Any = importlib.import_module("selfcon.training.loop")
    write_stripes(tmp_path / "stripes.npz")
    clock, saved = [0.0], []

    def update(self: Any, images: Any, labels: Any, step: int) -> None:
        clock[0] += 20.0

    def keep(self: Any) -> None:
        saved.append(clock[0])
        clock[0] += 30.0

    monkeypatch.setattr(loop.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(loop.Trainer, "update", update)
    monkeypatch.setattr(loop._Worker, "save", keep)
    selfcon.pretrain(
        data=str(tmp_path / "stripes.npz"), out=tmp_path / "run", width=0.125, epochs=40, batch_size=24,
        watch={"knn_every": 0}, device="cpu",
    )  # fmt: skip
    assert saved[0] <= 100  # after the first minute
    assert all(later - sooner - 30 >= 30 / 0.02 for sooner, later in itertools.pairwise(saved[:-1]))  # but for the end
    assert len(saved) == 4


@pytest.mark.slow
def test_killed_while_it_saves(tmp_path: Path) -> None:
    """benchmarks/kill_soak.py in little; the whole of it is run by hand."""
    script = Path(__file__).parents[2] / "benchmarks" / "kill_soak.py"
    done = subprocess.run(
        [sys.executable, str(script), "2", "4"], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2" in done.stdout


def test_sigterm_has_a_checkpoint_within_ten_seconds(tmp_path: Path) -> None:
    write_stripes(tmp_path / "stripes.npz", train=960)
    command = [sys.executable, "-m", "selfcon", "fit", "--data", "stripes.npz", *SMALL, "--epochs", "500", "--out"]
    for number in (signal.SIGTERM, signal.SIGUSR1):
        process = subprocess.Popen([*command, "run"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        begun = time.monotonic()
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert time.monotonic() - begun < 10
        assert process.returncode == 75, errors
        assert load_newest(tmp_path / "run" / "checkpoints" / "pretrain") is not None
        shutil.rmtree(tmp_path / "run")
