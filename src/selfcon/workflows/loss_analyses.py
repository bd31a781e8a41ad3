"""What losses do, from run folders: what they bound, where their gradients go and what they look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from selfcon.analysis import bounds as worlds
from selfcon.analysis import gradcam as cams
from selfcon.analysis.gradients import block_norms, compare_blocks, gradient_norms
from selfcon.config import make_settings
from selfcon.data.policies import Policy
from selfcon.errors import DataError, UsageError
from selfcon.losses.methods import Method, get_method
from selfcon.losses.parts import find_parts
from selfcon.report import figures
from selfcon.report.canvas import Picture
from selfcon.report.plots import spread
from selfcon.workflows.analysis_files import Result, choose_folder, write
from selfcon.workflows.several import several
from selfcon.workflows.task import make_policy, prepare
from selfcon.workflows.trained import open_run


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
    return write(short, {"bounds": picture}, Path(out))


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
    methods = several(methods)
    chosen = [_contrastive(name) for name in methods]
    if len(set(methods)) != 2:
        raise UsageError(f"Two methods are compared, not {', '.join(methods) or 'none'}.")
    run = open_run(run_folder, device)
    changes: dict[str, Any] = {"method": "selfcon-m"}
    if batch_size is not None:
        changes["batch_size"] = batch_size
    if run.settings.model.startswith("resnet"):
        changes["model_options"] = {**run.settings.model_options, "zero_init_last": False}
    changed = make_settings(run.settings.model_dump(mode="json"), changes)
    task = prepare(changed, run.device, streamed_before=bool(run.facts.get("streamed")))
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
            temperature=run.temperature if trained else settings.loss.temperature,
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
    return write(result, {"gradients": figures.draw_gradients(layers, factors)}, choose_folder([run_folder], out))


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
    chosen = [_contrastive(name) for name in several(methods)]
    own = run.method
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
    options = {"temperature": run.temperature, "alpha": run.settings.loss.alpha}

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
    return write(result, pictures, choose_folder([run_folder], out), name="gradcam")


def _contrastive(name: str) -> Method:
    method = get_method(name)
    if method.stages == 1:
        raise UsageError(f"{name} is not contrastive; this analysis is about losses that contrast.")
    if parts := find_parts(method):
        raise UsageError(
            f"{name} is not itself without {', '.join(parts)}, which a run keeps in its checkpoints alone."
        )
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
