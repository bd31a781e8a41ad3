"""Answers of a trained model for images: whole, of one exit, or of the first exit that is sure enough.

B images, C classes, D dimensions of a feature.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from selfcon.data.images import Pixels
from selfcon.data.scan import in_threads
from selfcon.deploy.fusion import fuse_normalisation
from selfcon.deploy.pictures import Eye, Picture, read_picture
from selfcon.deploy.trust import Trust, read_trust
from selfcon.errors import BadImageError, UsageError, unknown_name
from selfcon.evaluation.answers import ENSEMBLE
from selfcon.evaluation.early_exit import Rule, name_answers
from selfcon.networks.exits import BACKBONE
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.segments import cut_at_exits
from selfcon.networks.stages import Staged
from selfcon.training.artifact import load_model

EARLY = "early"
"""As an exit: the first one that is sure enough."""


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of an image with their probabilities, and where the answer came from."""

    classes: list[str]
    probabilities: list[float]
    exit: str
    unknown: bool = False  # the model had better say nothing
    strangeness: float | None = None

    @property
    def label(self) -> str:
        """The likeliest class, or `unknown`."""
        return "unknown" if self.unknown else self.classes[0]

    def to_dict(self) -> dict[str, Any]:
        return {"label": self.label, **vars(self)}


@dataclass(frozen=True)
class Answers:
    """What a batch was answered: probabilities [B, C], and by image the answer's name and the feature [D] behind it."""

    probabilities: Tensor
    names: list[str]
    features: Tensor  # [B, D], each of the last exit that was come to
    exits: list[str]  # that exit


class Predictor:
    """A trained model, ready to be asked. `selfcon.load` makes one."""

    def __init__(self, net: MultiExitNetwork, facts: dict[str, Any], trust: Trust, device: torch.device) -> None:
        self.net = net.eval().to(device)
        self.classes: list[str] = list(facts["classes"])
        self.trust, self.device, self.facts = trust, device, facts
        self.eye = Eye.of(facts, device)
        self.net.projections.clear()  # heads of the training, which no answer goes through
        fuse_normalisation(self.net)
        # Faster in forwards on a CPU, too, which is not where the trouble of `training.loop.memory_format` is.
        self.net = self.net.to(memory_format=torch.channels_last)
        self.segments = cut_at_exits(self.net) if net.classifiers and isinstance(net.splitter, Staged) else []

    @property
    def exits(self) -> list[str]:
        """The exits in the order that images come by them; the backbone is the last."""
        return [*self.net.names[1:], BACKBONE]

    def predict(
        self,
        images: Picture | Iterable[Picture],
        *,
        exit: str = ENSEMBLE,  # noqa: A002 - the word for it
        budget: float | None = None,
        top: int = 1,
        batch_size: int = 64,
    ) -> list[Prediction]:
        """The answer for each image: of the ensemble, of the exit named, or with `early` of the first that is sure.

        A `budget` is the mean cost of an image as a part of the whole network's, and leaves early, too.
        """
        found = []
        for answer in self.stream(_as_many(images), exit=exit, budget=budget, top=top, batch_size=batch_size):
            if isinstance(answer, BadImageError):
                raise answer
            found.append(answer)
        return found

    def stream(
        self,
        pictures: Iterable[Picture],
        *,
        exit: str = ENSEMBLE,  # noqa: A002 - the word for it
        budget: float | None = None,
        top: int = 1,
        batch_size: int = 64,
    ) -> Iterator[Prediction | BadImageError]:
        """An answer or an error for each image, in order, while more are being read."""
        rule = self._choose_rule(exit, budget)
        self._check_top(top)
        batches = self._batches(pictures, batch_size)

        def answer_all() -> Iterator[Prediction | BadImageError]:
            for crops in batches:
                good = [crop for crop in crops if not isinstance(crop, BadImageError)]
                answers = iter(self._describe(self.answer(self.eye.stack(good), exit, rule), top, rule) if good else ())
                yield from (crop if isinstance(crop, BadImageError) else next(answers) for crop in crops)

        return answer_all()  # mistakes in what was asked are told before anything is read

    def answer_crops(
        self,
        crops: Sequence[Pixels],
        *,
        exit: str = ENSEMBLE,  # noqa: A002 - the word for it
        budget: float | None = None,
        top: int = 1,
    ) -> list[Prediction]:
        """The answers for images that were cut out by `eye.crop`, as one batch."""
        rule = self._choose_rule(exit, budget)
        self._check_top(top)
        return list(self._describe(self.answer(self.eye.stack(crops), exit, rule), top, rule))

    def embed(self, images: Picture | Iterable[Picture], *, batch_size: int = 64) -> dict[str, Tensor]:
        """Features [N, D] of every exit, on the CPU."""
        parts: dict[str, list[Tensor]] = {name: [] for name in self.net.names}
        for batch in self.stream_features(_as_many(images), batch_size=batch_size):
            if isinstance(batch, BadImageError):
                raise batch
            for name, features in batch.items():
                parts[name].append(features)
        empty = torch.empty(0, self.net.width)
        return {name: torch.stack(found) if found else empty for name, found in parts.items()}

    def embed_crops(self, crops: Sequence[Pixels]) -> dict[str, Tensor]:
        """Features [B, D] by exit of images that were cut out by `eye.crop`, on the CPU."""
        with torch.inference_mode():
            out = self.net(self._laid_out(self.eye.stack(crops)))
        return {name: each.float().cpu() for name, each in out.features.items()}

    def stream_features(
        self, pictures: Iterable[Picture], *, batch_size: int = 64
    ) -> Iterator[dict[str, Tensor] | BadImageError]:
        """The features [D] of each image by exit, or an error, in order."""
        for crops in self._batches(pictures, batch_size):
            good = [crop for crop in crops if not isinstance(crop, BadImageError)]
            features = self.embed_crops(good) if good else {}
            rows = itertools.count()
            for crop in crops:
                if isinstance(crop, BadImageError):
                    yield crop
                else:
                    row = next(rows)
                    yield {name: each[row] for name, each in features.items()}

    def answer(self, images: Tensor, leave: str = ENSEMBLE, rule: Rule | None = None) -> Answers:
        """The answers for normalised images [B, 3, S, S] on the device."""
        with torch.inference_mode():
            images = self._laid_out(images)
            if rule is not None and self.segments:
                return self._leave_early(images, rule)
            out = self.net(images, upto=None if leave == ENSEMBLE else leave)
            logits = torch.stack([out.logits[name] for name in out.names]).float().mean(0)
            last = BACKBONE if leave == ENSEMBLE else leave
            name = leave if len(self.net.names) > 1 else BACKBONE
            probabilities = (logits / self.trust.temperature(name)).softmax(1)
            return Answers(probabilities, [name] * len(images), out.features[last].float(), [last] * len(images))

    def _leave_early(self, images: Tensor, rule: Rule) -> Answers:
        """Segment by segment; only who is not sure yet goes on."""
        names = name_answers([segment.name for segment in self.segments])
        rows = torch.arange(len(images), device=images.device)
        total: Tensor | None = None
        seen: list[Tensor] = []  # the probabilities so far of those that are still there
        done: list[tuple[Tensor, Tensor, Tensor, int]] = []
        x = images
        for number, segment in enumerate(self.segments):
            x, feature, logits = segment(x)
            total = logits.float() if total is None else total + logits.float()
            probabilities = (total / (number + 1) / self.trust.temperature(names[number])).softmax(1)
            seen.append(probabilities)
            last = number == len(self.segments) - 1
            leaves = torch.ones_like(rows, dtype=torch.bool) if last else rule.leaves(seen)
            done.append((rows[leaves], probabilities[leaves], feature[leaves].float(), number))
            stays = ~leaves
            if last or not bool(stays.any()):
                break
            x, rows, total, seen = x[stays], rows[stays], total[stays], [each[stays] for each in seen]
        order = torch.cat([part[0] for part in done]).argsort()
        where = torch.cat([torch.full((len(part[0]),), part[3]) for part in done])[order.cpu()].tolist()
        return Answers(
            torch.cat([part[1] for part in done])[order],
            [names[number] for number in where],
            torch.cat([part[2] for part in done])[order],
            [self.segments[number].name for number in where],
        )

    def _check_top(self, top: Any) -> None:
        if not isinstance(top, Integral) or not 1 <= int(top) <= len(self.classes):
            raise UsageError(f"The likeliest 1 to {len(self.classes)} classes can be told, not {top!r}.")

    def _choose_rule(self, leave: str, budget: float | None) -> Rule | None:
        if not self.net.classifiers:
            raise UsageError("This model has no classifiers yet: `selfcon probe` trains them.")
        known = [ENSEMBLE, EARLY, *self.net.names]
        if leave not in known:
            raise unknown_name("exit", leave, known)
        if budget is not None and leave not in (ENSEMBLE, EARLY):
            raise UsageError(f"A budget chooses the exit, so {leave} cannot be asked for as well.")
        if leave != EARLY and budget is None:
            return None
        if not self.segments or len(self.segments) < 2:
            raise UsageError("This model cannot be left early: it has no exits, or does not run stage by stage.")
        return self.trust.rule_for(budget)

    def _batches(self, pictures: Iterable[Picture], batch_size: int) -> Iterator[list[Pixels | BadImageError]]:
        if batch_size < 1:
            raise UsageError(f"A batch holds at least 1 image, not {batch_size}.")
        return self._read(pictures, batch_size)

    def _read(self, pictures: Iterable[Picture], batch_size: int) -> Iterator[list[Pixels | BadImageError]]:
        def look(picture: Picture) -> Pixels | BadImageError:
            try:
                return self.eye.crop(read_picture(picture))
            except BadImageError as error:
                return error

        if self.device.type == "cpu":  # which has nobody else to read: one after the other
            items = iter(pictures)
            while part := list(itertools.islice(items, batch_size)):
                yield [look(part[0])] if len(part) == 1 else list(in_threads(look, part, describe=_name))
            return
        crops = in_threads(look, pictures, describe=_name)  # while the GPU works
        while batch := list(itertools.islice(crops, batch_size)):
            yield batch

    def _laid_out(self, images: Tensor) -> Tensor:
        return images.to(self.net.dtype).contiguous(memory_format=torch.channels_last)

    def _describe(self, answers: Answers, top: int, rule: Rule | None) -> Iterator[Prediction]:
        best = answers.probabilities.topk(top, dim=1)
        silence = self.trust.silence_under(rule)
        strange = self._strangeness(answers)
        rows = zip(best.values.tolist(), best.indices.tolist(), answers.names, answers.exits, strange, strict=True)
        for probabilities, places, name, leave, score in rows:
            silent = probabilities[0] < silence.get(name, 0.0)
            foreign = score is not None and score > self.trust.strange_above[leave]
            yield Prediction([self.classes[place] for place in places], probabilities, name, silent or foreign, score)

    def _strangeness(self, answers: Answers) -> list[float | None]:
        found: list[float | None] = [None] * len(answers.exits)
        for leave, stranger in self.trust.strangers.items():
            rows = [row for row, name in enumerate(answers.exits) if name == leave]
            if rows:
                for row, score in zip(rows, stranger.score(answers.features[rows]).tolist(), strict=True):
                    found[row] = score
        return found


def _as_many(images: Picture | Iterable[Picture]) -> Iterable[Picture]:
    """One image, or several in whatever holds them."""
    one = isinstance(images, str | Path | bytes | Image.Image) or hasattr(images, "read")
    if one or getattr(images, "ndim", 4) in (0, 2, 3):
        return [images]  # type: ignore[list-item]
    try:
        iter(images)  # type: ignore[arg-type]
    except TypeError:
        raise UsageError(f"Images are files, pixels or several of them, not {type(images).__name__}.") from None
    return images  # type: ignore[return-value]


def _name(picture: Picture) -> str:
    return str(picture)[:100]


def load(folder: str | Path, device: torch.device | str = "cpu") -> Predictor:
    """The model of a run folder, ready to be asked, with what `selfcon calibrate` found out about it."""
    net, facts = load_model(folder)
    return Predictor(net, facts, read_trust(Path(folder), net), torch.device(device))
