"""Classifiers for an encoder that is trained already: in its own folder, or in others beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from selfcon.config import PROBE_NAMES, Settings, flatten, make_settings
from selfcon.data.policies import POLICIES
from selfcon.errors import InputMissingError, UsageError, added_elsewhere, name_some
from selfcon.losses.methods import standing_in
from selfcon.networks.added import check_there
from selfcon.training import checkpoint as checkpoints
from selfcon.training.checkpoint import Checkpoint, same_tensors
from selfcon.training.distributed import join
from selfcon.training.folder import RunFolder, read_settings
from selfcon.workflows.costs import explaining_shortage
from selfcon.workflows.pipeline import Result, work_in
from selfcon.workflows.places import with_data
from selfcon.workflows.task import Running, check_settings


def probe(
    run_folder: str | Path,
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
    compile: bool | None = None,
    log: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Train linear classifiers on every exit of a pretrained run, and report its accuracy.

    With `out`, in another folder, which takes over the encoder, and with other settings of the probe
    (`**{"probe.epochs": 200}`).
    """
    if other := [name for name in flatten(settings) if name not in PROBE_NAMES]:
        raise UsageError(f"{name_some(other)} cannot be set here: the encoder is trained already.")
    if out is None and (settings or overwrite):
        raise UsageError("Another probe needs a folder of its own: name one with --out.")
    running = Running.choose(device=device, compile=compile, log=log)
    with join(running.device) as world:
        opened: list[RunFolder] = []
        with standing_in(*world.tell(lambda: _read_method(run_folder))):
            if out is None:
                chosen = world.tell(lambda: _reopen_pretrained(run_folder, opened))
            else:
                chosen = world.tell(lambda: _take_over(run_folder, out, settings, opened, overwrite=overwrite))
            folder = opened[0] if opened else RunFolder.follow(run_folder if out is None else out)
            with folder as run, explaining_shortage(chosen, running.device):
                result = work_in(run, chosen, running, world, probe=True)
                world.tell(lambda: None)  # nobody goes on before everything is written
                return result


def _read_method(run_folder: str | Path) -> tuple[str, dict[str, Any] | None]:
    """The method of a run, and what it was if a script added it: a probe needs no loss, so it needs no script."""
    return read_settings(run_folder).method, RunFolder.follow(run_folder).read_json("method.json")


def _reopen_pretrained(run_folder: str | Path, opened: list[RunFolder]) -> Settings:
    run, settings = RunFolder.reopen(run_folder)
    try:
        _check_pretrained(run, settings)
    except BaseException:
        run.close()
        raise
    opened.append(run)
    return with_data(run_folder, settings)


def _take_over(
    run_folder: str | Path, out: str | Path, changed: Mapping[str, Any], opened: list[RunFolder], *, overwrite: bool
) -> Settings:
    """A folder with what a run knew when its encoder was trained. That run is only read."""
    if Path(out).resolve() == Path(run_folder).resolve():
        raise UsageError(f"{out} is the run itself: another probe needs another folder.")
    before, settings = RunFolder.follow(run_folder), with_data(run_folder, read_settings(run_folder))
    _check_pretrained(before, settings)
    found = checkpoints.read_newest(before.checkpoints / "pretrain")
    if found is None or found[1].facts["epoch"] < settings.epochs:
        raise InputMissingError(f"{before.path} has no checkpoint of its whole pretraining.")
    chosen = make_settings(settings.model_dump(mode="json"), changed)
    run = RunFolder.open(out, chosen, verb="probe", overwrite=overwrite)
    try:
        _fill(run, before, *found)
    except BaseException:
        run.close()
        raise
    opened.append(run)
    return chosen


def _fill(run: RunFolder, before: RunFolder, name: str, encoder: Checkpoint) -> None:
    """Take the encoder over, which comes last, so that whoever has it has the rest; or see that it is there already."""
    there = checkpoints.read_newest(run.checkpoints / "pretrain")
    if there is None:
        for each in ("data.json", "method.json", "network.json", "policy.json"):
            if (known := before.read_json(each)) is not None:
                run.write(each, json.dumps(known, indent=1) + "\n")
        run.write_metrics([line for line in before.read_metrics() if line["stage"] == "pretrain"])
        checkpoints.save(run.checkpoints / "pretrain", name, encoder)
    elif there[0] != name or not same_tensors(there[1].tensors, encoder.tensors):
        raise UsageError(
            f"{run.path} has another encoder than {before.path}: choose another --out, or start anew with --overwrite."
        )


def _check_pretrained(run: RunFolder, settings: Settings) -> None:
    check_there(settings.model, run.read_json("network.json"), run.path)
    if (policy := settings.augment.policy) not in POLICIES and run.read_json("policy.json") is not None:
        raise added_elsewhere("policy", policy, run.path)
    if check_settings(settings).stages == 1:
        raise UsageError(f"{run.path} was trained in one stage: its classifiers are trained already.")
    epochs = sum(line["stage"] == "pretrain" for line in run.read_metrics())
    if epochs < settings.epochs:
        raise UsageError(
            f"{run.path} is pretrained for {epochs} of {settings.epochs} epochs: "
            f"the command that began it goes on with it."
        )
