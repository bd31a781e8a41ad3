from __future__ import annotations

import pytest
import torch

import selfcon
from selfcon.data.resident import make_resident
from selfcon.errors import UsageError
from selfcon.evaluation import knn
from selfcon.evaluation.accuracy import Predictions, predict, summarise, top1_of, with_ensemble


def test_the_ensemble_is_the_mean_of_the_logits() -> None:
    logits = {"backbone": torch.tensor([[3.0, 0.0], [0.0, 1.0]]), "exit2": torch.tensor([[0.0, 1.0], [3.0, 0.0]])}
    predictions = Predictions(with_ensemble(logits), torch.tensor([0, 0]))
    assert summarise(predictions) == {
        "backbone": {"top1": 50.0},
        "exit2": {"top1": 50.0},
        "ensemble": {"top1": 100.0},
    }


def test_top5_is_absent_below_six_classes() -> None:
    def table(classes: int) -> dict[str, dict[str, float]]:
        predictions = Predictions({"ensemble": torch.eye(classes)}, torch.arange(classes))
        return summarise(predictions, predictions.top(1))

    assert table(5) == {"ensemble": {"top1": 100.0, "train_top1": 100.0}}
    assert table(6) == {"ensemble": {"top1": 100.0, "top5": 100.0, "train_top1": 100.0}}


def test_of_equal_logits_the_first_is_taken() -> None:
    labels = torch.tensor([0, 1, 5, 9])
    predictions = Predictions({"ensemble": torch.zeros(4, 10)}, labels)
    assert predictions.top(1) == {"ensemble": 25.0}
    assert predictions.top(5) == {"ensemble": 50.0}
    assert predictions.top(6) == {"ensemble": 75.0}
    logits = torch.randint(0, 3, (500, 10), generator=torch.Generator().manual_seed(0)).float()
    labels = torch.arange(500) % 10
    assert Predictions({"x": logits}, labels).top(1)["x"] == 100 * float((logits.argmax(1) == labels).double().mean())
    unknown = torch.full((4, 10), torch.nan)
    assert Predictions({"x": unknown}, torch.arange(4)).top(5) == {"x": 0.0}


def test_counting_is_as_good_as_keeping() -> None:
    data = make_resident(selfcon.data.load("digits").test, size=16, device=torch.device("cpu"))
    net = selfcon.create_model("resnet18", exits="2:fc", width=0.125, image_size=16, num_classes=10)
    kept = predict(net, data, batch_size=100).top(1)
    assert top1_of(net, data, batch_size=70) == pytest.approx(kept)
    assert list(kept) == ["backbone", "exit2", "ensemble"]


def test_neighbours_against_a_loop() -> None:
    known, asked = torch.randn(50, 4), torch.randn(20, 4)
    known_labels, labels = torch.randint(0, 3, (50,)), torch.randint(0, 3, (20,))
    right = 0
    for feature, label in zip(asked, labels, strict=True):
        cosines = torch.nn.functional.cosine_similarity(known, feature[None])
        votes = torch.zeros(3)
        for index in cosines.argsort(descending=True)[:7]:
            votes[known_labels[index]] += (cosines[index] / 0.2).exp()
        right += int(votes.argmax() == label)
    assert knn.accuracy(asked, labels, known, known_labels, k=7, temperature=0.2) == pytest.approx(5 * right)
    with pytest.raises(UsageError, match="at least 1"):
        knn.accuracy(asked, labels, known, known_labels, k=0)
    with pytest.raises(UsageError, match="greater than 0"):
        knn.accuracy(asked, labels, known, known_labels, temperature=0)
    nearest = knn.accuracy(asked, labels, known, known_labels, k=1)
    assert knn.accuracy(asked, labels, known, known_labels, k=20, temperature=1e-5) == nearest


def test_knn_of_a_network_is_an_error_that_names_the_function_for_features() -> None:
    net = selfcon.create_model("resnet18", width=0.125)
    with pytest.raises(
        UsageError, match=r"takes the path of a run directory, but got a MultiExitNetwork\..*knn\.accuracy"
    ):
        selfcon.knn(net)  # type: ignore[arg-type]
    for function in (selfcon.knn, selfcon.evaluate, selfcon.calibrate, selfcon.load):
        with pytest.raises(UsageError, match="Expected the path of a run directory, but got a dict"):
            function({})  # type: ignore[arg-type]
