"""Checkpoints are whole or not there."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch

from selfcon.config import Settings, make_settings
from selfcon.errors import InputMissingError, SelfconWarning, StorageError, UsageError
from selfcon.training.checkpoint import Checkpoint, load_newest, save
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


@pytest.mark.parametrize("damage", ["flip", "cut", "json", "number", "nest", "digit", "missing"])
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
    elif damage == "digit":
        text = (newest / "state.json").read_text()
        assert '"epoch": 2' in text
        (newest / "state.json").write_text(text.replace('"epoch": 2', '"epoch": 3'))
    else:
        weights.unlink()
    with pytest.warns(SelfconWarning, match="step-000000002 cannot be used") as warned:
        found = load_newest(tmp_path)
    said = str(warned[0].message)
    if damage in ("flip", "cut"):
        now = hashlib.sha256(weights.read_bytes()).hexdigest()
        assert f"state.safetensors has the hash {now}, and {written['sha256']} was written" in said
    elif damage == "digit":
        assert re.search(rf"state\.json has the hash [0-9a-f]{{64}}, and {written['facts_sha256']} was written", said)
    assert found is not None
    assert found.facts["epoch"] == 1
    (tmp_path / "step-000000001" / "state.json").unlink()
    with pytest.warns(SelfconWarning), pytest.raises(StorageError, match=r"No checkpoint in .* can be read"):
        load_newest(tmp_path)


def test_one_of_another_version_is_not_taken_for_damage(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    facts = tmp_path / "step-000000002" / "state.json"
    facts.write_text(json.dumps({**json.loads(facts.read_text()), "format": 99}))
    with pytest.raises(UsageError, match="is of format 99, and this version of selfcon reads format 2"):
        load_newest(tmp_path)


def test_leftovers_of_a_broken_save_are_removed(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    (tmp_path / ".step-000000002.part").mkdir()
    load_newest(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000001"]


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
