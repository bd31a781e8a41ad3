"""Whether our numbers agree with the paper's, as far as a few seeds can tell."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

_SURE = 0.975


@dataclass(frozen=True)
class Verdict:
    """Our mean, how far it is from the paper's, and how far chance alone would often bring it (None: not known).

    `aside` says why nothing is to be judged, where that is so: the two are not of the same experiment.
    """

    n: int
    mean: float
    spread: float | None
    difference: float
    margin: float | None
    decimals: int = 1
    aside: str | None = None

    @property
    def shown_mean(self) -> str:
        """As many decimals as the paper prints, and two digits of a small number at least."""
        small = 0 < abs(self.mean) < 0.1
        decimals = max(self.decimals, 1 - math.floor(math.log10(abs(self.mean)))) if small else self.decimals
        return f"{self.mean:.{decimals}f}"

    @property
    def agrees(self) -> bool | None:
        return None if self.margin is None or self.aside is not None else abs(self.difference) <= self.margin

    def __str__(self) -> str:
        off = f"{self.difference:+.{self.decimals}f}"
        if self.aside is not None:
            return " ".join(filter(None, (off, self.aside, f"(n={self.n})")))
        if self.margin is None:
            return f"{off}, neither side has a spread (n={self.n})"
        chance = f"chance gives ±{self.margin:.{self.decimals}f}"
        if self.agrees:
            return f"within the spread ({off}, {chance}, n={self.n})"
        return f"{off}, where {chance} (n={self.n})"


def judge(
    value: float,
    spread: float | None,
    seeds: int,
    ours: Sequence[float],
    decimals: int = 1,
    *,
    aside: str | None = None,
) -> Verdict:
    """The paper's mean over `seeds` seeds with its spread, against ours.

    Both are taken as means of normal draws with one variance, pooled from the spreads that are known: the difference
    is then within t · s · sqrt(1/seeds + 1/n) in 95 of 100 cases, but for what the paper's rounding to so many decimals
    hides: of its mean, and of its spread, where ±0.0 is anything up to 0.05. An unknown number of seeds counts as one.
    """
    half = 0.5 * 10**-decimals
    n, mean = len(ours), statistics.fmean(ours)
    own = statistics.stdev(ours) if n > 1 else None
    known = [(seeds - 1, max(spread, half))] if spread is not None and seeds > 1 else []
    known += [(n - 1, own)] if own is not None else []
    margin = None
    if known:
        from scipy.stats import t

        freedom = sum(weight for weight, _ in known)
        variance = sum(weight * deviation**2 for weight, deviation in known) / freedom
        margin = float(t.ppf(_SURE, freedom)) * math.sqrt(variance * (1 / seeds + 1 / n) + half**2 / 3)
    return Verdict(n, mean, own, mean - value, margin, decimals, aside)


def agreement_of_order(theirs: Sequence[float], ours: Sequence[float]) -> float | None:
    """Kendall's tau-b of two lists: 1 where both put things in the same order, -1 in the opposite one.

    None where one of them has no order, since all its values are the same.
    """
    from scipy.stats import kendalltau

    tau = float(kendalltau(theirs, ours).statistic)
    return None if math.isnan(tau) else tau
