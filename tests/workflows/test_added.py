"""Methods and networks of a script: a run knows them again, and later verbs say where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from timm.models import _registry

import selfcon
from selfcon.errors import InputMissingError, SelfconWarning, UsageError
from selfcon.losses import Term, methods
from tests.networks.test_added import SCRIPT, add_script

SMALL: dict[str, Any] = {"epochs": 1, "batch_size": 48, "probe.epochs": 2, "device": "cpu"}
pytestmark = pytest.mark.filterwarnings("ignore:.*has no stem for small images")


def test_a_network_is_what_its_run_began_with(stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {**SMALL, "data": str(stripes), "model": "actnet", "method": "supcon-s", "exits": "none"}
    run = tmp_path / "run"
    add_script(SCRIPT, tmp_path / "one.py", monkeypatch)
    selfcon.pretrain(out=run, **keys)
    selfcon.probe(run, device="cpu")
    first = selfcon.evaluate(run, device="cpu")
    selfcon.export(run, formats=["hub"])

    add_script(SCRIPT.replace("nn.ReLU", "nn.GELU"), tmp_path / "two.py", monkeypatch)
    with pytest.raises(UsageError, match=r"The network actnet is not the one that .*run began with \(Block\)"):
        selfcon.fit(out=run, **keys)
    for folder in (run, run / "export" / "hub"):
        with pytest.warns(SelfconWarning, match=r"actnet is not the one that .* was trained with \(Block\)"):
            selfcon.load(folder, "cpu")

    monkeypatch.delitem(_registry._model_entrypoints, "actnet")
    for verb in (selfcon.evaluate, selfcon.probe):
        with pytest.raises(InputMissingError, match=r"network actnet of .* was added by a script: .*SCRIPT\.py"):
            verb(run, device="cpu")

    add_script(SCRIPT, tmp_path / "three.py", monkeypatch)
    assert selfcon.evaluate(run, device="cpu") == first
    selfcon.train(out=tmp_path / "ce", **{**keys, "method": "ce"})


def test_a_probe_needs_no_script_of_the_method(stripes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcon.losses.methods._ADDED", {})
    keys: dict[str, Any] = {**SMALL, "width": 0.125, "data": str(stripes), "method": "mine"}
    mine = selfcon.Method(name="mine", paper="", uses_exits=True, terms=(Term("F", "F+G", "F+G"),))
    with monkeypatch.context() as script:
        script.setattr("selfcon.losses.methods._METHODS", dict(methods._METHODS))
        selfcon.add_method(mine)
        whole = selfcon.fit(out=tmp_path / "whole", **keys)
        selfcon.pretrain(out=tmp_path / "parts", **keys)
    monkeypatch.setattr("selfcon.losses.methods._ADDED", {})
    assert "mine" not in selfcon.list_methods()
    assert selfcon.probe(tmp_path / "parts", device="cpu")["accuracy"] == whole["accuracy"]
    again = selfcon.probe(tmp_path / "parts", out=tmp_path / "again", device="cpu", probe={"epochs": 3})
    assert "exit2" in again["accuracy"]
    assert "mine" not in selfcon.list_methods()
    with pytest.raises(InputMissingError, match=r"The method mine of .* was added by a script"):
        selfcon.analyze.gradcam(tmp_path / "parts", device="cpu")
