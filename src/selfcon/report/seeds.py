"""Runs that differ in their seed alone, taken together: means, spreads, and how many there are."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from selfcon.config import make_settings
from selfcon.evaluation.answers import distinct
from selfcon.paper.exhibits import identify


class Run(Protocol):
    """What is looked at of a run."""

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def result(self) -> Mapping[str, Any] | None: ...

    @property
    def added(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Group:
    """Runs of the same settings, and their accuracies by answer."""

    settings: Mapping[str, Any]
    accuracies: Mapping[str, Sequence[float]]
    count: int

    def describe(self, answer: str) -> str:
        """`75.4 ± 0.1`, where several runs have this answer."""
        values = self.accuracies.get(answer, ())
        if not values:
            return ""
        spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
        return f"{statistics.fmean(values):.1f}{spread}"

    def to_dict(self) -> dict[str, Any]:
        """Settings without the seed, and mean and standard deviation of every answer."""
        accuracy = {
            answer: {"mean": statistics.fmean(values), "std": statistics.stdev(values) if len(values) > 1 else None}
            for answer, values in self.accuracies.items()
        }
        settings = {name: value for name, value in self.settings.items() if name != "seed"}
        return {"settings": settings, "accuracy": accuracy, "seeds": self.count}


def group_by_seed(runs: Iterable[Run]) -> list[Group]:
    """Those that have an accuracy, of one group where only the seed differs; of equal seeds the last counts."""
    groups: dict[tuple[str, str | None, str], dict[int, Run]] = {}
    for run in runs:
        if run.result and run.result.get("accuracy"):
            asked = make_settings(run.settings)
            key = identify(asked, asked.data), asked.class_list, json.dumps(run.added, sort_keys=True)
            groups.setdefault(key, {})[asked.seed] = run
    found = []
    for members in groups.values():
        accuracies: dict[str, list[float]] = {}
        for run in members.values():
            for answer, values in distinct((run.result or {})["accuracy"]).items():
                accuracies.setdefault(answer, []).append(float(values["top1"]))
        found.append(Group(next(iter(members.values())).settings, accuracies, len(members)))
    return found
