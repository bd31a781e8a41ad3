"""Question: how much does an ensemble gain if the weights of its exits are learnt on held-out images?

Of runs made with `--val-fraction`: the weights whose mean of logits has the least cross-entropy there, none below 0,
and the accuracy on test images with them and with equal ones. A JSON line a run.
    python benchmarks/ensemble_weights.py runs/a runs/b
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from selfcon.evaluation.accuracy import predict
from selfcon.evaluation.answers import ENSEMBLE
from selfcon.workflows.trained import open_run


def learn_weights(logits_EBC: Tensor, labels: Tensor) -> Tensor:
    """[E], of a mean of 1: their common scale is a temperature, which moves no answer."""
    logs = torch.zeros(len(logits_EBC), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([logs], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(torch.einsum("e,ebc->bc", logs.exp() / len(logs), logits_EBC), labels)
        loss.backward()
        return loss

    optimizer.step(closure)
    weights = logs.detach().exp()
    return weights / weights.mean()


def main() -> None:
    for folder in sys.argv[1:]:
        run = open_run(folder)
        held, test = (predict(run.net, run.split(name), size=run.size) for name in ("val", "test"))
        names = [name for name in held.logits if name != ENSEMBLE]
        held_EBC, test_EBC = (torch.stack([each.logits[name] for name in names]).double() for each in (held, test))
        weights = learn_weights(held_EBC, held.labels)
        guesses = torch.einsum("e,ebc->bc", weights, test_EBC).argmax(1)
        equal, learnt = test.top(1)[ENSEMBLE], 100 * float((guesses == test.labels).double().mean())
        row = {"run": run.name, "weights": dict(zip(names, [round(each, 2) for each in weights.tolist()], strict=True))}
        print(json.dumps({**row, "equal": round(equal, 2), "learnt": round(learnt, 2), "held_out": len(held.labels)}))


if __name__ == "__main__":
    main()
