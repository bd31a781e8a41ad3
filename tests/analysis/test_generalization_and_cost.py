"""Linear classifiers fitted to the end, and what a step costs."""

from __future__ import annotations

import pytest
import torch

import selfcon
from selfcon.analysis.cost import measure
from selfcon.analysis.generalization import linear_accuracy
from selfcon.errors import DataError, UsageError
from selfcon.evaluation.cost import count_multiply_adds, zero_image
from selfcon.evaluation.linear import fit_linear


def test_the_classifier_is_that_of_scikit_learn() -> None:
    from sklearn.linear_model import LogisticRegression

    torch.manual_seed(0)
    features, labels = torch.randn(200, 5), torch.arange(200) % 3
    features += 0.8 * torch.nn.functional.one_hot(labels, 5)
    decay = 0.01
    ours = fit_linear(features, labels, decay=decay)
    theirs = LogisticRegression(C=1 / (decay * 200), tol=1e-8, max_iter=1000).fit(features.numpy(), labels.numpy())
    expected = torch.tensor(theirs.predict_proba(features.numpy())).float()
    torch.testing.assert_close(ours(features).softmax(1), expected, atol=2e-3, rtol=0)


def test_the_classifier_is_fitted_to_the_end_with_a_small_decay() -> None:
    from sklearn.linear_model import LogisticRegression

    torch.manual_seed(0)
    labels = torch.arange(600) % 5
    features = torch.randn(600, 20) + torch.nn.functional.one_hot(labels, 20)
    features = torch.cat([features, features**2], 1)
    theirs = LogisticRegression(C=1 / (1e-6 * 600), tol=1e-10, max_iter=10000).fit(features.numpy(), labels.numpy())

    def loss(weight: torch.Tensor, bias: torch.Tensor) -> float:
        logits = features.double() @ weight.double().T + bias
        return float(torch.nn.functional.cross_entropy(logits, labels) + 0.5e-6 * weight.double().square().sum())

    best = loss(torch.from_numpy(theirs.coef_), torch.from_numpy(theirs.intercept_))
    cold = fit_linear(features, labels, decay=1e-6)
    warm = fit_linear(features, labels, decay=1e-6, start=fit_linear(features, labels, decay=1e-3))
    for each in (cold, warm):
        assert loss(each.weight, each.bias) == pytest.approx(best, rel=1e-4)


def test_train_and_test_accuracy() -> None:
    torch.manual_seed(0)
    train, test = torch.randn(60, 120), torch.randn(60, 120)
    found = linear_accuracy(train, torch.arange(60) % 2, test, torch.arange(60) % 2, decay=1e-4)
    assert found["train"] == 100.0  # more dimensions than it needs to learn by heart
    assert 25 < found["test"] < 75


def test_classifiers_need_classes_and_a_decay() -> None:
    with pytest.raises(DataError, match="one class"):
        fit_linear(torch.randn(4, 2), torch.zeros(4, dtype=torch.long))
    with pytest.raises(UsageError, match="greater than 0"):
        fit_linear(torch.randn(4, 2), torch.arange(4), decay=0.0)


@pytest.mark.parametrize(
    ("model", "size", "structure", "millions", "billions"),
    [
        ("resnet18", 32, "fc", 11.89, 0.56),
        ("resnet50", 32, "fc", 33.47, 1.31),
        ("resnet18", 64, "fc", 11.89, 0.56),
        ("resnet18", 224, "small", 16.43, 2.18),
    ],
)
def test_parameters_and_multiply_adds_of_tables_15_and_16(
    model: str, size: int, structure: str, millions: float, billions: float
) -> None:
    leave = selfcon.Exit(2, structure)  # type: ignore[arg-type]
    net = selfcon.create_model(model, exits=[leave], image_size=size, projection_dim=128)
    assert sum(each.numel() for each in net.parameters()) / 1e6 == pytest.approx(millions, abs=0.006)
    assert count_multiply_adds(net, zero_image(net, size)) / 1e9 == pytest.approx(billions, rel=0.01)
    assert net.training


def test_a_step_of_two_views_costs_twice_the_arithmetic() -> None:
    one, two = (
        measure("resnet18", name, exits=[selfcon.Exit(2)], batch_size=4, width=0.125, steps=2)
        for name in ("selfcon", "selfcon-m")
    )
    assert two.multiply_adds == 2 * one.multiply_adds
    assert one.seconds is not None
    assert one.seconds > 0
    assert one.to_dict()["exits"] == "2:fc"
    assert measure("resnet18", "supcon", exits=[selfcon.Exit(2)], batch_size=4, width=0.125, steps=1).exits == ()
    assert measure("resnet18", "ce", batch_size=4, width=0.125, steps=1).method == "ce"
    with pytest.raises(UsageError, match="at least 2 samples"):
        measure("resnet18", "selfcon", batch_size=1)
