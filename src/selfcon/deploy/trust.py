"""What `selfcon calibrate` found out about a model, as files beside it: how far to believe which answer.

`calibration.json` holds the numbers, `calibration.safetensors` what strange images are told by.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from selfcon.errors import DataError, UsageError
from selfcon.evaluation.early_exit import Point, Rule
from selfcon.evaluation.outliers import Mahalanobis, Neighbours, Strangeness
from selfcon.networks.weights import hash_file

FORMAT = 1


@dataclass(frozen=True)
class Trust:
    """Temperatures by answer, when to leave early, when to say `unknown`; without calibration, plain answers."""

    temperatures: Mapping[str, float] = field(default_factory=dict)
    rule: Rule | None = None
    curve: tuple[Point, ...] = ()  # on held-out images, cheapest first
    costs: tuple[float, ...] = ()  # of getting as far as each answer, as parts of the whole
    silence: float | None = None  # answers less probable are not given
    strangers: Mapping[str, Strangeness] = field(default_factory=dict)  # by exit
    strange_above: Mapping[str, float] = field(default_factory=dict)

    def temperature(self, answer: str) -> float:
        return self.temperatures.get(answer, 1.0)

    def rule_for(self, budget: float | None) -> Rule:
        """The rule that was chosen, or that of a mean cost as a part of the whole network's."""
        if self.rule is None:
            raise UsageError("This model has no rule for leaving early yet: `selfcon calibrate` chooses one.")
        if budget is None:
            return self.rule
        if not 0 < budget <= 1:
            raise UsageError(f"A budget is a part of the whole cost, above 0 and up to 1, not {budget:g}.")
        affordable = [point for point in self.curve if point.cost <= budget + 1e-9]
        if not affordable:
            raise UsageError(
                f"The first exit costs {self.curve[0].cost:.2f} of the whole network: no answer can cost {budget:g}."
            )
        return Rule(self.rule.criterion, max(affordable, key=lambda point: point.accuracy).threshold)


def read_trust(folder: Path) -> Trust:
    """What was found out about the model of a folder; plain trust where nothing was."""
    path = folder / "calibration.json"
    if not path.is_file():
        return Trust()
    try:
        found = json.loads(path.read_text())
        if found["format"] != FORMAT:
            raise DataError(f"{path} is of format {found['format']}, and this version reads {FORMAT}.")
        if found["model_sha256"] != hash_file(folder / "model.safetensors"):
            raise DataError(f"{path} was made for other weights than {folder} holds: run `selfcon calibrate` again.")
        return _read(folder, found)
    except (AttributeError, LookupError, TypeError, ValueError, SafetensorError) as error:
        if isinstance(error, DataError | UsageError):
            raise
        raise DataError(f"{path} cannot be read as calibration ({type(error).__name__}: {error}).") from error


def _read(folder: Path, found: dict[str, Any]) -> Trust:
    early = found.get("early_exit")
    strangers: dict[str, Strangeness] = {}
    if found.get("strange_above"):
        tensors = load_tensors((folder / "calibration.safetensors").read_bytes())
        strangers = {name: _stranger(name, tensors) for name in found["strange_above"]}
    return Trust(
        temperatures={str(name): float(value) for name, value in found["temperatures"].items()},
        rule=None if early is None else Rule(early["criterion"], float(early["threshold"])),
        curve=() if early is None else tuple(_point(each) for each in early["curve"]),
        costs=() if early is None else tuple(float(each) for each in early["costs"]),
        silence=None if found.get("silence") is None else float(found["silence"]),
        strangers=strangers,
        strange_above={str(name): float(value) for name, value in found.get("strange_above", {}).items()},
    )


def _point(found: dict[str, Any]) -> Point:
    shares = tuple(float(each) for each in found["shares"])
    return Point(float(found["threshold"]), float(found["accuracy"]), float(found["cost"]), shares)


def _stranger(name: str, tensors: Mapping[str, Tensor]) -> Strangeness:
    if f"{name}.known" in tensors:
        known = torch.nn.functional.normalize(tensors[f"{name}.known"].float())
        return Neighbours(known, min(10, len(known)))
    return Mahalanobis(tensors[f"{name}.means"], tensors[f"{name}.whitening"])
