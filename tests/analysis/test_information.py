"""The estimators where the information is known, and where they must say that they do not know."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import selfcon
from selfcon.analysis.information import Critic, estimate, infonce, mine, nwj
from selfcon.errors import DataError, SelfconWarning, UsageError


def correlated(nats: float, dimensions: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gaussians whose information is known: each of the dimensions has its share of it."""
    generator = torch.Generator().manual_seed(1)
    rho = math.sqrt(1 - math.exp(-2 * nats / dimensions))
    a = torch.randn(samples, dimensions, generator=generator)
    return a, rho * a + math.sqrt(1 - rho**2) * torch.randn(samples, dimensions, generator=generator)


_NATS = [2.0, *(pytest.param(nats, marks=pytest.mark.slow) for nats in (0.5, 1.0))]


@pytest.mark.medium
@pytest.mark.parametrize("dimensions", [16, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("nats", _NATS)
@pytest.mark.parametrize("estimator", ["mine", "nwj"])
def test_correlated_gaussians(estimator: str, nats: float, dimensions: int) -> None:
    a, b = correlated(nats, dimensions, 20_000)
    found = estimate(a, b, estimator, seeds=1, steps=1000)
    assert found.spread is None  # one critic is no spread
    assert float(found) == pytest.approx(nats, rel=0.15)
    assert found.resolved


@pytest.mark.medium
@pytest.mark.parametrize("dimensions", [16, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("nats", _NATS)
def test_correlated_gaussians_by_infonce(nats: float, dimensions: int) -> None:
    a, b = correlated(nats, dimensions, 10_000)
    found = estimate(a, b, "infonce", seeds=1, steps=600, batch_size=32)
    assert float(found) == pytest.approx(nats, rel=0.35)
    assert found.nats < found.ceiling == math.log(32)


@pytest.mark.medium
@pytest.mark.parametrize("estimator", ["infonce", "mine", "nwj"])
def test_independent_variables_have_none(estimator: str) -> None:
    a, b = correlated(0.0, 16, 4000)
    found = estimate(a, b, estimator, seeds=2, steps=300)
    assert all(value <= 0.05 for value in found.values)


@pytest.mark.medium
def test_more_than_a_batch_can_show_is_told() -> None:
    a, _ = correlated(0.0, 4, 2000)
    with pytest.warns(SelfconWarning, match="can show no more than 2.77, the log of its batch of 16"):
        found = estimate(a, a, "infonce", seeds=1, steps=300, batch_size=16)
    assert not found.resolved
    with pytest.warns(SelfconWarning, match="found up to .* not to be trusted near"):
        estimate(a, a, "mine", seeds=1, steps=300)


@pytest.mark.slow
def test_maps_labels_and_vectors() -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (900,), generator=generator)
    maps = torch.randn(900, 4, 8, 8, generator=generator)
    maps[:, 0] += 3 * labels[:, None, None]
    images = torch.nn.functional.interpolate(maps[:, :3], scale_factor=2) + torch.randn(900, 3, 16, 16)
    of_label = estimate(labels, maps, "nwj", seeds=1, steps=100)
    assert float(of_label) == pytest.approx(math.log(3), rel=0.2)
    assert float(estimate(maps.mean((2, 3)), maps, "mine", seeds=1, steps=100)) > 0.8
    with pytest.warns(SelfconWarning, match="can show no more"):
        assert float(estimate(images, maps, "infonce", seeds=1, steps=100)) > 0.8
    assert float(estimate(labels.numpy(), maps.numpy(), "nwj", seeds=1, steps=100)) == pytest.approx(of_label.nats)


@pytest.mark.medium
def test_seeds_give_a_spread_and_the_same_seeds_the_same_value() -> None:
    a, b = correlated(1.0, 2, 1000)
    first, second = (estimate(a, b, "nwj", seeds=3, steps=100) for _ in range(2))
    assert first.values == second.values
    assert len(set(first.values)) == 3
    assert first.spread == pytest.approx(np.std(first.values, ddof=1))
    assert first.nats == pytest.approx(np.mean(first.values))
    assert estimate(a, b, "nwj", seeds=1, seed=7, steps=100).values != first.values[:1]
    state = torch.get_rng_state()
    estimate(a, b, "nwj", seeds=1, steps=20)
    assert torch.equal(torch.get_rng_state(), state)


def test_what_is_learnt_by_heart_counts_nothing() -> None:
    """Few samples of many dimensions: a critic can tell them all apart, and must not be measured on them."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(300, 200, generator=generator) for _ in range(2))
    assert float(estimate(a, b, "mine", seeds=1, steps=400)) < 0.05


def test_bounds_of_known_scores() -> None:
    scores = torch.tensor([[2.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    assert float(infonce(scores)) == pytest.approx(math.log(3) + 2 - math.log(math.exp(2) + 2))
    assert float(mine(scores)) == pytest.approx(2.0)
    assert float(nwj(scores)) == pytest.approx(1 + 2 - 1)


def test_a_critic_scores_the_pairs_that_are_named() -> None:
    torch.manual_seed(0)
    critic = Critic(torch.Size([5]), torch.Size([2]), 8).eval()
    torch.nn.init.normal_(critic.last.weight)
    torch.nn.init.normal_(critic.product)
    a, b = torch.randn(4, 5), torch.randn(4, 2)
    partners = torch.tensor([[0, 1], [1, 3], [2, 0], [3, 2]])
    scores = critic(a, b, partners).detach()
    for row, column in ((0, 1), (1, 1), (3, 0)):
        alone = critic(a[row : row + 1], b[partners[row, column]][None], torch.tensor([[0]])).detach()
        assert float(scores[row, column]) == pytest.approx(float(alone), abs=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "options", "error", "says"),
    [
        (torch.randn(300, 2), torch.randn(200, 2), {}, UsageError, "300 of a and 200 of b"),
        (torch.randn(50, 2), torch.randn(50, 2), {}, DataError, "too few to estimate"),
        (torch.zeros(300, dtype=torch.long), torch.randn(300, 2), {}, DataError, "one class only"),
        (torch.full((300, 2), torch.nan), torch.randn(300, 2), {}, DataError, "not finite"),
        (torch.randn(300, 2, 2), torch.randn(300, 2), {}, UsageError, "labels"),
        (torch.randn(300, 2), torch.randn(300, 2), {"estimator": "nwi"}, UsageError, "nwj"),
        (torch.randn(300, 2), torch.randn(300, 2), {"seeds": 0}, UsageError, "seeds must be at least 1"),
        (torch.randn(300, 2), torch.randn(300, 2), {"batch_size": 1}, UsageError, "at least 2 samples"),
        (torch.randn(300, 2), torch.randn(300, 2), {"lr": 0.0}, UsageError, "greater than 0"),
    ],
)
def test_bad_input(a: torch.Tensor, b: torch.Tensor, options: dict[str, object], error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        estimate(a, b, **options)  # type: ignore[arg-type]


def test_the_name_that_the_design_gives_it() -> None:
    assert selfcon.analysis.information.estimate is estimate


def test_a_class_that_was_not_learnt_does_no_harm() -> None:
    generator = torch.Generator().manual_seed(0)
    rare = torch.randint(0, 100, (300,), generator=generator)
    for estimator in ("infonce", "mine"):
        assert -1 < float(estimate(torch.randn(300, 8), rare, estimator, seeds=1, steps=60)) < 0.3
