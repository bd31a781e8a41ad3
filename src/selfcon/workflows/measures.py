"""Numbers about a trained run: accuracy on any split, nearest neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from selfcon.errors import UsageError
from selfcon.evaluation import knn as neighbours
from selfcon.evaluation.accuracy import embed, find_never_guessed, predict, summarise
from selfcon.workflows.trained import open_run


def evaluate(
    run_folder: str | Path, *, data: str | None = None, split: str = "test", device: str = "auto"
) -> dict[str, Any]:
    """Accuracy of every exit and of the ensemble on a split of the run's data, or of other data of the same classes."""
    run = open_run(run_folder, device)
    source = run.source if data is None else run.labelled_source(data)
    if not run.net.classifiers:
        raise UsageError(f"{run_folder} has no classifiers yet: `selfcon probe` trains them.")
    images = source.splits().get(split)
    if images is None:
        raise UsageError(f"{source.name} has no split {split!r}; it has {', '.join(source.splits())}.")
    seen = run.split(split) if data is None else run.as_seen(images)
    found = predict(run.net, seen, size=run.size)
    result = {"data": source.name, "split": split, "images": len(seen), "accuracy": summarise(found)}
    never = [source.classes[label] for label in find_never_guessed(found)]
    return {**result, **({"never_guessed": never} if never else {})}


def knn(run_folder: str | Path, *, k: int = 20, temperature: float = 0.07, device: str = "auto") -> dict[str, Any]:
    """Return the k-NN accuracy of every exit on the test images, with the training images as neighbors.

    Args:
        run_folder: Path of a run directory. For a network without one, pass features and labels of your own data to
            `selfcon.evaluation.knn.accuracy`.
        k: Number of neighbors that vote.
        temperature: Neighbors vote with the weight exp(cosine similarity / temperature).
        device: `auto`, `cpu`, `cuda`, ...

    Returns:
        The accuracy in percent by exit (`accuracy`), `data`, `k`, and the number of test `images`.

    Raises:
        UsageError: If `run_folder` is not a path.
    """
    if isinstance(run_folder, nn.Module):
        raise UsageError(
            f"selfcon.knn takes the path of a run directory, but got a {type(run_folder).__name__}. For your own "
            f"network and data, compute features such as net(images).features['backbone'] and use `from "
            f"selfcon.evaluation import knn; knn.accuracy(test_features, test_labels, train_features, train_labels)`."
        )
    run = open_run(run_folder, device)
    train, test = run.split("train"), run.split("test")
    known, asked = embed(run.net, train, size=run.size), embed(run.net, test, size=run.size)
    accuracy = {
        name: neighbours.accuracy(
            asked[name], test.labels.cpu(), known[name], train.labels.cpu(), k=k, temperature=temperature
        )
        for name in run.net.names
    }
    return {"data": run.source.name, "k": k, "images": len(test), "accuracy": accuracy}
