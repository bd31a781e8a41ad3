"""What features know, from run folders: information, generalisation, and how they lie in space."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfcon.analysis import embedding as embeddings
from selfcon.analysis.generalization import linear_accuracy
from selfcon.analysis.information import ESTIMATORS, estimate
from selfcon.data.split import Split
from selfcon.errors import DataError, InputMissingError, StorageError, UsageError, unknown_name
from selfcon.evaluation.accuracy import embed, evaluating
from selfcon.networks.exits import DEFAULT_STAGE
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.weights import read_weights
from selfcon.paper.exhibits import Cell, get_exhibit
from selfcon.progress import say
from selfcon.report import figures
from selfcon.report.plots import spread
from selfcon.workflows.analysis_files import Result, choose_folder, label, open_all, write
from selfcon.workflows.several import several
from selfcon.workflows.trained import TrainedRun, open_run

PAIRS = ("x, T", "y, T", "F, T")
_ENOUGH = 2000


def information(
    run_folders: Sequence[str | Path],
    *,
    pairs: Sequence[str] = PAIRS,
    estimators: Sequence[str] = tuple(ESTIMATORS),
    after: int | None = None,
    split: str | None = None,
    samples: int = 10_000,
    seeds: int = 3,
    steps: int | None = None,
    batch_size: int | None = None,
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """Information between input x, label y, intermediate feature T and last feature F of runs (Figure 6, Table 17).

    T is the map `after` a stage (where the run's first exit leaves). The images are those of the test split, or where
    these are few, of the training split.
    """
    run_folders, pairs, estimators = several(run_folders), several(pairs), several(estimators)
    for pair in pairs:
        if len(names := pair.split(", ")) != 2 or not set(names) <= set("xyTF") or names[0] == names[1]:
            raise UsageError(f"A pair is two of x, y, T and F, such as 'F, T', not {pair!r}.")
    for name in estimators:
        if name not in ESTIMATORS:
            raise unknown_name("estimator", name, ESTIMATORS)
    found = []
    for run in open_all(run_folders, device):
        chosen = split or ("test" if len(run.source.test) >= _ENOUGH else "train")
        data = run.split(chosen)
        stage = _first_exit(run) if after is None else after
        variables = _variables(run, data.take(spread(len(data), samples).to(data.device)), stage)
        on_gpu = run.device.type == "cuda"
        estimates = []
        for pair in pairs:
            a, b = (variables[name] for name in pair.split(", "))
            for estimator in estimators:
                value = estimate(
                    a,
                    b,
                    estimator,
                    seeds=seeds,
                    steps=steps or (2000 if on_gpu else 100),
                    batch_size=batch_size or (128 if on_gpu else None),
                    hidden=64 if on_gpu else 32,
                    device=run.device,
                )
                estimates.append({"between": pair, **value.to_dict()})
                apart = "" if value.spread is None else f" ± {value.spread:.3f}"
                say(f"{run.name}: I({pair.replace(', ', '; ')}) by {estimator}: {value.nats:.3f}{apart}")
        found.append(
            {
                "run": run.name,
                "label": label(run, run_folders),
                "method": run.settings.method,
                "model": run.settings.model,
                "data": Path(run.settings.data).stem,
                "top1": _top1(run.path),
                "split": chosen,
                "after": stage,
                "estimates": estimates,
            }
        )
    pictures = {"information": figures.draw_information(found)}
    if "F, T" in pairs and len(found) > 1 and all(each["top1"] is not None for each in found):
        pictures["information-and-accuracy"] = figures.draw_trend(found, "F, T")
    result = {"runs": found, "paper": _paper_information(found)}
    return write(result, pictures, choose_folder(run_folders, out))


def generalization(
    run_folders: Sequence[str | Path],
    *,
    samples: int = 50_000,
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """Accuracy on training and test images of runs, and of the encoders that --keep-epochs kept (Figure 3)."""
    run_folders = several(run_folders)
    found = []
    for run in open_all(run_folders, device):
        accuracy = _accuracy(run.path)
        epochs = _kept_epochs(run.path)
        measured = []
        if epochs:
            train, test = run.split("train"), run.split("test")
            train = train.take(spread(len(train), samples).to(train.device))
            for epoch, path in epochs.items():
                _load_encoder(run.net, path)
                known, asked = (
                    embed(run.net, data, size=run.size)["backbone"].to(run.device) for data in (train, test)
                )
                measured.append({"epoch": epoch, **linear_accuracy(known, train.labels, asked, test.labels)})
                say(
                    f"{run.name}, epoch {epoch}: train {measured[-1]['train']:.1f} %, test {measured[-1]['test']:.1f} %"
                )
        found.append(
            {
                "run": run.name,
                "label": label(run, run_folders),
                "method": run.settings.method,
                "train": accuracy["backbone"]["train_top1"],
                "test": accuracy["backbone"]["top1"],
                "gap": accuracy["backbone"]["train_top1"] - accuracy["backbone"]["top1"],
                "epochs": measured,
            }
        )
    result = {"runs": found}
    return write(result, {"generalization": figures.draw_generalization(found)}, choose_folder(run_folders, out))


def embedding(
    run_folder: str | Path,
    *,
    split: str = "test",
    samples: int = 1000,
    by: str = "tsne",
    neighbours_of: int | None = None,
    count: int = 6,
    seed: int = 0,
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """Every exit's features: on a plane, how classes lie in them, and whom an image has for neighbours."""
    run = open_run(run_folder, device)
    data = run.split(split)
    features = embed(run.net, data, size=run.size)
    labels, classes = data.labels.cpu(), run.facts["classes"]
    some = spread(len(data), samples)
    planes = {name: embeddings.project(each[some], by=by, seed=seed) for name, each in features.items()}
    asked = 0 if neighbours_of is None else neighbours_of
    if not 0 <= asked < len(data):
        raise UsageError(f"The {split} images are numbered from 0 to {len(data) - 1}: there is no number {asked}.")
    nearest, shown = {}, {}
    for name, each in features.items():
        rows, cosines = embeddings.find_nearest(each[asked], each, count=count + 1)
        kept = rows != asked
        rows, cosines = rows[kept][:count], cosines[kept][:count]
        captions = [classes[int(labels[row])] for row in rows]
        nearest[name] = [
            {"image": int(row), "class": caption, "cosine": float(cosine)}
            for row, caption, cosine in zip(rows, captions, cosines, strict=True)
        ]
        shown[name] = (data.pictures(rows), captions)
    result = {
        "run": run.name,
        "split": split,
        "map": by,
        "mapped": len(some),
        "exits": {name: embeddings.describe(each, labels) for name, each in features.items()},
        "neighbours": {"of": asked, "class": classes[int(labels[asked])], "nearest": nearest},
    }
    own = data.pictures(torch.tensor([asked]))
    pictures = {
        "embedding": figures.draw_embedding(planes, labels[some], classes),
        "neighbours": figures.draw_neighbours(own[0], shown, classes[int(labels[asked])]),
    }
    return write(result, pictures, choose_folder([run_folder], out), name="embedding")


def _paper_information(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """What Table 17 has for the methods of these runs, by method, where they are of its data and network."""
    cells: list[Cell] = [cell for cell in get_exhibit("T17").cells if "estimator" in cell.condition]
    methods = {run["method"] for run in runs if (run["data"], run["model"]) == ("cifar100", "resnet18")}
    found: dict[str, dict[str, float]] = {}
    for cell in cells:
        if cell.condition["method"] in methods and "loss.alpha" not in cell.condition:
            key = f"{cell.condition['estimator']}, I({str(cell.condition['between']).replace(', ', '; ')})"
            found.setdefault(str(cell.condition["method"]), {})[key] = cell.value
    return found


def _accuracy(folder: Path) -> dict[str, Any]:
    try:
        accuracy: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"))["accuracy"]
    except FileNotFoundError:
        raise InputMissingError(f"{folder} has no results.json: its run is not finished.") from None
    except KeyError:
        raise UsageError(f"{folder} has no classifiers yet: `selfcon probe` trains them.") from None
    except (ValueError, TypeError) as error:
        raise StorageError(f"{folder / 'results.json'} is damaged ({error}).") from error
    return accuracy


def _top1(folder: Path) -> float | None:
    try:
        return float(_accuracy(folder)["backbone"]["top1"])
    except (InputMissingError, UsageError):
        return None


def _first_exit(run: TrainedRun) -> int:
    return run.net.exits[0].after if run.net.exits else DEFAULT_STAGE


def _variables(run: TrainedRun, data: Split, after: int) -> dict[str, Tensor]:
    """The input, the label, the map after a stage and the last feature of all images."""
    parts: dict[str, list[Tensor]] = {"x": [], "y": [], "T": [], "F": []}
    with evaluating(run.net):
        for batch in data.plain_batches(batch_size=512, size=run.size):
            inside, out = run.net.look_inside(batch.images.to(run.net.dtype), after)
            for name, values in zip(
                "xyTF", (batch.images, batch.labels, inside, out.features["backbone"]), strict=True
            ):
                parts[name].append(values if name == "y" else values.float())
    return {name: torch.cat(values) for name, values in parts.items()}


def _kept_epochs(folder: Path) -> dict[int, Path]:
    found = ((path.stem.partition("-")[2], path) for path in sorted((folder / "encoders").glob("epoch-*.safetensors")))
    return {int(epoch): path for epoch, path in found if epoch.isdecimal()}


def _load_encoder(net: MultiExitNetwork, path: Path) -> None:
    """The weights of an epoch, which were kept before there were classifiers."""
    weights = {name.removeprefix("net."): value for name, value in read_weights(path).items()}
    missing, _ = net.load_state_dict(weights, strict=False)
    if wrong := [name for name in missing if not name.startswith("classifiers.")]:
        raise DataError(f"{path} does not fit the network of its run: {wrong[0]} is not in it.")
