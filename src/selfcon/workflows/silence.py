"""When a run had better say nothing: probabilities below which an answer is kept back, for `calibrate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from selfcon.data.split import Split
from selfcon.errors import name_some
from selfcon.evaluation.accuracy import Predictions, predict
from selfcon.evaluation.calibration import choose_silence, trace_risk
from selfcon.evaluation.early_exit import NEVER, Rule, name_answers
from selfcon.progress import say
from selfcon.workflows.analysis_files import Result
from selfcon.workflows.held_out import HeldOut


def fit_silence(
    held: HeldOut, result: Result, most_wrong: float, early: Result | None, strange: Mapping[str, Mapping[str, Tensor]]
) -> Result:
    """By answer, the probability below which it is not given; and for those whom the rule lets come that far.

    Of strange images nothing is said anyway, so they do not count where a probability is chosen.
    """
    known = {name: tuple(~strange[part][leave] for part in ("held", "told")) for name, leave in _behind(held).items()}
    chosen = {name: _silence(held, name, most_wrong, known[name], None) for name in held.temperatures}
    kept: Result = {"silence": {name: threshold for name, (threshold, _) in chosen.items()}}
    found = {name: numbers for name, (_, numbers) in chosen.items()}
    if early is not None:
        names = name_answers(held.order)
        kept["silence_early"] = []
        for point in early["curve"]:  # a budget takes any of them
            rule = Rule(early["criterion"], point["thresholds"])
            groups = zip(*(_who_leaves(held, each, rule) for each in held.both), strict=True)
            # Where nobody leaves, what holds for all is the best that is known.
            by_rule = {
                name: _silence(
                    held, name, most_wrong, known[name], both if bool((both[0] & known[name][0]).any()) else None
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


def tell_unknown(held: HeldOut, others: Split, silence: Mapping[str, float], strange: Mapping[str, Tensor]) -> float:
    """How many percent of other images the last answer, of all exits, will be `unknown` of."""
    name = name_answers(held.order)[-1]
    probable = held.calibrated(predict(held.run.net, others, size=held.run.size), name).amax(1)
    return 100 * float(((probable < silence[name]) | strange[_behind(held)[name]]).double().mean())


def _silence(
    held: HeldOut, name: str, most_wrong: float, known: Sequence[Tensor], only: tuple[Tensor, Tensor] | None
) -> tuple[float, Result]:
    """A threshold, and what it does to the images that are told of; `only` are those of both that count."""
    scores, right, familiar = [], [], []
    for number, each in enumerate(held.both):
        counted = torch.ones(len(each.labels), dtype=torch.bool) if only is None else only[number]
        probabilities = held.calibrated(each, name)[counted]
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


def _who_leaves(held: HeldOut, predictions: Predictions, rule: Rule) -> list[Tensor]:
    """For each answer, who is given it."""
    answers = held.running(predictions)
    stays, found = torch.ones(len(predictions.labels), dtype=torch.bool), []
    for number in range(1, len(answers) + 1):
        leaves = stays if number == len(answers) else stays & rule.leaves(answers[:number])
        found.append(leaves)
        stays = stays & ~leaves
    return found


def _behind(held: HeldOut) -> dict[str, str]:
    """By answer, the exit whose features tell whether an image is strange."""
    return {**{name: name for name in held.order}, **dict(zip(name_answers(held.order), held.order, strict=True))}
