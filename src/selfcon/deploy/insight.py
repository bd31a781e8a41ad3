"""One image looked at closely: what every exit thinks of it, how sure it is, and where it looks.

h, w are the places of a map.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from selfcon.data.images import Pixels
from selfcon.deploy.predictor import Predictor
from selfcon.evaluation.early_exit import name_answers, sureness

_Seen = tuple[str, Tensor, Tensor, list[list[float]] | None]  # of an exit: name, feature [1, D], logits [1, C], map


def look_closer(model: Predictor, crop: Pixels, *, top: int = 5) -> dict[str, Any]:
    """Of a cut-out image [S, S, 3]: by exit its own answer and Grad-CAM [h, w]; and the answers as they would come.

    Warm places are what speaks for the class that this exit takes it for. A network that does not run stage by stage,
    and an exit without places, have no such map.
    """
    x = model.eye.stack([crop]).to(model.net.dtype)
    exits, answers = {}, []
    total: Tensor | None = None
    seen: list[Tensor] = []
    names = name_answers(model.exits)
    criterion = model.trust.rule.criterion if model.trust.rule else "confidence"
    looks = _by_stages(model, x) if model.segments else _at_once(model, x)
    for number, (leave, feature, logits, warm) in enumerate(looks):
        exits[leave] = {"classes": _top(model, (logits / model.trust.temperature(leave)).softmax(1), top), "map": warm}
        total = logits if total is None else total + logits
        probabilities = (total / (number + 1) / model.trust.temperature(names[number])).softmax(1)
        seen.append(probabilities)
        answers.append(
            {
                "name": names[number],
                "exit": leave,
                "classes": _top(model, probabilities, top),
                "sureness": float(sureness(seen, criterion)),
                "strange": _is_strange(model, leave, feature),
            }
        )
    return {"exits": exits, "answers": answers, "criterion": criterion}


def _by_stages(model: Predictor, x: Tensor) -> Iterator[_Seen]:
    with torch.enable_grad():
        for segment in model.segments:
            inside = segment.before(x).detach().requires_grad_()
            feature = segment.behind(inside)
            logits = segment.classifier(feature)
            (pull,) = torch.autograd.grad(logits[0, int(logits.argmax())], inside)
            x = inside.detach()
            yield segment.name, feature.detach(), logits.detach().float(), _warm(x, pull) if x.ndim == 4 else None


def _at_once(model: Predictor, x: Tensor) -> Iterator[_Seen]:
    with torch.inference_mode():
        out = model.net(x)
    for leave in model.exits:
        yield leave, out.features[leave], out.logits[leave].float(), None


def _is_strange(model: Predictor, leave: str, feature: Tensor) -> bool:
    """Whether the image is unlike those that the model was trained on, by the feature [1, D] of an exit."""
    stranger = model.trust.strangers.get(leave)
    return stranger is not None and float(stranger.score(feature.float())[0]) > model.trust.strange_above[leave]


def _top(model: Predictor, probabilities: Tensor, top: int) -> list[dict[str, Any]]:
    best = probabilities[0].topk(min(top, len(model.classes)))
    return [
        {"class": model.classes[place], "probability": part}
        for part, place in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    ]


def _warm(inside: Tensor, pull: Tensor) -> list[list[float]]:
    """Grad-CAM: the positive part of the channels, weighted by their mean gradient, between 0 and 1."""
    cam = (pull.mean((2, 3), keepdim=True) * inside).sum(1)[0].relu().float()
    scaled: list[list[float]] = (cam / cam.max().clamp(min=1e-12)).cpu().tolist()
    return scaled
