"""`selfcon calibrate`: how far to believe a run, when to leave it early, when it had better say nothing.

Everything is chosen on held-out images and measured on others.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from selfcon.data.split import Split
from selfcon.data.splits import hold_out
from selfcon.deploy.trust import FORMAT
from selfcon.errors import DataError, StorageError, UsageError, name_some, unknown_name
from selfcon.evaluation.accuracy import Predictions, predict
from selfcon.evaluation.answers import ENSEMBLE
from selfcon.evaluation.calibration import (
    calibration_error,
    choose_silence,
    choose_temperature,
    sort_into_bins,
    trace_risk,
)
from selfcon.evaluation.cost import count_multiply_adds, zero_image
from selfcon.evaluation.early_exit import (
    CRITERIA,
    NEVER,
    Point,
    Rule,
    choose,
    follow,
    name_answers,
    running_answers,
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
from selfcon.workflows.strangers import fit_strangers, open_outside
from selfcon.workflows.trained import TrainedRun, open_run

_TIMED_POINTS = 6
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
    """Temperatures, a rule for leaving early, thresholds for `unknown`: chosen on held-out images, stored in the run.

    Held-out are the run's validation images, or `data`, or a half of its test images, whose other half is then what
    results are told of. The rule gives up at most `within` percent of the ensemble's accuracy (1 unless told), or has
    at most a `mean_cost`, as a part of the whole network's, or is `as_good_as` one exit alone, such as the backbone.
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
    work = _Calibration.begin(run, data, seed)
    result: Result = {"run": run.name, "held_out": work.describe()}
    pictures: dict[str, Picture] = {}
    work.fit_temperatures(result, pictures)
    work.draw_risks(result, pictures)
    foreign = fit_strangers(run, work.held, work.told, kind=strangers, outside=others)
    result["strangers"] = {**({} if outside is None else {"outside": outside}), **foreign.found}
    kept: Result = {
        "format": FORMAT,
        "model_sha256": hash_file(run.weights),
        "temperatures": work.temperatures,
        "strange_above": foreign.thresholds,
        "strangers": strangers,
    }
    if can_leave:
        kept["early_exit"] = work.fit_rule(result, pictures, criterion, target or {"within": 1.0}, batch_size)
    if most_wrong is not None:
        kept |= work.fit_silence(result, most_wrong, kept.get("early_exit"), foreign.strange)
        if others is not None:
            result["silence"]["outside_unknown"] = work.tell_unknown(
                others, kept["silence"], foreign.strange["outside"]
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


@dataclass
class _Calibration:
    """A run's logits on images to choose by and on images to tell of."""

    run: TrainedRun
    held: Split
    told: Split
    held_name: str
    told_name: str
    choosing: Predictions
    telling: Predictions
    temperatures: dict[str, float]

    @classmethod
    def begin(cls, run: TrainedRun, data: str | None, seed: int) -> _Calibration:
        test = run.split("test")
        if data is not None:
            source = run.labelled_source(data)
            which = "the images" if source.train is source.test else "the test images"
            held, told, names = run.as_seen(source.test), test, (f"{which} of {source.name}", "all test images")
            if held.fingerprint() == test.fingerprint():
                raise UsageError(f"{data} are the run's own test images, to measure results on: hold out others.")
        elif run.source.val is not None:
            held, told, names = run.split("val"), test, ("the validation images", "all test images")
        else:
            labels = test.labels.cpu().numpy()
            if len(labels) // 2 > len(labels) - len(np.unique(labels)):
                raise DataError(
                    f"{run.source.name} has too few test images to hold out half of them: name others (--data)."
                )
            rows = hold_out(labels, len(labels) // 2, seed)
            told, held = (test.take(torch.from_numpy(each).to(test.device)) for each in rows)
            names = ("half of the test images", "the other half of the test images")
            say("There are no validation images: half of the test images are held out, results are of the other half.")
        if not len(held) or not len(told):
            raise DataError(f"{run.source.name} has too few test images to hold some of them out.")
        choosing, telling = (predict(run.net, each, size=run.size) for each in (held, told))
        return cls(run, held, told, *names, choosing, telling, {})

    def describe(self) -> Result:
        return {
            "chosen_on": self.held_name,
            "images": len(self.held),
            "told_of": self.told_name,
            "told_images": len(self.told),
        }

    @property
    def order(self) -> list[str]:
        """The exits in the order that images come by them."""
        return [*self.run.net.names[1:], BACKBONE]

    def fit_temperatures(self, result: Result, pictures: dict[str, Picture]) -> None:
        names, found = self._all_answers(self.choosing), {}
        before, after = {}, {}
        told = self._all_answers(self.telling)
        for name, logits in names.items():
            self.temperatures[name] = choose_temperature(logits, self.choosing.labels)
            bins = [
                sort_into_bins((told[name] / heat).softmax(1), self.telling.labels)
                for heat in (1.0, self.temperatures[name])
            ]
            found[name] = {
                "temperature": self.temperatures[name],
                "ece_before": calibration_error(bins[0]),
                "ece": calibration_error(bins[1]),
                "top1": 100 * float((told[name].argmax(1) == self.telling.labels).double().mean()),
            }
            before[name], after[name] = bins
        result["answers"] = found
        if len(self.held) < _FEW:
            say(
                f"note: {len(self.held)} images are few to choose by, and errors of calibration are measured on "
                f"{len(self.told)}: hold out more (--val-fraction when training, or --data)"
            )
        pictures["reliability"] = trust_figures.draw_reliability(before, after)

    def draw_risks(self, result: Result, pictures: dict[str, Picture]) -> None:
        curves, areas = {}, {}
        for name in self.temperatures:
            probabilities = self._calibrated(self.telling, name)
            traced = trace_risk(probabilities.amax(1), probabilities.argmax(1) == self.telling.labels)
            some = spread(len(traced.coverage), 200)
            curves[name] = ((100 * traced.coverage[some]).tolist(), (100 * traced.risk[some]).tolist())
            areas[name] = traced.area
        pictures["risk"] = trust_figures.draw_risk(curves)
        result["risk_coverage_area"] = areas

    @property
    def _behind(self) -> dict[str, str]:
        """By answer, the exit whose features tell whether an image is strange."""
        return {**{name: name for name in self.order}, **dict(zip(name_answers(self.order), self.order, strict=True))}

    def tell_unknown(self, others: Split, silence: Mapping[str, float], strange: Mapping[str, Tensor]) -> float:
        """How many percent of other images the last answer, of all exits, will be `unknown` of."""
        name = name_answers(self.order)[-1]
        probable = self._calibrated(predict(self.run.net, others, size=self.run.size), name).amax(1)
        return 100 * float(((probable < silence[name]) | strange[self._behind[name]]).double().mean())

    def fit_silence(
        self, result: Result, most_wrong: float, early: Result | None, strange: Mapping[str, Mapping[str, Tensor]]
    ) -> Result:
        """By answer, the probability below which it is not given; and for those whom the rule lets come that far.

        Of strange images nothing is said anyway, so they do not count where a probability is chosen.
        """
        known = {
            name: tuple(~strange[part][leave] for part in ("held", "told")) for name, leave in self._behind.items()
        }
        chosen = {name: self._silence(name, most_wrong, known[name], None) for name in self.temperatures}
        kept: Result = {"silence": {name: threshold for name, (threshold, _) in chosen.items()}}
        found = {name: numbers for name, (_, numbers) in chosen.items()}
        if early is not None:
            names = name_answers(self.order)
            kept["silence_early"] = []
            for point in early["curve"]:  # a budget takes any of them
                rule = Rule(early["criterion"], point["thresholds"])
                groups = zip(*(self._who_leaves(each, rule) for each in self._both), strict=True)
                # Where nobody leaves, what holds for all is the best that is known.
                by_rule = {
                    name: self._silence(
                        name, most_wrong, known[name], both if bool((both[0] & known[name][0]).any()) else None
                    )
                    for name, both in zip(names, groups, strict=True)
                }
                thresholds = {name: threshold for name, (threshold, _) in by_rule.items()}
                kept["silence_early"].append({"thresholds": rule.thresholds, "answers": thresholds})
                if rule.thresholds == early["thresholds"]:
                    found |= {f"early, {name}": numbers for name, (_, numbers) in by_rule.items()}
        result["silence"] = {"most_wrong": most_wrong, "answers": found}
        if silent := [name for name, each in found.items() if each["threshold"] >= NEVER]:
            say(
                f"note: no threshold keeps wrong answers of {name_some(silent, most=9)} at {most_wrong:g} %, so "
                f"`unknown` is all that will be said; `selfcon calibrate` without --most-wrong takes that back"
            )
        return kept

    @property
    def _both(self) -> tuple[Predictions, Predictions]:
        return self.choosing, self.telling

    def _silence(
        self, name: str, most_wrong: float, known: Sequence[Tensor], only: tuple[Tensor, Tensor] | None
    ) -> tuple[float, Result]:
        """A threshold, and what it does to the images that are told of; `only` are those of both that count."""
        scores, right, familiar = [], [], []
        for number, each in enumerate(self._both):
            counted = torch.ones(len(each.labels), dtype=torch.bool) if only is None else only[number]
            probabilities = self._calibrated(each, name)[counted]
            scores.append(probabilities.amax(1))
            right.append(probabilities.argmax(1) == each.labels[counted])
            familiar.append(known[number][counted])
        threshold = choose_silence(trace_risk(scores[0][familiar[0]], right[0][familiar[0]]), most_wrong)
        given = (scores[1] >= threshold) & familiar[1]
        numbers = {
            "threshold": min(threshold, NEVER),
            "answered": 100 * float(given.double().mean()) if len(given) else 0.0,
            "wrong": 100 * float((~right[1][given]).double().mean()) if bool(given.any()) else 0.0,
        }
        return min(threshold, NEVER), numbers

    def _who_leaves(self, predictions: Predictions, rule: Rule) -> list[Tensor]:
        """For each answer, who is given it."""
        answers = self._running(predictions)
        stays, found = torch.ones(len(predictions.labels), dtype=torch.bool), []
        for number in range(1, len(answers) + 1):
            leaves = stays if number == len(answers) else stays & rule.leaves(answers[:number])
            found.append(leaves)
            stays = stays & ~leaves
        return found

    def fit_rule(
        self,
        result: Result,
        pictures: dict[str, Picture],
        criterion: str,
        target: Mapping[str, Any],
        batch_size: int,
    ) -> Result:
        costs, alone_costs, total = self._costs()

        def rule_of(point: Point) -> Rule:
            return Rule(criterion, point.thresholds)

        choosing, telling = (self._running(each) for each in (self.choosing, self.telling))
        curve = trace(choosing, self.choosing.labels, costs, criterion)
        chosen = self._choose(curve, **target)
        points = [self._tell(telling, costs, criterion, point.thresholds) for point in curve]
        told = self._tell(telling, costs, criterion, chosen.thresholds)
        alone = {
            name: {"accuracy": result["answers"][name]["top1"], "cost": alone_costs[name]}
            for name in (*self.order, ENSEMBLE)
        }
        clock = Clock(self.run, self.told, self.temperatures, batch_size)
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
            "target": dict(target),
            "held_out_accuracy": self.choosing.top(1),
            "multiply_adds": total,
            "chosen": chosen_row,
            "alone": alone,
            "points": rows,
        }
        pictures["early-exit"] = trust_figures.draw_early_exit(rows, chosen_row, alone)
        rule = {"criterion": criterion, "thresholds": chosen.thresholds}
        return {**rule, "costs": costs, "curve": [asdict(point) for point in curve]}

    def _choose(
        self,
        curve: Sequence[Point],
        *,
        within: float | None = None,
        cost: float | None = None,
        as_good_as: str | None = None,
    ) -> Point:
        if cost is not None:
            return choose(curve, cost=cost)
        if as_good_as is not None:
            least = self.choosing.top(1)[as_good_as]
            chosen = choose(curve, accuracy=least)
            if chosen.accuracy < least:
                say(f"note: no rule is as good as {as_good_as} alone ({least:.1f} %), so the best one was taken")
            return chosen
        return choose(curve, accuracy=curve[-1].accuracy - (within or 0.0))

    def _tell(self, answers: Sequence[Tensor], costs: Sequence[float], criterion: str, thresholds: Any) -> Point:
        return follow(answers, self.telling.labels, costs, Rule(criterion, thresholds))

    def _all_answers(self, predictions: Predictions) -> dict[str, Tensor]:
        """Logits of every exit and of every ensemble that may answer."""
        logits = [predictions.logits[name] for name in self.order]
        running = dict(zip(name_answers(self.order), running_answers(logits), strict=True))
        return {**dict(zip(self.order, logits, strict=True)), **running}

    def _calibrated(self, predictions: Predictions, name: str) -> Tensor:
        return (self._all_answers(predictions)[name] / self.temperatures[name]).softmax(1)

    def _running(self, predictions: Predictions) -> list[Tensor]:
        return [self._calibrated(predictions, name) for name in name_answers(self.order)]

    def _costs(self) -> tuple[list[float], dict[str, float], int]:
        """Multiply-adds up to each answer and of each exit alone as parts of the whole, and the whole."""
        x, spent = zero_image(self.run.net, self.run.size), []
        for segment in cut_at_exits(self.run.net):
            spent.append(count_multiply_adds(segment, x))
            with torch.no_grad():
                x = segment.eval()(x)[0]
        total = sum(spent)
        cumulated = [sum(spent[: number + 1]) / total for number in range(len(spent))]
        net, image = copy.deepcopy(self.run.net), zero_image(self.run.net, self.run.size)
        net.projections.clear()  # heads of the training, which no answer goes through
        alone = {name: count_multiply_adds(_Upto(net, name), image) / total for name in self.order}
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
