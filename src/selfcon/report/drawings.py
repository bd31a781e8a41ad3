"""The sets of a method in a small batch, drawn: what is contrasted with what."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import torch
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from selfcon.losses.methods import Method
from selfcon.losses.sets import belongs

_LABELS = ("cat", "dog", "cat", "bird")
_COLOURS = ("#f3f4f6", "#16a34a", "#dc2626", "#1e3a8a")  # nothing, positive, negative, the anchor itself
MARKS = ".+-o"
NOTHING, POSITIVE, NEGATIVE, ITSELF = range(4)


def list_sets(method: Method) -> tuple[list[str], Tensor]:
    """Names of the features of a batch of four images, and for each pair [N, N] what the second is to the first."""
    exits = 2 if method.uses_exits else 1
    names, groups, places = [], [], []
    for sample, label in enumerate(_LABELS):
        for view in range(method.views):
            for leave in range(exits):
                names.append(f"{label} {sample + 1}{'ab'[view] if method.views > 1 else ''} {'FG'[leave]}")
                alone = (sample, view if method.views_apart else 0)
                groups.append(_LABELS.index(label) if method.uses_labels else alone[0] * 2 + alone[1])
                places.append(leave)
    group, place = torch.tensor(groups), torch.tensor(places)
    itself = torch.eye(len(names), dtype=torch.bool)
    same = group[:, None] == group
    table = torch.full((len(names), len(names)), NOTHING)
    for term in method.terms:
        anchor = belongs(place, term.anchors)[:, None]
        positive = same & belongs(place, term.positives) & ~itself
        negative = ~same & belongs(place, term.negatives)
        table[anchor & positive] = POSITIVE
        table[anchor & negative] = NEGATIVE
        table[anchor & itself] = ITSELF
    return names, table


def draw_sets(methods: Sequence[Method]) -> bytes:
    """One square a method, as PNG: rows are anchors, columns what they are contrasted with."""
    figure = Figure(figsize=(4.4 * len(methods), 4.8), layout="constrained")
    for number, method in enumerate(methods, start=1):
        names, table = list_sets(method)
        axes = figure.add_subplot(1, len(methods), number)
        axes.imshow(table.numpy(), cmap=ListedColormap(_COLOURS), vmin=0, vmax=3)
        axes.set_title(f"{method.name} ({method.paper})", fontsize=10)
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7, family="monospace")
        axes.set_yticks(range(len(names)), names, fontsize=7, family="monospace")
        axes.set_xticks([place - 0.5 for place in range(len(names))], minor=True)
        axes.set_yticks([place - 0.5 for place in range(len(names))], minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
        axes.tick_params(which="both", length=0)
    figure.suptitle(
        "rows: anchors (blue); green: their positives; red: their negatives; F backbone, G sub-network", fontsize=9
    )
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    return buffer.getvalue()


def print_sets(method: Method) -> list[str]:
    """The same for a terminal: o the anchor itself, + a positive, - a negative."""
    names, table = list_sets(method)
    width = max(map(len, names))
    return [
        f"{name:{width}s}  {' '.join(MARKS[value] for value in row)}"
        for name, row in zip(names, table.tolist(), strict=True)
    ]
