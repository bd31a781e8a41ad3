"""The learning rate at each step of the paper's CIFAR setting, against values worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from selfcon.config import Schedule
from selfcon.training.schedule import plan

# Base 0.5, 1000 epochs of 49 steps (50,000 images in batches of 1024), floor 0.0005, warm-up of 10 epochs from 0.01.
# The cosine at epoch e is 0.0005 + 0.4995 (1 + cos(pi e / 1000)) / 2; at epoch 10 it is 0.499877.
BY_HAND = [
    (0, 0.01),
    (1, 0.01 + 0.489877 / 490),
    (245, 0.01 + 0.489877 / 2),
    (489, 0.01 + 0.489877 * 489 / 490),
    (490, 0.499851),  # epoch 11
    (538, 0.499851),  # its last step
    (539, 0.499823),  # epoch 12
    (499 * 49, 0.25025),  # epoch 500
    (749 * 49, 0.073649),  # epoch 750: (1 - 0.707107) / 2 = 0.146447
    (999 * 49, 0.0005),  # epoch 1000
    (48_999, 0.0005),
]


@pytest.mark.parametrize(("step", "expected"), BY_HAND)
def test_the_papers_cifar_setting(step: int, expected: float) -> None:
    rate = plan(0.5, Schedule(kind="cosine"), epochs=1000, steps_per_epoch=49, batch_size=1024)
    assert rate.at(step) == pytest.approx(expected, abs=1.5e-6)


def test_a_warm_up_never_comes_from_above() -> None:
    rate = plan(1e-3, Schedule(kind="cosine"), epochs=50, steps_per_epoch=4, batch_size=2048)
    rates = [rate.at(step) for step in range(200)]
    assert max(rates) <= 1e-3
    assert rates[0] == pytest.approx(0.02 * rates[39], rel=0.05), "and is one at low rates, too"
    assert rates[:40] == sorted(rates[:40])


def test_no_warm_up_for_small_batches() -> None:
    rate = plan(0.5, Schedule(kind="cosine"), epochs=100, steps_per_epoch=10, batch_size=512)
    assert rate.at(0) == pytest.approx(0.0005 + 0.4995 * (1 + math.cos(math.pi / 100)) / 2)


@pytest.mark.parametrize(
    ("kind", "epochs", "slow_start", "warms"),
    [
        ("smooth-cosine", 200, True, 10),
        ("smooth-cosine", 40, True, 8),  # a fifth
        ("smooth-cosine", 39, True, 0),  # too few updates to make up for it
        ("smooth-cosine", 200, False, 0),
        ("cosine", 200, True, 0),  # as the paper's scripts
    ],
)
def test_long_pretrainings_start_slowly(kind: Any, epochs: int, slow_start: bool, warms: int) -> None:
    rate = plan(0.1, Schedule(kind=kind), epochs=epochs, steps_per_epoch=50, batch_size=256, slow_start=slow_start)
    assert rate.warmup_epochs == warms
    assert (rate.at(0) < 0.02) == (warms > 0)


def test_a_smooth_cosine_moves_at_every_step_of_a_short_training_too() -> None:
    rate = plan(1.0, Schedule(floor=0.0), epochs=1, steps_per_epoch=4, batch_size=8)
    assert [rate.at(step) for step in range(4)] == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
    warm = plan(1.0, Schedule(floor=0.0, warmup_epochs=1, warmup_from=0.0), epochs=2, steps_per_epoch=4, batch_size=8)
    assert [warm.at(step) for step in (0, 2, 4, 6)] == pytest.approx([0.0, 0.25, 0.5, 0.146447], abs=1e-6)


def test_steps_of_the_probe() -> None:
    rate = plan(3.0, Schedule(kind="step"), epochs=100, steps_per_epoch=98, batch_size=512)
    rates = [rate.at(epoch * 98) for epoch in (0, 59, 60, 79, 80, 99)]  # epochs 1, 60, 61, 80, 81, 100
    assert rates == pytest.approx([3.0, 3.0, 0.3, 0.3, 0.03, 0.03])


def test_a_probe_of_one_epoch_is_at_the_full_rate() -> None:
    rate = plan(3.0, Schedule(kind="step"), epochs=1, steps_per_epoch=5, batch_size=512)
    assert {rate.at(step) for step in range(5)} == {3.0}


def test_constant_and_chosen_warm_up() -> None:
    settings = Schedule(kind="constant", warmup_epochs=2, warmup_from=0.0)
    rate = plan(1.0, settings, epochs=5, steps_per_epoch=4, batch_size=8)
    assert [rate.at(step) for step in (0, 4, 8, 19)] == pytest.approx([0.0, 0.5, 1.0, 1.0])


@pytest.mark.parametrize("third", [0.333333, 0.33333334])
def test_a_milestone_that_binary_or_decimal_numbers_cannot_hold_is_no_epoch_late(third: float) -> None:
    settings = Schedule(kind="step", milestones=(third,), warmup_epochs=0)
    rate = plan(1.0, settings, epochs=90, steps_per_epoch=1, batch_size=8)
    assert [rate.at(epoch) for epoch in (29, 30)] == pytest.approx([1.0, 0.1])


def test_a_milestone_is_a_whole_epoch_where_it_is_meant_to_be() -> None:
    settings = Schedule(kind="step", milestones=(0.7,), warmup_epochs=0)
    rate = plan(1.0, settings, epochs=90, steps_per_epoch=1, batch_size=8)
    assert [round(rate.at(step), 6) for step in (62, 63)] == [1.0, 0.1]
