"""CutMix: what a box covers, whose it is, and that the loss is shared as the area is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from selfcon.config import make_settings
from selfcon.data.mixing import cut_mix
from selfcon.errors import UsageError
from selfcon.losses import get_method
from selfcon.networks import create_model
from selfcon.training.distributed import ALONE
from selfcon.training.pretraining import Pretraining
from selfcon.workflows.task import check_settings

SIDE = 16


def numbered(samples: int, views: int = 1) -> Tensor:
    """Images whose every pixel is the sample's number, and in a second view a hundred more."""
    numbers = torch.cat([torch.arange(samples) + 100 * view for view in range(views)])
    return numbers.float()[:, None, None, None].expand(-1, 3, SIDE, SIDE).contiguous()


def mix(step: int, *, samples: int = 6, views: int = 1, probability: float = 1.0) -> tuple[Tensor, Tensor, float]:
    images, labels, share = cut_mix(
        numbered(samples, views),
        10 * torch.arange(samples),
        torch.tensor(step),
        probability=probability,
        seed=3,
        views=views,
    )
    return images, labels, float(share)


def test_a_box_is_of_the_partner_and_its_area_is_its_share() -> None:
    for step in range(50):
        images, labels, share = mix(step, views=2)
        assert labels.tolist() == [50, 40, 30, 20, 10, 0]
        own, other = numbered(6, 2), numbered(6, 2).view(2, 6, 3, SIDE, SIDE).flip(1).flatten(0, 1)
        boxed = images == other
        assert torch.equal(images, torch.where(boxed, other, own))
        assert (boxed == boxed[:1, :1]).all(), "one box for all samples, views and channels"
        rows, columns = boxed[0, 0].any(1), boxed[0, 0].any(0)
        assert torch.equal(boxed[0, 0], rows[:, None] & columns), "it is a rectangle"
        for line in (rows, columns):
            assert line.int().diff().abs().sum() <= 2, "without holes"
        assert share == pytest.approx(1 - boxed[0, 0].float().mean().item(), abs=1e-6)


def test_the_draw_is_of_the_seed_and_the_step_alone() -> None:
    shares = [mix(step)[2] for step in range(400)]
    assert shares == [mix(step, samples=4)[2] for step in range(400)]
    assert len(set(shares)) > 50
    # A box of a uniform share, cut off at the border, covers 0.32 of the image on average (1/2 if it were not).
    assert sum(shares) / 400 == pytest.approx(1 - 0.32, abs=0.04)


def test_so_many_batches_are_mixed() -> None:
    plain = sum(mix(step, probability=0.3)[2] == 1 for step in range(500))
    assert 310 <= plain <= 390
    images, _, share = mix(5, probability=0.0)
    assert share == 1
    assert torch.equal(images, numbered(6))


def stage_of(settings: dict[str, Any]) -> Pretraining:
    chosen = make_settings({"watch.knn_every": 0, "method": "ce-sub", **settings})
    net = create_model("resnet18", num_classes=5, exits="2:fc", width=0.125, image_size=SIDE, norm=chosen.norm).eval()
    data: Any = type("Eight", (), {"__len__": lambda self: 8})()
    stage = Pretraining(
        net,
        data,
        None,
        method=get_method(chosen.method),
        settings=chosen,
        policy=None,  # type: ignore[arg-type]
        size=SIDE,
        keep_encoder=lambda epoch, module: None,
        world=ALONE,
    )
    stage.step = torch.tensor(7)
    return stage


@pytest.mark.parametrize("settings", [{}, {"micro_batch": 3, "norm": "group"}])
def test_the_loss_is_shared_as_the_area_is(settings: dict[str, Any]) -> None:
    stage = stage_of({"cutmix": 1.0, **settings})
    images, labels = torch.randn(8, 3, SIDE, SIDE), torch.arange(8) % 5
    mixed, others, share = cut_mix(images, labels, stage.step, probability=1.0, seed=0)
    assert 0.1 < share < 0.9
    logits = stage.net(mixed).logits.values()
    expected = sum(share * cross_entropy(each, labels) + (1 - share) * cross_entropy(each, others) for each in logits)
    torch.testing.assert_close(stage.loss(images, labels), expected)


def test_a_method_without_labels_is_refused() -> None:
    with pytest.raises(UsageError, match="simclr learns without labels"):
        check_settings(make_settings({"method": "simclr", "cutmix": 0.5}))
