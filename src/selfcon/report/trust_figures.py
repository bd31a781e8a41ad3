"""Pictures about how far to believe a model, and how early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from selfcon.report.canvas import GREY, Picture, colour_of_exit, draw

_FEW = 10  # images in a bin


def draw_reliability(before: Mapping[str, Sequence[Any]], after: Mapping[str, Sequence[Any]]) -> Picture:
    """Accuracy by confidence, a panel an answer: bins before the temperature as a line, after it as bars."""
    names = list(before)

    def work(figure: Figure) -> None:
        for place, name in enumerate(names, start=1):
            axes = figure.add_subplot(1, len(names), place)
            axes.plot([0, 1], [0, 1], color=GREY, linestyle=":")
            for few, label in ((False, "calibrated"), (True, f"fewer than {_FEW} images")):
                bars = [each for each in after[name] if (each.count < _FEW) == few]
                axes.bar(
                    [each.confidence for each in bars],
                    [each.accuracy for each in bars],
                    1 / 18,
                    color=colour_of_exit(name),
                    alpha=0.2 if few else 0.7,
                    label=label,
                )
            line = before[name]
            axes.plot(
                [each.confidence for each in line],
                [each.accuracy for each in line],
                "o-",
                color=GREY,
                ms=3,
                label="before",
            )
            axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="confidence", title=name)
            axes.set_ylabel("right" if place == 1 else "")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9)

    return draw(work, (2.8 * len(names), 3.2))


def draw_risk(curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> Picture:
    """Percent of wrong answers against the part of images that are answered at all."""

    def work(figure: Figure) -> None:
        axes = figure.add_subplot()
        for name, (coverage, risk) in curves.items():
            axes.plot(coverage, risk, color=colour_of_exit(name), label=name)
        axes.set(xlabel="answered, % of images", ylabel="wrong, % of answers")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=9)

    return draw(work, (4.2, 3.2))


def draw_early_exit(
    points: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any], alone: Mapping[str, Mapping[str, float]]
) -> Picture:
    """Accuracy against the mean cost of an image, counted and measured; single exits as marks."""

    def work(figure: Figure) -> None:
        timed = [point for point in points if "milliseconds" in point]
        panels = [("cost", "multiply-adds, % of the whole network", points, 100.0)]
        if timed:
            panels.append(("milliseconds", "measured, ms an image", timed, 1.0))
        for place, (key, label, shown, unit) in enumerate(panels, start=1):
            axes = figure.add_subplot(1, len(panels), place)
            xs = [unit * point[key] for point in shown]
            axes.plot(xs, [point["accuracy"] for point in shown], ".-", color=GREY, label="first exit that is sure")
            for name, each in alone.items():
                if key in each:
                    axes.plot(unit * each[key], each["accuracy"], "D", color=colour_of_exit(name), label=name)
            if key in chosen:
                axes.plot(
                    unit * chosen[key], chosen["accuracy"], "o", ms=12, mfc="none", color="#D55E00", label="chosen"
                )
            axes.set(xlabel=label, ylabel="accuracy, %" if place == 1 else "")
            axes.set_xlim(left=0)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=8, fontsize=9)

    return draw(work, (4.4 * (2 if any("milliseconds" in point for point in points) else 1), 3.4))
