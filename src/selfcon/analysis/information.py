"""Mutual information between two variables from samples of both, by a critic that tells true pairs from mixed ones.

InfoNCE, MINE (Donsker and Varadhan) and NWJ are lower bounds that a critic f(a, b) makes tight: the critic is trained
on one part of the samples, chosen on a second and measured on a third, so that what it learnt by heart counts nothing.
A variable is a vector [N, D], a map [N, C, H, W] or a label [N]; N samples, K of them in a batch, S mixtures of each.

None of them can show more than they have pairs: InfoNCE stays below log K, the others have a variance that grows with
exp(I). Scores are therefore kept within the log of the mixed pairs, beyond which nothing can be told apart: a single
pair that a critic is all too sure of would else decide the value. A network's features are a function of its input, so
their information is without bound (the paper's Appendix A says why it is measured nevertheless): what is measured there
is what a critic of this size finds in this time.
"""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, interpolate, one_hot, pixel_unshuffle

from selfcon.errors import DataError, SelfconWarning, UsageError, unknown_name

_FEWEST = 200
_CHOOSE, _MEASURE = 0.1, 0.2  # parts of the samples: to choose the critic on, and to measure it on
_MIXTURES = 15  # of every sample, for the estimators that need no square of a batch
_AVERAGE = 0.99
_CLIP = 1.0
_DROP = 0.2
_FINEST = 4  # places of a map along a side
_TOGETHER = 8  # batches that are measured at once


@dataclass(frozen=True)
class Estimate:
    """Information in nats: the mean of several critics and how far they lie apart. `float()` is the mean."""

    nats: float
    spread: float | None  # of one critic, none
    values: tuple[float, ...]
    estimator: str
    samples: int
    ceiling: float

    def __float__(self) -> float:
        return self.nats

    @property
    def resolved(self) -> bool:
        """Whether the values lie well below what the estimator could show at all, and near each other."""
        return max(self.values) < 0.8 * self.ceiling and (self.spread or 0.0) <= max(0.5, 0.5 * self.nats)

    def to_dict(self) -> dict[str, Any]:
        return {
            "estimator": self.estimator,
            "nats": self.nats,
            "spread": self.spread,
            "values": list(self.values),
            "samples": self.samples,
            "ceiling": self.ceiling,
            "resolved": self.resolved,
        }


def estimate(
    a: Any,
    b: Any,
    estimator: str = "infonce",
    *,
    seeds: int = 3,
    seed: int = 0,
    steps: int = 2000,
    batch_size: int | None = None,
    hidden: int = 64,
    lr: float = 1e-3,
    patience: int = 8,
    device: str | torch.device = "cpu",
) -> Estimate:
    """The information between `a` and `b`, of which equal rows belong together.

    `steps` is the most that a critic is trained; `patience` how many looks at held-out samples may pass without gain
    (there are 40 of them, at most). A batch holds 64 samples for InfoNCE, which compares each with each, else 128;
    half as many of maps.
    """
    if estimator not in ESTIMATORS:
        raise unknown_name("estimator", estimator, ESTIMATORS)
    for name, number in {"seeds": seeds, "steps": steps, "patience": patience, "hidden": hidden}.items():
        if number < 1:
            raise UsageError(f"{name} must be at least 1, not {number}.")
    a, b = _as_variable(a, "a"), _as_variable(b, "b")
    if len(a) != len(b):
        raise UsageError(f"Equal rows belong together, but there are {len(a)} of a and {len(b)} of b.")
    if len(a) < _FEWEST:
        raise DataError(f"{len(a)} samples are too few to estimate information: {_FEWEST} is the least.")
    if not lr > 0:
        raise UsageError(f"The learning rate must be greater than 0, not {lr}.")
    wanted = batch_size or (64 if estimator == "infonce" else 128) // (2 if 4 in (a.ndim, b.ndim) else 1)
    if wanted < 2:
        raise UsageError(f"A batch must hold at least 2 samples, not {wanted}.")
    batch_size = min(wanted, int(_CHOOSE * len(a)))
    a, b = _match(a.to(device), b.to(device))
    pairs = int(_MEASURE * len(a)) * min(_MIXTURES, batch_size - 1)
    ceiling = math.log(batch_size if estimator == "infonce" else pairs)
    values = []
    for number in range(1000 * seed, 1000 * seed + seeds):
        with torch.random.fork_rng():
            torch.manual_seed(number)
            critic = Critic(a.shape[1:], b.shape[1:], hidden, most=math.log(pairs)).to(device)
            work = _Work(ESTIMATORS[estimator], a, b, batch_size, number)
            values.append(work.run(critic, steps=steps, lr=lr, patience=patience))
    found = Estimate(
        statistics.fmean(values),
        statistics.stdev(values) if seeds > 1 else None,
        tuple(values),
        estimator,
        len(a),
        ceiling,
    )
    if not found.resolved:
        warnings.warn(f"{estimator} {_explain(found, batch_size)}.", SelfconWarning, stacklevel=2)
    return found


def _explain(found: Estimate, batch_size: int) -> str:
    """Why a value is not resolved."""
    if max(found.values) < 0.8 * found.ceiling:
        return f"gave values {found.spread or 0.0:.1f} nats apart: there are too few samples, or too much information"
    if found.estimator == "infonce":
        limit = f"can show no more than {found.ceiling:.2f}, the log of its batch of {batch_size}"
        return f"found up to {max(found.values):.2f} nats and {limit}: the information may be larger"
    limit = f"is not to be trusted near {found.ceiling:.2f}, the log of its mixed pairs"
    return f"found up to {max(found.values):.2f} nats and {limit}"


def infonce(scores: Tensor) -> Tensor:
    """log K - cross-entropy, of scores [K, K] whose first column are the true pairs."""
    return math.log(scores.shape[1]) + (scores[:, 0] - scores.logsumexp(1)).mean()


def mine(scores: Tensor) -> Tensor:
    """Donsker and Varadhan's bound: E f - log E' exp f, of scores [K, 1 + S]."""
    mixed = scores[:, 1:]
    return scores[:, 0].mean() - (mixed.logsumexp((0, 1)) - math.log(mixed.numel()))


def nwj(scores: Tensor) -> Tensor:
    """Nguyen, Wainwright and Jordan's bound: 1 + E f - E' exp f, where f is theirs less one."""
    mixed = scores[:, 1:]
    return 1 + scores[:, 0].mean() - (mixed.logsumexp((0, 1)) - math.log(mixed.numel())).exp()


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"infonce": infonce, "mine": mine, "nwj": nwj}


class Critic(nn.Module):
    """Three layers over both variables: convolutions where one of them is a map, dense layers for vectors.

    The first layer is a sum of one layer for each variable, so that it is computed once for every row and not for every
    pair; their products are a shortcut, which finds linear dependence from few samples.
    """

    def __init__(self, a: torch.Size, b: torch.Size, hidden: int, most: float = 10.0) -> None:
        super().__init__()
        self.most = most  # a score, of either sign
        self.maps = len(a) == 3 or len(b) == 3
        self.first = nn.ModuleList(_layer(shape, hidden) for shape in (a, b))
        self.second: nn.Module
        if self.maps:
            self.second = nn.Conv2d(hidden, hidden, 3, stride=2, padding=1)
            self.third: nn.Module = nn.Conv2d(hidden, hidden, 3, stride=2, padding=1)
        else:
            self.second, self.third = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.last = nn.Linear(hidden, 1)
        self.product = nn.Parameter(torch.zeros(hidden))
        nn.init.zeros_(self.last.weight)  # begin by knowing nothing
        nn.init.zeros_(self.last.bias)

    def forward(self, a: Tensor, b: Tensor, partners: Tensor) -> Tensor:
        """Scores [K, S] of every row of a [K, ...] with those rows of b that `partners` [K, S] names."""
        left, right = self.first[0](a), self.first[1](b)
        if left.ndim != right.ndim:  # a vector stands at every place of a map
            left, right = (side if side.ndim == 4 else side[:, :, None, None] for side in (left, right))
        # Not by plain indexing, whose gradient adds up in whatever order threads come.
        partner = right.index_select(0, partners.flatten()).unflatten(0, partners.shape)
        pairs = (left[:, None] + partner).flatten(0, 1)
        features = self.third(self.second(dropout(pairs.relu(), _DROP, self.training)).relu()).relu()
        scores: Tensor = self.last(features.mean((2, 3)) if self.maps else features).view(partners.shape)
        products = left[:, None] * partner
        shortcut: Tensor = (products.mean((3, 4)) if self.maps else products) @ self.product
        return self.most * ((scores + shortcut) / self.most).tanh()


def _layer(shape: torch.Size, hidden: int) -> nn.Module:
    return nn.Conv2d(shape[0], hidden, 3, padding=1) if len(shape) == 3 else nn.Linear(shape[0], hidden)


class _Work:
    """One critic's way from samples to a value."""

    def __init__(self, bound: Callable[[Tensor], Tensor], a: Tensor, b: Tensor, batch_size: int, seed: int) -> None:
        self.bound, self.batch_size = bound, batch_size
        self.generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(a), generator=self.generator).to(a.device)
        choose, measure = int(_CHOOSE * len(a)), int(_MEASURE * len(a))
        self.chosen, self.measured, self.trained = order.split([choose, measure, len(a) - choose - measure])
        self.a, self.b = (_standardise(side, self.trained) for side in (a, b))

    def run(self, critic: Critic, *, steps: int, lr: float, patience: int) -> float:
        on_gpu = self.a.device.type == "cuda"
        optimiser = torch.optim.AdamW(critic.parameters(), lr=lr, weight_decay=0.1, fused=on_gpu)
        averaged = copy.deepcopy(critic).eval()
        means: list[Tensor] = list(averaged.parameters())
        nows: list[Tensor] = list(critic.parameters())
        # To know nothing is worth 0 nats, and always one of the critics to choose from.
        best, since, kept = 0.0, 0, copy.deepcopy(averaged.state_dict())
        look_after = max(10, steps // 40)
        rows = self._rows()
        for step in range(1, steps + 1):
            for group in optimiser.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * (step - 1) / steps))
            loss = -self.bound(self._scores(critic, next(rows)))
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(critic.parameters(), _CLIP)
            optimiser.step()
            with torch.no_grad():
                keep = min(_AVERAGE, step / (step + 10))
                torch._foreach_lerp_(means, nows, 1 - keep)
            if step % look_after == 0 or step == steps:
                value = self._value(averaged, self.chosen)
                if value > best:
                    best, since, kept = value, 0, copy.deepcopy(averaged.state_dict())
                elif (since := since + 1) >= patience:
                    break
        averaged.load_state_dict(kept)
        return self._value(averaged, self.measured)

    def _rows(self) -> Iterator[Tensor]:
        """Batches of training rows, epoch after epoch."""
        while True:
            order = self.trained[torch.randperm(len(self.trained), generator=self.generator).to(self.trained.device)]
            yield from (rows for rows in order.split(self.batch_size) if len(rows) == self.batch_size)

    def _scores(self, critic: Critic, rows: Tensor) -> Tensor:
        """Scores of rows in batches of K, one after the other: of each with its own partner, then with others."""
        batch = self.batch_size
        shifts = batch if self.bound is infonce else min(_MIXTURES, batch - 1) + 1
        places = torch.arange(len(rows), device=rows.device)[:, None]
        partners = places // batch * batch + (places + torch.arange(shifts, device=rows.device)) % batch
        return critic(self.a[rows], self.b[rows], partners)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _value(self, critic: Critic, rows: Tensor) -> float:
        """The bound on held-out rows, over all pairs at once; those of InfoNCE lie within a batch."""
        whole = rows[: len(rows) // self.batch_size * self.batch_size]
        scores = [self._scores(critic, part) for part in whole.split(self.batch_size * _TOGETHER)]
        return float(self.bound(torch.cat(scores)))


def _as_variable(given: Any, name: str) -> Tensor:
    values = torch.as_tensor(given)
    if values.ndim == 1 and not values.is_floating_point():
        classes, labels = values.unique(return_inverse=True)
        if len(classes) < 2:
            raise DataError(f"{name} holds one class only, which says nothing.")
        return one_hot(labels).float()
    if values.ndim == 1:
        values = values[:, None]
    if values.ndim not in (2, 4):
        raise UsageError(f"{name} must be labels [N], vectors [N, D] or maps [N, C, H, W], not {list(values.shape)}.")
    values = values.float()
    if not bool(values.isfinite().all()):
        raise DataError(f"{name} holds values that are not finite.")
    return values


def _match(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Maps at one resolution, and not finer than pairs of them can be afforded."""
    sizes = [side.shape[-2:] for side in (a, b) if side.ndim == 4]
    if not sizes:
        return a, b
    target = [min(_FINEST, *(int(size[axis]) for size in sizes)) for axis in (0, 1)]
    return _fold(a, target), _fold(b, target)


def _fold(side: Tensor, target: list[int]) -> Tensor:
    """A map with its neighbouring places as channels, so that nothing is lost; resized where they do not fit."""
    if side.ndim == 2:
        return side
    height, width = side.shape[-2:]
    ratio = max(1, height // target[0])
    if height % ratio or width % ratio or (height // ratio, width // ratio) != tuple(target):
        side = interpolate(side, size=[ratio * size for size in target], mode="bilinear", antialias=True)
    return pixel_unshuffle(side, ratio) if ratio > 1 else side


def _standardise(side: Tensor, rows: Tensor) -> Tensor:
    axes = (0, 2, 3) if side.ndim == 4 else (0,)
    known = side[rows]
    std = known.std(axes, keepdim=True)
    return (side - known.mean(axes, keepdim=True)) / torch.where(std > 1e-6, std, 1.0)  # what never changes stays small
