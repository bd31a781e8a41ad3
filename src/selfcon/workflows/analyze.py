"""The analyses on run folders: what each verb of `selfcon analyze` does. Each writes NAME.json, NAME.svg and NAME.png.

For networks that are no runs, the functions of `selfcon.analysis` do the same work on tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfcon.analysis import bounds as worlds
from selfcon.analysis import cost as costs
from selfcon.analysis import embedding as embeddings
from selfcon.analysis import gradcam as cams
from selfcon.analysis.generalization import linear_accuracy
from selfcon.analysis.gradients import block_norms, compare_blocks, gradient_norms
from selfcon.analysis.information import ESTIMATORS, estimate
from selfcon.config import make_settings
from selfcon.data.policies import Policy
from selfcon.data.split import Split
from selfcon.errors import DataError, InputMissingError, StorageError, UsageError, unknown_name
from selfcon.evaluation.accuracy import embed, evaluating
from selfcon.losses.methods import Method, get_method
from selfcon.networks.exits import Exit
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.weights import read_weights
from selfcon.paper.exhibits import Cell, get_exhibit
from selfcon.progress import say
from selfcon.report import figures
from selfcon.report.canvas import Picture
from selfcon.report.plots import spread
from selfcon.training.artifact import parse_exits
from selfcon.workflows.reproduce import DATA_OF_SIZE
from selfcon.workflows.task import choose_device, make_policy, prepare
from selfcon.workflows.trained import TrainedRun, open_run

Result = dict[str, Any]
PAIRS = ("x, T", "y, T", "F, T")
_DEFAULT_STAGE = 2  # where the paper leaves ResNets
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
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """Information between input x, label y, intermediate feature T and last feature F of runs (Figure 6, Table 17).

    T is the map `after` a stage (where the run's first exit leaves). The images are those of the test split, or where
    these are few, of the training split.
    """
    for pair in pairs:
        if len(names := pair.split(", ")) != 2 or not set(names) <= set("xyTF") or names[0] == names[1]:
            raise UsageError(f"A pair is two of x, y, T and F, such as 'F, T', not {pair!r}.")
    for name in estimators:
        if name not in ESTIMATORS:
            raise unknown_name("estimator", name, ESTIMATORS)
    found = []
    for run in _open_all(run_folders, device):
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
                    hidden=64 if on_gpu else 32,
                    device=run.device,
                )
                estimates.append({"between": pair, **value.to_dict()})
                say(f"{run.name}: I({pair.replace(', ', '; ')}) by {estimator}: {value.nats:.3f} ± {value.spread:.3f}")
        found.append(
            {
                "run": run.name,
                "label": _label(run, run_folders),
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
    return _write(result, pictures, _folder(run_folders, out))


def bounds(
    *, draws: int = 1000, samples: int = 2, temperature: float = 1.0, seed: int = 0, out: str | Path = "analysis"
) -> Result:
    """The paper's propositions in random worlds where the truth is known, and the counterexample."""
    result = worlds.experiment(draws, samples=samples, temperature=temperature, seed=seed)
    picture = figures.draw_bounds(result)
    short = {
        **result,
        "bounds": {
            name: {key: value for key, value in each.items() if key != "points"}
            for name, each in result["bounds"].items()
        },
    }
    return _write(short, {"bounds": picture}, Path(out))


def gradients(
    run_folder: str | Path,
    *,
    methods: Sequence[str] = ("supcon", "selfcon-m"),
    trained: bool = False,
    batch_size: int | None = None,
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """The gradient's length by layer, two methods from the same weights on the same batch (Figure 4).

    The weights are fresh ones (of residual networks with the last normalisation of a block at 1, as the paper's are:
    at 0 nothing would flow through it), or those of the run with `trained`.
    """
    chosen = [_contrastive(name) for name in methods]
    if len(set(methods)) != 2:
        raise UsageError(f"Two methods are compared, not {', '.join(methods) or 'none'}.")
    run = open_run(run_folder, device)
    changes: dict[str, Any] = {"method": "selfcon-m"}
    if batch_size is not None:
        changes["batch_size"] = batch_size
    if run.settings.model.startswith("resnet"):
        changes["model_options"] = {**run.settings.model_options, "zero_init_last": False}
    task = prepare(make_settings(run.settings.model_dump(mode="json"), changes), run.device)
    net = run.net if trained else task.build_network(classifiers=False)
    settings = task.settings
    norms = {}
    for method in chosen:
        batch = next(
            task.train.batches(
                make_policy(settings.augment),
                batch_size=settings.batch_size,
                seed=settings.seed,
                epoch=0,
                views=method.views,
                size=task.size,
            )
        )
        norms[method.name] = gradient_norms(
            net,
            batch.images.to(net.dtype),
            batch.labels,
            method,
            temperature=settings.loss.temperature,
            alpha=settings.loss.alpha,
        )
    layers = {name: [vars(layer) for layer in each] for name, each in norms.items()}
    factors = compare_blocks(norms)
    result = {
        "run": run.name,
        "weights": "trained" if trained else "initial",
        "batch_size": min(settings.batch_size, len(task.train)),
        "methods": {name: {"layers": layers[name], "blocks": block_norms(norms[name])} for name in norms},
        "factors": factors,
    }
    return _write(result, {"gradients": figures.draw_gradients(layers, factors)}, _folder([run_folder], out))


def gradcam(
    run_folder: str | Path,
    *,
    methods: Sequence[str] = ("supcon", "selfcon-m"),
    after: int | None = None,
    images: int = 8,
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """Where the loss looks, by the exit that its gradient comes through (Figure 5), and by method (Figure 7)."""
    run = open_run(run_folder, device)
    chosen = [_contrastive(name) for name in methods]
    own = get_method(run.settings.method)
    if not run.net.projections:
        raise UsageError(
            f"{run_folder} was trained by {own.name}, without a contrastive loss: there is none to look at."
        )
    if after is None and not run.net.exits:
        raise UsageError(f"{run_folder} has no exit: say after which stage to look with --after.")
    if missing := [each.name for each in chosen if each.uses_exits and not run.net.exits]:
        raise UsageError(f"{run_folder} has no sub-network, which {missing[0]} needs: choose other --methods.")
    if not chosen:
        raise UsageError("Name at least one method with --methods.")
    if images < 1:
        raise UsageError(f"At least 1 image must be shown, not {images}.")
    test = run.split("test")
    rows, shown = _some_of_each_class(test.labels, images)
    plain = test.batch(rows, Policy(), seed=0, epoch=0, size=run.size)
    policy = make_policy(run.settings.augment)
    other = test.batch(rows, policy, seed=run.settings.seed, epoch=0, size=run.size).images
    options = {"temperature": run.settings.loss.temperature, "alpha": run.settings.loss.alpha}

    def maps_of(method: Method) -> dict[str, Tensor]:
        views = [plain.images, other][: method.views]
        return cams.loss_maps(run.net, torch.cat(views).to(run.net.dtype), plain.labels, method, after=after, **options)

    def picture(maps: Mapping[str, Tensor]) -> Picture:
        seen = test.pictures(rows[shown])
        side = seen.shape[-2:]
        return figures.draw_cams(
            seen / 255,
            {name: cams.enlarge(each[shown].float().cpu(), side) for name, each in maps.items()},
        )

    by_exit = maps_of(own)
    by_exit.pop(cams.WHOLE)
    by_method = {method.name: maps_of(method)[cams.WHOLE] for method in chosen}
    result = {
        "run": run.name,
        "after": after or run.net.exits[0].after,
        "images": [int(row) for row in rows[shown]],
        "classes": [run.facts["classes"][int(label)] for label in plain.labels[shown]],
        "mean_by_exit": {name: float(each.mean()) for name, each in by_exit.items()},
        "correlation_of_exits": _correlation(list(by_exit.values())),
        "mean_by_method": {name: float(each.mean()) for name, each in by_method.items()},
    }
    each_alone = {name: cams.normalise_together({name: each})[name] for name, each in by_exit.items()}
    pictures = {"gradcam-exits": picture(each_alone), "gradcam-methods": picture(cams.normalise_together(by_method))}
    return _write(result, pictures, _folder([run_folder], out), name="gradcam")


def generalization(
    run_folders: Sequence[str | Path],
    *,
    samples: int = 50_000,
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """Accuracy on training and test images of runs, and of the encoders that --keep-epochs kept (Figure 3)."""
    found = []
    for run in _open_all(run_folders, device):
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
                "label": _label(run, run_folders),
                "method": run.settings.method,
                "train": accuracy["backbone"]["train_top1"],
                "test": accuracy["backbone"]["top1"],
                "gap": accuracy["backbone"]["train_top1"] - accuracy["backbone"]["top1"],
                "epochs": measured,
            }
        )
    result = {"runs": found}
    return _write(result, {"generalization": figures.draw_generalization(found)}, _folder(run_folders, out))


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
    return _write(result, pictures, _folder([run_folder], out), name="embedding")


def cost(
    run_folder: str | Path | None = None,
    *,
    methods: Sequence[str] = ("supcon", "selfcon"),
    models: Sequence[str] = (),
    image_sizes: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    exits: str | None = None,
    width: float | None = None,
    steps: int = 10,
    out: str | Path | None = None,
    device: str = "auto",
) -> Result:
    """Parameters, multiply-adds, memory and time a step, for all combinations (Tables 2, 15 and 16).

    What is not named is the run's, or ResNet-18 at 32 pixels with batches of 256. Sub-networks are the paper's: `fc`
    after stage 2, and `small` above 96 pixels.
    """
    if not methods:
        raise UsageError("Name at least one method with --methods.")
    run = None if run_folder is None else open_run(run_folder, device)
    ground = None if run is None else run.settings
    models = models or ((ground.model,) if ground else ("resnet18",))
    image_sizes = image_sizes or ((run.size,) if run else (32,))
    batch_sizes = batch_sizes or ((ground.batch_size,) if ground else (256,))
    chosen_width = width if width is not None else ground.width if ground else 1.0
    chosen = choose_device(device)
    given = exits or (ground.exits if ground else None)
    rows = []
    for model in models:
        for size in image_sizes:
            usual = [Exit(_DEFAULT_STAGE, "small" if size > 96 else "fc")]
            leaves = parse_exits(given) if given and given != "none" else usual
            for method in methods:
                get_method(method)
                for batch_size in batch_sizes:
                    each = costs.measure(
                        model,
                        method,
                        exits=leaves,
                        image_size=size,
                        batch_size=batch_size,
                        width=chosen_width,
                        device=chosen,
                        steps=steps,
                    )
                    rows.append(each.to_dict())
                    say(_tell_cost(rows[-1]))
    where = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else chosen.type
    result = {"device": where, "width": chosen_width, "rows": rows, "ratios": _cost_ratios(rows, chosen_width)}
    folder = Path(out) if out is not None else _folder([run_folder], None) if run_folder else Path("analysis")
    measured = any(row["seconds"] is not None for row in rows)
    return _write(result, {"cost": figures.draw_cost(rows)} if measured else {}, folder, name="cost")


def _tell_cost(row: Mapping[str, Any]) -> str:
    time = "does not fit" if row["seconds"] is None else f"{1000 * row['seconds']:.1f} ms"
    memory = "" if row["memory_bytes"] is None else f", {row['memory_bytes'] / 2**30:.2f} GiB"
    return f"{row['model']}, {row['image_size']} px, {row['method']}, batch {row['batch_size']}: {time}{memory}"


def _cost_ratios(rows: Sequence[Mapping[str, Any]], width: float) -> list[Result]:
    """SelfCon's time and memory over SupCon's, with the paper's ratio where it has one."""
    found = {(row["model"], row["image_size"], row["batch_size"], row["method"]): row for row in rows}
    ratios = []
    for (model, size, batch, method), row in found.items():
        other = found.get((model, size, batch, "supcon"))
        if method != "selfcon" or other is None:
            continue
        ratio: Result = {"model": model, "image_size": size, "batch_size": batch}
        for key, quantity in (("seconds", "time, seconds a step"), ("memory_bytes", "memory, GiB a GPU")):
            if row[key] is not None and other[key] is not None:
                ratio[key] = row[key] / other[key]
            theirs = [_paper_cost(model, size, batch, name, quantity) for name in ("selfcon", "supcon")]
            if theirs[0] is not None and theirs[1] is not None and width == 1.0:
                ratio[f"paper_{key}"] = theirs[0] / theirs[1]
        ratios.append(ratio)
    return ratios


def _paper_cost(model: str, size: int, batch: int, method: str, quantity: str) -> float | None:
    exhibit = {"resnet18": "T15", "resnet50": "T16"}.get(model)
    wanted = {"data": DATA_OF_SIZE.get(size), "batch_size": batch, "method": method}
    for cell in get_exhibit(exhibit).cells if exhibit else ():
        if cell.quantity == quantity and all(cell.condition.get(key) == value for key, value in wanted.items()):
            return cell.value
    return None


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


def _open_all(run_folders: Sequence[str | Path], device: str) -> list[TrainedRun]:
    if not run_folders:
        raise UsageError("Name at least one run folder.")
    return [open_run(folder, device) for folder in run_folders]


def _folder(run_folders: Sequence[str | Path | None], out: str | Path | None) -> Path:
    """Where results go: beside the one run, or into a folder of their own."""
    if out is not None:
        return Path(out)
    return Path(str(run_folders[0])) / "analysis" if len(run_folders) == 1 else Path("analysis")


def _write(result: Result, pictures: Mapping[str, Picture], folder: Path, name: str | None = None) -> Result:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for title, picture in pictures.items():
            (folder / f"{title}.svg").write_bytes(picture.svg)
            (folder / f"{title}.png").write_bytes(picture.png)
        path = folder / f"{name or next(iter(pictures))}.json"
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to ({error.strerror}).") from error
    return {**result, "files": sorted(str(folder / f"{title}.svg") for title in pictures)}


def _label(run: TrainedRun, run_folders: Sequence[str | Path]) -> str:
    """The method's name where that tells the runs apart."""
    if len(run_folders) == 1:
        return run.settings.method
    names = [make_label(folder) for folder in run_folders]
    return run.settings.method if len(set(names)) == len(names) else run.name


def make_label(folder: str | Path) -> str:
    """The method of a run folder."""
    return str(json.loads((Path(folder) / "model.json").read_text())["method"])


def _accuracy(folder: Path) -> dict[str, Any]:
    try:
        accuracy: dict[str, Any] = json.loads((folder / "results.json").read_text())["accuracy"]
    except FileNotFoundError:
        raise InputMissingError(f"{folder} has no results.json: its run is not finished.") from None
    except KeyError:
        raise UsageError(f"{folder} has no classifiers yet: `selfcon probe` trains them.") from None
    return accuracy


def _top1(folder: Path) -> float | None:
    try:
        return float(_accuracy(folder)["backbone"]["top1"])
    except (InputMissingError, UsageError):
        return None


def _first_exit(run: TrainedRun) -> int:
    return run.net.exits[0].after if run.net.exits else _DEFAULT_STAGE


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


def _contrastive(name: str) -> Method:
    method = get_method(name)
    if method.stages == 1:
        raise UsageError(f"{name} is not contrastive; this analysis is about losses that contrast.")
    return method


def _some_of_each_class(labels: Tensor, shown: int, each: int = 8) -> tuple[Tensor, Tensor]:
    """Rows of up to 8 images of as many classes as are shown, and the places among them that are shown."""
    classes = labels.unique()
    if len(classes) < 2:
        raise DataError("All test images are of one class, so there is nothing to contrast.")
    chosen = classes[spread(len(classes), max(2, min(shown, len(classes)))).to(classes.device)]
    rows = [(labels == label).nonzero()[:each, 0] for label in chosen]
    if all(len(row) < 2 for row in rows):
        raise DataError("No class has two test images, so there is nothing to attract.")
    # One of each class, then a second of each, until there are as many as asked for.
    firsts = torch.tensor([0, *torch.tensor([len(row) for row in rows]).cumsum(0)[:-1]])
    places = [
        int(first) + turn for turn in range(each) for first, row in zip(firsts, rows, strict=True) if turn < len(row)
    ]
    return torch.cat(rows), torch.tensor(places[:shown])


def _correlation(maps: Sequence[Tensor]) -> float | None:
    """How alike the maps of two exits are, over all images; nothing to say of fewer or more."""
    if len(maps) != 2:
        return None
    flat = torch.stack([each.flatten().double() for each in maps])
    return float(torch.corrcoef(flat)[0, 1]) if bool((flat.std(1) > 0).all()) else None


def _kept_epochs(folder: Path) -> dict[int, Path]:
    return {
        int(path.stem.partition("-")[2]): path for path in sorted((folder / "encoders").glob("epoch-*.safetensors"))
    }


def _load_encoder(net: MultiExitNetwork, path: Path) -> None:
    """The weights of an epoch, which were kept before there were classifiers."""
    weights = {name.removeprefix("net."): value for name, value in read_weights(path).items()}
    missing, _ = net.load_state_dict(weights, strict=False)
    if wrong := [name for name in missing if not name.startswith("classifiers.")]:
        raise DataError(f"{path} does not fit the network of its run: {wrong[0]} is not in it.")
