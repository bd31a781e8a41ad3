"""Augmentation policies by name: which steps there are, and how strong. Reading the table needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from selfcon.errors import UsageError, unknown_name


@dataclass(frozen=True)
class Policy:
    """Steps in the order in which they are applied; normalisation always follows."""

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

    def __post_init__(self) -> None:
        if not 0 <= self.magnitude <= 30:
            raise UsageError(f"RandAugment's magnitude is 0 to 30, not {self.magnitude}.")
        if not 0 < self.scale[0] <= self.scale[1]:
            raise UsageError(f"A crop takes from a smaller to a larger share of the image, not {self.scale}.")


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


def get_policy(name: str) -> Policy:
    """The policy of that name."""
    if name not in POLICIES:
        raise unknown_name("augmentation policy", name, POLICIES)
    return POLICIES[name]
