"""The look that all pictures share: colours by method and exit, greys that are legible in print and on a dark page.

Colours are those of Okabe and Ito, which people who are blind to red or green can tell apart; where several lines meet,
marks and hatches differ, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib takes long to import: only what draws needs it
    from matplotlib.figure import Figure

GREY = "#808080"  # legible on light and on dark
_PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_METHODS = {
    "ce": "#999999",
    "supcon": "#0072B2",
    "supcon-s": "#56B4E9",
    "selfcon": "#D55E00",
    "selfcon-m": "#E69F00",
    "simclr": "#009E73",
    "selfcon-star": "#CC79A7",
    "selfcon-m-star": "#F0E442",
}
_EXITS = {"backbone": "#0072B2", "ensemble": "#D55E00", "all": "#D55E00"}
MARKS = ("o", "s", "^", "D", "v", "P", "X")


def colour_of_method(name: str) -> str:
    """The same in every picture."""
    return _METHODS.get(name) or _PALETTE[sum(name.encode()) % len(_PALETTE)]


def colour_of_exit(name: str) -> str:
    """The same in every picture; exits by their stage."""
    if name in _EXITS:
        return _EXITS[name]
    stage = int("".join(filter(str.isdigit, name)) or 0)
    return ("#009E73", "#CC79A7", "#56B4E9", "#E69F00")[stage % 4]


def plain(name: str) -> str:
    """A name that can be drawn: no dollar signs that are read as mathematics, nothing that is no character."""
    return name.encode("utf-8", "replace").decode().replace("$", r"\$")


@dataclass(frozen=True)
class Picture:
    """A drawing in both forms, with a transparent ground."""

    svg: bytes
    png: bytes


def draw(work: Callable[[Figure], None], size: tuple[float, float]) -> Picture:
    """What `work` draws on a figure of that size in inches."""
    import matplotlib as mpl

    figure = _figure(work, size)
    with mpl.rc_context({"svg.hashsalt": "selfcon", "svg.fonttype": "none"}):
        return Picture(_save(figure, "svg"), _save(figure, "png"))


def draw_png(work: Callable[[Figure], None], size: tuple[float, float]) -> bytes:
    """The same as pixels alone."""
    return _save(_figure(work, size), "png")


def _figure(work: Callable[[Figure], None], size: tuple[float, float]) -> Figure:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    look: dict[Any, Any] = {
        "text.color": GREY,
        "axes.labelcolor": GREY,
        "axes.titlecolor": GREY,
        "xtick.color": GREY,
        "ytick.color": GREY,
        "legend.frameon": False,
        "legend.labelcolor": GREY,
    }
    with mpl.rc_context(look):
        work(figure)
    for axes in figure.axes:
        axes.patch.set_alpha(0)
        for side, spine in axes.spines.items():
            spine.set_color(GREY)
            bare = side == "top" or (side == "right" and axes.yaxis.get_ticks_position() != "right")
            spine.set_visible(spine.get_visible() and not bare)
    return figure


def _save(figure: Figure, form: str) -> bytes:
    buffer = BytesIO()
    metadata = {"Date": None} if form == "svg" else None
    with warnings.catch_warnings():
        # Names may be in letters that the font lacks, and there may be more curves than a legend has room for.
        warnings.filterwarnings("ignore", "Glyph .* missing from|constrained_layout not applied")
        figure.savefig(buffer, format=form, dpi=130, transparent=True, metadata=metadata)
    return buffer.getvalue()
