"""A run's answers on images to choose by and on images to tell of: what everything in `calibrate` is chosen with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from selfcon.data.split import Split
from selfcon.data.splits import hold_out
from selfcon.errors import DataError, UsageError
from selfcon.evaluation.accuracy import Predictions, predict
from selfcon.evaluation.early_exit import name_answers, running_answers
from selfcon.networks.exits import BACKBONE
from selfcon.progress import say
from selfcon.workflows.analysis_files import Result
from selfcon.workflows.trained import TrainedRun


@dataclass
class HeldOut:
    """A run's logits on images to choose by and on images to tell of."""

    run: TrainedRun
    held: Split
    told: Split
    held_name: str
    told_name: str
    choosing: Predictions
    telling: Predictions
    temperatures: dict[str, float]

    @classmethod
    def begin(cls, run: TrainedRun, data: str | None, seed: int) -> HeldOut:
        test = run.split("test")
        if data is not None:
            source = run.labelled_source(data)
            which = "the images" if source.train is source.test else "the test images"
            held, told, names = run.as_seen(source.test), test, (f"{which} of {source.name}", "all test images")
            if held.fingerprint() == test.fingerprint():
                raise UsageError(f"{data} are the run's own test images, to measure results on: hold out others.")
        elif run.source.val is not None:
            held, told, names = run.split("val"), test, ("the validation images", "all test images")
        else:
            labels = test.labels.cpu().numpy()
            if len(labels) // 2 > len(labels) - len(np.unique(labels)):
                raise DataError(
                    f"{run.source.name} has too few test images to hold out half of them: name others (--data)."
                )
            rows = hold_out(labels, len(labels) // 2, seed)
            told, held = (test.take(torch.from_numpy(each).to(test.device)) for each in rows)
            names = ("half of the test images", "the other half of the test images")
            say("There are no validation images: half of the test images are held out, results are of the other half.")
        if not len(held) or not len(told):
            raise DataError(f"{run.source.name} has too few test images to hold some of them out.")
        choosing, telling = (predict(run.net, each, size=run.size) for each in (held, told))
        return cls(run, held, told, *names, choosing, telling, {})

    def describe(self) -> Result:
        return {
            "chosen_on": self.held_name,
            "images": len(self.held),
            "told_of": self.told_name,
            "told_images": len(self.told),
        }

    @property
    def order(self) -> list[str]:
        """The exits in the order that images come by them."""
        return [*self.run.net.names[1:], BACKBONE]

    @property
    def both(self) -> tuple[Predictions, Predictions]:
        return self.choosing, self.telling

    def all_answers(self, predictions: Predictions) -> dict[str, Tensor]:
        """Logits of every exit and of every ensemble that may answer."""
        logits = [predictions.logits[name] for name in self.order]
        running = dict(zip(name_answers(self.order), running_answers(logits), strict=True))
        return {**dict(zip(self.order, logits, strict=True)), **running}

    def calibrated(self, predictions: Predictions, name: str) -> Tensor:
        return (self.all_answers(predictions)[name] / self.temperatures[name]).softmax(1)

    def running(self, predictions: Predictions) -> list[Tensor]:
        return [self.calibrated(predictions, name) for name in name_answers(self.order)]
