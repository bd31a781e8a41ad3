"""Training on scenes with a pretrained encoder, from run folders: `selfcon transfer segment` and `detect`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import torch

from selfcon.config import Count, NotNegative, Positive, Section, Seed, make_section
from selfcon.data.scenes import Scenes, load_scenes
from selfcon.networks.weights import hash_file
from selfcon.report import figures
from selfcon.report.canvas import Picture
from selfcon.training.distributed import World, join
from selfcon.training.files import refuse_link
from selfcon.training.folder import RunFolder
from selfcon.training.loop import train as train_stage
from selfcon.training.signals import watch
from selfcon.training.trainer import Stage
from selfcon.transfer import detection, segmentation
from selfcon.transfer.scene_stage import Plan
from selfcon.workflows.task import Running
from selfcon.workflows.trained import TrainedRun, open_encoder

Result = dict[str, Any]
TaskName = Literal["segment", "detect"]
_SHOWN = 6  # scenes in a picture


class SceneOptions(TypedDict, total=False):
    """What both tasks can be told."""

    image_size: int
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    random: bool
    skip_broken: bool
    seed: int
    out: str | Path | None
    overwrite: bool
    device: str
    trust: bool


_BOTH: SceneOptions = {"batch_size": 8, "weight_decay": 1e-2, "random": False, "skip_broken": False, "seed": 0}
_USUAL: dict[TaskName, SceneOptions] = {
    "segment": {**_BOTH, "image_size": 256, "epochs": 50, "lr": 5e-4},
    "detect": {**_BOTH, "image_size": 384, "epochs": 30, "lr": 2e-4},
}


class SceneSettings(Section):
    """Everything that decides the result of training on scenes."""

    task: Literal["segment", "detect"]
    encoder: str
    encoder_sha256: str
    random: bool
    data: str
    data_sha256: str = ""
    skip_broken: bool
    image_size: Count
    epochs: Count
    batch_size: Count
    lr: Positive
    weight_decay: NotNegative
    precision: str
    seed: Seed


def segment(encoder: str | Path, *, data: str, **options: Unpack[SceneOptions]) -> Result:
    """Train DeepLabV3+ on an encoder with scenes of VOC or COCO, and measure mIoU.

    The encoder is a run folder, or `timm:NAME=FILE`. The same call again goes on where it was stopped, or returns the
    result where it is done. Of the options, epochs are 50 and crops 256 pixels unless told.
    """
    return _learn_scenes("segment", encoder, data, options)


def detect(encoder: str | Path, *, data: str, **options: Unpack[SceneOptions]) -> Result:
    """Train RetinaNet on an encoder with scenes of VOC or COCO, and measure mAP (VOC's is that at IoU 0.5).

    As `segment`, with 30 epochs and images whose longer side is 384 pixels unless told.
    """
    return _learn_scenes("detect", encoder, data, options)


def _learn_scenes(task: TaskName, what: str | Path, data: str, options: SceneOptions) -> Result:
    out, overwrite = options.pop("out", None), options.pop("overwrite", False)
    device, trust = options.pop("device", "auto"), options.pop("trust", False)
    running = Running.choose(device=device, compile=None, log=())
    encoder = open_encoder(what, str(running.device), trust=trust)
    told: Result = {**_USUAL[task], **options}
    settings = make_section(
        SceneSettings,
        {
            "task": task,
            "encoder": str(what),
            "encoder_sha256": hash_file(encoder.weights),
            "data": data,
            "precision": "bf16" if running.device.type == "cuda" else "fp32",
            **told,
        },
    )
    scenes = load_scenes(settings.data, task, skip_broken=settings.skip_broken)
    settings = settings.model_copy(update={"data_sha256": scenes.fingerprint()})
    kind = "random" if settings.random else "encoder"
    usual = refuse_link(encoder.path / "transfer") / f"{task}-{Path(settings.data).name}-{kind}-{settings.seed}"
    folder = Path(out) if out is not None else usual
    with join(running.device) as world:
        opened: list[RunFolder] = []
        verb = f"transfer {task}"
        world.tell(lambda: opened.append(RunFolder.open(folder, settings, verb=verb, overwrite=overwrite)))
        with opened[0] if opened else RunFolder.follow(folder) as run:
            done = world.tell(lambda: run.read_json("results.json"))
            if done is not None:
                return {**done, "out": str(folder), "already_done": True}
            return {**_train(run, encoder, scenes, settings, world), "out": str(folder)}


def _train(run: RunFolder, encoder: TrainedRun, scenes: Scenes, settings: SceneSettings, world: World) -> Result:
    torch.manual_seed(settings.seed)
    if settings.random:
        encoder = encoder.with_fresh_weights(settings.seed)
    kind = _Segmentation if settings.task == "segment" else _Detection
    work = kind(encoder, scenes, settings, world)
    with watch() as stop:
        trained = train_stage(work.stage, run, device=encoder.device, stop=stop, compiled=False)
    numbers, picture = work.finish(trained.module)
    result: Result = {
        "task": settings.task,
        "encoder": encoder.name,
        "method": encoder.facts["method"],
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
    return result


class _Segmentation:
    """What is trained for segmentation, and what comes of it."""

    def __init__(self, encoder: TrainedRun, scenes: Scenes, settings: SceneSettings, world: World) -> None:
        self.scenes, self.device = scenes, encoder.device
        mean, std = (torch.tensor(encoder.facts[key]) for key in ("mean", "std"))
        self.look = segmentation.Look(settings.image_size, mean, std)
        module = segmentation.Segmenter(encoder.net, len(scenes.classes) + 1).to(encoder.device)
        module.check_size(settings.image_size)
        self.stage: Stage = segmentation.Segmenting(
            module, scenes.train, _plan(settings), look=self.look, device=encoder.device, world=world
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

    def __init__(self, encoder: TrainedRun, scenes: Scenes, settings: SceneSettings, world: World) -> None:
        self.scenes, self.device = scenes, encoder.device
        module = detection.Detector(
            encoder.net,
            len(scenes.classes),
            size=settings.image_size,
            mean=encoder.facts["mean"],
            std=encoder.facts["std"],
        ).to(encoder.device)
        self.stage: Stage = detection.Detecting(
            module, scenes.train, _plan(settings), device=encoder.device, world=world
        )

    def finish(self, module: Any) -> tuple[Result, Picture]:
        found = [detection.detect(module, scene, self.device) for scene in self.scenes.test]
        shown = [
            (scene.read(), scene.boxes, scene.labels, each["boxes"].numpy(), each["labels"].numpy())
            for scene, each in zip(self.scenes.test[:_SHOWN], map(_best, found), strict=False)
        ]
        return dict(detection.measure(found, self.scenes.test)), figures.draw_boxes(shown, self.scenes.classes)


def _plan(settings: SceneSettings) -> Plan:
    keys = ("epochs", "batch_size", "lr", "weight_decay", "precision", "seed")
    return Plan(**{key: getattr(settings, key) for key in keys})


def _best(found: detection.Found, count: int = 5) -> detection.Found:
    """The surest detections."""
    rows = found["scores"].argsort(descending=True)[:count]
    return {name: each[rows] for name, each in found.items()}
