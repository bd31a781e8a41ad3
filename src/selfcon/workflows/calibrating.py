"""`selfcon calibrate`: how far to believe a run, when to leave it early, when it had better say nothing.

Everything is chosen on held-out images and measured on others.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from selfcon.deploy.trust import FORMAT
from selfcon.errors import StorageError, UsageError, unknown_name
from selfcon.evaluation.answers import ENSEMBLE
from selfcon.evaluation.calibration import (
    calibration_error,
    choose_temperature,
    sort_into_bins,
    trace_risk,
)
from selfcon.evaluation.cost import count_multiply_adds, zero_image
from selfcon.evaluation.early_exit import (
    CRITERIA,
    Point,
    Rule,
    choose,
    find_gains,
    follow,
    trace,
)
from selfcon.evaluation.outliers import KINDS
from selfcon.networks.exits import BACKBONE
from selfcon.networks.segments import cut_at_exits
from selfcon.networks.stages import Staged
from selfcon.networks.weights import hash_file
from selfcon.progress import say
from selfcon.report import trust_figures
from selfcon.report.canvas import Picture
from selfcon.report.plots import spread
from selfcon.training.files import refuse_link, write_whole
from selfcon.workflows.analysis_files import Result, write
from selfcon.workflows.clock import Clock
from selfcon.workflows.held_out import HeldOut
from selfcon.workflows.silence import fit_silence, tell_unknown
from selfcon.workflows.strangers import fit_strangers, open_outside
from selfcon.workflows.trained import open_run

_TIMED_POINTS = 6
_WITHIN = 1.0  # percentage points below the ensemble, where nothing is asked for
_FEW = 200  # held-out images


def calibrate(
    run_folder: str | Path,
    *,
    data: str | None = None,
    criterion: str = "confidence",
    within: float | None = None,
    mean_cost: float | None = None,
    as_good_as: str | None = None,
    most_wrong: float | None = None,
    outside: str | None = None,
    strangers: str = "neighbours",
    batch_size: int = 64,
    seed: int = 0,
    device: str = "auto",
) -> Result:
    """Choose temperatures, early-exit thresholds and thresholds for `unknown` on held-out images, and store them.

    Held-out are the run's validation images, or `data`, or a half of its test images, whose other half is then what
    results are told of. The early-exit thresholds give up at most `within` percent of the ensemble's accuracy, or have
    at most a `mean_cost`, as a part of the whole network's, or are `as_good_as` one exit alone, such as the backbone.
    Without any of these, they give up 1 percent, and are stored only if they beat the backbone alone on these images.
    With `most_wrong`, answers are kept back so that at most so many percent of those given are wrong. `outside` are
    images of something else, to see whether they are told apart.
    """
    targets = {"within": within, "cost": mean_cost, "as_good_as": as_good_as}
    target = {name: value for name, value in targets.items() if value is not None}
    _check(target, criterion, strangers, most_wrong, batch_size)
    run = open_run(run_folder, device)
    folder = refuse_link(run.path / "analysis")
    if not run.net.classifiers:
        raise UsageError(f"{run_folder} has no classifiers yet: `selfcon probe` trains them.")
    can_leave = len(run.net.names) > 1 and isinstance(run.net.splitter, Staged)
    if not can_leave and target:
        raise UsageError(f"{run_folder} cannot be left early: it has no exits, or does not run stage by stage.")
    if as_good_as is not None and as_good_as not in run.net.names:
        raise unknown_name("exit", as_good_as, run.net.names)
    others = None if outside is None else open_outside(run, outside)  # what is not there is told before any work
    held = HeldOut.begin(run, data, seed)
    result: Result = {"run": run.name, "held_out": held.describe()}
    pictures: dict[str, Picture] = {}
    _fit_temperatures(held, result, pictures)
    _draw_risks(held, result, pictures)
    foreign = fit_strangers(run, held.held, held.told, kind=strangers, outside=others)
    result["strangers"] = {**({} if outside is None else {"outside": outside}), **foreign.found}
    kept: Result = {
        "format": FORMAT,
        "model_sha256": hash_file(run.weights),
        "temperatures": held.temperatures,
        "strange_above": foreign.thresholds,
        "strangers": strangers,
    }
    if can_leave and (rule := _fit_rule(held, result, pictures, criterion, target, batch_size=batch_size)) is not None:
        kept["early_exit"] = rule
    if most_wrong is not None:
        kept |= fit_silence(held, result, most_wrong, kept.get("early_exit"), foreign.strange)
        if others is not None:
            result["silence"]["outside_unknown"] = tell_unknown(
                held, others, kept["silence"], foreign.strange["outside"]
            )
    _store(run.path, kept, foreign.tensors)
    result["model_sha256"] = kept["model_sha256"]
    return write(result, pictures, folder, name="calibration")


def _check(
    target: Mapping[str, Any], criterion: str, strangers: str, most_wrong: float | None, batch_size: int
) -> None:
    """UsageError for what cannot be meant."""
    if len(target) > 1:
        raise UsageError(
            "A rule is chosen for one thing: leave out all but one of --within, --mean-cost, --as-good-as."
        )
    if criterion not in CRITERIA:
        raise unknown_name("criterion", criterion, CRITERIA)
    if strangers not in KINDS:
        raise unknown_name("way to tell strange images", strangers, KINDS)
    for name, value in {
        "within": target.get("within"),
        "mean_cost": target.get("cost"),
        "most_wrong": most_wrong,
    }.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise UsageError(f"{name} is a number of at least 0, not {value}.")
    if target.get("cost", 0) > 1:
        raise UsageError(f"A mean cost is a part of the whole network's, up to 1, not {target['cost']:g}.")
    if most_wrong is not None and most_wrong >= 100:
        raise UsageError(f"The part of wrong answers must be between 0 and 100 percent, not {most_wrong:g}.")
    if batch_size < 1:
        raise UsageError(f"A batch holds at least 1 image, not {batch_size}.")


def _fit_temperatures(held: HeldOut, result: Result, pictures: dict[str, Picture]) -> None:
    names, found = held.all_answers(held.choosing), {}
    before, after = {}, {}
    told = held.all_answers(held.telling)
    for name, logits in names.items():
        held.temperatures[name] = choose_temperature(logits, held.choosing.labels)
        bins = [
            sort_into_bins((told[name] / heat).softmax(1), held.telling.labels)
            for heat in (1.0, held.temperatures[name])
        ]
        found[name] = {
            "temperature": held.temperatures[name],
            "ece_before": calibration_error(bins[0]),
            "ece": calibration_error(bins[1]),
            "top1": 100 * float((told[name].argmax(1) == held.telling.labels).double().mean()),
        }
        before[name], after[name] = bins
    result["answers"] = found
    if len(held.held) < _FEW:
        say(
            f"note: {len(held.held)} images are few to choose by, and errors of calibration are measured on "
            f"{len(held.told)}: hold out more (--val-fraction when training, or --data)"
        )
    pictures["reliability"] = trust_figures.draw_reliability(before, after)


def _draw_risks(held: HeldOut, result: Result, pictures: dict[str, Picture]) -> None:
    curves, areas = {}, {}
    for name in held.temperatures:
        probabilities = held.calibrated(held.telling, name)
        traced = trace_risk(probabilities.amax(1), probabilities.argmax(1) == held.telling.labels)
        some = spread(len(traced.coverage), 200)
        curves[name] = ((100 * traced.coverage[some]).tolist(), (100 * traced.risk[some]).tolist())
        areas[name] = traced.area
    pictures["risk"] = trust_figures.draw_risk(curves)
    result["risk_coverage_area"] = areas


def _fit_rule(
    held: HeldOut,
    result: Result,
    pictures: dict[str, Picture],
    criterion: str,
    target: Mapping[str, Any],
    *,
    batch_size: int,
) -> Result | None:
    """Describe early exit in the result; return the thresholds to store, or None if they are not worth it."""
    costs, alone_costs, total = _costs(held)

    def rule_of(point: Point) -> Rule:
        return Rule(criterion, point.thresholds)

    choosing, telling = (held.running(each) for each in (held.choosing, held.telling))
    curve = trace(choosing, held.choosing.labels, costs, criterion)
    accuracy = held.choosing.top(1)
    gains = find_gains(curve, accuracy=accuracy[BACKBONE], cost=alone_costs[BACKBONE])
    gains = [
        point
        for point in gains
        if point.accuracy >= curve[-1].accuracy - _WITHIN and not _find_better(point, accuracy, alone_costs)
    ]
    usual = choose(gains or curve, accuracy=curve[-1].accuracy - _WITHIN)
    chosen = _choose(held, curve, **target) if target else usual
    stored, better = bool(target or gains), _find_better(chosen, accuracy, alone_costs)
    points = [_tell(held, telling, costs, criterion, point.thresholds) for point in curve]
    told = _tell(held, telling, costs, criterion, chosen.thresholds)
    alone = {
        name: {"accuracy": result["answers"][name]["top1"], "cost": alone_costs[name]}
        for name in (*held.order, ENSEMBLE)
    }
    clock = Clock(held.run, held.told, held.temperatures, batch_size)
    timed = set(spread(len(points), _TIMED_POINTS).tolist())
    rows = [
        {**asdict(point), **({"milliseconds": clock.measure(rule=rule_of(point))} if place in timed else {})}
        for place, point in enumerate(points)
    ]
    for name, each in alone.items():
        each["milliseconds"] = clock.measure(name)
    chosen_row = {**asdict(told), "milliseconds": clock.measure(rule=rule_of(told))}
    result["early_exit"] = {
        "criterion": criterion,
        "target": dict(target) or {"within": _WITHIN},
        "stored": stored,
        "held_out": {"accuracy": chosen.accuracy, "cost": chosen.cost},
        "held_out_accuracy": accuracy,
        "compared_with": BACKBONE if accuracy[BACKBONE] > chosen.accuracy else better or BACKBONE,
        "multiply_adds": total,
        "chosen": chosen_row,
        "alone": alone,
        "points": rows,
    }
    pictures["early-exit"] = trust_figures.draw_early_exit(rows, chosen_row, alone)
    if not stored:
        return None
    rule = {"criterion": criterion, "thresholds": chosen.thresholds}
    return {**rule, "costs": costs, "curve": [asdict(point) for point in curve]}


def _find_better(point: Point, accuracy: Mapping[str, float], costs: Mapping[str, float]) -> str | None:
    """Return the best single exit that is as accurate as early exit for no more cost, or None."""
    better = [name for name in costs if costs[name] <= point.cost and accuracy[name] >= point.accuracy]
    return max(better, key=lambda name: (accuracy[name], -costs[name])) if better else None


def _choose(
    held: HeldOut,
    curve: Sequence[Point],
    *,
    within: float | None = None,
    cost: float | None = None,
    as_good_as: str | None = None,
) -> Point:
    if cost is not None:
        return choose(curve, cost=cost)
    if as_good_as is not None:
        least = held.choosing.top(1)[as_good_as]
        chosen = choose(curve, accuracy=least)
        if chosen.accuracy < least:
            say(f"note: no rule is as good as {as_good_as} alone ({least:.1f} %), so the best one was taken")
        return chosen
    return choose(curve, accuracy=curve[-1].accuracy - (within or 0.0))


def _tell(held: HeldOut, answers: Sequence[Tensor], costs: Sequence[float], criterion: str, thresholds: Any) -> Point:
    return follow(answers, held.telling.labels, costs, Rule(criterion, thresholds))


def _costs(held: HeldOut) -> tuple[list[float], dict[str, float], int]:
    """Multiply-adds up to each answer and of each exit alone as parts of the whole, and the whole."""
    x, spent = zero_image(held.run.net, held.run.size), []
    for segment in cut_at_exits(held.run.net):
        spent.append(count_multiply_adds(segment, x))
        with torch.no_grad():
            x = segment.eval()(x)[0]
    total = sum(spent)
    cumulated = [sum(spent[: number + 1]) / total for number in range(len(spent))]
    net, image = copy.deepcopy(held.run.net), zero_image(held.run.net, held.run.size)
    net.projections.clear()  # heads of the training, which no answer goes through
    alone = {name: count_multiply_adds(_Upto(net, name), image) / total for name in held.order}
    return cumulated, {**alone, ENSEMBLE: 1.0}, total


class _Upto(torch.nn.Module):
    """One exit of a network, as a module."""

    def __init__(self, net: Any, name: str) -> None:
        super().__init__()
        self.net, self.name = net, name

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images, upto=self.name).logits[self.name]
        return logits


def _store(folder: Path, kept: Result, tensors: dict[str, Tensor]) -> None:
    """Both files, each whole or not at all; the second one says which first one belongs to it."""
    data = save_tensors(tensors)
    told = {**kept, "tensors_sha256": hashlib.sha256(data).hexdigest()}
    try:
        write_whole(folder / "calibration.safetensors", data)
        write_whole(folder / "calibration.json", (json.dumps(told, indent=1) + "\n").encode())
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to ({error.strerror}).") from error
