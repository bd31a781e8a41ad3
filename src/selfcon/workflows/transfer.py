"""A pretrained encoder on other classes and on corrupted images: `selfcon transfer classify` and `corruption`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfcon.data.fine_grained import MEAN_PER_CLASS
from selfcon.data.folders import read_classes
from selfcon.data.resident import Resident
from selfcon.data.source import Source
from selfcon.errors import InputMissingError, StorageError, UsageError, unknown_name
from selfcon.evaluation import knn as neighbours
from selfcon.evaluation.accuracy import Predictions, embed, predict
from selfcon.networks.backbones import default_stem
from selfcon.networks.registry import list_models
from selfcon.networks.weights import hash_file
from selfcon.progress import say
from selfcon.report.plots import spread
from selfcon.training.distributed import join
from selfcon.training.files import as_bytes, refuse_link, write_whole
from selfcon.transfer.classification import evaluate_linear, measure
from selfcon.transfer.robustness import CORRUPTIONS, SEVERITIES, corrupt_all, mean_corruption_error
from selfcon.workflows.pipeline import run_stages
from selfcon.workflows.settings import collect_settings
from selfcon.workflows.several import several
from selfcon.workflows.task import Running
from selfcon.workflows.trained import TrainedRun, open_encoder, open_run

Result = dict[str, Any]
MODES = ("linear", "knn", "finetune")
_CLASSES_OF_ALEXNET = 1000
_RATES, _DECAYS = (0.003, 0.01, 0.03), (1e-4, 1e-3)
_SHORTER = 4  # how much shorter runs are that only choose settings


def classify(
    encoder: str | Path,
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
    overwrite: bool = False,
    device: str = "auto",
    trust: bool = False,
) -> Result:
    """What an encoder is worth on other classes: linear evaluation, nearest neighbours, full fine-tuning.

    The encoder is a run folder, or `timm:NAME=FILE`; `random` takes its network with fresh weights instead, for
    comparison. Decay (linear), and learning rate and decay (fine-tuning) are chosen on a held-out part of the training
    images. What other calls found of the same encoder and data stays in classify.json.
    """
    modes = several(modes)
    _check_classify(modes, {"epochs": epochs, "batch_size": batch_size, "image_size": image_size or 1})
    if random and "finetune" in modes:
        raise UsageError("Fine-tuning from fresh weights is `selfcon train`: leave out --random or finetune.")
    running = Running.choose(device=device, compile=None, log=())
    with join(running.device) as world:
        run = open_encoder(encoder, str(running.device), trust=trust)
        if image_size is not None:
            run = run.at_size(image_size)
        if random:
            run = run.with_fresh_weights(seed)
        source = run.other_source(data, root=data_root)
        result: Result = {
            "encoder": run.name,
            "encoder_sha256": hash_file(run.weights),
            "method": run.facts["method"],
            "model": run.settings.model,
            "data": source.name,
            "metric": "mean_per_class" if data in MEAN_PER_CLASS else "top1",
            "images": {name: len(images) for name, images in source.splits().items()},
            "image_size": run.size,
            "seed": seed,
            **({"data_folder": str(Path(data).resolve())} if Path(data).exists() else {}),
        }
        kind = ("-random" if random else "") + (f"-{image_size}px" if image_size else "")
        usual = refuse_link(run.path / "transfer") / f"classify-{Path(source.name).name}{kind}-{seed}"
        folder = Path(out) if out is not None else usual
        result = world.tell(lambda: _found_before(folder / "classify.json", result)) | result
        if {"linear", "knn"} & set(modes):
            result |= _on_features(run, source, modes, k=k, seed=seed)
        if world.is_main:
            _write(folder / "classify.json", result)
    if "finetune" in modes:
        fine = _Finetuning(run, source, data, data_root, folder, device, overwrite=overwrite, trust=trust)
        if run.is_own(data) and seed != run.settings.seed:  # which decides what is held out
            say(f"note: {data} is divided as for {run.name}, so that fine-tuning has its seed, {run.settings.seed}")
            seed = run.settings.seed
        result["finetune"] = fine.run(epochs=epochs, batch_size=batch_size, seed=seed)
        if world.is_main:
            _write(folder / "classify.json", result)
    return {**result, "out": str(folder)}


def _check_classify(modes: Sequence[str], counts: Mapping[str, int]) -> None:
    for mode in modes:
        if mode not in MODES:
            raise unknown_name("way to transfer", mode, MODES)
    if not modes:
        raise UsageError(f"Name at least one way to transfer: {', '.join(MODES)}.")
    for name, number in counts.items():
        if number < 1:
            raise UsageError(f"{name} must be at least 1, not {number}.")


def _found_before(path: Path, result: Result) -> Result:
    """What other calls found of the same encoder and the same data."""
    try:
        before: Result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    same = isinstance(before, dict) and all(before.get(key) == value for key, value in result.items())
    return before if same else {}


def _on_features(run: TrainedRun, source: Source, modes: Sequence[str], *, k: int, seed: int) -> Result:
    parts = [run.as_seen(images) for images in (source.train, source.val, source.test) if images is not None]
    features = [embed(run.net, part, size=run.size) for part in parts]
    known = {name: torch.cat([each[name] for each in features[:-1]]).to(run.device) for name in run.net.names}
    asked = {name: each.to(run.device) for name, each in features[-1].items()}
    labels, truth = torch.cat([part.labels for part in parts[:-1]]), parts[-1].labels
    validation = 0 if source.val is None else len(source.val)
    found: Result = {}
    if "linear" in modes:
        found["linear"] = evaluate_linear(known, labels, asked, truth, validation=validation, seed=seed).to_dict()
    if "knn" in modes:
        scores = {
            name: neighbours.classify(asked[name], known[name], labels, classes=len(source.classes), k=k)
            for name in run.net.names
        }
        found["knn"] = {"k": k, "accuracy": measure(scores, truth)}
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
    overwrite: bool
    trust: bool

    def run(self, *, epochs: int, batch_size: int, seed: int) -> Result:
        told = {"batch_size": max(2, min(batch_size, len(self.source.train) // 2)), "seed": seed}
        tried = []
        for rate in _RATES:
            for decay in _DECAYS:
                short = {**told, "epochs": max(1, epochs // _SHORTER), "val_fraction": self._to_choose_by()}
                result = self._train(f"choose-{rate:g}-{decay:g}", rate, decay, short)
                tried.append((result["held_out_accuracy"]["ensemble"]["top1"], rate, decay))
                say(f"fine-tuning, rate {rate:g}, decay {decay:g}: {tried[-1][0]:.1f} % of held-out images")
        _, rate, decay = max(tried)
        self._train("whole", rate, decay, {**told, "epochs": epochs})
        return {"lr": rate, "weight_decay": decay, "epochs": epochs, "accuracy": self._measure()}

    def _to_choose_by(self) -> float:
        """The share of the training images: none where the data have a part for it, the run's own where it held out."""
        if self.source.val is None:
            return 0.2
        return self.encoder.settings.val_fraction if self.encoder.is_own(self.data) else 0.0

    def _measure(self) -> dict[str, dict[str, float]]:
        """Both kinds of accuracy of the whole run."""
        run = open_run(self.folder / "whole", self.device)
        test = predict(run.net, run.as_seen(self.source.test), size=run.size)
        return measure({name: test.logits[name] for name in run.net.names}, test.labels)

    def _stem(self) -> str | None:
        """That of the encoder, whatever the images are here."""
        settings = self.encoder.settings
        if settings.stem is not None or settings.model not in list_models():
            return settings.stem
        return default_stem(self.encoder.facts["network"]["image_size"])

    def _train(self, name: str, rate: float, decay: float, told: Result) -> Result:
        settings = self.encoder.settings
        like_the_encoder = ["model", "width", "exits", "norm", "precision"]
        if self.encoder.is_own(self.data):
            like_the_encoder += ["class_list", "bad_images", "per_class", "imbalance"]
        chosen = collect_settings(
            None,
            {
                **{key: getattr(settings, key) for key in like_the_encoder},
                **told,
                "stem": self._stem(),
                "model_options": dict(settings.model_options),
                "weights": str(self.encoder.weights),
                "data": self.data,
                "data_root": self.data_root,
                "image_size": self.encoder.size,
                "method": "ce-sub" if self.encoder.net.exits else "ce",
                "lr": rate,
                "optim": {"name": "sgd", "weight_decay": decay},
                "augment": {"policy": "simple", "flip": settings.augment.flip},
                "watch": {"knn_every": 0},
            },
        )
        running = Running.choose(device=self.device, compile=None, log=(), trust=self.trust)
        return run_stages(chosen, self.folder / name, running, overwrite=self.overwrite, verb="fit", probe=False)


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
    corruptions = several(corruptions)
    for name in corruptions:
        if name not in CORRUPTIONS:
            raise unknown_name("corruption", name, CORRUPTIONS)
    if imagenet_c is not None and (tuple(corruptions) != CORRUPTIONS or tuple(severities) != SEVERITIES or samples):
        raise UsageError("mCE is over all corruptions, severities and images: leave those options out.")
    running = Running.choose(device=device, compile=None, log=())
    with join(running.device) as world:
        result = _count_errors(
            open_run(run_folder, str(running.device)),
            corruptions=corruptions,
            severities=severities,
            samples=samples,
            imagenet_c=imagenet_c,
            seed=seed,
        )
        folder = Path(out) if out is not None else refuse_link(Path(run_folder) / "transfer")
        if world.is_main:
            path = folder / "corruption.json"
            _put_aside(path, result)
            _write(path, result)
    return {**result, "out": str(folder)}


def _put_aside(path: Path, result: Result) -> None:
    """What was found before stays beside the new result if that is of other or fewer images, corruptions or draws."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        what = {key: before[key] for key in ("images", "severities", "seed", "data")}
        kinds = sorted(before["errors"]["ensemble"])
    except (OSError, ValueError, LookupError, TypeError):
        return
    if what != {key: result[key] for key in what} or kinds != sorted(result["errors"]["ensemble"]):
        digest = hashlib.sha256(json.dumps([what, kinds]).encode()).hexdigest()[:8]
        kept = path.with_name(f"corruption-{digest}.json")
        path.replace(kept)
        say(f"What was measured before, with other settings, is now {kept}")


def _count_errors(
    run: TrainedRun,
    *,
    corruptions: Sequence[str],
    severities: Sequence[int],
    samples: int | None,
    imagenet_c: str | Path | None,
    seed: int,
) -> Result:
    if not run.net.classifiers:
        raise UsageError(f"{run.path} has no classifiers yet: `selfcon probe` trains them.")
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
    published = imagenet_c is not None and len(run.facts["classes"]) == _CLASSES_OF_ALEXNET
    if imagenet_c is not None and not published:
        say("note: mCE is relative to AlexNet's errors among 1,000 classes; with others, mean errors are told")
    return {
        "run": run.name,
        "method": run.settings.method,
        "data": "imagenet-c" if imagenet_c else run.source.name,
        "images": len(some),
        "severities": list(severities),
        "seed": None if imagenet_c else seed,
        "clean_error": clean_errors,
        "errors": errors,
        "summary": {
            leave: mean_corruption_error(each, clean_errors[leave], imagenet=published)
            for leave, each in errors.items()
        },
    }


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
        write_whole(path, as_bytes(json.dumps(result, indent=1, ensure_ascii=False) + "\n"))
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error.strerror}).") from error
