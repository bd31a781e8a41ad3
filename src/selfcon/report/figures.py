"""The pictures of the analyses, from their results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from selfcon.report.canvas import GREY, MARKS, Picture, colour_of_method, draw, plain
from selfcon.report.maps import lay_out

_HATCHES = ("", "//", "..", "xx", "--")


def draw_information(runs: Sequence[Mapping[str, Any]]) -> Picture:
    """Information by pair and estimator, a bar a run, with its spread and the estimators' ceilings (Figure 6)."""
    estimators = list(dict.fromkeys(each["estimator"] for run in runs for each in run["estimates"]))
    pairs = list(dict.fromkeys(each["between"] for run in runs for each in run["estimates"]))

    def work(figure: Figure) -> None:
        for place, estimator in enumerate(estimators, start=1):
            axes = figure.add_subplot(1, len(estimators), place)
            for number, run in enumerate(runs):
                chosen = {e["between"]: e for e in run["estimates"] if e["estimator"] == estimator}
                xs = [pairs.index(pair) + (number - (len(runs) - 1) / 2) * 0.8 / len(runs) for pair in chosen]
                axes.bar(
                    xs,
                    [e["nats"] for e in chosen.values()],
                    0.8 / len(runs),
                    yerr=[e["spread"] or 0.0 for e in chosen.values()],
                    color=colour_of_method(run["method"]),
                    hatch=_HATCHES[number % len(_HATCHES)],
                    edgecolor="white",
                    ecolor=GREY,
                    label=plain(run["label"]),
                )
            ceiling = max(e["ceiling"] for run in runs for e in run["estimates"] if e["estimator"] == estimator)
            if axes.get_ylim()[1] > 0.6 * ceiling:
                axes.axhline(ceiling, color=GREY, linestyle=":")
                axes.text(len(pairs) - 0.5, ceiling, "ceiling", ha="right", va="bottom", fontsize=8)
            axes.set_xticks(range(len(pairs)), [f"I({pair.replace(', ', '; ')})" for pair in pairs])
            axes.set_title(estimator)
            axes.set_ylabel("nats" if place == 1 else "")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=5, fontsize=9)

    return draw(work, (max(3.2, 1.1 * len(pairs) + 0.5 * len(runs)) * len(estimators), 3.2))


def draw_trend(runs: Sequence[Mapping[str, Any]], between: str) -> Picture:
    """Accuracy against information, a point a run: the right half of the story of Figure 6."""
    estimators = list(dict.fromkeys(each["estimator"] for run in runs for each in run["estimates"]))

    def work(figure: Figure) -> None:
        axes = figure.add_subplot()
        for mark, estimator in zip(MARKS, estimators, strict=False):
            for run in runs:
                for each in run["estimates"]:
                    if (each["estimator"], each["between"]) == (estimator, between):
                        axes.errorbar(
                            each["nats"],
                            run["top1"],
                            xerr=each["spread"],
                            marker=mark,
                            color=colour_of_method(run["method"]),
                        )
                        axes.annotate(
                            plain(run["label"]),
                            (each["nats"], run["top1"]),
                            xytext=(4, 4),
                            textcoords="offset points",
                            fontsize=7,
                        )
            axes.plot([], [], mark, color=GREY, label=estimator)
        axes.set_xlabel(f"I({between.replace(', ', '; ')}), nats")
        axes.set_ylabel("accuracy of the backbone, %")
        axes.legend(fontsize=8)

    return draw(work, (4.6, 3.4))


def draw_bounds(result: Mapping[str, Any]) -> Picture:
    """What the loss promises against what is true, a point a random world; above the diagonal a promise is broken."""

    def work(figure: Figure) -> None:
        for place, (name, each) in enumerate(result["bounds"].items(), start=1):
            axes = figure.add_subplot(1, len(result["bounds"]), place)
            points = np.array(each["points"])
            axes.scatter(points[:, 0], points[:, 1], s=5, color="#0072B2", linewidths=0, alpha=0.6)
            high = float(points[:, 0].max()) * 1.05 + 1e-9
            axes.plot([0, high], [0, high], color=GREY, linewidth=1)
            if name == "proposition 1":
                broken = result["counterexample"]
                axes.plot(broken["truth"], broken["bound"], "X", color="#D55E00", markersize=9)
                axes.annotate(
                    "negatives from\nother classes",
                    (broken["truth"], broken["bound"]),
                    xytext=(8, -6),
                    textcoords="offset points",
                    fontsize=8,
                    va="top",
                )
            axes.set_title(f"{name}\nholds in {each['holds']:,} of {each['of']:,}", fontsize=10)
            axes.set_xlabel("what is true, nats")
            axes.set_ylabel("what is promised, nats" if place == 1 else "")

    return draw(work, (3.1 * len(result["bounds"]), 3.3))


def draw_gradients(norms: Mapping[str, Sequence[Mapping[str, Any]]], factors: Mapping[str, float]) -> Picture:
    """The gradient's length in every layer, one method below the other on the same scale; blocks are shaded."""

    def work(figure: Figure) -> None:
        largest = max(layer["norm"] for layers in norms.values() for layer in layers)
        for place, (method, layers) in enumerate(norms.items(), start=1):
            axes = figure.add_subplot(len(norms), 1, place)
            places = range(len(layers))
            axes.bar(places, [layer["norm"] for layer in layers], color=colour_of_method(method))
            axes.set_ylim(0, 1.3 * largest)
            axes.set_ylabel("gradient norm")
            axes.set_title(method, loc="left")
            _mark_blocks(axes, [layer["block"] for layer in layers], factors if place == len(norms) else {})
            names = [layer["layer"] if place == len(norms) else "" for layer in layers]
            axes.set_xticks(places, names, rotation=60, ha="right", fontsize=7)

    count = max(len(layers) for layers in norms.values())
    return draw(work, (max(5.0, 0.3 * count), 2.4 * len(norms) + 1))


def _mark_blocks(axes: Axes, blocks: Sequence[str], factors: Mapping[str, float]) -> None:
    first = 0
    for number, block in enumerate(dict.fromkeys(blocks)):
        last = first + blocks.count(block)
        if number % 2:
            axes.axvspan(first - 0.5, last - 0.5, color=GREY, alpha=0.12, linewidth=0)
        text = ("stem" if block == "0" else block) + (f"\nx{factors[block]:.2g}" if block in factors else "")
        axes.text((first + last - 1) / 2, 0.98, text, transform=axes.get_xaxis_transform(), ha="center", va="top")
        first = last


def draw_cams(images: Tensor, rows: Mapping[str, Tensor]) -> Picture:
    """Images [B, 3, H, W] in [0, 1] in the first row, below them the same with maps [B, H, W] in [0, 1] over them."""
    count = len(images)

    def work(figure: Figure) -> None:
        grid = figure.subplots(1 + len(rows), count, squeeze=False)
        for column in range(count):
            picture = images[column].permute(1, 2, 0).numpy()
            grey = picture.mean(2, keepdims=True).repeat(3, 2)
            grid[0, column].imshow(picture)
            for line, maps in enumerate(rows.values(), start=1):
                grid[line, column].imshow(grey)
                heat = maps[column].numpy()
                grid[line, column].imshow(heat, cmap="inferno", alpha=0.25 + 0.5 * heat, vmin=0, vmax=1)
        for line, name in enumerate(["image", *rows]):
            grid[line, 0].set_ylabel(name, rotation=0, ha="right", va="center")
            for axes in grid[line]:
                axes.set_xticks([])
                axes.set_yticks([])

    return draw(work, (1.1 * count + 1.2, 1.1 * (1 + len(rows))))


def draw_masks(scenes: Sequence[tuple[Any, Any, Any]], classes: int) -> Picture:
    """Images [H, W, 3] with their true and predicted masks [H, W], a column a scene; 255 is left grey."""
    table = np.full((256, 3), 0.5)
    table[:classes] = [mpl.colormaps["tab20"](index % 20)[:3] for index in range(classes)]
    table[0] = 0.0

    def work(figure: Figure) -> None:
        grid = figure.subplots(3, len(scenes), squeeze=False)
        for column, (image, truth, predicted) in enumerate(scenes):
            for line, each in enumerate((image, table[truth], table[predicted])):
                grid[line, column].imshow(each)
                grid[line, column].set_xticks([])
                grid[line, column].set_yticks([])
        for line, name in enumerate(("image", "truth", "predicted")):
            grid[line, 0].set_ylabel(name, rotation=0, ha="right", va="center")

    return draw(work, (1.7 * len(scenes) + 0.8, 4.2))


def draw_boxes(scenes: Sequence[tuple[Any, Any, Any, Any, Any]], classes: Sequence[str]) -> Picture:
    """Images [H, W, 3] with true boxes and labels above, and the surest found ones below; a column a scene."""

    def work(figure: Figure) -> None:
        grid = figure.subplots(2, len(scenes), squeeze=False)
        for column, (image, *objects) in enumerate(scenes):
            for line, (boxes, labels) in enumerate((objects[:2], objects[2:])):
                axes = grid[line, column]
                axes.imshow(image)
                axes.set_xticks([])
                axes.set_yticks([])
                for box, label in zip(boxes, labels, strict=True):
                    colour = mpl.colormaps["tab20"](int(label) % 20)
                    place, width, height = (box[0], box[1]), box[2] - box[0], box[3] - box[1]
                    axes.add_patch(Rectangle(place, width, height, fill=False, edgecolor=colour, linewidth=1.5))
                    axes.text(*place, plain(classes[int(label)]), fontsize=6, color="white", backgroundcolor=colour)
        for line, name in enumerate(("truth", "found")):
            grid[line, 0].set_ylabel(name, rotation=0, ha="right", va="center")

    return draw(work, (2.1 * len(scenes) + 0.8, 4.0))


def draw_generalization(runs: Sequence[Mapping[str, Any]]) -> Picture:
    """Train and test accuracy as bars, and where encoders were kept, over their epochs (Figure 3)."""
    over_epochs = [run for run in runs if run["epochs"]]

    def work(figure: Figure) -> None:
        axes = figure.add_subplot(1, 2 if over_epochs else 1, 1)
        for number, run in enumerate(runs):
            colour = colour_of_method(run["method"])
            axes.bar(number - 0.2, run["train"], 0.38, color=colour, alpha=0.45, hatch="//", edgecolor="white")
            axes.bar(number + 0.2, run["test"], 0.38, color=colour)
            for place, value in ((number - 0.2, run["train"]), (number + 0.2, run["test"])):
                axes.text(place, value, f"{value:.1f}", ha="center", va="bottom", fontsize=8)
        least = min(min(run["train"], run["test"]) for run in runs)
        axes.set_ylim(max(0.0, least - 10), 102)
        axes.set_xticks(range(len(runs)), [plain(run["label"]) for run in runs], rotation=20, ha="right")
        axes.set_ylabel("accuracy, %")
        axes.set_title("training images (hatched) and test images", fontsize=10)
        if over_epochs:
            _draw_epochs(figure.add_subplot(1, 2, 2), over_epochs)

    return draw(work, (max(3.4, 1.1 * len(runs) + 1.2) + (4.2 if over_epochs else 0), 3.4))


def _draw_epochs(axes: Axes, runs: Sequence[Mapping[str, Any]]) -> None:
    for mark, run in zip(MARKS * len(runs), runs, strict=False):
        epochs = [each["epoch"] for each in run["epochs"]]
        colour = colour_of_method(run["method"])
        axes.plot(
            epochs, [each["train"] for each in run["epochs"]], mark + "-", color=colour, label=plain(run["label"])
        )
        axes.plot(epochs, [each["test"] for each in run["epochs"]], mark + "--", color=colour)
    axes.set_xlabel("epoch")
    axes.set_title("training images (solid) and test images (dashed)", fontsize=10)
    axes.legend(fontsize=8)


def draw_embedding(planes: Mapping[str, Tensor], labels: Tensor, classes: Sequence[str]) -> Picture:
    """The plane [N, 2] of every exit side by side, coloured by class."""
    return draw(*lay_out({name: plane.numpy() for name, plane in planes.items()}, labels.numpy(), classes))


def draw_neighbours(asked: Tensor, found: Mapping[str, tuple[Tensor, Sequence[str]]], title: str) -> Picture:
    """An image [3, H, W] and, a row an exit, its nearest [K, 3, H, W] with what they are; all uint8."""
    columns = 1 + max(len(images) for images, _ in found.values())

    def work(figure: Figure) -> None:
        grid = figure.subplots(len(found), columns, squeeze=False)
        for line, (name, (images, captions)) in enumerate(found.items()):
            shown = [(asked, plain(title)), *zip(images, map(plain, captions), strict=True)]
            for column, axes in enumerate(grid[line]):
                axes.set_axis_off()
                if column < len(shown):
                    axes.imshow(shown[column][0].permute(1, 2, 0).numpy())
                    axes.set_title(shown[column][1], fontsize=8)
            grid[line, 0].text(-0.1, 0.5, name, transform=grid[line, 0].transAxes, ha="right", va="center")

    return draw(work, (1.25 * columns + 0.8, 1.5 * len(found)))


def draw_cost(rows: Sequence[Mapping[str, Any]]) -> Picture:
    """Time and memory a step over the batch, a panel a network and image size."""
    groups = list(dict.fromkeys((row["model"], row["image_size"]) for row in rows))
    what = [("seconds", "milliseconds a step", 1e3), ("memory_bytes", "GiB", 2.0**-30)]
    shown = [each for each in what if any(row[each[0]] is not None for row in rows)]

    def work(figure: Figure) -> None:
        grid = figure.subplots(len(shown), len(groups), squeeze=False)
        for line, (key, unit, factor) in enumerate(shown):
            for axes, (model, size) in zip(grid[line], groups, strict=True):
                chosen = [row for row in rows if (row["model"], row["image_size"]) == (model, size)]
                for mark, method in zip(MARKS * 3, dict.fromkeys(row["method"] for row in chosen), strict=False):
                    points = [row for row in chosen if row["method"] == method and row[key] is not None]
                    axes.plot(
                        [row["batch_size"] for row in points],
                        [factor * row[key] for row in points],
                        mark + "-",
                        color=colour_of_method(method),
                        label=method,
                    )
                axes.set_title(f"{model}, {size} px" if line == 0 else "")
                axes.set_xscale("log", base=2)
                axes.set_ylim(bottom=0)
                axes.set_xlabel("batch" if line == len(shown) - 1 else "")
            grid[line, 0].set_ylabel(unit)
        grid[0, 0].legend(fontsize=8)

    return draw(work, (3.2 * len(groups), 2.6 * len(shown)))
