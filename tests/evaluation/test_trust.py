"""Calibration, early exits and strange images, against plain definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from selfcon.errors import DataError, UsageError
from selfcon.evaluation.calibration import (
    calibration_error,
    choose_silence,
    choose_temperature,
    fit_temperature,
    sort_into_bins,
    trace_risk,
)
from selfcon.evaluation.early_exit import (
    CRITERIA,
    Point,
    Rule,
    choose,
    find_gains,
    follow,
    name_answers,
    running_answers,
    sureness,
    trace,
)
from selfcon.evaluation.outliers import Mahalanobis, Neighbours, auroc


def world(samples: int = 4000, classes: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits that are as sure as they are right: labels are drawn from them."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, classes, generator=generator)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("heat", [0.3, 1.0, 4.0])
def test_the_temperature_is_found(heat: float) -> None:
    logits, labels = world()
    assert fit_temperature(logits * heat, labels) == pytest.approx(heat, rel=0.06)


def test_temperatures_at_the_ends_stay_finite() -> None:
    logits, labels = torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4)
    assert 0 < fit_temperature(logits, labels) < 0.03  # all right: as sure as can be
    assert fit_temperature(logits, (labels + 1) % 3) > 40  # all wrong: as unsure as can be
    with pytest.raises(DataError, match="no held-out image"):
        fit_temperature(logits[:0], labels[:0])


def test_a_temperature_is_taken_where_it_helps() -> None:
    logits, labels = world()
    assert choose_temperature(3 * logits, labels) == pytest.approx(fit_temperature(3 * logits, labels))
    all_right = logits.argmax(1)
    assert choose_temperature(80 * logits, labels) == pytest.approx(fit_temperature(80 * logits, labels))
    assert choose_temperature(logits, all_right) == 1.0  # none fits
    assert choose_temperature(logits[:1], labels[:1]) == 1.0
    with pytest.raises(DataError, match="no held-out image"):
        choose_temperature(logits[:0], labels[:0])


def test_calibration_error_is_the_definition() -> None:
    logits, labels = world(700)
    probabilities = (3 * logits).softmax(1)
    confidence, guesses = (each.numpy() for each in probabilities.double().max(1))
    right = guesses == labels.numpy()
    plain = 0.0
    for low in range(15):
        inside = (confidence > low / 15) & (confidence <= (low + 1) / 15)
        if inside.any():
            plain += inside.mean() * abs(confidence[inside].mean() - right[inside].mean())
    bins = sort_into_bins(probabilities, labels)
    assert sum(each.count for each in bins) == 700
    assert calibration_error(bins) == pytest.approx(100 * plain)
    calm = (3 * logits / fit_temperature(3 * logits, labels)).softmax(1)
    assert calibration_error(sort_into_bins(calm, labels)) < calibration_error(bins) / 2


def test_silence_keeps_its_promise() -> None:
    scores = torch.tensor([0.9, 0.8, 0.8, 0.7, 0.6])
    right = torch.tensor([True, True, False, True, True])
    traced = trace_risk(scores, right)
    assert traced.coverage.tolist() == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert traced.risk.tolist() == pytest.approx([0, 1 / 4, 1 / 3, 1 / 4, 1 / 5])  # of equals, half a wrong one each
    assert choose_silence(traced, 34) == pytest.approx(0.6)  # all may speak: one wrong of five, and one more
    sure = trace_risk(torch.arange(100) / 100.0, torch.ones(100, dtype=torch.bool))
    assert choose_silence(sure, 5) == pytest.approx(0.0)
    assert choose_silence(sure, 0.5) == math.inf  # nobody can promise that from a hundred images
    assert choose_silence(trace_risk(scores, torch.zeros(5, dtype=torch.bool)), 5) == math.inf
    with pytest.raises(UsageError, match="between 0 and 100"):
        choose_silence(traced, 120)
    thirds = trace_risk(torch.tensor([0.9] * 3 + [0.8] * 7), torch.tensor([True, True, False] + [True] * 7))
    assert thirds.risk[[2, 9]].tolist() == [1 / 3, 1 / 10]  # to the bit, where somebody is to keep silent
    for order in (torch.arange(100), torch.arange(100).flip(0)):  # scores that say nothing have no order
        assert trace_risk(torch.ones(100), order >= 20).area == pytest.approx(20.0)


def test_answers_are_ensembles_of_what_came_before() -> None:
    logits = [torch.randn(4, 3) for _ in range(3)]
    answers = running_answers(logits)
    assert torch.equal(answers[0], logits[0])
    assert torch.allclose(answers[1], (logits[0] + logits[1]) / 2)
    assert torch.allclose(answers[2], torch.stack(logits).mean(0))
    assert name_answers(["exit1", "exit2", "backbone"]) == ["exit1", "exit1+exit2", "ensemble"]
    assert name_answers(["backbone"]) == ["backbone"]


def test_how_sure_an_answer_is() -> None:
    sure, unsure = torch.tensor([[1.0, 0.0, 0.0]]), torch.full((1, 3), 1 / 3)
    for criterion in ("confidence", "margin", "entropy"):
        assert float(sureness([sure], criterion)) == pytest.approx(1)
        assert float(sureness([unsure], criterion)) == pytest.approx(
            1 / 3 if criterion == "confidence" else 0, abs=1e-6
        )
    for classes in range(2, 40):  # whose logarithms do not round alike
        assert 0 <= float(sureness([torch.full((1, classes), 1 / classes)], "entropy")) < 1e-5
    assert float(sureness([sure], "agreement")) == 0  # nobody to agree with
    assert float(sureness([unsure, sure], "agreement")) == pytest.approx(1 / 3)
    with pytest.raises(UsageError, match="did you mean 'margin'"):
        sureness([sure], "margn")
    with pytest.raises(UsageError, match="did you mean 'entropy'"):
        Rule("entrop", 0.5)
    with pytest.raises(UsageError, match="at least 0"):
        Rule("margin", -0.1)


def test_a_rule_by_hand() -> None:
    first = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]])
    last = torch.tensor([[0.8, 0.2], [0.1, 0.9], [0.9, 0.1]])
    labels = torch.tensor([0, 1, 0])
    point = follow([first, last], labels, [0.4, 1.0], Rule("confidence", 0.75))
    assert point.shares == pytest.approx((2 / 3, 1 / 3))
    assert point.accuracy == pytest.approx(100 * 2 / 3)  # the third left with a wrong answer
    assert point.cost == pytest.approx((0.4 + 0.4 + 1.0) / 3)


def test_accuracy_is_a_whole_number_of_answers() -> None:
    """2 right early and 7 late of 10 are 90 percent, not a rounding below it."""
    first = torch.tensor([[0.9, 0.1]] * 2 + [[0.6, 0.4]] * 8)
    last = torch.tensor([[0.9, 0.1]] * 9 + [[0.1, 0.9]])
    for rule in (Rule("confidence", 0.75), Rule("confidence", 2.0)):
        assert follow([first, last], torch.zeros(10).long(), [0.5, 1.0], rule).accuracy == 90.0


def test_curves_begin_at_the_first_exit_and_end_at_the_whole() -> None:
    logits, labels = world()
    worse = logits + 2 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    answers = [each.softmax(1) for each in (worse, logits)]
    points = trace(answers, labels, [0.5, 1.0], "confidence")
    assert (points[0].cost, points[-1].cost) == (0.5, 1.0)
    assert points[-1].accuracy == pytest.approx(100 * float((logits.argmax(1) == labels).double().mean()))
    cheap = choose(points, accuracy=points[-1].accuracy - 1.0)
    assert cheap.cost < 1.0
    assert cheap == min((each for each in points if each.accuracy >= points[-1].accuracy - 1.0), key=lambda e: e.cost)
    assert choose(points, accuracy=101.0).accuracy == max(each.accuracy for each in points)
    assert cheap.accuracy >= points[-1].accuracy - 1.0
    assert choose(points, cost=0.7).cost <= 0.7
    with pytest.raises(UsageError, match=r"No answer costs less than 0\.50"):
        choose(points, cost=0.4)
    with pytest.raises(UsageError, match="name one of them"):
        choose(points)


@pytest.mark.medium
def test_every_answer_has_a_threshold_of_its_own() -> None:
    logits, labels = world()
    noise = torch.Generator().manual_seed(2)
    answers = [(logits + far * torch.randn(logits.shape, generator=noise)).softmax(1) for far in (2.0, 0.5, 0.0)]
    costs = [0.5, 0.75, 1.0]
    points = trace(answers, labels, costs, "confidence")
    assert points[-1].thresholds == (2.0, 2.0)
    for point in points:
        assert follow(answers, labels, costs, Rule("confidence", point.thresholds)) == point
    assert all(one.cost < two.cost for one, two in itertools.pairwise(points))
    assert all(one.accuracy < two.accuracy for one, two in itertools.pairwise(points[:-1]))
    assert len({point.thresholds[0] == point.thresholds[1] for point in points}) == 2  # type: ignore[index]
    for criterion in CRITERIA:  # agreement cannot let anybody leave at the first exit but all
        others = trace(answers, labels, costs, criterion)
        assert len(others) > 10
        assert any(point.shares[1] > 0 for point in others), criterion
    many = trace([answers[0]] * 9 + [answers[2]], labels, [0.1 * number for number in range(1, 11)], "margin")
    assert 5 < len(many) <= 51
    single = [follow(answers, labels, costs, Rule("confidence", each / 20)) for each in range(21)]
    for each in single:  # one threshold for all is never clearly better for its cost
        best = max(point.accuracy for point in points if point.cost <= each.cost + 0.02)
        assert best >= each.accuracy - 0.5


def test_a_gain_over_the_backbone_alone() -> None:
    points = [Point((0.5,), accuracy, cost, (0.5, 0.5)) for accuracy, cost in ((60, 0.2), (75.6, 0.5), (76, 0.9))]
    whole = Point((2.0,), 78, 1.0, (0.0, 1.0))
    assert find_gains([*points, whole], accuracy=76, cost=0.99) == [points[1]]
    assert find_gains([*points, whole], accuracy=75.5, cost=0.99) == points[1:]
    assert find_gains([*points, whole], accuracy=77, cost=1.0) == [whole]
    assert find_gains([*points, whole], accuracy=77, cost=0.99) == []  # as accurate at most, or more expensive


def test_thresholds_tell_nearly_sure_answers_apart() -> None:
    nearly = 1 - 2.0**-24  # what float32 has before 1
    first = torch.tensor([[nearly, 1 - nearly]] * 490 + [[1.0, 0.0]] * 510)
    last = torch.tensor([[0.0, 1.0]] * 490 + [[1.0, 0.0]] * 510)
    labels = last.argmax(1)
    points = trace([first, last], labels, [0.5, 1.0], "confidence")
    assert any(point.accuracy == 100 and point.cost < 0.8 for point in points)
    for point in points:
        assert follow([first, last], labels, [0.5, 1.0], Rule("confidence", point.thresholds)) == point


@pytest.mark.parametrize("kind", [Neighbours, Mahalanobis])
def test_strange_images_are_told(kind: type[Neighbours] | type[Mahalanobis]) -> None:
    generator = torch.Generator().manual_seed(0)
    centres = 4 * torch.eye(8)[:3]
    labels = torch.arange(600) % 3
    known = centres[labels] + torch.randn(600, 8, generator=generator) * 0.5
    inside = centres[labels[:90]] + torch.randn(90, 8, generator=generator) * 0.5
    outside = -centres[labels[:90]] + torch.randn(90, 8, generator=generator) * 0.5
    stranger = kind.fit(known, labels)
    scores = stranger.score(inside), stranger.score(outside)
    assert auroc(*scores) > 99
    truth = np.r_[np.zeros(90), np.ones(90)]
    assert auroc(*scores) == pytest.approx(100 * roc_auc_score(truth, torch.cat(scores).numpy()))
    assert auroc(scores[0], scores[0]) == pytest.approx(50)
    with pytest.raises(DataError, match="two known images"):
        kind.fit(known[:1], labels[:1])


def test_mahalanobis_is_its_distance() -> None:
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(4, 4, generator=generator)
    labels = torch.arange(20_000) % 2
    known = torch.randn(20_000, 4, generator=generator) @ mixing + 3.0 * labels[:, None]
    asked = torch.randn(5, 4, generator=generator)
    apart = asked[:, None] - torch.stack([torch.zeros(4), torch.full((4,), 3.0)])
    covariance = mixing.T @ mixing
    shrunk = 0.95 * covariance + 0.05 * torch.diag(covariance.diag())
    plain = torch.einsum("mci,ij,mcj->mc", apart, torch.linalg.inv(shrunk), apart).sqrt().min(1).values
    assert Mahalanobis.fit(known, labels).score(asked) == pytest.approx(plain, rel=0.1)
