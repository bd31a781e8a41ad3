from __future__ import annotations

import pytest
import torch
from torch import nn

from selfcon.config import Optim
from selfcon.training.ema import Average
from selfcon.training.optimizers import create_optimizer


def test_lars_takes_steps_in_proportion_to_the_weights() -> None:
    matrix, vector = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
    before = matrix.detach().clone(), vector.detach().clone()
    optimizer = create_optimizer([matrix, vector], Optim(name="lars", weight_decay=0.1, momentum=0.9), lr=2.0)
    for number in (1, 2):
        matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
        optimizer.step()
        if number == 1:
            gradient = 1 + 0.1 * before[0]
            expected = before[0] - 2.0 * 1e-3 * before[0].norm() / gradient.norm() * gradient
            torch.testing.assert_close(matrix.detach(), expected)
            torch.testing.assert_close(vector.detach(), before[1] - 2.0)
    torch.testing.assert_close(vector.detach(), before[1] - 2.0 - 2.0 * 1.9)


@pytest.mark.parametrize(("name", "decay"), [("sgd", 1e-4), ("lars", 1e-4), ("adamw", 0.05)])
def test_weight_decay_suits_the_optimiser(name: str, decay: float) -> None:
    optimizer = create_optimizer([nn.Parameter(torch.zeros(1))], Optim(name=name), lr=0.1)  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_a_moving_average() -> None:
    layer = nn.BatchNorm1d(2)
    average = Average(layer, decay=0.9)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        assert layer.running_mean is not None
        layer.running_mean.fill_(5.0)
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.fill_(7)
    average.update(layer, torch.tensor(1000))
    found = average.module.state_dict()
    torch.testing.assert_close(found["weight"], torch.full((2,), 1.1))
    torch.testing.assert_close(found["running_mean"], torch.full((2,), 0.5))
    assert int(found["num_batches_tracked"]) == 7


def test_little_of_the_first_weights_is_left_after_a_short_training() -> None:
    layer = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    average = Average(layer, decay=0.9999)
    with torch.no_grad():
        layer.weight.fill_(0.0)
    expected = 1.0
    for step in range(60):
        average.update(layer, torch.tensor(step))
        expected *= (2 + step) / (11 + step)
    assert float(average.module.state_dict()["weight"]) == pytest.approx(expected, rel=1e-5)
    assert expected < 1e-6
