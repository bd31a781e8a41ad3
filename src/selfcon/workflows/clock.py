"""How long a run takes to answer, on the device that it is on."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from selfcon.data.policies import Policy
from selfcon.data.split import Split
from selfcon.deploy.predictor import Predictor
from selfcon.deploy.trust import Trust
from selfcon.evaluation.answers import ENSEMBLE
from selfcon.evaluation.early_exit import Rule
from selfcon.report.plots import spread
from selfcon.workflows.trained import TrainedRun, open_run

_TIMED = 512  # images that times are measured on
_ROUNDS = 3  # of which the shortest counts


class Clock:
    """Measures answers for the same images again and again."""

    def __init__(self, run: TrainedRun, data: Split, temperatures: Mapping[str, float], batch_size: int) -> None:
        # The network again, since a predictor joins layers of its own.
        net = open_run(run.path, str(run.device)).net
        self._predictor = Predictor(net, run.facts, Trust(temperatures), run.device)
        some = data.take(spread(len(data), _TIMED).to(data.device))
        rows = torch.arange(len(some), device=some.device)
        self._images = some.batch(rows, Policy(), seed=0, epoch=0, size=run.size).images
        self._batch_size, self._device = batch_size, run.device

    def measure(self, leave: str = ENSEMBLE, rule: Rule | None = None) -> float:
        """Milliseconds an image."""
        times = []
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            for part in self._images.split(self._batch_size):
                self._predictor.answer(part, leave, rule)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times.append(time.perf_counter() - start)
        return 1000 * min(times) / len(self._images)
