"""`selfcon calibrate`: how far to believe a run, when to leave it early, when it had better say nothing.

Everything is chosen on held-out images and told of others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from selfcon.data.policies import Policy
from selfcon.data.split import Split
from selfcon.data.splits import hold_out
from selfcon.deploy.predictor import Predictor
from selfcon.deploy.trust import FORMAT, Trust
from selfcon.errors import DataError, StorageError, UsageError, unknown_name
from selfcon.evaluation.accuracy import ENSEMBLE, Predictions, embed, predict
from selfcon.evaluation.calibration import (
    calibration_error,
    choose_silence,
    fit_temperature,
    sort_into_bins,
    trace_risk,
)
from selfcon.evaluation.cost import count_multiply_adds, zero_image
from selfcon.evaluation.early_exit import CRITERIA, Point, Rule, choose, follow, name_answers, running_answers, trace
from selfcon.evaluation.outliers import KINDS, auroc
from selfcon.networks.exits import BACKBONE
from selfcon.networks.segments import cut_at_exits
from selfcon.networks.stages import Staged
from selfcon.networks.weights import hash_file
from selfcon.progress import say
from selfcon.report import trust_figures
from selfcon.report.canvas import Picture
from selfcon.report.plots import spread
from selfcon.workflows.analysis_files import Result, write
from selfcon.workflows.trained import TrainedRun, open_run

_KNOWN = 10_000  # training images that strange ones are told by
_TIMED = 512  # images that times are measured on
_TIMED_POINTS = 6
_KEPT = 0.95  # of held-out images that are not to be called strange


def calibrate(
    run_folder: str | Path,
    *,
    data: str | None = None,
    criterion: str = "confidence",
    within: float | None = None,
    mean_cost: float | None = None,
    most_wrong: float | None = None,
    outside: str | None = None,
    strangers: str = "neighbours",
    batch_size: int = 64,
    seed: int = 0,
    device: str = "auto",
) -> Result:
    """Temperatures, a rule for leaving early, thresholds for `unknown`: chosen on held-out images, stored in the run.

    Held-out are the run's validation images, or `data`, or a half of its test images, whose other half is then what
    results are told of. The rule gives up at most `within` percent of the ensemble's accuracy (1 unless told), or has
    at most a `mean_cost`, as a part of the whole network's. With `most_wrong`, answers are kept back so that at most so
    many percent of those given are wrong. `outside` are images of something else, to see whether they are told apart.
    """
    if within is not None and mean_cost is not None:
        raise UsageError("A rule is chosen for an accuracy or for a cost: leave out --within or --mean-cost.")
    if criterion not in CRITERIA:
        raise unknown_name("criterion", criterion, CRITERIA)
    if strangers not in KINDS:
        raise unknown_name("way to tell strange images", strangers, KINDS)
    run = open_run(run_folder, device)
    if not run.net.classifiers:
        raise UsageError(f"{run_folder} has no classifiers yet: `selfcon probe` trains them.")
    work = _Calibration.begin(run, data, seed)
    result: Result = {"run": run.name, "held_out": work.describe()}
    pictures: dict[str, Picture] = {}
    work.fit_temperatures(result, pictures)
    silence = work.fit_silence(result, pictures, most_wrong)
    foreign = work.fit_strangers(result, KINDS[strangers], outside)
    kept: Result = {
        "format": FORMAT,
        "model_sha256": hash_file(run.weights),
        "temperatures": work.temperatures,
        "silence": silence,
        "strange_above": foreign.thresholds,
        "strangers": strangers,
    }
    if len(run.net.names) > 1 and isinstance(run.net.splitter, Staged):
        target = {"cost": mean_cost} if mean_cost is not None else {"within": 1.0 if within is None else within}
        kept["early_exit"] = work.fit_rule(result, pictures, criterion, target, batch_size)
    _store(run.path, kept, foreign.tensors)
    return write(result, pictures, run.path / "analysis", name="calibration")


@dataclass(frozen=True)
class _Foreign:
    thresholds: dict[str, float]
    tensors: dict[str, Tensor]


@dataclass
class _Calibration:
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
    def begin(cls, run: TrainedRun, data: str | None, seed: int) -> _Calibration:
        test = run.split("test")
        if data is not None:
            source = run.other_source(data)
            if list(source.classes) != run.facts["classes"]:
                raise DataError(f"{source.name} has other classes than {run.path} was trained on.")
            held, told, names = run.as_seen(source.test), test, (f"the test images of {source.name}", "all test images")
        elif run.source.val is not None:
            held, told, names = run.split("val"), test, ("the validation images", "all test images")
        else:
            labels = test.labels.cpu().numpy()
            rows = hold_out(labels, len(labels) // 2, seed)
            told, held = (test.take(torch.from_numpy(each).to(test.device)) for each in rows)
            names = ("half of the test images", "the other half of the test images")
            say("There are no validation images: half of the test images are held out, results are of the other half.")
        if not len(held) or not len(told):
            raise DataError(f"{run.source.name} has too few test images to hold some of them out.")
        choosing, telling = (predict(run.net, each, size=run.size) for each in (held, told))
        return cls(run, held, told, *names, _plain(choosing), _plain(telling), {})

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

    def fit_temperatures(self, result: Result, pictures: dict[str, Picture]) -> None:
        names, found = self._all_answers(self.choosing), {}
        before, after = {}, {}
        told = self._all_answers(self.telling)
        for name, logits in names.items():
            self.temperatures[name] = fit_temperature(logits, self.choosing.labels)
            bins = [
                sort_into_bins((told[name] / heat).softmax(1), self.telling.labels)
                for heat in (1.0, self.temperatures[name])
            ]
            found[name] = {
                "temperature": self.temperatures[name],
                "ece_before": calibration_error(bins[0]),
                "ece": calibration_error(bins[1]),
                "top1": 100 * float((told[name].argmax(1) == self.telling.labels).double().mean()),
            }
            before[name], after[name] = bins
        result["answers"] = found
        pictures["reliability"] = trust_figures.draw_reliability(before, after)

    def fit_silence(self, result: Result, pictures: dict[str, Picture], most_wrong: float | None) -> float | None:
        last = ENSEMBLE if ENSEMBLE in self.temperatures else BACKBONE
        curves, areas = {}, {}
        for name in self.temperatures:
            probabilities = self._calibrated(self.telling, name)
            traced = trace_risk(probabilities.amax(1), probabilities.argmax(1) == self.telling.labels)
            some = spread(len(traced.coverage), 200)
            curves[name] = ((100 * traced.coverage[some]).tolist(), (100 * traced.risk[some]).tolist())
            areas[name] = traced.area
        pictures["risk"] = trust_figures.draw_risk(curves)
        result["risk_coverage_area"] = areas
        if most_wrong is None:
            return None
        chosen = self._calibrated(self.choosing, last)
        threshold = choose_silence(trace_risk(chosen.amax(1), chosen.argmax(1) == self.choosing.labels), most_wrong)
        told = self._calibrated(self.telling, last)
        given = told.amax(1) >= threshold
        wrong = (told.argmax(1) != self.telling.labels)[given]
        result["silence"] = {
            "most_wrong": most_wrong,
            "threshold": threshold,
            "answered": 100 * float(given.double().mean()),
            "wrong": 100 * float(wrong.double().mean()) if len(wrong) else 0.0,
        }
        return min(threshold, 2.0)  # JSON knows no infinity

    def fit_strangers(self, result: Result, kind: Any, outside: str | None) -> _Foreign:
        run = self.run
        train = run.split("train")
        known = train.take(spread(len(train), _KNOWN).to(train.device))
        parts = {"known": known, "held": self.held, "told": self.told}
        if outside is not None:
            parts["outside"] = run.as_seen(run.other_source(outside).test)
        features = {name: embed(run.net, each, size=run.size) for name, each in parts.items()}
        thresholds, found = {}, {}
        tensors: dict[str, Tensor] = {}
        for name in run.net.names:
            stranger = kind.fit(features["known"][name], known.labels.cpu())
            thresholds[name] = float(torch.quantile(stranger.score(features["held"][name]).double(), _KEPT))
            scores = stranger.score(features["told"][name])
            found[name] = {"called_strange": 100 * float((scores > thresholds[name]).double().mean())}
            if outside is not None:
                others = stranger.score(features["outside"][name])
                found[name] |= {
                    "auroc": auroc(scores, others),
                    "outside_called_strange": 100 * float((others > thresholds[name]).double().mean()),
                }
            tensors |= {f"{name}.{part}": value.cpu().contiguous() for part, value in stranger.state().items()}
        result["strangers"] = {**({"outside": outside} if outside else {}), "exits": found}
        return _Foreign(thresholds, tensors)

    def fit_rule(
        self,
        result: Result,
        pictures: dict[str, Picture],
        criterion: str,
        target: Mapping[str, float],
        batch_size: int,
    ) -> Result:
        costs, alone_costs, total = self._costs()
        choosing, telling = (self._running(each) for each in (self.choosing, self.telling))
        curve = trace(choosing, self.choosing.labels, costs, criterion)
        chosen = choose(curve, **target)
        points = [self._tell(telling, costs, criterion, point.threshold) for point in curve]
        told = self._tell(telling, costs, criterion, chosen.threshold)
        alone = {
            name: {"accuracy": result["answers"][name]["top1"], "cost": alone_costs[name]}
            for name in (*self.order, ENSEMBLE)
        }
        times = self._time(points, told, criterion, batch_size)
        rows = [
            {**asdict(point), **({} if spent is None else {"milliseconds": spent})}
            for point, spent in zip(points, times.points, strict=True)
        ]
        for name, spent in times.alone.items():
            alone[name]["milliseconds"] = spent
        chosen_row = {**asdict(told), "milliseconds": times.chosen}
        result["early_exit"] = {
            "criterion": criterion,
            "target": dict(target),
            "multiply_adds": total,
            "chosen": chosen_row,
            "alone": alone,
            "points": rows,
        }
        pictures["early-exit"] = trust_figures.draw_early_exit(rows, chosen_row, alone)
        rule = {"criterion": criterion, "threshold": chosen.threshold}
        return {**rule, "costs": costs, "curve": [asdict(point) for point in curve]}

    def _tell(self, answers: Sequence[Tensor], costs: Sequence[float], criterion: str, threshold: float) -> Point:
        return follow(answers, self.telling.labels, costs, Rule(criterion, threshold))

    def _all_answers(self, predictions: Predictions) -> dict[str, Tensor]:
        """Logits of every exit and of every ensemble that may answer."""
        logits = [predictions.logits[name] for name in self.order]
        running = dict(zip(name_answers(self.order), running_answers(logits), strict=True))
        return {**dict(zip(self.order, logits, strict=True)), **running}

    def _calibrated(self, predictions: Predictions, name: str) -> Tensor:
        return (self._all_answers(predictions)[name] / self.temperatures[name]).softmax(1)

    def _running(self, predictions: Predictions) -> list[Tensor]:
        return [self._calibrated(predictions, name) for name in name_answers(self.order)]

    def _costs(self) -> tuple[list[float], dict[str, float], int]:
        """Multiply-adds up to each answer and of each exit alone as parts of the whole, and the whole."""
        x, spent = zero_image(self.run.net, self.run.size), []
        for segment in cut_at_exits(self.run.net):
            spent.append(count_multiply_adds(segment, x))
            with torch.no_grad():
                x = segment.eval()(x)[0]
        total = sum(spent)
        cumulated = [sum(spent[: number + 1]) / total for number in range(len(spent))]
        net, image = self.run.net, zero_image(self.run.net, self.run.size)
        alone = {name: count_multiply_adds(_Upto(net, name), image) / total for name in self.order}
        return cumulated, {**alone, ENSEMBLE: 1.0}, total

    def _time(self, points: Sequence[Point], chosen: Point, criterion: str, batch_size: int) -> _Times:
        """Milliseconds an image, measured, of some points, of the chosen one and of single exits."""
        run = self.run
        predictor = Predictor(_copy(run), run.facts, Trust(self.temperatures), run.device)
        some = self.told.take(spread(len(self.told), _TIMED).to(self.told.device))
        rows = torch.arange(len(some), device=some.device)
        images = some.batch(rows, Policy(), seed=0, epoch=0, size=run.size).images

        def spent(leave: str, rule: Rule | None) -> float:
            best = []
            for _ in range(3):
                start = time.perf_counter()
                for part in images.split(batch_size):
                    predictor.answer(part, leave, rule)
                if run.device.type == "cuda":
                    torch.cuda.synchronize(run.device)
                best.append(time.perf_counter() - start)
            return 1000 * min(best) / len(images)

        places = set(spread(len(points), _TIMED_POINTS).tolist())
        timed = [
            spent(ENSEMBLE, Rule(criterion, point.threshold)) if place in places else None
            for place, point in enumerate(points)
        ]
        alone = {name: spent(name, None) for name in (*self.order, ENSEMBLE)}
        return _Times(timed, spent(ENSEMBLE, Rule(criterion, chosen.threshold)), alone)


@dataclass(frozen=True)
class _Times:
    points: list[float | None]
    chosen: float
    alone: dict[str, float]


class _Upto(torch.nn.Module):
    """One exit of a network, as a module."""

    def __init__(self, net: Any, name: str) -> None:
        super().__init__()
        self.net, self.name = net, name

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.net(images, upto=self.name).logits[self.name]
        return logits


def _copy(run: TrainedRun) -> Any:
    """The network again, since a predictor joins layers of its own."""
    return open_run(run.path, str(run.device)).net


def _plain(predictions: Predictions) -> Predictions:
    return Predictions({name: each.float() for name, each in predictions.logits.items()}, predictions.labels)


def _store(folder: Path, kept: Result, tensors: dict[str, Tensor]) -> None:
    try:
        (folder / "calibration.safetensors").write_bytes(save_tensors(tensors))
        (folder / "calibration.json").write_text(json.dumps(kept, indent=1) + "\n")
    except OSError as error:
        raise StorageError(f"{folder} cannot be written to ({error.strerror}).") from error
