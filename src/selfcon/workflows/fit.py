"""The main job, from settings to a result: pretrain (or train in one stage), probe, evaluate, report."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selfcon.config import Settings, flatten
from selfcon.errors import UsageError
from selfcon.evaluation.accuracy import Predictions, embed, predict, summarise
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.report.page import Evidence, write_report
from selfcon.training.artifact import save_encoder, save_model
from selfcon.training.folder import RunFolder
from selfcon.training.logging import check_logs, open_logs
from selfcon.training.loop import train as train_stage
from selfcon.training.pretraining import Pretraining
from selfcon.training.probing import Probing
from selfcon.training.signals import Stop, watch
from selfcon.workflows.task import Task, check_settings, choose_device, collect_settings, prepare

Result = dict[str, Any]


def fit(
    *,
    out: str | Path,
    recipe: str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    log: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Train, probe every exit and their ensemble, write the report; returns what results.json holds.

    Settings go by their names (`epochs=3`, `optim={"momentum": 0.95}`). The same call again goes on where it was
    stopped, or returns the result at once where it is done.
    """
    chosen = collect_settings(recipe, settings)
    return run_stages(chosen, out, device=device, overwrite=overwrite, log=log, verb="fit", probe=True)


def pretrain(
    *,
    out: str | Path,
    recipe: str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    log: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Train the encoder alone, by a two-stage method; `probe` can follow in the same folder."""
    chosen = collect_settings(recipe, settings)
    if check_settings(chosen).stages == 1:
        raise UsageError(f"{chosen.method} trains in one stage: use `selfcon train` or `selfcon fit`.")
    return run_stages(chosen, out, device=device, overwrite=overwrite, log=log, verb="pretrain", probe=False)


def train(
    *,
    out: str | Path,
    recipe: str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    log: Sequence[str] = (),
    **settings: Any,
) -> Result:
    """Train encoder and classifier together, by a one-stage method."""
    chosen = collect_settings(recipe, settings)
    if check_settings(chosen).stages == 2:
        raise UsageError(f"{chosen.method} trains in two stages: use `selfcon fit`, or pretrain and probe.")
    return run_stages(chosen, out, device=device, overwrite=overwrite, log=log, verb="train", probe=False)


def probe(run_folder: str | Path, *, device: str = "auto", log: Sequence[str] = ()) -> Result:
    """Train linear classifiers on every exit of a pretrained run, and report its accuracy."""
    run, settings = RunFolder.reopen(run_folder)
    with run:
        if check_settings(settings).stages == 1:
            raise UsageError(f"{run.path} was trained in one stage: its classifiers are trained already.")
        if not any((run.checkpoints / "pretrain").glob("step-*")):
            raise UsageError(f"{run.path} is not pretrained: `selfcon pretrain` or `selfcon fit` comes first.")
        return _work(run, settings, choose_device(device), log, probe=True)


def run_stages(
    settings: Settings,
    out: str | Path,
    *,
    device: str,
    overwrite: bool,
    log: Sequence[str],
    verb: str,
    probe: bool,
) -> Result:
    """All stages of a run in its folder."""
    check_settings(settings)
    check_logs(log)
    chosen_device = choose_device(device)
    with RunFolder.open(out, settings, verb=verb, overwrite=overwrite) as run:
        return _work(run, settings, chosen_device, log, probe=probe)


def _work(run: RunFolder, settings: Settings, device: torch.device, log: Sequence[str], *, probe: bool) -> Result:
    done: Result | None = run.read_json("results.json")
    if done is not None and (not probe or "accuracy" in done):
        return {**done, "already_done": True}
    with watch() as stop:
        return _run(run, settings, device, log, stop, probe=probe)


def _run(
    run: RunFolder, settings: Settings, device: torch.device, log: Sequence[str], stop: Stop, *, probe: bool
) -> Result:
    write_log = open_logs(log, run.path, settings.model_dump(mode="json"))
    task = prepare(settings, device)
    task.check_last_batch()
    _check_same_data(task, run)
    stop.check()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    net = _train_encoder(task, run, write_log, stop)
    accuracy = None
    if task.method.stages == 1 or probe:
        if task.method.stages == 2:
            _train_probe(task, net, run, write_log, stop)
        test = predict(net, task.test, size=task.size)
        val = None if task.val is None else predict(net, task.val, size=task.size)
        accuracy = summarise(test, predict(net, task.train, size=task.size))
        stop.check()
        _write_model(task, net, run)
        result = _result(task, run, accuracy, val)
        write_report(
            run.path,
            name=task.source.name,
            settings=flatten(settings.model_dump(mode="json")),
            classes=task.classes,
            result=result,
            metrics=run.read_metrics(),
            evidence=Evidence(test, embed(net, task.test, size=task.size)["backbone"], task.test.pixels.cpu()),
            seed=settings.seed,
        )
    else:
        _write_model(task, net, run)
        result = _result(task, run, None, None)
    run.write("results.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return result


Log = Callable[[dict[str, Any]], None] | None


def _check_same_data(task: Task, run: RunFolder) -> None:
    """A run that is gone on with must see the data that it began with."""
    before, now = run.read_json("data.json"), task.fingerprints()
    if before is None:
        run.write("data.json", json.dumps(now, indent=1) + "\n")
    elif before != now:
        changed = ", ".join(sorted(name for name in {*before, *now} if before.get(name) != now.get(name)))
        raise UsageError(
            f"{task.settings.data} has changed since {run.path} began ({changed}): "
            f"bring it back, or start anew with --overwrite."
        )


def make_pretraining(task: Task, keep_encoder: Callable[[int, nn.Module], None]) -> Pretraining:
    """The first stage of a task, with a fresh network."""
    return Pretraining(
        task.build_network(classifiers=task.method.stages == 1),
        task.train,
        task.val,
        method=task.method,
        settings=task.settings,
        policy=task.policy(task.settings.augment),
        size=task.size,
        keep_encoder=keep_encoder,
    )


def _train_encoder(task: Task, run: RunFolder, log: Log, stop: Stop) -> MultiExitNetwork:
    stage = make_pretraining(task, lambda epoch, module: save_encoder(run, epoch, module))
    trained = train_stage(stage, run, device=task.device, stop=stop, log=log)
    assert isinstance(trained, MultiExitNetwork)
    return trained


def _train_probe(task: Task, net: MultiExitNetwork, run: RunFolder, log: Log, stop: Stop) -> None:
    """Put trained classifiers on the network."""
    policy = task.policy(task.settings.probe.augment)
    stage = Probing(net, task.train, classes=len(task.classes), settings=task.settings, policy=policy, size=task.size)
    classifiers = train_stage(stage, run, device=task.device, stop=stop, log=log)
    assert isinstance(classifiers, nn.ModuleDict)
    net.classifiers.update(dict(classifiers.items()))


def _write_model(task: Task, net: MultiExitNetwork, run: RunFolder) -> None:
    settings = task.settings
    facts = {
        "network": task.network_options(classifiers=len(net.classifiers) > 0),
        "classes": list(task.classes),
        "method": settings.method,
        "data": settings.data,
        "image_size": task.size,
        "mean": task.train.mean.tolist(),
        "std": task.train.std.tolist(),
        "data_sha256": run.read_json("data.json"),
    }
    save_model(run, net, facts)


def _result(
    task: Task, run: RunFolder, accuracy: dict[str, dict[str, float]] | None, val: Predictions | None
) -> Result:
    metrics, settings = run.read_metrics(), task.settings
    first = [line for line in metrics if line["stage"] in ("pretrain", "train")]
    seconds = sum(_last_seconds(metrics, stage) for stage in ("pretrain", "train", "probe"))
    result: Result = {
        "method": settings.method,
        "model": settings.model,
        "data": settings.data,
        "epochs": settings.epochs,
        "seed": settings.seed,
    }
    if accuracy is not None:
        result["accuracy"] = accuracy
    if val is not None:
        result["held_out_accuracy"] = summarise(val)
    return result | {
        "seconds": seconds,
        "images_per_second": len(task.train) * len(first) / max(first[-1]["seconds"], 1e-9),
        "peak_memory_bytes": peak_memory(task.device),
        "device": torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else task.device.type,
    }


def _last_seconds(metrics: list[dict[str, Any]], stage: str) -> float:
    return max((float(line["seconds"]) for line in metrics if line["stage"] == stage), default=0.0)


def peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
