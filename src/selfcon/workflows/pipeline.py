"""The main job, from settings to a result: pretrain (or train in one stage), probe, evaluate, report."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from selfcon.config import Settings
from selfcon.data.policies import describe_added_policy
from selfcon.data.sources import is_path
from selfcon.data.streamed import Streamed
from selfcon.described import differing
from selfcon.errors import SelfconError, StoppedError, UsageError
from selfcon.evaluation.accuracy import embed, find_never_guessed, predict, summarise, top1_of
from selfcon.losses.methods import describe_added
from selfcon.networks.added import describe_network
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.weights import check_weights
from selfcon.progress import say
from selfcon.report import evidence
from selfcon.report.page import render
from selfcon.training.artifact import save_encoder, save_model
from selfcon.training.distributed import World, join
from selfcon.training.folder import RunFolder, has_learnt
from selfcon.training.logging import open_logs
from selfcon.training.loop import Trained, forget_peak_memory
from selfcon.training.loop import train as train_stage
from selfcon.training.pretraining import Pretraining
from selfcon.training.probing import Probing
from selfcon.training.progress import Forecast
from selfcon.training.signals import Stop, watch
from selfcon.workflows.advice import advise_training, describe_data
from selfcon.workflows.costs import explaining_shortage
from selfcon.workflows.places import noted_counts
from selfcon.workflows.reporting import read_page
from selfcon.workflows.settings import collect_settings, default_folder
from selfcon.workflows.task import Running, Task, check_settings, make_policy, prepare, read_source, weights_file

Result = dict[str, Any]
_LEARNT_NOTHING = 0.99  # of the loss of features that are all equal
_LARGEST_TOLD = 4096  # images of a batch, for which that is a matter of two seconds


def fit(
    *,
    out: str | Path | None = None,
    recipe: str | None = None,
    device: str = "auto",
    compile: bool | None = None,
    overwrite: bool = False,
    log: Sequence[str] = (),
    deterministic: bool = False,
    trust: bool = False,
    **settings: Any,
) -> Result:
    """Train, probe every exit and their ensemble, write the report; return what results.json holds.

    `out` is the run directory, by default runs/DATA-MODEL-METHOD as on the command line. Settings go by their names
    (`epochs=3`, `optim={"momentum": 0.95}`). The same call again resumes a run that was stopped, and returns the result
    at once if the run is done. On a GPU long stages are compiled, unless `compile` says otherwise.
    """
    chosen = collect_settings(recipe, settings)
    running = Running.choose(device=device, compile=compile, log=log, deterministic=deterministic, trust=trust)
    return run_stages(chosen, out, running, overwrite=overwrite, verb="fit", probe=True)


def pretrain(
    *,
    out: str | Path | None = None,
    recipe: str | None = None,
    device: str = "auto",
    compile: bool | None = None,
    overwrite: bool = False,
    log: Sequence[str] = (),
    deterministic: bool = False,
    trust: bool = False,
    **settings: Any,
) -> Result:
    """Train the encoder alone, by a two-stage method; `probe` can follow in the same directory.

    `out` is the run directory, by default runs/DATA-MODEL-METHOD as on the command line.
    """
    chosen = collect_settings(recipe, settings)
    if check_settings(chosen).stages == 1:
        raise UsageError(f"{chosen.method} trains in one stage: use `selfcon train` or `selfcon fit`.")
    running = Running.choose(device=device, compile=compile, log=log, deterministic=deterministic, trust=trust)
    return run_stages(chosen, out, running, overwrite=overwrite, verb="pretrain", probe=False)


def train(
    *,
    out: str | Path | None = None,
    recipe: str | None = None,
    device: str = "auto",
    compile: bool | None = None,
    overwrite: bool = False,
    log: Sequence[str] = (),
    deterministic: bool = False,
    trust: bool = False,
    **settings: Any,
) -> Result:
    """Train encoder and classifier together, by a one-stage method.

    `out` is the run directory, by default runs/DATA-MODEL-METHOD as on the command line.
    """
    chosen = collect_settings(recipe, settings)
    if check_settings(chosen).stages == 2:
        raise UsageError(f"{chosen.method} trains in two stages: use `selfcon fit`, or pretrain and probe.")
    running = Running.choose(device=device, compile=compile, log=log, deterministic=deterministic, trust=trust)
    return run_stages(chosen, out, running, overwrite=overwrite, verb="train", probe=False)


def run_stages(
    settings: Settings, out: str | Path | None, running: Running, *, overwrite: bool, verb: str, probe: bool
) -> Result:
    """All stages of a run in its folder; under torchrun, all processes together."""
    check_settings(settings)
    out = default_folder(settings) if out is None else out
    begun = has_learnt(out) or (Path(out) / "results.json").exists()
    if settings.weights is not None and (overwrite or not begun):
        check_weights(weights_file(settings), trust=running.trust)
    with join(running.device) as world:
        opened: list[RunFolder] = []
        world.tell(lambda: opened.append(RunFolder.open(out, settings, verb=verb, overwrite=overwrite)))
        folder = opened[0] if opened else RunFolder.follow(out)
        with folder as run, explaining_shortage(settings, running.device):
            try:
                result = work_in(run, settings, running, world, probe=probe)
            except StoppedError as error:
                if not (overwrite and run.has_begun):
                    raise
                raise StoppedError(str(error).replace("same command", "same command without --overwrite")) from error
            world.tell(lambda: None)  # nobody goes on before everything is written
            return result


def work_in(run: RunFolder, settings: Settings, running: Running, world: World, *, probe: bool) -> Result:
    """What is left to do of a run in its folder, and the result; at once where there is nothing."""
    world.tell(lambda: _check_same_code(run, settings))
    done = world.tell(lambda: _find_done(run, probe=probe))
    if done is not None:
        world.tell(lambda: _tell_changed_data(run, settings))
        return {**done, "already_done": True}
    with watch() as stop, running.as_asked():
        return _run(run, settings, running, world, stop, probe=probe)


def _find_done(run: RunFolder, *, probe: bool) -> Result | None:
    """The result of a run that has nothing left to do."""
    done: Result | None = run.read_json("results.json")
    if done is None or ("accuracy" not in done and probe):
        return None
    needed = ("model.json", "model.safetensors", *(("evidence.json", "report.html") if "accuracy" in done else ()))
    return done if all((run.path / name).exists() for name in needed) else None


def _run(run: RunFolder, settings: Settings, running: Running, world: World, stop: Stop, *, probe: bool) -> Result:
    device = running.device
    known = world.tell(lambda: run.read_json("data.json")) or {}
    begun = world.tell(lambda: has_learnt(run.path))
    began_with = known.get("weights") if begun else None
    task = prepare(
        settings,
        device,
        world,
        trust=running.trust,
        streamed_before=known.get("streamed"),
        began_with=began_with,
    )
    task.check_batches()
    task.check_shares()
    world.tell(lambda: _check_same_data(task, run))
    _print_notes(task, begun=begun)
    _check_stop(world, stop, device)
    forget_peak_memory(device)
    pretraining = make_pretraining(task, lambda epoch, module: save_encoder(run, epoch, module))
    write_log = open_logs(running.log if world.is_main else (), run.path, settings.model_dump(mode="json"))
    work = partial(train_stage, run=run, device=device, stop=stop, log=write_log, compiled=running.compile)
    seen = settings.model_copy(update={"image_size": task.size})
    with explaining_shortage(seen, device):
        encoder = work(pretraining, forecast=_forecast(task, probe=probe))
    net, spent = encoder.module, [encoder]
    assert isinstance(net, MultiExitNetwork)
    fixed = not settings.loss.learn_temperature and task.method.has_terms
    long = settings.limit_batches is None and settings.batch_size <= _LARGEST_TOLD
    if world.is_main and task.method.stages == 2 and fixed and long:
        _tell_what_was_learnt(run.read_metrics(), pretraining.loss_of_nothing(), labelled=task.method.uses_labels)
    if task.method.stages == 2 and probe:
        forget_peak_memory(device)
        with explaining_shortage(settings, device, probing=True):
            classifiers = work(make_probing(task, net))
        assert isinstance(classifiers.module, nn.ModuleDict)
        net.classifiers.update(dict(classifiers.module.items()))
        spent.append(classifiers)
    if not net.classifiers:
        _write_model(task, net, run)
        return _write_result(task, run, spent, {})
    test = predict(net, task.test, size=task.size)
    accuracy: Result = {"accuracy": summarise(test, top1_of(net, task.train, size=task.size))}
    if never := find_never_guessed(test):
        accuracy["never_guessed"] = [task.classes[label] for label in never]
    if task.val is not None:
        accuracy["held_out_accuracy"] = summarise(predict(net, task.val, size=task.size))
    if write_log is not None:
        for stage, key in (("held_out", "held_out_accuracy"), ("test", "accuracy")):
            found = {answer: values["top1"] for answer, values in accuracy.get(key, {}).items()}
            write_log({"stage": stage, "epoch": settings.epochs, **found})
    features = embed(net, task.test, size=task.size)
    _check_stop(world, stop, device)
    _write_model(task, net, run)
    if world.is_main:
        shown = evidence.gather(
            test,
            features,
            pictures=task.test.pictures,
            describe=task.source.test.describe,
            classes=task.classes,
            seed=settings.seed,
            samples=settings.epochs * len(task.train),
        )
        run.write("evidence.json", json.dumps(shown) + "\n")
    result = _write_result(task, run, spent, accuracy)
    if world.is_main:
        run.write("report.html", render([read_page(run.path)]).encode("utf-8", "replace"))
    return result


def _print_notes(task: Task, *, begun: bool) -> None:
    """Print what is worth knowing before the first step."""
    if place := task.train.describe_place():
        say(place)
    for sentence in () if begun else [*describe_data(task), *advise_training(task)]:
        say(f"note: {sentence}")


def _forecast(task: Task, *, probe: bool) -> Forecast:
    """Return what a run's time is estimated for. A step of the probe is a forward, a third of a training step."""
    settings, stages = task.settings, task.method.stages
    what = f"{settings.epochs} epoch{'s' * (settings.epochs > 1)} of {'pretraining' if stages == 2 else 'training'}"
    streamed = isinstance(task.train, Streamed)
    if stages == 1 or not probe:
        return Forecast(what, streamed=streamed)
    later = settings.probe_epochs * len(task.train) / (3 * task.method.views)
    return Forecast(f"{what} and the linear probe", later, streamed)


def _tell_what_was_learnt(metrics: list[dict[str, Any]], nothing: float, *, labelled: bool) -> None:
    """Where that is next to nothing: whoever looks at the curve alone takes it for one that has come to its end."""
    last = next((line["loss"] for line in reversed(metrics) if line["stage"] == "pretrain"), None)
    if last is not None and last > _LEARNT_NOTHING * nothing:
        other = ", or --method selfcon-1stage" if labelled else ""
        say(
            f"note: the loss ended at {last:.2f}, and is {nothing:.2f} where nothing is told apart: "
            f"the encoder has hardly begun to learn. More --epochs or a smaller --batch-size help{other}"
        )


def _check_stop(world: World, stop: Stop, device: torch.device) -> None:
    """Raise StoppedError in all processes if one of them was told to stop."""
    if any(world.anywhere(stop.by is not None, device=device)):
        stop.by = stop.by or "a signal to another process"
        stop.check()


def _check_same_code(run: RunFolder, settings: Settings) -> None:
    """A method, a network or a policy that a script added is more than its name."""
    policy, of_probe = settings.augment.policy, settings.probe.augment.policy
    for file, kind, name, now in (
        ("method", "method", settings.method, describe_added(settings.method)),
        ("network", "network", settings.model, describe_network(settings.model, settings.model_options)),
        ("policy", "policy", policy, describe_added_policy(policy)),
        ("probe-policy", "probe's policy", of_probe, describe_added_policy(of_probe)),
    ):
        before = run.read_json(f"{file}.json")
        if now is None or before == now:
            continue
        if before is not None:
            raise UsageError(
                f"The {kind} {name} is not the one that {run.path} began with ({differing(before, now)}): "
                f"choose another --out, or start anew with --overwrite."
            )
        run.write(f"{file}.json", json.dumps(now, indent=1) + "\n")


def _check_same_data(task: Task, run: RunFolder) -> None:
    """A run that is gone on with must see the data that it began with."""
    before, now = run.read_json("data.json"), {**task.fingerprints(), "streamed": isinstance(task.train, Streamed)}
    if before is None:
        where = {"place": str(Path(task.settings.data).resolve())} if is_path(task.settings.data) else {}
        counts = {name: len(images) for name, images in task.source.splits().items()}
        run.write("data.json", json.dumps({**now, **where, "images": counts}, indent=1) + "\n")
        return
    before = {"streamed": now["streamed"], **before}  # which was not always noted
    before = {name: value for name, value in before.items() if name not in ("place", "images")}
    if before != now:
        changed = ", ".join(sorted(name for name in {*before, *now} if before.get(name) != now.get(name)))
        raise UsageError(
            f"{task.settings.data} has changed since {run.path} began ({changed}): "
            f"bring it back, or start anew with --overwrite."
        )


def _tell_changed_data(run: RunFolder, settings: Settings) -> None:
    """Of a folder that has more or fewer images than when the run was trained, which is done."""
    before = noted_counts(run.path)
    if not before or settings.bad_images != "error":
        return
    with suppress(SelfconError, OSError):
        if not (is_path(settings.data) and Path(settings.data).is_dir()):
            return
        now = {name: len(images) for name, images in read_source(settings).splits().items()}
        if now != before:
            then, there = (", ".join(f"{count:,} {name}" for name, count in each.items()) for each in (before, now))
            say(
                f"note: {settings.data} has changed since {run.path} was trained on it: then it had {then} images, "
                f"now {there}"
            )


def make_pretraining(task: Task, keep_encoder: Callable[[int, nn.Module], None]) -> Pretraining:
    """The first stage of a task, with a fresh network."""
    return Pretraining(
        task.build_network(classifiers=task.method.stages == 1),
        task.train,
        task.val,
        method=task.method,
        settings=task.settings,
        policy=make_policy(task.settings.augment),
        size=task.size,
        keep_encoder=keep_encoder,
        world=task.world,
    )


def make_probing(task: Task, net: MultiExitNetwork) -> Probing:
    """The second stage of a task, on a trained network."""
    policy = make_policy(task.settings.probe.augment)
    if not task.settings.augment.flip:
        policy = replace(policy, flip_probability=0.0)
    return Probing(
        net,
        task.train,
        task.test,
        classes=len(task.classes),
        settings=task.settings,
        policy=policy,
        size=task.size,
        world=task.world,
    )


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
        "data_sha256": task.fingerprints(),
        **({"streamed": True} if isinstance(task.train, Streamed) else {}),
    }
    save_model(run, net, facts)


def _count_images_in_peak(task: Task) -> int:
    """Bytes of images in the memory whose peak is told: what streams stays in main memory, the peak is the GPU's."""
    splits = [split for split in (task.train, task.val, task.test) if split is not None]
    on_gpu = task.device.type == "cuda"
    return sum(split.stored_bytes for split in splits if not (on_gpu and isinstance(split, Streamed)))


def _write_result(task: Task, run: RunFolder, spent: list[Trained], accuracy: dict[str, Any]) -> Result:
    settings = task.settings
    result: Result = {
        "method": settings.method,
        "model": settings.model,
        "data": settings.data,
        "epochs": settings.epochs,
        "seed": settings.seed,
        **accuracy,
        **({"notes": list(task.notes)} if task.notes else {}),
        "seconds": sum(stage.seconds for stage in spent),
        "images_per_second": len(task.train) * settings.epochs / max(spent[0].seconds, 1e-9),
        "peak_memory_bytes": max(stage.peak_memory_bytes for stage in spent),
        "stages": [
            {"name": each.stage, "seconds": each.seconds, "peak_memory_bytes": each.peak_memory_bytes} for each in spent
        ],
        "data_bytes": _count_images_in_peak(task),
        "device": torch.cuda.get_device_name(task.device) if task.device.type == "cuda" else task.device.type,
    }
    run.write("results.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return result
