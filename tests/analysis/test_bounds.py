"""The propositions in small worlds, and that their losses are those that the package trains with."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import selfcon
from selfcon.analysis import bounds
from selfcon.analysis.bounds import World, check, counterexample, draw_world, experiment, information
from selfcon.errors import UsageError


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, object]]:
    return experiment(1000)


@pytest.mark.medium
def test_every_bound_holds_in_every_world(found: dict[str, dict[str, object]]) -> None:
    for each in found["bounds"].values():
        assert each["holds"] == each["of"] == 1000  # type: ignore[index]
    assert found["equation_6"]["largest_difference"] < 1e-12  # type: ignore[operator]


def test_bounds_are_not_empty_promises(found: dict[str, dict[str, object]]) -> None:
    for name, each in found["bounds"].items():
        points = np.array(each["points"])  # type: ignore[index]
        assert (points[:, 1] > 0).sum() >= 3, name
        assert points[:, 0].max() > 0.3, name


@pytest.mark.parametrize("temperature", [0.1, 0.5])
def test_they_hold_at_other_temperatures_and_batches(temperature: float) -> None:
    generator = np.random.default_rng(3)
    for _ in range(30):
        assert all(each.holds for each in check(draw_world(generator), temperature=temperature))
    assert all(each.holds for each in check(draw_world(generator, vectors=2), samples=3, temperature=temperature))


def test_negatives_from_other_classes_break_the_bound() -> None:
    broken = counterexample()
    assert not broken.holds
    assert broken.bound == pytest.approx(0.859, abs=1e-3)
    assert broken.truth == 0
    features = torch.tensor([[[1.0, 0.0]], [[-1.0, 0.0]]])[:, None].expand(2, 2, 1, 2)
    loss = selfcon.get_method("supcon").loss(features, torch.tensor([0, 1]), temperature=1.0)
    assert broken.bound == pytest.approx(math.log(3) - float(loss), abs=1e-6)


def points(f: list[int], g: list[int]) -> World:
    """A world whose features follow from the state, with unit vectors at these angles in degrees."""
    vectors = [np.stack([np.cos(np.radians(a)), np.sin(np.radians(a))], axis=1) for a in (f, g)]
    return World(np.full(len(f), 1 / len(f)), np.eye(len(f)), np.eye(len(g)), vectors[0], vectors[1])


@pytest.mark.parametrize("name", ["supcon", "selfcon", "selfcon_m"])
def test_losses_are_those_of_the_package(name: str) -> None:
    """Of every batch that can be drawn, where negatives count as other classes: the mean of the anchor's losses."""
    world, samples, tau = points([0, 70, 200], [30, 100, 290]), 2, 0.7
    method = selfcon.get_method({"selfcon_m": "selfcon-m"}.get(name, name))
    losses = []
    others = 1 if name == "selfcon" else 2  # independent negatives: each a sample of its own, of one view
    for states in np.ndindex(*[3] * (1 + others)):
        anchor, *rest = states
        f, g = torch.tensor(world.f_vectors), torch.tensor(world.g_vectors)
        both = torch.stack([f, g], dim=1) if "selfcon" in name else f[:, None]  # [3, E, D]
        rows = torch.cat([both[[anchor] * method.views], both[list(rest)]]).flatten(0, 1)
        own = method.views * both.shape[1]
        logits = rows @ rows.T / tau
        per_anchor = []
        for row in range(own):
            there = [other for other in range(len(rows)) if other != row]
            positives = [other for other in there if other < own]
            per_anchor.append(logits[row, there].logsumexp(0) - logits[row, positives].mean())
        losses.append(float(torch.stack(per_anchor).mean()))
    assert getattr(bounds, name)(world, samples=samples, temperature=tau) == pytest.approx(np.mean(losses), rel=1e-9)
    # One such batch by the package itself, whose negatives come as samples with all their views.
    features = torch.stack([f, g], dim=1)[[0, 1]] if "selfcon" in name else f[[0, 1]][:, None]
    ours = method.loss(features[:, None].expand(-1, method.views, -1, -1), torch.tensor([0, 1]), temperature=tau)
    assert float(ours) > 0


def test_information_of_tables() -> None:
    assert information(np.eye(4) / 4) == pytest.approx(math.log(4))
    assert information(np.full((2, 3), 1 / 6)) == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [({"draws": 0}, "at least 1 draw"), ({"samples": 9}, "2 or 3"), ({"temperature": 0.0}, "at least 0.02")],
)
def test_bad_input(options: dict[str, float], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        experiment(**{"draws": 1, **options})  # type: ignore[arg-type]
