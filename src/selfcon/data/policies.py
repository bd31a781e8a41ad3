"""Augmentation policies by name: which steps there are, and how strong. Reading the table needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from selfcon.described import describe
from selfcon.errors import UsageError, unknown_name


@dataclass(frozen=True)
class Policy:
    """Steps in the order in which they are applied; normalisation always follows.

    `then` is a step of one's own behind them: a function of pixels [B, 3, S, S] in [0, 1] and of random numbers in
    [0, 1) that belong to each sample, [B, numbers], which returns pixels of the same shape.
    """

    randaugment: bool = False
    crop_and_flip: bool = False
    colour: bool = False

    scale: tuple[float, float] = (0.2, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip_probability: float = 0.5
    jitter_probability: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    grey_probability: float = 0.2
    magnitude: int = 9

    then: Callable[[Any, Any], Any] | None = None
    numbers: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.magnitude <= 30:
            raise UsageError(f"RandAugment's magnitude is 0 to 30, not {self.magnitude}.")
        if not 0 < self.scale[0] <= self.scale[1]:
            raise UsageError(f"A crop takes from a smaller to a larger share of the image, not {self.scale}.")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise UsageError(f"A crop's width over its height is from a smaller to a larger one, not {self.ratio}.")
        for name in ("flip_probability", "jitter_probability", "grey_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is 0 to 1, not {getattr(self, name)}.")
        if self.numbers < 1:
            raise UsageError(f"A step of one's own is given at least one random number a sample, not {self.numbers}.")


POLICIES = {
    "standard": Policy(crop_and_flip=True, colour=True),
    "simple": Policy(crop_and_flip=True),
    "randaugment": Policy(randaugment=True),
    "randaugment-simple": Policy(randaugment=True, crop_and_flip=True),
    "randaugment-standard": Policy(randaugment=True, crop_and_flip=True, colour=True),
    "none": Policy(),
}
"""The policies of the paper's Table 13, where RandAugment stands alone; the released code has it before "standard"."""

RANDAUGMENT_OPERATIONS = (
    *("Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", "Brightness"),
    *("Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"),
)


_OURS = frozenset(POLICIES)
_ADDED: dict[str, dict[str, Any]] = {}


def add_policy(name: str, policy: Policy) -> Policy:
    """Make a policy known by a name, so that `--augment.policy` and `selfcon.fit` take it in this process.

    Adding another of that name replaces the one before. A run remembers what the policy was, and is not gone on with by
    another one.
    """
    if name in _OURS:
        raise UsageError(f"There is an augmentation policy {name!r} already: choose another name.")
    if not isinstance(policy, Policy):
        raise UsageError(f"{name!r} must be a Policy; a function goes into one: Policy(crop_and_flip=True, then=...).")
    if policy.scale != Policy.scale:
        raise UsageError("How much of an image a crop takes is a setting: leave scale out, and give --augment.scale.")
    POLICIES[name] = policy
    _ADDED[name] = describe(policy)
    return policy


def describe_added_policy(name: str) -> dict[str, Any] | None:
    """What an added policy was when it was added, to tell it from another of its name; None of the table's."""
    return _ADDED.get(name)


def get_policy(name: str) -> Policy:
    """The policy of that name."""
    if not isinstance(name, str):
        raise UsageError(f"A policy goes by its name: make {name!r} known with selfcon.data.add_policy.")
    if name not in POLICIES:
        raise unknown_name("augmentation policy", name, POLICIES)
    return POLICIES[name]
