"""Linear evaluation on other classes."""

from __future__ import annotations

import pytest
import torch

from selfcon.errors import DataError
from selfcon.evaluation.accuracy import mean_per_class
from selfcon.transfer.classification import evaluate_linear, measure


def clouds(count: int, spread: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return 3 * torch.eye(8)[labels] + spread * torch.randn(count, 8, generator=generator), labels


def test_separable_classes_are_found_and_noise_wants_a_larger_decay() -> None:
    train, labels = clouds(60, 0.3, 0)
    test, test_labels = clouds(30, 0.3, 1)
    noise = torch.randn(60, 200)
    found = evaluate_linear(
        {"backbone": train, "exit2": torch.cat([train, noise], dim=1)},
        labels,
        {"backbone": test, "exit2": torch.cat([test, torch.randn(30, 200)], dim=1)},
        test_labels,
    )
    assert set(found.accuracy) == {"backbone", "exit2", "ensemble"}
    assert found.accuracy["backbone"] == {"top1": 100.0, "mean_per_class": 100.0}
    assert found.accuracy["exit2"]["top1"] > 60
    assert set(found.decay) == {"backbone", "exit2"}


def test_small_classes_count_as_much_as_large_ones() -> None:
    labels = torch.tensor([0] * 9 + [4])
    logits = torch.zeros(10, 5)
    logits[:, 0] = 1.0
    assert measure({"backbone": logits}, labels)["ensemble"] == {"top1": 90.0, "mean_per_class": 50.0}
    assert mean_per_class(torch.tensor([1, 1, 2]), torch.tensor([1, 2, 2])) == 75.0


def test_one_image_a_class_is_too_few() -> None:
    features = torch.randn(3, 2)
    with pytest.raises(DataError, match="one training image only"):
        evaluate_linear({"backbone": features}, torch.arange(3), {"backbone": features}, torch.arange(3))


def test_images_to_validate_with_choose_the_decay() -> None:
    """The feature tells the class of the first samples; those to validate with are of the larger one throughout."""
    labels = torch.cat([torch.arange(60) % 3 // 2, torch.zeros(20, dtype=torch.long)])
    feature = 2.0 * labels[:, None] - 1
    feature[60::2] = 1.0
    train = {"backbone": feature}
    decays = {
        held: evaluate_linear(train, labels, train, labels, validation=held, decays=(1e-6, 1e3)).decay["backbone"]
        for held in (20, 0)
    }
    assert decays == {20: 1e3, 0: 1e-6}
