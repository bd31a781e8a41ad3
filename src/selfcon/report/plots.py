"""Pictures of a report, as data that can stand inside the page."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from selfcon.errors import UsageError
from selfcon.evaluation.answers import distinct
from selfcon.report.canvas import GREY, MARKS, colour_of_exit, colour_of_method, draw_png, plain
from selfcon.report.maps import lay_out

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKED = 20  # points of a curve that can be told apart


class Run(Protocol):
    """What a comparison draws of a run."""

    @property
    def name(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def metrics(self) -> list[dict[str, Any]]: ...
    @property
    def result(self) -> Mapping[str, Any] | None: ...


def draw_curves(metrics: list[dict[str, Any]], result: Mapping[str, Any] | None) -> str:
    """Loss (and kNN accuracy, where it was measured) over the epochs of every stage; a run's result tells of what."""
    asked = "" if result is None else "held-out " if "held_out_accuracy" in result else "training "
    stages = list(dict.fromkeys(line["stage"] for line in metrics))

    def draw(figure: Figure) -> None:
        for place, stage in enumerate(stages, start=1):
            lines = [line for line in metrics if line["stage"] == stage]
            axes = figure.add_subplot(1, len(stages), place)
            axes.plot([line["epoch"] for line in lines], [line["loss"] for line in lines], color="#3b82f6")
            axes.set_title(stage, color=GREY)
            axes.set_xlabel("epoch")
            axes.set_ylabel("loss")
            measured = [line for line in lines if "knn" in line]
            if measured:
                right = axes.twinx()
                right.plot(
                    [line["epoch"] for line in measured],
                    [line["knn"] for line in measured],
                    marker="o",
                    markevery=_apart(measured),
                    color="#f59e0b",
                )
                right.set_ylabel(f"{asked}kNN accuracy, %", color="#f59e0b")

    return _data_uri(draw_png(draw, (4.6 * len(stages), 2.9)))


def _apart(points: Sequence[Any]) -> float | None:
    """How far apart a curve's marks stand, in diagonals of the picture: None is one on every point."""
    return None if len(points) <= _MARKED else 0.08


def sort_answers(names: Iterable[str]) -> list[str]:
    """Each once: the backbone, the exits from the first to the last, the ensemble."""
    order = sorted(dict.fromkeys(names), key=lambda name: (len(name), name))  # exit10 behind exit2
    return sorted(order, key=lambda name: (name == "ensemble", name != "backbone"))


def draw_together(runs: Sequence[Run]) -> dict[str, str]:
    """Several runs side by side: pictures by what they show."""
    done = [(run, distinct(run.result["accuracy"])) for run in runs if run.result and "accuracy" in run.result]
    pictures = {}
    if done:
        exits = sort_answers(name for _, accuracy in done for name in accuracy)

        def marks(figure: Figure) -> None:  # no bars: their axis would have to begin at 0, where little could be seen
            axes = figure.add_subplot()
            for number, name in enumerate(exits):
                rows = [(row, accuracy[name]["top1"]) for row, (_, accuracy) in enumerate(done) if name in accuracy]
                look: dict[str, Any] = {
                    "color": colour_of_exit(name),
                    "marker": MARKS[number % len(MARKS)],
                    "label": name,
                }
                axes.scatter([top1 for _, top1 in rows], [row for row, _ in rows], s=60, zorder=2, **look)
            for row, (_, accuracy) in enumerate(done):
                found = [values["top1"] for values in accuracy.values()]
                axes.plot([min(found), max(found)], [row, row], color=GREY, alpha=0.4, zorder=1)
            axes.set_yticks(range(len(done)), [plain(run.name) for run, _ in done])
            axes.set_ylim(len(done) - 0.5, -0.5)
            axes.grid(axis="x", alpha=0.3)
            axes.set_xlabel("top 1, %")
            figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=len(exits), fontsize=9)

        pictures["Accuracy by exit"] = _data_uri(draw_png(marks, (6.2, 1.2 + 0.36 * len(done))))
    watched = [(run, [line for line in run.metrics if "knn" in line]) for run in runs]
    if any(len(lines) > 1 for _, lines in watched):  # a point alone is no way

        def curves(figure: Figure) -> None:
            axes = figure.add_subplot()
            for number, (run, lines) in enumerate(watched):
                if not lines:
                    continue
                axes.plot(
                    [line["seconds"] / 60 for line in lines],
                    [line["knn"] for line in lines],
                    marker=MARKS[number % len(MARKS)],
                    markevery=_apart(lines),
                    color=colour_of_method(run.settings["method"]),
                    label=plain(run.name),
                )
            axes.set_xlabel("minutes of training")
            axes.set_ylabel("kNN accuracy, %")
            axes.legend(fontsize=8)

        what = "kNN accuracy on the way, of held-out images or, where there are none, of training images"
        pictures[what] = _data_uri(draw_png(curves, (5.2, 3.4)))
    return pictures


def draw_map(plane: Tensor, labels: Tensor, classes: tuple[str, ...]) -> str:
    """Features on a plane [N, 2], coloured by label."""
    return _data_uri(draw_png(*lay_out({"": plane.numpy()}, labels.numpy(), classes)))


def thumbnail(pixels: Tensor, side: int = 64) -> str:
    """An image [3, H, W], uint8, as a small PNG."""
    image = Image.fromarray(np.ascontiguousarray(pixels.permute(1, 2, 0).numpy()))
    return _data_uri(
        _png(image.resize((side, side), Image.Resampling.NEAREST if image.width < side else Image.Resampling.LANCZOS))
    )


def _png(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def _data_uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def spread(count: int, most: int) -> Tensor:
    """Indices of at most `most` of `count` samples, evenly over their order."""
    if most < 1:
        raise UsageError(f"At least 1 sample must be taken, not {most}.")
    return torch.arange(count) if count <= most else torch.linspace(0, count - 1, most, dtype=torch.double).long()
