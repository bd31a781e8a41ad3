"""The paper's propositions where everything is known: a world so small that expectations are sums.

In a class, a hidden state t (the intermediate feature T) is drawn, and from it independently which of a few unit
vectors the backbone and the sub-network give: F and G are stochastic maps of T, as the paper's Appendix A reads them.
Information is computed from the tables, and the loss as the sum over everything that can be drawn. What is compared:

    Proposition 1    log(2K - 1) - L_sup     <=  I(F(x); F(z) | c)
    Proposition 2    log(2K - 1) - L_self    <=  I(F(x); G(x) | c)
    SelfCon-M        log(4K - 1) - L_self-m  <=  the mean of the six informations of its pairs
    Proposition 3    I(F; G | c)             <=  I(F; T | c)
    Equation 6       I(F; T | c)              =  I(F; T) + I(F; c | T) - I(F; c)

The negatives are drawn from p(z|c), as the expectations of the proofs have it. Training takes them from other classes,
and then the left side is no bound: `counterexample` is a class of one point, whose information is nothing.

Legend: T states, S pairs of vectors (one of F, one of G), D dimensions, K samples in a batch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from selfcon.errors import UsageError

Array = npt.NDArray[np.float64]
_LEAST_TEMPERATURE = 0.02  # below, exponentials overflow


@dataclass(frozen=True)
class World:
    """One class: p(t), p(f|t), p(g|t), and the unit vectors that f and g stand for."""

    state: Array  # [T]
    f_given_t: Array  # [T, f]
    g_given_t: Array  # [T, g]
    f_vectors: Array  # [f, D]
    g_vectors: Array  # [g, D]

    @property
    def features(self) -> Array:
        """p(f, g) of one sample."""
        joint: Array = np.einsum("t,tf,tg->fg", self.state, self.f_given_t, self.g_given_t)
        return joint


@dataclass(frozen=True)
class Check:
    """One inequality: what the loss promises, and what is true."""

    name: str
    bound: float
    truth: float

    @property
    def holds(self) -> bool:
        return self.bound <= self.truth + 1e-9


def draw_world(generator: np.random.Generator, *, states: int = 3, vectors: int = 3, dimensions: int = 3) -> World:
    """A random one: from hardly dependent features to such that follow from the state."""
    sharpness = 10 ** generator.uniform(-1, 1)

    def channel() -> Array:
        return generator.dirichlet(np.full(vectors, 1 / sharpness), size=states) + 1e-12

    def directions() -> Array:
        found = generator.normal(size=(vectors, dimensions))
        return found / np.linalg.norm(found, axis=1, keepdims=True)  # type: ignore[no-any-return]

    f, g = channel(), channel()
    return World(
        generator.dirichlet(np.ones(states)),
        f / f.sum(1, keepdims=True),
        g / g.sum(1, keepdims=True),
        directions(),
        directions(),
    )


def check(world: World, *, samples: int = 2, temperature: float = 1.0) -> list[Check]:
    """All inequalities in one world, with negatives from its own class."""
    views = two_views(world)
    return [
        Check(
            "proposition 1",
            math.log(2 * samples - 1) - supcon(world, samples=samples, temperature=temperature),
            information(views.sum((1, 3))),
        ),
        Check(
            "proposition 2",
            math.log(2 * samples - 1) - selfcon(world, samples=samples, temperature=temperature),
            information(world.features),
        ),
        Check(
            "selfcon-m",
            math.log(4 * samples - 1) - selfcon_m(world, samples=samples, temperature=temperature),
            selfcon_m_information(world),
        ),
        Check("proposition 3", information(world.features), information(world.state[:, None] * world.f_given_t)),
    ]


def two_views(world: World) -> Array:
    """p(f, g, f', g') of two views of one sample: they share its state."""
    one = world.f_given_t[:, :, None] * world.g_given_t[:, None, :]
    joint: Array = np.einsum("t,tfg,tij->fgij", world.state, one, one)
    return joint


def information(joint: Array) -> float:
    """I(a; b) in nats of a table p(a, b)."""
    product = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    there = joint > 0
    return float((joint[there] * np.log(joint[there] / product[there])).sum())


def supcon(world: World, *, samples: int, temperature: float = 1.0) -> float:
    """The expectation of SupCon's loss: an anchor, its other view, and 2K - 2 features of the class itself."""
    pair, single = two_views(world).sum((1, 3)), world.features.sum(1)
    ff = world.f_vectors @ world.f_vectors.T / temperature
    total = 0.0
    for negatives, probability in _draws(single, 2 * samples - 2):
        others = np.exp(ff[:, list(negatives)]).sum(1)  # of every anchor
        total += probability * float((pair * (np.log(np.exp(ff) + others[:, None]) - ff)).sum())
    return total


def selfcon(world: World, *, samples: int, temperature: float = 1.0) -> float:
    """The expectation of SelfCon's loss: anchors F(x) and G(x), each other's positive, both features of K - 1 more."""
    joint = world.features
    ff, fg, gg = _similarities(world, temperature)
    total = 0.0
    for negatives, probability in _draws(joint.ravel(), samples - 1):
        f, g = np.unravel_index(list(negatives), joint.shape)
        of_f = (np.exp(fg[:, g]) + np.exp(ff[:, f])).sum(1)[:, None]
        of_g = (np.exp(fg.T[:, f]) + np.exp(gg[:, g])).sum(1)[None, :]
        loss = 0.5 * (np.log(np.exp(fg) + of_f) + np.log(np.exp(fg) + of_g)) - fg
        total += probability * float((joint * loss).sum())
    return total


def selfcon_m(world: World, *, samples: int, temperature: float = 1.0) -> float:
    """The expectation of SelfCon-M's loss: three positives of each anchor, both features of 2K - 2 more."""
    joint, views = world.features, two_views(world)
    ff, fg, gg = _similarities(world, temperature)
    total = 0.0
    for negatives, probability in _draws(joint.ravel(), 2 * samples - 2):
        f, g = np.unravel_index(list(negatives), joint.shape)
        of_f = (np.exp(fg[:, g]) + np.exp(ff[:, f])).sum(1)[:, None, None, None]
        of_g = (np.exp(fg.T[:, f]) + np.exp(gg[:, g])).sum(1)[None, :, None, None]
        for_f = (fg[:, :, None, None], fg[:, None, None, :], ff[:, None, :, None])
        for_g = (fg[:, :, None, None], fg.T[None, :, :, None], gg[None, :, None, :])
        loss = 0.0
        for positives, rest in ((for_f, of_f), (for_g, of_g)):
            loss = loss + np.log(sum(np.exp(each) for each in positives) + rest) - sum(positives) / 3
        total += probability * float((views * loss / 2).sum())
    return total


def selfcon_m_information(world: World) -> float:
    """The mean information over the pairs that SelfCon-M contrasts: F with G of the same view, and all of two views."""
    views = two_views(world)
    same = information(world.features)
    across = information(views.sum((1, 2)))  # F(x) and G(z), as G(x) and F(z)
    return (2 * same + 2 * across + information(views.sum((1, 3))) + information(views.sum((0, 2)))) / 6


def split_information(classes: Array, worlds: list[World]) -> dict[str, float]:
    """Equation 6 over several classes p(c): I(F; T | c), and the terms that it is the sum of.

    States and vectors are those of the first world in every class: only the probabilities differ.
    """
    joint = np.stack(
        [p * world.state[:, None] * world.f_given_t for p, world in zip(classes, worlds, strict=True)]
    )  # [c, t, f]
    given_class = sum(
        float(p) * information(world.state[:, None] * world.f_given_t) for p, world in zip(classes, worlds, strict=True)
    )
    f_and_t = information(joint.sum(0))
    f_and_c = information(joint.sum(1))
    both = information(joint.transpose(2, 0, 1).reshape(joint.shape[2], -1))  # I(F; c, T)
    return {"given the class": given_class, "F; T": f_and_t, "F; c | T": both - f_and_t, "F; c": f_and_c}


def counterexample(*, samples: int = 2, temperature: float = 1.0) -> Check:
    """A class of one point with negatives from another class, opposite to it: a promise above I = 0."""
    away = (2 * samples - 2) * math.exp(-1 / temperature)
    loss = math.log(math.exp(1 / temperature) + away) - 1 / temperature
    return Check("negatives from other classes", math.log(2 * samples - 1) - loss, 0.0)


def experiment(draws: int = 1000, *, samples: int = 2, temperature: float = 1.0, seed: int = 0) -> dict[str, Any]:
    """Every inequality in so many random worlds, Equation 6 in each pair of them, and the counterexample."""
    if draws < 1:
        raise UsageError(f"There must be at least 1 draw, not {draws}.")
    if not 2 <= samples <= 3:
        raise UsageError(f"Sums over everything are within reach for batches of 2 or 3 samples, not {samples}.")
    if not temperature >= _LEAST_TEMPERATURE:
        raise UsageError(f"The temperature must be at least {_LEAST_TEMPERATURE}, not {temperature}.")
    generator = np.random.default_rng(seed)
    found: dict[str, list[Check]] = {}
    worst = 0.0
    before = draw_world(generator)
    for _ in range(draws):
        world = draw_world(generator)
        for each in check(world, samples=samples, temperature=temperature):
            found.setdefault(each.name, []).append(each)
        share = generator.uniform(0.1, 0.9)
        terms = split_information(np.array([share, 1 - share]), [before, world])
        worst = max(worst, abs(terms["given the class"] - (terms["F; T"] + terms["F; c | T"] - terms["F; c"])))
        before = world
    return {
        "draws": draws,
        "samples": samples,
        "temperature": temperature,
        "seed": seed,
        "bounds": {
            name: {
                "holds": sum(each.holds for each in checks),
                "of": len(checks),
                "least_margin": min(each.truth - each.bound for each in checks),
                "points": [[each.truth, each.bound] for each in checks],
            }
            for name, checks in found.items()
        },
        "equation_6": {"largest_difference": worst},
        "counterexample": _describe(counterexample(samples=samples, temperature=temperature)),
    }


def _describe(each: Check) -> dict[str, Any]:
    return {"name": each.name, "bound": each.bound, "truth": each.truth, "holds": each.holds}


def _similarities(world: World, temperature: float) -> tuple[Array, Array, Array]:
    f, g = world.f_vectors, world.g_vectors
    return f @ f.T / temperature, f @ g.T / temperature, g @ g.T / temperature


def _draws(probabilities: Array, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every multiset of so many draws, with its probability: their order does not matter to a sum."""
    for drawn in itertools.combinations_with_replacement(range(len(probabilities)), count):
        ways = math.factorial(count)
        for each in set(drawn):
            ways //= math.factorial(drawn.count(each))
        yield drawn, ways * float(np.prod(probabilities[list(drawn)]))
