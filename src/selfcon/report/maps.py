"""Features on a plane, coloured by class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from selfcon.report.canvas import colour_of_exit, plain

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NAMED = 20  # classes; more would not be told apart by their colours
_LETTERS = 60  # of a line below a plane


def lay_out(
    planes: Mapping[str, np.ndarray], labels: np.ndarray, classes: Sequence[str]
) -> tuple[Callable[[Figure], None], tuple[float, float]]:
    """What draws planes [N, 2] side by side, and its size; few classes are named below, where no name hides another."""
    import matplotlib as mpl

    few = len(classes) <= _NAMED
    colours = mpl.colormaps["tab10" if len(classes) <= 10 else "tab20" if few else "gist_ncar"]
    columns = min(5 * len(planes), max(1, _LETTERS * len(planes) // (4 + max(map(len, classes)))))
    lines = -(-len(classes) // columns) if few else 0

    def work(figure: Figure) -> None:
        for place, (name, plane) in enumerate(planes.items(), start=1):
            axes = figure.add_subplot(1, len(planes), place)
            dots = axes.scatter(
                plane[:, 0],
                plane[:, 1],
                c=labels,
                s=9 if len(plane) > 500 else 18,
                cmap=colours,
                vmin=0,
                vmax=max(1, len(classes) - 1),
                linewidths=0,
            )
            axes.set_title(name, color=colour_of_exit(name))
            axes.set_axis_off()
        if lines:
            there = np.unique(labels).tolist()
            handles, names = dots.legend_elements(num=there)[0], [plain(classes[label]) for label in there]
            figure.legend(handles, names, loc="outside lower center", ncols=columns, fontsize=8)

    return work, (4.4 * len(planes), 4.4 + 0.2 * lines)
