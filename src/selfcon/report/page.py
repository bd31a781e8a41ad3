"""One page about one run or many: self-contained, with no request to anywhere, safe with whatever names it is given."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from selfcon.config import make_settings
from selfcon.evaluation.answers import distinct, final_answer
from selfcon.report.plots import draw_curves, draw_together, sort_answers
from selfcon.report.seeds import group_by_seed

_MAY_BE_SAME = ("epochs", "seed", "network", "data", "device")
_MOST_COLUMNS = 6  # of settings that differ


@dataclass(frozen=True)
class Table:
    """Rows below a header; numbers stand to the right, in the format of their column or with digits by their size."""

    header: Sequence[str]
    rows: Sequence[Sequence[str | float | None]]
    formats: Mapping[str, str] = field(default_factory=dict)

    def as_text(self) -> list[list[str]]:
        """Return the cells of every row as the page shows them."""
        return [
            [_number(value, self.formats.get(name)) for name, value in zip(self.header, row, strict=True)]
            for row in self.rows
        ]


@dataclass(frozen=True)
class Section:
    """Something that was found out about a run: a sentence, a table, pictures as data URIs with their descriptions."""

    title: str
    text: str = ""
    table: Table | None = None
    pictures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunPage:
    """A run as the page shows it; one that is not done yet has no result and no evidence."""

    name: str
    settings: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    result: Mapping[str, Any] | None = None
    evidence: Mapping[str, Any] | None = None
    paper: Mapping[str, str] = field(default_factory=dict)  # by exit, what the paper prints
    added: Mapping[str, Any] = field(default_factory=dict)  # what a method was that a script added
    sections: Sequence[Section] = ()

    @property
    def probe_epochs(self) -> int:
        return make_settings(self.settings).probe_epochs

    @property
    def title(self) -> str:
        return f"{self.settings['method']} on {self.settings['data']}"

    @property
    def done(self) -> bool:
        """Whether nothing more is to come: an encoder alone is enough, unless its probe has begun."""
        if self.result is None:
            return False
        return "accuracy" in self.result or all(line["stage"] != "probe" for line in self.metrics)

    @property
    def final_answer(self) -> str:
        """Return the prediction whose errors the page lists: the ensemble, or the only exit."""
        return final_answer((self.result or {}).get("accuracy", {}))

    @property
    def progress(self) -> str:
        """How far a run is."""
        if not self.metrics:
            return "has not finished an epoch yet"
        last = self.metrics[-1]
        epochs = self.settings["epochs"] if last["stage"] != "probe" else self.probe_epochs
        return f"{last['stage']}: epoch {last['epoch']} of {epochs}, loss {float(last['loss']):.3f}"


def render(pages: Sequence[RunPage], *, refresh: int | None = None) -> str:
    """The page as HTML; where runs are under way it may load itself again every so many seconds."""
    environment = Environment(
        loader=PackageLoader("selfcon.report"),
        autoescape=select_autoescape(default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _number
    environment.filters["distinct"] = distinct
    environment.filters["breakable"] = _breakable
    columns, same = compare_runs(pages) if len(pages) > 1 else (None, "")
    script = (files("selfcon.report") / "templates" / "report.js").read_text(encoding="utf-8")
    return environment.get_template("report.html").render(
        pages=pages,
        curves=[draw_curves(page.metrics, page.result) if page.metrics else None for page in pages],
        together=draw_together(pages) if len(pages) > 1 else None,
        columns=columns,
        same=same,
        seeds=tabulate_seeds(pages),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        refresh=refresh,
    )


def compare_runs(pages: Sequence[RunPage]) -> tuple[Table, str]:
    """Return the comparison table of several runs, and the values that are equal in all of them."""
    table = tabulate_runs(pages)
    same = {
        name: str(table.rows[0][place])
        for place, name in enumerate(table.header)
        if name in _MAY_BE_SAME and len({str(row[place]) for row in table.rows}) == 1
    }
    places = [place for place, name in enumerate(table.header) if name not in same]
    rows = [[row[place] for place in places] for row in table.rows]
    told = ", ".join(f"{name} {value}" for name, value in same.items())
    return Table([table.header[place] for place in places], rows, table.formats), told


def tabulate_runs(pages: Sequence[RunPage]) -> Table:
    """A line a run: accuracies, what the paper prints, the settings in which they differ, and what it took."""
    exits = sort_answers(name for page in pages if page.result for name in distinct(page.result.get("accuracy", {})))
    papers = [name for name in exits if any(name in page.paper for page in pages)]
    printed = [f"paper, {name}" for name in papers]
    differing = {name: _as_column([page.settings.get(name) for page in pages]) for name in _differing(pages)}
    header = ["run", "method", "epochs", "seed", *exits, *printed, *differing]
    header += ["network", "data", "images/s", "minutes", "GB", "device"]
    rows: list[Sequence[str | float | None]] = []
    for number, page in enumerate(pages):
        asked, result = page.settings, page.result or {}
        accuracy = distinct(result.get("accuracy", {}))
        rows.append(
            [
                page.name,
                asked["method"],
                asked["epochs"],
                asked["seed"],
                *(float(accuracy[name]["top1"]) if name in accuracy else None for name in exits),
                *(_printed(page.paper.get(name, "")) for name in papers),
                *(values[number] for values in differing.values()),
                asked["model"] if asked["width"] == 1 else f"{asked['model']}, width {asked['width']}",
                asked["data"],
                float(result["images_per_second"]) if result else None,
                float(result["seconds"]) / 60 if result else None,
                float(result["peak_memory_bytes"]) / 1e9 if result else None,
                result.get("device", "under way"),
            ]
        )
    formats = dict.fromkeys([*exits, *printed], ".1f") | dict.fromkeys(differing, "")  # settings as they were written
    return Table(header, rows, formats)


def tabulate_seeds(pages: Sequence[RunPage]) -> Table | None:
    """Means and spreads of runs that differ in their seed alone, where there are such."""
    groups = group_by_seed(pages)
    if all(group.count == 1 for group in groups):
        return None
    exits = sort_answers(name for group in groups for name in group.accuracies)
    several = ("model", "width", "data", "epochs")
    differing = [name for name in several if len({group.settings[name] for group in groups}) > 1] + _differing(pages)
    rows: list[Sequence[str | float | None]] = [
        [
            group.settings["method"],
            *("" if group.settings.get(name) is None else str(group.settings[name]) for name in differing),
            *(group.describe(name) for name in exits),
            group.count,
        ]
        for group in groups
    ]
    return Table(["method", *differing, *exits, "seeds"], rows)


def _differing(pages: Sequence[RunPage]) -> list[str]:
    """The settings that make these runs differ, beside those that have a column anyway."""
    shown = {"method", "epochs", "seed", "model", "width", "data", "data_root"}
    names = dict.fromkeys(name for page in pages for name in page.settings if name not in shown)
    found = [name for name in names if len({str(page.settings.get(name)) for page in pages}) > 1]
    return [name for name in found if not name.startswith("watch.")][:_MOST_COLUMNS]


def _as_column(values: Sequence[Any]) -> list[str | float | None]:
    """A setting of all runs: numbers, which are sorted as such, where there is nothing else, or else text."""
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        return list(values)
    return ["" if value is None else str(value) for value in values]


def _printed(text: str) -> float | str | None:
    """A number of the paper, without its spread and what stands in brackets behind it."""
    first = text.partition(" (")[0].partition("±")[0]
    try:
        return float(first) if first else None
    except ValueError:
        return first


def _breakable(name: str) -> Markup:
    """A name that may go on in the next line behind its underscores."""
    return Markup("_<wbr>").join(name.split("_"))


def _number(value: object, form: str | None = None) -> str:
    """A cell of a table as text, a number in its format if it has one."""
    if value is None:
        return ""
    if not isinstance(value, float):
        return str(value)
    if form is not None:
        return format(value, form)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
