"""Checkpoints are whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from selfcon.config import Settings, make_settings
from selfcon.errors import InputMissingError, SelfconWarning, StoppedError, StorageError, UnsafeError, UsageError
from selfcon.training import checkpoint as checkpoints
from selfcon.training.checkpoint import Checkpoint, load_newest, save
from selfcon.training.files import write_whole
from selfcon.training.folder import RunFolder


def checkpoint(number: int) -> Checkpoint:
    return Checkpoint({"weights": torch.full((3,), float(number))}, {"epoch": number})


def fill(folder: Path, count: int) -> None:
    for number in range(1, count + 1):
        save(folder, f"step-{number:09d}", checkpoint(number))


def test_the_newest_is_loaded_and_two_are_kept(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "none") is None
    fill(tmp_path, 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000003", "step-000000004"]
    found = load_newest(tmp_path)
    assert found is not None
    assert found.facts["epoch"] == 4
    assert torch.equal(found.tensors["weights"], torch.full((3,), 4.0))


@pytest.mark.parametrize("renames", [1, 2])
def test_one_of_the_same_name_is_there_until_its_successor_is(
    tmp_path: Path, renames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed at a rename does not clean up behind itself."""
    save(tmp_path, "step-000000001", checkpoint(1))
    rename, made = Path.rename, []

    def killed(self: Path, target: Path) -> Path:
        made.append(target)
        if len(made) > renames:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as dying:
        dying.setattr(Path, "rename", killed)
        dying.setattr(checkpoints, "_bring_back", lambda *_: None)
        if renames == 1:
            with pytest.raises(KeyboardInterrupt):
                save(tmp_path, "step-000000001", checkpoint(2))
        else:
            save(tmp_path, "step-000000001", checkpoint(2))
    found = load_newest(tmp_path)
    assert found is not None
    assert found.facts["epoch"] == renames
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


@pytest.mark.parametrize("damage", ["flip", "cut", "json", "number", "nest", "digit", "format", "missing"])
def test_a_damaged_one_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    fill(tmp_path, 2)
    newest = tmp_path / "step-000000002"
    weights = newest / "state.safetensors"
    data = bytearray(weights.read_bytes())
    written = json.loads((newest / "state.json").read_text())
    if damage == "flip":
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(data[:-3])
    elif damage == "json":
        (newest / "state.json").write_text("{")
    elif damage == "number":
        (newest / "state.json").write_text("616")
    elif damage == "nest":
        (newest / "state.json").write_text("[" * 100_000)
    elif damage in ("digit", "format"):
        text, entry = (newest / "state.json").read_text(), f'"{"epoch" if damage == "digit" else damage}": 2'
        assert entry in text
        (newest / "state.json").write_text(text.replace(entry, entry.replace("2", "3")))
    else:
        weights.unlink()
    with pytest.warns(SelfconWarning, match="step-000000002 cannot be used") as warned:
        found = load_newest(tmp_path)
    said = str(warned[0].message)
    if damage in ("flip", "cut"):
        now = hashlib.sha256((tmp_path / "damaged-step-000000002" / "state.safetensors").read_bytes()).hexdigest()
        assert f"state.safetensors has the hash {now}, and {written['sha256']} was written" in said
    elif damage in ("digit", "format"):
        assert re.search(rf"state\.json has the hash [0-9a-f]{{64}}, and {written['facts_sha256']} was written", said)
    assert found is not None
    assert found.facts["epoch"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step-000000002", "step-000000001"]
    assert checkpoints.newest(tmp_path) == tmp_path / "step-000000001"
    (tmp_path / "step-000000001" / "state.json").unlink()
    with pytest.warns(SelfconWarning), pytest.raises(StorageError, match=r"No checkpoint in .* can be read"):
        load_newest(tmp_path)


def test_one_of_another_version_is_not_taken_for_damage(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    path = tmp_path / "step-000000002" / "state.json"
    facts = {**json.loads(path.read_text()), "format": 99}
    path.write_text(json.dumps({**facts, "facts_sha256": checkpoints._hash_facts(facts)}))
    with pytest.raises(UsageError, match="is of format 99, and this version of selfcon reads format 2"):
        load_newest(tmp_path)


def test_leftovers_of_a_broken_save_are_removed(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / ".step-000000002.part").mkdir()
    load_newest(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


def test_nothing_is_removed_through_links(tmp_path: Path) -> None:
    """A run folder may be somebody else's, and lead to what is ours."""
    mine, run = tmp_path / "mine", tmp_path / "run"
    for name in ("letters", "step-000000001", "photos"):
        (mine / name).mkdir(parents=True)
        (mine / name / "file").touch()
    fill(run / "real" / "probe", 2)
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "probe").symlink_to(mine)
    (run / "real" / "probe" / "step-000000009").symlink_to(mine / "letters")
    (run / "whole").symlink_to(run / "real")
    for folder in (run / "checkpoints" / "probe", run / "whole" / "probe"):
        with pytest.raises(UnsafeError, match="is a link"):
            load_newest(folder)
        with pytest.raises(UnsafeError, match="is a link"):
            save(folder, "step-000000005", checkpoint(5))
    found = load_newest(run / "real" / "probe")
    assert found is not None
    assert found.facts["epoch"] == 2
    save(run / "real" / "probe", "step-000000010", checkpoint(10))
    assert sorted(path.name for path in mine.rglob("*")) == ["file"] * 3 + ["letters", "photos", "step-000000001"]


def test_nothing_is_written_through_links(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    for name in (f".results.json.{os.getpid()}.part", "results.json"):
        (tmp_path / name).symlink_to(mine)
    write_whole(tmp_path / "results.json", b"{}")
    assert mine.read_text() == "mine"
    assert (tmp_path / "results.json").read_text() == "{}"
    assert not (tmp_path / "results.json").is_symlink()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(mine)
    with pytest.raises(UnsafeError, match=r"\.lock is a link"):
        RunFolder.open(tmp_path / "run", Settings(), verb="fit")
    assert mine.read_text() == "mine"


@pytest.mark.medium
def test_what_a_broken_start_left_does_not_stop_the_next_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (run / f".config.yaml.{ended.pid}.part").write_text("data: dig")
    RunFolder.open(run, Settings(), verb="fit").close()
    assert sorted(path.name for path in run.iterdir()) == [".lock", "config.yaml", "environment.json"]
    (run / f".results.json.{ended.pid}.part").write_text("{")
    (run / f".report.html.{os.getppid()}.part").write_text("being written")
    (run / "results.json").write_text("{}")
    RunFolder.open(run, Settings(), verb="fit").close()
    assert not (run / f".results.json.{ended.pid}.part").exists()
    assert (run / f".report.html.{os.getppid()}.part").exists()


@pytest.mark.medium
def test_halves_of_encoders_are_removed_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder.open(run, Settings(), verb="fit").close()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (run / "encoders").mkdir()
    half = run / "encoders" / f".epoch-0001.safetensors.{ended.pid}.part"
    half.write_text("half")
    RunFolder.open(run, Settings(), verb="fit").close()
    assert not half.exists()


@pytest.mark.medium
def test_processes_that_were_forked_do_not_hold_the_folder(tmp_path: Path) -> None:
    """A reader outlives a run that was killed by a moment, in which the same command may come again."""
    code = f"""
import os, signal, time
from selfcon.config import Settings
from selfcon.training.folder import RunFolder
run = RunFolder.open({str(tmp_path / "run")!r}, Settings(), verb="fit")
child = os.fork()
if not child:
    time.sleep(60)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with (tmp_path / "child").open("wb") as told:
        done = subprocess.run([sys.executable, "-c", code], stdout=told, check=False)
    child = int((tmp_path / "child").read_text())
    try:
        assert done.returncode == -signal.SIGKILL
        os.kill(child, 0)  # is there still
        RunFolder.open(tmp_path / "run", Settings(), verb="fit").close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_run_folder_belongs_to_one_run_and_one_process(tmp_path: Path) -> None:
    with RunFolder.open(tmp_path / "run", Settings(), verb="fit") as run:
        run.write("results.json", "{}")
        run.write("notes.txt", "mine")
        with pytest.raises(UsageError, match="is in use by process"):
            RunFolder.open(tmp_path / "run", Settings(), verb="fit")
    other = make_settings({"epochs": 7})
    with pytest.raises(UsageError, match=r"other settings \(epochs: 100 -> 7\)"):
        RunFolder.open(tmp_path / "run", other, verb="fit")
    with RunFolder.open(tmp_path / "run", other, verb="fit", overwrite=True) as run:
        assert not (run.path / "results.json").exists()
        assert (run.path / "notes.txt").read_text() == "mine"
    reopened, settings = RunFolder.reopen(tmp_path / "run")
    with reopened:
        assert settings == other


def test_a_run_that_never_began_gives_way(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "run", Settings(), verb="fit").close()
    other = make_settings({"epochs": 7})
    RunFolder.open(tmp_path / "run", other, verb="fit").close()
    reopened, settings = RunFolder.reopen(tmp_path / "run")
    reopened.close()
    assert settings == other


def test_of_what_was_refused_nothing_is_left(tmp_path: Path) -> None:
    for error in (UsageError, InputMissingError):
        with pytest.raises(error), RunFolder.open(tmp_path / "run", Settings(), verb="fit"):
            raise error
        assert list(tmp_path.iterdir()) == []
    with pytest.raises(StoppedError), RunFolder.open(tmp_path / "run", Settings(), verb="fit"):
        raise StoppedError
    (tmp_path / "run" / "metrics.jsonl").touch()
    with pytest.raises(UsageError), RunFolder.open(tmp_path / "run", Settings(), verb="fit"):
        raise UsageError
    (tmp_path / "run" / "environment.json").unlink()  # as where there was no room for it
    RunFolder.open(tmp_path / "run", Settings(), verb="fit").close()
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    assert names == [".lock", "config.yaml", "environment.json", "metrics.jsonl"]


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "x.jpg").touch()
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="is not empty and holds no run"):
            RunFolder.open(tmp_path / "photos", Settings(), verb="fit", overwrite=overwrite)
        assert [path.name for path in (tmp_path / "photos").iterdir()] == ["x.jpg"]
    with pytest.raises(InputMissingError, match="holds no run"):
        RunFolder.reopen(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written"):
        RunFolder.open(tmp_path / "file" / "run", Settings(), verb="fit")
    with pytest.raises(StorageError, match="cannot be written"):
        RunFolder.open("/proc/run", Settings(), verb="fit")
