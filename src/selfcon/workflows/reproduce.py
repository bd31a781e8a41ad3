"""From the paper's numbers to ours: what to run for a table, running it, and the comparison."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selfcon.config import Settings, make_settings, read_yaml
from selfcon.errors import SelfconError, StoppedError, UsageError
from selfcon.paper.exhibits import COST, Cell, choose, get_exhibit, identify, label
from selfcon.paper.recipes import count_images
from selfcon.paper.verdicts import Verdict, agreement_of_order, judge
from selfcon.progress import say
from selfcon.workflows.costs import Cost, Estimator
from selfcon.workflows.findings import cost_of, found_in, read_facts
from selfcon.workflows.pipeline import run_stages
from selfcon.workflows.task import Running, choose_device

ASIDES = {"smoke": "on other images", "short": "after a fifth of the epochs"}
"""Why runs of a scale are not the paper's experiment; only those of full length are judged by chance."""
_DIGITS = 1437


@dataclass(frozen=True)
class Job:
    """One training run that cells need."""

    name: str
    settings: Settings
    exhibits: tuple[str, ...]

    @property
    def folder(self) -> str:
        return f"{self.name}-seed{self.settings.seed}"


def select(exhibits: Sequence[str], only: Sequence[str] = ()) -> list[Cell]:
    """The cells of these tables and figures that `only` leaves."""
    cells = [cell for name in exhibits for cell in get_exhibit(name).cells]
    return choose(cells, only) if only else cells


def list_jobs(cells: Sequence[Cell], scale: str, seeds: Sequence[int], data: Mapping[str, str]) -> list[Job]:
    """The runs behind cells, each once; `data` says where a data set lies that is not found by its name."""
    found: dict[tuple[str, int], tuple[Settings, list[str]]] = {}
    for cell in cells:
        if not cell.runs:
            continue
        for seed in seeds:
            for method in (None, cell.minus or cell.over):
                settings = cell.settings(scale, seed=seed, method=method)
                name = identify(settings)
                if settings.data in data:
                    settings = make_settings(settings.model_dump(mode="json"), {"data": data[settings.data]})
                exhibits = found.setdefault((name, seed), (settings, []))[1]
                if cell.exhibit not in exhibits:
                    exhibits.append(cell.exhibit)
    return [Job(name, settings, tuple(exhibits)) for (name, _), (settings, exhibits) in found.items()]


def plan(jobs: Sequence[Job], device: str) -> Iterator[tuple[Job, Cost]]:
    """Each run with what it will cost on this machine."""
    estimator = Estimator(choose_device(device))
    for job in jobs:
        images = _DIGITS if job.settings.data == "digits" else count_images(job.name)
        yield job, estimator.estimate(job.settings, images)


def run(jobs: Sequence[Job], out: Path, running: Running) -> list[tuple[Job, SelfconError]]:
    """Make every run that is not there yet, go on with those that were interrupted; returns those that failed."""
    failed: list[tuple[Job, SelfconError]] = []
    for number, job in enumerate(jobs, start=1):
        try:
            result = run_stages(job.settings, out / job.folder, running, overwrite=False, verb="fit", probe=True)
        except StoppedError:
            raise
        except SelfconError as error:
            say(f"{number}/{len(jobs)} {job.folder}: {error}")
            failed.append((job, error))
        else:
            done = "was there" if result.get("already_done") else f"{result['seconds']:.0f} s"
            say(f"{number}/{len(jobs)} {job.folder}: {result['accuracy']['ensemble']['top1']:.1f} %, {done}")
    return failed


@dataclass(frozen=True)
class Measured:
    """A finished run and where it is."""

    folder: Path
    settings: Settings
    result: Mapping[str, Any]

    def number(self, quantity: str) -> float | None:
        """The quantity of a cell."""
        accuracy = self.result["accuracy"]
        if quantity == "memory":
            # What training takes beside the images, which the paper's code keeps elsewhere.
            stages = self.result.get("stages")
            return None if not stages else float(stages[0]["peak_memory_bytes"] - self.result["data_bytes"])
        if quantity == "time":
            return self._seconds_of_an_epoch()
        if quantity == "exit":
            exits = [name for name in accuracy if name not in ("backbone", "ensemble")]
            quantity = exits[0] if len(exits) == 1 else ""
        return float(accuracy[quantity]["top1"]) if quantity in accuracy else None

    def _seconds_of_an_epoch(self) -> float:
        """In the middle of the first stage: without what was set up, measured or stored now and then."""
        times = [0.0, *(line["seconds"] for line in _epochs(self.folder))]
        return float(statistics.median(later - sooner for sooner, later in itertools.pairwise(times)))


def _epochs(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["stage"] == lines[0]["stage"]]


def find_runs(folders: Sequence[Path], data: Mapping[str, str] | None = None) -> dict[str, list[Measured]]:
    """Finished runs below these folders, by the name of their experiment; `data` says which path is which data set."""
    found: dict[str, list[Measured]] = {}
    names = {path: name for name, path in (data or {}).items()}
    for folder in folders:
        for path in sorted(folder.glob("*/results.json")):
            config, result = path.parent / "config.yaml", read_facts(path)
            if not config.is_file() or "accuracy" not in result:
                continue
            try:
                settings = make_settings(read_yaml(config))
            except UsageError as error:
                say(f"note: {path.parent} is left out: {error}")
                continue
            runs = found.setdefault(identify(settings, names.get(settings.data)), [])
            runs.append(Measured(path.parent, settings, result))
    # Of several with the same seed, the one that nothing was watched or kept of on the way.
    chosen: dict[str, list[Measured]] = {}
    for name, runs in found.items():
        runs.sort(key=lambda run: len(run.settings.keep_epochs) + run.settings.watch.test_in_probe)
        chosen[name] = list({run.settings.seed: run for run in reversed(runs)}.values())
    return chosen


@dataclass(frozen=True)
class Comparison:
    """A cell, what we measured for it, and what that means."""

    cell: Cell
    ours: tuple[float, ...]
    folders: tuple[Path, ...]
    verdict: Verdict | None

    @property
    def _missing(self) -> str:
        return "not measured" + (f": {self.cell.made_by} does" if self.cell.made_by else "")

    def to_dict(self) -> dict[str, Any]:
        verdict = self.verdict
        return {
            "exhibit": self.cell.exhibit,
            "condition": dict(self.cell.condition),
            "quantity": self.cell.quantity,
            **({"minus": self.cell.minus} if self.cell.minus else {}),
            **({"over": self.cell.over} if self.cell.over else {}),
            "paper": self.cell.value,
            "paper_spread": self.cell.spread,
            "ours": None if verdict is None else verdict.mean,
            "our_spread": None if verdict is None else verdict.spread,
            "n": len(self.ours),
            "verdict": f"waits for {self.cell.waits_for}" if self.cell.waits_for else str(verdict or self._missing),
            "agrees": None if verdict is None else verdict.agrees,
            "folders": [folder.name for folder in self.folders],
        }


def compare(
    cells: Sequence[Cell],
    scale: str,
    runs: Mapping[str, Sequence[Measured]],
    costs: Mapping[Path, Sequence[Mapping[str, Any]]] | None = None,
) -> list[Comparison]:
    """Every cell beside what was measured at that scale."""
    compared = []
    for cell in cells:
        if cell.made_by == COST:
            ours = cost_of(cell, costs or {})
        else:
            ours = dict(_numbers(cell, scale, runs)) if cell.runs else {}
        decimals = len(cell.text.partition("±")[0].partition(".")[2])
        aside = "" if cell.made_by == COST else ASIDES.get(scale)
        if cell.is_ours and scale != "smoke":
            aside = None
        numbers = list(ours.values())
        verdict = judge(cell.value, cell.spread, cell.seeds, numbers, decimals, aside=aside) if ours else None
        compared.append(Comparison(cell, tuple(ours.values()), tuple(ours), verdict))
    return compared


def _numbers(cell: Cell, scale: str, runs: Mapping[str, Sequence[Measured]]) -> Iterator[tuple[Path, float]]:
    other = cell.minus or cell.over
    others = {}
    if other is not None:
        base = "backbone" if cell.minus else cell.quantity
        others = {
            (run.settings.seed, run.result.get("device")): run.number(base)
            for run in runs.get(identify(cell.settings(scale, method=other)), ())
        }
    for run in runs.get(identify(cell.settings(scale)), ()):
        number = found_in(run.folder, cell) if cell.made_by else run.number(cell.quantity)
        if number is None:
            continue
        if other is None:
            yield run.folder, number
        elif (base_number := others.get((run.settings.seed, run.result.get("device")))) is not None:
            yield run.folder, number - base_number if cell.minus else number / base_number


def compare_orders(compared: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Where three methods or more were measured under one condition: in which order the paper has them, and we."""
    groups: dict[str, list[Comparison]] = {}
    for each in compared:
        if each.ours and each.cell.minus is None and each.cell.over is None:
            rest = {key: value for key, value in each.cell.condition.items() if key != "method"}
            groups.setdefault(json.dumps([each.cell.exhibit, each.cell.quantity, rest]), []).append(each)
    orders = []
    for key, members in groups.items():
        if len(members) < 3:
            continue
        exhibit, quantity, rest = json.loads(key)
        ours = [statistics.fmean(member.ours) for member in members]
        names = [str(member.cell.condition["method"]) for member in members]
        theirs = [member.cell.value for member in members]
        orders.append(
            {
                "exhibit": exhibit,
                "quantity": quantity,
                "condition": rest,
                "paper": _rank(names, theirs),
                "ours": _rank(names, ours),
                "tau": agreement_of_order(theirs, ours),
            }
        )
    return orders


def _rank(names: Sequence[str], values: Sequence[float]) -> list[list[str]]:
    """Names by falling value; those with the same value share a place."""
    places: dict[float, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        places.setdefault(value, []).append(name)
    return [places[value] for value in sorted(places, reverse=True)]


def describe_order(order: Mapping[str, Any]) -> tuple[str, str, str]:
    """Under which condition, the paper's order, and ours, as words."""
    what = ", ".join(filter(None, (label(order["condition"]), order["quantity"])))
    tau = "no order to compare" if order["tau"] is None else f"Kendall's tau {order['tau']:.2f}"
    paper, ours = (" > ".join(" = ".join(names) for names in order[side]) for side in ("paper", "ours"))
    return f"{what}; {tau}", paper, ours


def parse_data(pairs: Sequence[str]) -> dict[str, str]:
    """`name=path` pairs."""
    found = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not equals or not path:
            raise UsageError(f"--data wants name=path, such as cifar100=cifar100.npz, not {pair!r}.")
        found[name] = path
    return found
