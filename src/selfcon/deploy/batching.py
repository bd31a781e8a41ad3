"""Requests that come at the same time are answered together: whoever comes while a batch is computed is in the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from selfcon.data.images import Pixels
from selfcon.deploy.predictor import Prediction, Predictor


class BusyError(Exception):
    """Too many images wait already."""


@dataclass(frozen=True)
class Wish:
    """How an image is to be answered; images of equal wishes go together."""

    exit: str = "ensemble"
    budget: float | None = None
    top: int = 1
    k: int = 8  # neighbours


@dataclass(frozen=True)
class _Waiting:
    crop: Pixels
    wish: Wish
    model: Predictor  # which the crop was made for
    answer: asyncio.Future[Prediction]


class Batcher:
    """A queue and the one thread that works through it."""

    def __init__(
        self,
        *,
        most: int = 64,
        most_waiting: int = 512,
        watch: Callable[[int], None] = lambda size: None,
    ) -> None:
        self._most, self._most_waiting, self._watch = most, most_waiting, watch
        self._waiting: list[_Waiting] = []
        self._something = asyncio.Event()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="answer")

    async def ask(self, crops: Sequence[Pixels], wish: Wish, model: Predictor) -> list[Prediction]:
        """The answers of a model for images that it has cropped, in order."""
        if len(self._waiting) + len(crops) > self._most_waiting:
            raise BusyError
        loop = asyncio.get_running_loop()
        own = [_Waiting(crop, wish, model, loop.create_future()) for crop in crops]
        self._waiting += own
        self._something.set()
        return list(await asyncio.gather(*(each.answer for each in own)))

    async def work(self) -> None:
        """Answer, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await self._something.wait()
            wish, model = self._waiting[0].wish, self._waiting[0].model
            batch = [each for each in self._waiting if each.wish == wish and each.model is model][: self._most]
            chosen = set(map(id, batch))
            self._waiting = [each for each in self._waiting if id(each) not in chosen]
            if not self._waiting:
                self._something.clear()
            batch = [each for each in batch if not each.answer.done()]  # who has left is not asked for any more
            if not batch:
                continue
            self._watch(len(batch))
            crops = [each.crop for each in batch]
            try:
                found: Sequence[Any] = await loop.run_in_executor(self.thread, _answer, model, crops, wish)
            except Exception as error:  # each asks for itself what went wrong
                found = [error] * len(batch)
            for each, answer in zip(batch, found, strict=True):
                if each.answer.done():
                    continue
                if isinstance(answer, Exception):
                    each.answer.set_exception(answer)
                else:
                    each.answer.set_result(answer)


def _answer(model: Predictor, crops: Sequence[Pixels], wish: Wish) -> list[Prediction]:
    return model.answer_crops(crops, exit=wish.exit, budget=wish.budget, top=wish.top)
