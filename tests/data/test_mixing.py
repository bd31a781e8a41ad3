"""CutMix: what a box covers, whose it is, that the loss is shared as the area is, and that each update draws anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import selfcon
from selfcon.config import make_settings
from selfcon.data.mixing import cut_mix
from selfcon.errors import UsageError
from selfcon.training.distributed import ALONE
from selfcon.training.pretraining import Pretraining
from selfcon.training.trainer import Trainer
from selfcon.workflows.task import check_settings

SIDE = 16
PARTNERS = [2, 3, 0, 1, 6, 5, 4]  # of seven samples; the sixth has none


def numbered(samples: int, views: int = 1) -> Tensor:
    """Images whose every pixel is the sample's number, and in a second view a hundred more."""
    numbers = torch.cat([torch.arange(samples) + 100 * view for view in range(views)])
    return numbers.float()[:, None, None, None].expand(-1, 3, SIDE, SIDE).contiguous()


def mix(
    step: int, *, samples: int = 7, views: int = 1, probability: float = 1.0, seed: int = 3
) -> tuple[Tensor, Tensor, float]:
    labels = 10 * torch.arange(samples)
    images, others, share = cut_mix(
        numbered(samples, views), labels, torch.tensor(step), probability=probability, seed=seed, views=views
    )
    return images, others, float(share)


def test_a_box_is_of_the_partner_and_its_area_is_its_share() -> None:
    own = numbered(7, views=2)
    other = torch.cat([own[:7][PARTNERS], own[7:][PARTNERS]])
    for step in range(50):
        images, labels, share = mix(step, views=2)
        assert labels.tolist() == [10 * number for number in PARTNERS]
        boxed = (images == other)[:5]
        assert torch.equal(images, torch.where(boxed[:1], other, own)), "one box for all samples and views"
        box = boxed[0, 0]
        assert (boxed == box).all()
        rows, columns = box.any(1), box.any(0)
        assert torch.equal(box, rows[:, None] & columns), "it is a rectangle"
        for line in (rows, columns):
            assert line.int().diff().abs().sum() <= 2, "without holes"
        assert share == pytest.approx(1 - box.float().mean().item(), abs=1e-6)


def test_the_draw_is_of_the_seed_and_the_step_alone() -> None:
    shares = [mix(step)[2] for step in range(400)]
    assert shares == [mix(step, samples=4)[2] for step in range(400)]
    assert shares != [mix(step, seed=4)[2] for step in range(400)]
    assert len(set(shares)) > 50
    # A box of a uniform share, cut off at the border, covers 0.32 of the image on average (1/2 if it were not).
    assert sum(shares) / 400 == pytest.approx(1 - 0.32, abs=0.04)


def test_so_many_batches_are_mixed() -> None:
    plain = sum(mix(step, probability=0.3)[2] == 1 for step in range(500))
    assert 310 <= plain <= 390
    images, _, share = mix(5, probability=0.0)
    assert share == 1
    assert torch.equal(images, numbered(7))


def test_parts_of_a_batch_are_mixed_as_the_whole() -> None:
    images, labels = torch.randn(24, 3, SIDE, SIDE), torch.arange(24)
    whole, others, share = cut_mix(images, labels, torch.tensor(4), probability=1.0, seed=0)
    for sizes in ([12, 12], [8, 16], [4, 8, 12]):
        parts = [
            cut_mix(*part, torch.tensor(4), probability=1.0, seed=0)
            for part in zip(images.split(sizes), labels.split(sizes), strict=True)
        ]
        assert torch.equal(torch.cat([part[0] for part in parts]), whole)
        assert torch.equal(torch.cat([part[1] for part in parts]), others)
        assert all(torch.equal(part[2], share) for part in parts)


def stage_of(settings: dict[str, Any]) -> Pretraining:
    chosen = make_settings({"watch.knn_every": 0, "seed": 5, "cutmix": 0.6, "precision": "fp64", **settings})
    method = selfcon.get_method(chosen.method)
    net = selfcon.create_model(
        "resnet18",
        num_classes=5 if method.one_stage else None,
        exits="2:fc",
        width=0.125,
        image_size=SIDE,
        norm="group",
    )
    data: Any = type("Seven", (), {"__len__": lambda self: 7})()
    return Pretraining(
        net.double(),
        data,
        None,
        method=method,
        settings=chosen,
        policy=None,  # type: ignore[arg-type]
        size=SIDE,
        keep_encoder=lambda epoch, module: None,
        world=ALONE,
    )


@pytest.mark.parametrize("micro_batch", [None, 3])
@pytest.mark.parametrize("name", ["ce-sub", "selfcon-1stage", "selfcon-m"])
def test_the_loss_is_shared_as_the_area_is(name: str, micro_batch: int | None) -> None:
    stage, method = stage_of({"method": name, "micro_batch": micro_batch}), selfcon.get_method(name)
    images = torch.randn(7 * method.views, 3, SIDE, SIDE, dtype=torch.float64)
    labels, shares = torch.arange(7) % 3, []
    for step in range(6):
        stage.step = torch.tensor(step)
        mixed, others, share = cut_mix(images, labels, stage.step, probability=0.6, seed=5, views=method.views)
        output = stage.net(mixed)
        own, other = (method.loss_from_output(output, each) for each in (labels, others))
        expected = share * own + (1 - share) * other
        torch.testing.assert_close(stage.loss(images, labels), expected, rtol=1e-6, atol=1e-6)
        shares.append(float(share))
    assert 1 in shares, "one is left as it is"
    assert min(shares) < 0.9, "and another is not"


def test_every_update_draws_for_itself() -> None:
    stage = stage_of({"method": "ce-sub", "lr": 1e-9, "epochs": 9})  # so low a rate that nothing but the box differs
    trainer = Trainer(stage, torch.device("cpu"))
    images, labels = torch.randn(7, 3, SIDE, SIDE, dtype=torch.float64), torch.arange(7) % 3
    sums = [0.0]
    for step in (0, 1, 2, 3, 4, 5, 1):
        trainer.update(images, labels, step)
        sums.append(float(trainer.loss_sum))
    *each, again = torch.tensor(sums).diff().tolist()
    assert len({round(loss, 4) for loss in each}) >= 3
    assert again == pytest.approx(each[1], abs=1e-3)


def test_a_method_without_labels_is_refused() -> None:
    with pytest.raises(UsageError, match="simclr learns without labels"):
        check_settings(make_settings({"method": "simclr", "cutmix": 0.5}))
