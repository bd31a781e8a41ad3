"""A pretrained encoder at other tasks, from run folders: what each verb of `selfcon transfer` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from selfcon.config import Count, Positive, Section
from selfcon.data.fine_grained import MEAN_PER_CLASS
from selfcon.data.folders import read_classes
from selfcon.data.resident import Resident
from selfcon.data.scenes import Scenes, load_scenes
from selfcon.data.source import Source
from selfcon.errors import InputMissingError, StorageError, UsageError, unknown_name
from selfcon.evaluation import knn as neighbours
from selfcon.evaluation.accuracy import Predictions, embed, predict
from selfcon.networks.backbones import default_stem
from selfcon.networks.registry import list_models
from selfcon.networks.weights import hash_file
from selfcon.progress import say
from selfcon.report import figures
from selfcon.report.canvas import Picture
from selfcon.report.plots import spread
from selfcon.training.artifact import build_model
from selfcon.training.distributed import join
from selfcon.training.folder import RunFolder
from selfcon.training.loop import train as train_stage
from selfcon.training.signals import watch
from selfcon.training.trainer import Stage
from selfcon.transfer import detection, segmentation
from selfcon.transfer.classification import DECAYS, evaluate_linear, measure
from selfcon.transfer.robustness import CORRUPTIONS, SEVERITIES, corrupt_all, mean_corruption_error
from selfcon.workflows.pipeline import run_stages
from selfcon.workflows.task import Running, collect_settings
from selfcon.workflows.trained import TrainedRun, open_run

Result = dict[str, Any]
MODES = ("linear", "knn", "finetune")
_RATES, _DECAYS = (0.003, 0.01, 0.03), (1e-4, 1e-3)
_SHOWN = 6  # scenes in a picture
_SHORTER = 4  # how much shorter runs are that only choose settings


def classify(
    run_folder: str | Path,
    *,
    data: str,
    data_root: str = "data",
    modes: Sequence[str] = ("linear", "knn"),
    random: bool = False,
    image_size: int | None = None,
    epochs: int = 30,
    batch_size: int = 64,
    k: int = 20,
    seed: int = 0,
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """What a run's encoder is worth on other classes: linear evaluation, nearest neighbours, full fine-tuning.

    `random` takes its network with fresh weights instead, for comparison. Decay (linear), and learning rate and decay
    (fine-tuning) are chosen on a held-out part of the training images.
    """
    for mode in modes:
        if mode not in MODES:
            raise unknown_name("way to transfer", mode, MODES)
    if not modes:
        raise UsageError(f"Name at least one way to transfer: {', '.join(MODES)}.")
    for name, number in {"epochs": epochs, "batch_size": batch_size, "image_size": image_size or 1}.items():
        if number < 1:
            raise UsageError(f"{name} must be at least 1, not {number}.")
    if random and "finetune" in modes:
        raise UsageError("Fine-tuning from fresh weights is `selfcon train`: leave out --random or finetune.")
    with join(Running.choose(device=device, compile=None, log=()).device) as world:
        run = open_run(run_folder, device)
        run = replace(run, facts={**run.facts, "image_size": image_size or run.size})
        if random:
            torch.manual_seed(seed)
            run = replace(run, net=build_model(run.facts["network"]).to(run.device).eval())
        source = run.other_source(data, root=data_root, seed=seed)
        result: Result = {
            "encoder": run.name,
            "method": "none: fresh weights" if random else run.settings.method,
            "model": run.settings.model,
            "data": source.name,
            "metric": "mean_per_class" if data in MEAN_PER_CLASS else "top1",
            "images": {name: len(images) for name, images in source.splits().items()},
        }
        if {"linear", "knn"} & set(modes):
            result |= _on_features(run, source, modes, k=k, seed=seed)
        kind = ("-random" if random else "") + (f"-{image_size}px" if image_size else "")
        usual = Path(run_folder) / "transfer" / f"classify-{Path(source.name).name}{kind}-{seed}"
        folder = Path(out) if out is not None else usual
        if world.is_main:
            _write(folder / "classify.json", result)
    if "finetune" in modes:
        fine = _Finetuning(run, source, data, data_root, folder, device)
        result["finetune"] = fine.run(epochs=epochs, batch_size=batch_size, seed=seed)
        if world.is_main:
            _write(folder / "classify.json", result)
    return {**result, "out": str(folder)}


def _on_features(run: TrainedRun, source: Source, modes: Sequence[str], *, k: int, seed: int) -> Result:
    train, test = run.as_seen(source.train), run.as_seen(source.test)
    known, asked = (
        {name: each.to(run.device) for name, each in embed(run.net, data, size=run.size).items()}
        for data in (train, test)
    )
    found: Result = {}
    if "linear" in modes:
        found["linear"] = evaluate_linear(known, train.labels, asked, test.labels, decays=DECAYS, seed=seed).to_dict()
    if "knn" in modes:
        scores = {
            name: neighbours.classify(asked[name], known[name], train.labels, classes=len(source.classes), k=k)
            for name in run.net.names
        }
        found["knn"] = {"k": k, "accuracy": measure(scores, test.labels)}
    return found


@dataclass(frozen=True)
class _Finetuning:
    """The whole network trained on: short runs choose rate and decay on held-out images, a whole one follows."""

    encoder: TrainedRun
    source: Source
    data: str
    data_root: str
    folder: Path
    device: str

    def run(self, *, epochs: int, batch_size: int, seed: int) -> Result:
        told = {"batch_size": max(2, min(batch_size, len(self.source.train) // 2)), "seed": seed}
        tried = []
        for rate in _RATES:
            for decay in _DECAYS:
                short = {
                    **told,
                    "epochs": max(1, epochs // _SHORTER),
                    "val_fraction": 0.0 if self.source.val is not None else 0.2,
                }
                result = self._train(f"choose-{rate:g}-{decay:g}", rate, decay, short)
                tried.append((result["held_out_accuracy"]["ensemble"]["top1"], rate, decay))
                say(f"fine-tuning, rate {rate:g}, decay {decay:g}: {tried[-1][0]:.1f} % of held-out images")
        _, rate, decay = max(tried)
        final = self._train("whole", rate, decay, {**told, "epochs": epochs})
        return {"lr": rate, "weight_decay": decay, "epochs": epochs, "accuracy": final["accuracy"]}

    def _stem(self) -> str | None:
        """That of the encoder, whatever the images are here."""
        settings = self.encoder.settings
        if settings.stem is not None or settings.model not in list_models():
            return settings.stem
        return default_stem(self.encoder.facts["network"]["image_size"])

    def _train(self, name: str, rate: float, decay: float, told: Result) -> Result:
        settings = self.encoder.settings
        like_the_encoder = {
            key: getattr(settings, key) for key in ("model", "width", "stem", "exits", "norm", "precision")
        }
        chosen = collect_settings(
            None,
            {
                **like_the_encoder,
                **told,
                "stem": self._stem(),
                "model_options": dict(settings.model_options),
                "weights": str(self.encoder.path / "model.safetensors"),
                "data": self.data,
                "data_root": self.data_root,
                "image_size": self.encoder.size,
                "method": "ce-sub" if self.encoder.net.exits else "ce",
                "lr": rate,
                "optim": {"name": "sgd", "weight_decay": decay},
                "augment": {"policy": "simple"},
                "watch": {"knn_every": 0},
            },
        )
        running = Running.choose(device=self.device, compile=None, log=())
        return run_stages(chosen, self.folder / name, running, overwrite=False, verb="fit", probe=False)


class SceneSettings(Section):
    """Everything that decides the result of training on scenes."""

    task: Literal["segment", "detect"]
    encoder: str
    encoder_sha256: str
    random: bool
    data: str
    skip_broken: bool
    image_size: int
    epochs: Count
    batch_size: Count
    lr: Positive
    weight_decay: float
    precision: str
    seed: int


def segment(
    run_folder: str | Path,
    *,
    data: str,
    image_size: int = 256,
    epochs: int = 50,
    batch_size: int = 8,
    lr: float = 5e-4,
    weight_decay: float = 1e-2,
    random: bool = False,
    skip_broken: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
) -> Result:
    """Train DeepLabV3+ on a run's encoder with scenes of VOC or COCO, and measure mIoU.

    The same call again goes on where it was stopped, or returns the result where it is done.
    """
    asked: Result = {"image_size": image_size, "epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    asked |= {"weight_decay": weight_decay, "random": random, "skip_broken": skip_broken, "data": data}
    return _learn_scenes("segment", run_folder, asked, out, overwrite=overwrite, device=device)


def detect(
    run_folder: str | Path,
    *,
    data: str,
    image_size: int = 384,
    epochs: int = 30,
    batch_size: int = 8,
    lr: float = 2e-4,
    weight_decay: float = 1e-2,
    random: bool = False,
    skip_broken: bool = False,
    seed: int = 0,
    out: str | Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
) -> Result:
    """Train RetinaNet on a run's encoder with scenes of VOC or COCO, and measure mAP (VOC's is that at IoU 0.5).

    The same call again goes on where it was stopped, or returns the result where it is done.
    """
    asked: Result = {"image_size": image_size, "epochs": epochs, "batch_size": batch_size, "lr": lr, "seed": seed}
    asked |= {"weight_decay": weight_decay, "random": random, "skip_broken": skip_broken, "data": data}
    return _learn_scenes("detect", run_folder, asked, out, overwrite=overwrite, device=device)


def _learn_scenes(
    task: Literal["segment", "detect"],
    run_folder: str | Path,
    asked: Result,
    out: str | Path | None,
    *,
    overwrite: bool,
    device: str,
) -> Result:
    chosen = Running.choose(device=device, compile=None, log=()).device
    encoder = open_run(run_folder, device)
    settings = SceneSettings(
        task=task,
        encoder=str(run_folder),
        encoder_sha256=hash_file(encoder.path / "model.safetensors"),
        precision="bf16" if chosen.type == "cuda" else "fp32",
        **asked,
    )
    scenes = load_scenes(settings.data, task, skip_broken=settings.skip_broken)
    kind = "random" if settings.random else "encoder"
    usual = encoder.path / "transfer" / f"{task}-{Path(settings.data).name}-{kind}-{settings.seed}"
    folder = Path(out) if out is not None else usual
    with RunFolder.open(folder, settings, verb=f"transfer {task}", overwrite=overwrite) as run:
        if (done := run.read_json("results.json")) is not None:
            return {**done, "out": str(folder), "already_done": True}
        torch.manual_seed(settings.seed)
        if settings.random:
            encoder = replace(encoder, net=build_model(encoder.facts["network"]).to(chosen))
        work = _Segmentation(encoder, scenes, settings) if task == "segment" else _Detection(encoder, scenes, settings)
        with watch() as stop:
            trained = train_stage(work.stage, run, device=chosen, stop=stop, compiled=False)
        numbers, picture = work.finish(trained.module)
        result: Result = {
            "task": task,
            "encoder": encoder.name,
            "method": "none: fresh weights" if settings.random else encoder.settings.method,
            "model": encoder.settings.model,
            "data": scenes.name,
            "scenes": {"train": len(scenes.train), "test": len(scenes.test)},
            "epochs": settings.epochs,
            "seed": settings.seed,
            **numbers,
            "seconds": trained.seconds,
        }
        run.write("predictions.png", picture.png)
        run.write("results.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return {**result, "out": str(folder)}


class _Segmentation:
    """What is trained for segmentation, and what comes of it."""

    def __init__(self, encoder: TrainedRun, scenes: Scenes, settings: SceneSettings) -> None:
        self.scenes, self.device = scenes, encoder.device
        mean, std = (torch.tensor(encoder.facts[key]) for key in ("mean", "std"))
        self.look = segmentation.Look(settings.image_size, mean, std)
        module = segmentation.Segmenter(encoder.net, len(scenes.classes) + 1).to(encoder.device)
        module.check_size(settings.image_size)
        self.stage: Stage = segmentation.Segmenting(
            module, scenes.train, look=self.look, device=encoder.device, **_told(settings)
        )

    def finish(self, module: Any) -> tuple[Result, Picture]:
        numbers = segmentation.evaluate(module, self.scenes, self.look, self.device)
        shown = [
            (scene.read(), scene.mask(), segmentation.predict_mask(module, scene, self.look, self.device).numpy())
            for scene in self.scenes.test[:_SHOWN]
        ]
        return numbers, figures.draw_masks(shown, len(self.scenes.classes) + 1)


class _Detection:
    """What is trained for detection, and what comes of it."""

    def __init__(self, encoder: TrainedRun, scenes: Scenes, settings: SceneSettings) -> None:
        self.scenes, self.device = scenes, encoder.device
        module = detection.Detector(
            encoder.net,
            len(scenes.classes),
            size=settings.image_size,
            mean=encoder.facts["mean"],
            std=encoder.facts["std"],
        ).to(encoder.device)
        self.stage: Stage = detection.Detecting(module, scenes.train, device=encoder.device, **_told(settings))

    def finish(self, module: Any) -> tuple[Result, Picture]:
        found = [detection.detect(module, scene, self.device) for scene in self.scenes.test]
        shown = [
            (scene.read(), scene.boxes, scene.labels, each["boxes"].numpy(), each["labels"].numpy())
            for scene, each in zip(self.scenes.test[:_SHOWN], map(_best, found), strict=False)
        ]
        return dict(detection.measure(found, self.scenes.test)), figures.draw_boxes(shown, self.scenes.classes)


def _told(settings: SceneSettings) -> Result:
    keys = ("epochs", "batch_size", "lr", "weight_decay", "precision", "seed")
    return {key: getattr(settings, key) for key in keys}


def _best(found: detection.Found, count: int = 5) -> detection.Found:
    """The surest detections."""
    rows = found["scores"].argsort(descending=True)[:count]
    return {name: each[rows] for name, each in found.items()}


def corruption(
    run_folder: str | Path,
    *,
    corruptions: Sequence[str] = CORRUPTIONS,
    severities: Sequence[int] = SEVERITIES,
    samples: int | None = None,
    imagenet_c: str | Path | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """Errors of a run's exits on corrupted test images, made on the fly; or on ImageNet-C where that lies on disk."""
    for name in corruptions:
        if name not in CORRUPTIONS:
            raise unknown_name("corruption", name, CORRUPTIONS)
    if imagenet_c is not None and (tuple(corruptions) != CORRUPTIONS or tuple(severities) != SEVERITIES or samples):
        raise UsageError("mCE is over all corruptions, severities and images: leave those options out.")
    run = open_run(run_folder, device)
    if not run.net.classifiers:
        raise UsageError(f"{run_folder} has no classifiers yet: `selfcon probe` trains them.")
    data = run.split("test")
    some = spread(len(data), samples or len(data))
    clean = _as_resident(data.pictures(some), data.labels[some.to(data.device)], run)
    clean_errors = _errors(predict(run.net, clean, size=run.size))
    errors: dict[str, dict[str, list[float]]] = {name: {} for name in clean_errors}
    for name in corruptions:
        for severity in severities:
            seen = _read_imagenet_c(run, Path(imagenet_c), name, severity) if imagenet_c else None
            if seen is None:
                array = corrupt_all(clean.pixels.cpu().permute(0, 2, 3, 1).numpy(), name, severity, seed=seed)
                seen = _as_resident(torch.from_numpy(array).permute(0, 3, 1, 2), clean.labels, run)
            for leave, error in _errors(predict(run.net, seen, size=run.size)).items():
                errors[leave].setdefault(name, []).append(error)
        say(f"{name}: {', '.join(f'{error:.1f}' for error in errors['ensemble'][name])} % wrong (ensemble)")
    result: Result = {
        "run": run.name,
        "method": run.settings.method,
        "data": "imagenet-c" if imagenet_c else run.source.name,
        "images": len(some),
        "clean_error": clean_errors,
        "errors": errors,
        "summary": {
            leave: mean_corruption_error(each, clean_errors[leave], imagenet=imagenet_c is not None)
            for leave, each in errors.items()
        },
    }
    folder = Path(out) if out is not None else Path(run_folder) / "transfer"
    _write(folder / "corruption.json", result)
    return {**result, "out": str(folder)}


def _errors(predictions: Predictions) -> dict[str, float]:
    return {name: 100 - value for name, value in predictions.top(1).items()}


def _as_resident(pixels: Tensor, labels: Tensor, run: TrainedRun) -> Resident:
    mean, std = (torch.tensor(run.facts[key], device=run.device) for key in ("mean", "std"))
    return Resident(pixels.contiguous().to(run.device), labels, mean, std)


def _read_imagenet_c(run: TrainedRun, root: Path, corruption: str, severity: int) -> Resident:
    """A folder of ImageNet-C: CORRUPTION/SEVERITY/CLASS/FILE, with the classes of the run."""
    folder = root / corruption / str(severity)
    if not folder.is_dir():
        raise InputMissingError(f"{folder} is not there: ImageNet-C lies in CORRUPTION/SEVERITY/CLASS.")
    seen = run.as_seen(read_classes(folder, run.facts["classes"]))
    return _as_resident(seen.pictures(torch.arange(len(seen))), seen.labels, run)


def _write(path: Path, result: Result) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror}).") from error
