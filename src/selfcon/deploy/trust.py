"""What `selfcon calibrate` found out about a model, as files beside it: how far to believe which answer.

`calibration.json` holds the numbers, `calibration.safetensors` what strange images are told by.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor

from selfcon.errors import DataError, SelfconError, UnsafeError, UsageError
from selfcon.evaluation.early_exit import Point, Rule
from selfcon.evaluation.outliers import Mahalanobis, Neighbours, Strangeness
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.weights import hash_file
from selfcon.training.files import inside

FORMAT = 4
_LEAST_TEMPERATURE = 1e-3
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RecursionError,
    SafetensorError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True)
class Trust:
    """Temperatures by answer, when to leave early, when to say `unknown`; without calibration, plain answers."""

    temperatures: Mapping[str, float] = field(default_factory=dict)
    rule: Rule | None = None
    curve: tuple[Point, ...] = ()  # on held-out images, cheapest first
    costs: tuple[float, ...] = ()  # of getting as far as each answer, as parts of the whole
    silence: Mapping[str, float] = field(default_factory=dict)  # by answer: what is less probable is not given
    # The same for who comes that far by a rule, by its thresholds.
    silence_early: Mapping[tuple[float, ...], Mapping[str, float]] = field(default_factory=dict)
    strangers: Mapping[str, Strangeness] = field(default_factory=dict)  # by exit
    strange_above: Mapping[str, float] = field(default_factory=dict)

    def temperature(self, answer: str) -> float:
        return self.temperatures.get(answer, 1.0)

    def silence_under(self, rule: Rule | None) -> Mapping[str, float]:
        """By answer, what it must be probable by to be given, where images leave by this rule or not at all."""
        if rule is None or not isinstance(rule.thresholds, tuple):
            return self.silence
        return self.silence_early.get(rule.thresholds, self.silence)

    def rule_for(self, budget: float | None) -> Rule:
        """The rule that was chosen, or that of a mean cost as a part of the whole network's."""
        if self.rule is None:
            why = ": they were not worth it when it was calibrated" if self.temperatures else ""
            raise UsageError(
                f"This model has no early-exit thresholds{why}. "
                f"`selfcon calibrate RUN --within 1` stores the cheapest that lose at most 1 %."
            )
        if budget is None:
            return self.rule
        if not 0 < budget <= 1:
            raise UsageError(f"A budget is a part of the whole cost, above 0 and up to 1, not {budget:g}.")
        affordable = [point for point in self.curve if point.cost <= budget + 1e-9]
        if not affordable:
            raise UsageError(
                f"The first exit costs {self.curve[0].cost:.2f} of the whole network: no answer can cost {budget:g}."
            )
        return Rule(self.rule.criterion, max(affordable, key=lambda point: point.accuracy).thresholds)


def read_trust(folder: Path, net: MultiExitNetwork) -> Trust:
    """What was found out about the model of a folder; plain trust where nothing was."""
    path = folder / "calibration.json"
    if not path.is_file():
        return Trust()
    try:
        found = json.loads(inside(folder, path.name).read_text(encoding="utf-8"))
        if found["format"] != FORMAT:
            raise DataError(f"it is of format {found['format']}, and this version reads {FORMAT}")
        if found["model_sha256"] != hash_file(folder / "model.safetensors"):
            raise DataError("it was made for other weights")
        return _read(folder, found, net)
    except UnsafeError:
        raise
    except _UNREADABLE as error:
        reason = str(error).rstrip(".") if isinstance(error, SelfconError) else f"{type(error).__name__}: {error}"
        raise DataError(f"{path} cannot be used ({reason}): `selfcon calibrate` makes it anew.") from error


def _read(folder: Path, found: dict[str, Any], net: MultiExitNetwork) -> Trust:
    early = found.get("early_exit")
    above = _numbers(found["strange_above"])
    strangers: dict[str, Strangeness] = {}
    if above:
        data = inside(folder, "calibration.safetensors").read_bytes()
        if hashlib.sha256(data).hexdigest() != found["tensors_sha256"]:
            raise DataError("calibration.safetensors is not the file that it tells of")
        tensors = load_tensors(data)
        strangers = {name: _stranger(name, tensors, net) for name in above}
    temperatures = _numbers(found["temperatures"])
    if not all(_LEAST_TEMPERATURE <= each <= 1 / _LEAST_TEMPERATURE for each in temperatures.values()):
        raise DataError("a temperature is beyond what can be meant")
    curve = () if early is None else tuple(_point(each) for each in early["curve"])
    if early is not None:
        if not curve:
            raise DataError("its curve is empty")
        early_answers = len(net.names) - 1
        if any(len(each["thresholds"]) != early_answers for each in (early, *early["curve"])):
            raise DataError(f"there are {early_answers} exits before the last, each with a threshold")
    return Trust(
        temperatures=temperatures,
        rule=None if early is None else Rule(early["criterion"], _thresholds(early["thresholds"])),
        curve=curve,
        costs=() if early is None else tuple(_number(each) for each in early["costs"]),
        silence=_numbers(found.get("silence") or {}),
        silence_early={
            _thresholds(each["thresholds"]): _numbers(each["answers"]) for each in found.get("silence_early") or ()
        },
        strangers=strangers,
        strange_above=above,
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(value):
        raise DataError(f"{value!r} is no number")
    return float(value)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _number(value) for name, value in values.items()}


def _point(found: dict[str, Any]) -> Point:
    shares = tuple(_number(each) for each in found["shares"])
    return Point(_thresholds(found["thresholds"]), _number(found["accuracy"]), _number(found["cost"]), shares)


def _thresholds(found: list[Any]) -> tuple[float, ...]:
    return tuple(_number(each) for each in found)


def _stranger(name: str, tensors: Mapping[str, Tensor], net: MultiExitNetwork) -> Strangeness:
    if name not in net.names:
        raise DataError(f"there is no exit {name!r}")
    parts = {key.partition(".")[2]: value.float() for key, value in tensors.items() if key.partition(".")[0] == name}
    for value in parts.values():
        if value.ndim != 2 or not len(value) or value.shape[1] != net.width or not bool(value.isfinite().all()):
            raise DataError(f"the features of {name} do not fit the network")
    if "known" in parts:
        known = torch.nn.functional.normalize(parts["known"])
        return Neighbours(known, min(10, len(known)))
    if len(parts["whitening"]) != net.width:
        raise DataError(f"the features of {name} do not fit the network")
    return Mahalanobis(parts["means"], parts["whitening"])
