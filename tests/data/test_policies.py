"""What is drawn has the distributions of torchvision's own classes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torchvision import transforms

from selfcon.data.draws import JITTER_ORDERS, Draws, draw, order_colours
from selfcon.data.policies import POLICIES, RANDAUGMENT_OPERATIONS, Policy, add_policy, get_policy
from selfcon.errors import UsageError

COUNT = 50_000


@pytest.fixture(scope="module")
def draws() -> Draws:
    return draw(POLICIES["standard"], torch.arange(COUNT), height=32, width=32, seed=0, epoch=0)


def agree(ours: Tensor, theirs: Tensor) -> None:
    """Means and variances within five standard errors of each other."""
    ours, theirs = ours.double(), theirs.double()
    error = math.sqrt(float(ours.var() / len(ours) + theirs.var() / len(theirs)))
    assert abs(float(ours.mean() - theirs.mean())) < 5 * error + 1e-9
    fourth = float(((ours - ours.mean()) ** 4).mean())
    error = math.sqrt(2 * max(fourth - float(ours.var()) ** 2, 0) / len(ours))
    assert abs(float(ours.var() - theirs.var())) < 5 * error + 1e-9


@pytest.mark.medium
@pytest.mark.parametrize(("height", "width"), [(32, 32), (40, 90)])
def test_crops(height: int, width: int) -> None:
    ours = draw(POLICIES["standard"], torch.arange(COUNT), height=height, width=width, seed=1, epoch=0)
    image = torch.empty(3, height, width)
    get = transforms.RandomResizedCrop.get_params
    theirs = torch.tensor([get(image, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(COUNT)])
    for column, values in enumerate((ours.top, ours.left, ours.height, ours.width)):
        agree(values, theirs[:, column])
    assert (ours.top + ours.height).max() == height  # the last row is reached
    assert ours.height.min() > 0


@pytest.mark.parametrize(("height", "width"), [(10, 100), (100, 10), (33, 33)])
def test_a_crop_that_never_fits_falls_back_as_torchvisions(height: int, width: int) -> None:
    policy = Policy(crop_and_flip=True, scale=(2.0, 3.0))
    ours = draw(policy, torch.arange(5), height=height, width=width, seed=0, epoch=0)
    theirs = transforms.RandomResizedCrop.get_params(torch.empty(3, height, width), [2.0, 3.0], [3 / 4, 4 / 3])
    crops = torch.stack([ours.top, ours.left, ours.height, ours.width], dim=1)
    assert torch.equal(crops, torch.tensor([theirs] * 5))


def test_colours(draws: Draws) -> None:
    jitter = transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)
    orders, factors = [], []
    for _ in range(COUNT):
        order, *values = jitter.get_params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue)
        orders.append(order)
        factors.append(values)
    theirs = torch.tensor(factors)
    for column in range(4):
        agree(draws.factors[:, column], theirs[:, column])
        assert abs(float(draws.factors[:, column].min() - theirs[:, column].min())) < 1e-3
    their_orders = torch.stack(orders)
    for place in range(4):
        agree(draws.order[:, place], their_orders[:, place])
    counts = torch.unique(draws.order, dim=0, return_counts=True)[1]
    assert len(counts) == len(JITTER_ORDERS) == 24
    assert counts.min() > 0.9 * COUNT / 24


def test_orders_are_rows_of_the_table() -> None:
    """The GPU's kernel looks them up there."""
    index = torch.arange(len(JITTER_ORDERS))
    assert torch.equal(order_colours(index), torch.tensor(JITTER_ORDERS))


def test_gates(draws: Draws) -> None:
    for gate, probability in ((draws.flip, 0.5), (draws.jitter, 0.8), (draws.grey, 0.2)):
        assert abs(float(gate.float().mean()) - probability) < 5 * math.sqrt(0.25 / COUNT)


def test_randaugment(draws: Draws) -> None:
    theirs = torch.randint(len(RANDAUGMENT_OPERATIONS), (COUNT,))
    for choice in draws.choices.unbind(1):
        agree(choice // 2, theirs)
        assert abs(float((choice % 2).float().mean()) - 0.5) < 5 * math.sqrt(0.25 / COUNT)
    space = transforms.RandAugment()._augmentation_space(31, (32, 32))
    assert tuple(space) == RANDAUGMENT_OPERATIONS


def test_names() -> None:
    assert set(POLICIES) == {"standard", "simple", "randaugment", "randaugment-simple", "randaugment-standard", "none"}
    with pytest.raises(UsageError, match="did you mean 'randaugment'"):
        get_policy("randaugmnt")


def test_policies_of_a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("selfcon.data.policies.POLICIES", dict(POLICIES))
    strong = add_policy("mine", Policy(crop_and_flip=True, colour=True, hue=0.4))
    assert get_policy("mine") is strong
    again = add_policy("mine", Policy(crop_and_flip=True))  # as a cell of a notebook does that is run again
    assert get_policy("mine") is again
    with pytest.raises(UsageError, match="'standard' already: choose another name"):
        add_policy("standard", strong)
    with pytest.raises(UsageError, match=r"Policy\(crop_and_flip=True, then="):
        add_policy("blur", lambda pixels, numbers: pixels)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"give --augment\.scale"):
        add_policy("crops", Policy(crop_and_flip=True, scale=(0.5, 1.0)))
    with pytest.raises(UsageError, match=r"make .* known with"):
        get_policy(strong)  # type: ignore[arg-type]
