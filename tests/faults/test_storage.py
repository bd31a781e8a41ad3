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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import selfcon
from selfcon.errors import StorageError
from selfcon.training import checkpoint as checkpoints
from selfcon.training.checkpoint import Checkpoint, load_newest, save
from tests.cli.calling import call, run
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


KINDS = (
    "environment.json",
    "data.json",
    "encoders/epoch-0001.safetensors",
    "metrics.jsonl",
    "checkpoints/pretrain/.step-000000006.part/state.safetensors",
    "checkpoints/pretrain/.step-000000006.part/state.json",
    "checkpoints/probe/.step-000000002.part/state.safetensors",
    "model.safetensors",
    "model.json",
    "evidence.json",
    "results.json",
    "report.html",
)
"""The files of a run, in the order in which they are written."""


def is_half(path: Path, target: Path) -> bool:
    """Whether a file is there for another, until it is whole."""
    return path.parent == target.parent and path.match(f".{target.name}.*.{os.getpid()}.part")


def test_a_disk_that_is_full_in_the_middle_of_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of it is there when the disk says so: exit 74 with its name; the same command gets further, and ends."""
    write_stripes(tmp_path / "stripes.npz")
    command = ["fit", "--data", "stripes.npz", *SMALL, "--keep_epochs", "1", "--out"]
    whole = call(*command, "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    synchronise = os.fsync
    for name in KINDS:
        target = tmp_path / "run" / name

        def full(handle: int, target: Path = target) -> None:
            if is_half(Path(f"/proc/self/fd/{handle}").readlink(), target):
                os.ftruncate(handle, os.fstat(handle).st_size // 2)
                raise OSError(errno.ENOSPC, "No space left on device")
            synchronise(handle)

        monkeypatch.setattr(os, "fsync", full)
        done = call(*command, "run", cwd=tmp_path)
        monkeypatch.undo()
        assert done.returncode == 74, (name, done.stderr)
        told = target.parent.name[1:].removesuffix(".part") if "checkpoints" in name else name
        assert f"{told} cannot be written (No space left on device)" in done.stderr
        assert ("bytes, and" in done.stderr) == ("checkpoints" in name)
        assert not target.exists()
    assert call(*command, "run", cwd=tmp_path).returncode == 0
    same = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("run", "whole")]
    assert same[0] == same[1]
    for name in ("model.json", "evidence.json", "encoders/epoch-0001.safetensors", "data.json"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


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


@pytest.mark.slow  # as `test_a_disk_that_is_full_in_the_middle_of_any_file`, in processes
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
        assert call(*command, out, cwd=tmp_path).returncode == 0
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
    with read_only(tmp_path / "sealed") as sealed:
        for out in ("/proc/nowhere/run", tmp_path / "file" / "run", sealed, sealed / "run", sealed / "a" / "b" / "run"):
            # Had it looked at the data first, it would have missed them, and ended with 66.
            done = call("fit", "--data", "nothing.npz", "--out", out, cwd=tmp_path)
            assert done.returncode == 74, done.stderr
            assert f"{out} cannot be written" in done.stderr
        assert list(sealed.iterdir()) == []


def test_a_run_whose_folder_became_read_only_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stripes(tmp_path / "stripes.npz")
    command = ["fit", "--data", "stripes.npz", *SMALL, "--out"]
    trainer = importlib.import_module("selfcon.training.loop").Trainer
    with read_only(tmp_path / "sealed", begin=lambda sealed: stop_early(command, sealed / "run")) as sealed:
        before = {path: path.read_bytes() for path in sealed.rglob("*") if path.is_file()}
        assert any("step-" in str(path) for path in before)
        monkeypatch.setattr(trainer, "update", lambda *_: pytest.fail("a step was taken"))
        done = call(*command, sealed / "run", cwd=tmp_path)
        assert done.returncode == 74, done.stderr
        assert {path: path.read_bytes() for path in sealed.rglob("*") if path.is_file()} == before


def stop_early(command: list[str], out: Path) -> None:
    """A run that was told to stop in its first step."""
    trainer = importlib.import_module("selfcon.training.loop").Trainer
    original = trainer.update

    def update(self: Any, images: Any, labels: Any, step: int) -> None:
        original(self, images, labels, step)
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "update", update)
        assert call(*command, out, cwd=out.parents[1]).returncode == 75


@contextmanager
def read_only(folder: Path, begin: Callable[[Path], None] = lambda _: None) -> Iterator[Path]:
    """A folder in which nothing can be written any more; root, whom rights do not stop, needs a file system for it."""
    folder.mkdir()
    if os.geteuid():
        begin(folder)
        below = [path for path in (folder, *folder.rglob("*")) if path.is_dir()]
        files = [path for path in folder.rglob("*") if path.is_file()]
        for path in (*files, *below):
            path.chmod(path.stat().st_mode & ~0o222)
        try:
            yield folder
        finally:
            for path in below:
                path.chmod(0o755)
        return
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=False)
    if made.returncode:
        pytest.skip("a file system cannot be mounted here")
    try:
        begin(folder)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=False)


def test_the_second_of_two_processes_is_told_who_has_the_folder(tmp_path: Path) -> None:
    write_stripes(tmp_path / "stripes.npz")
    command = ["fit", "--data", "stripes.npz", *SMALL, "--epochs", "500", "--out", "run"]
    first = subprocess.Popen([sys.executable, "-m", "selfcon", *command], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        for more in ([], ["--overwrite"], ["--seed", "1"]):
            second = call(*command, *more, cwd=tmp_path)
            assert second.returncode == 64, second.stderr
            assert f"run is in use by process {first.pid} on " in second.stderr
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    third = call("fit", "--data", "stripes.npz", *SMALL, "--out", "run", "--overwrite", cwd=tmp_path)
    assert third.returncode == 0, third.stderr  # the lock of a process that is gone holds nobody


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


@pytest.mark.slow
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
