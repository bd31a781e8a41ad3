"""An exit: where a sub-network leaves the backbone, and what it is made of. Reading one needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from selfcon.errors import UsageError, unknown_name

Structure = Literal["fc", "small", "same"]
BACKBONE = "backbone"
"""The name of exit 0."""
_LONGEST = 4  # digits of a stage
DEFAULT_STAGE = 2
"""After which the paper's ResNets have their sub-network."""


@dataclass(frozen=True, order=True)
class Exit:
    """A sub-network after a stage of the backbone.

    `after` counts stages from 1, the stem not counted. `structure` is "fc" (pooling and one linear layer), "same" (the
    stages that follow, with weights of their own) or "small" (the same with half as many layers in each stage).
    """

    after: int
    structure: Structure = "fc"

    def __post_init__(self) -> None:
        if isinstance(self.after, bool) or not isinstance(self.after, int) or self.after < 1:
            raise UsageError(f"An exit stands after a stage, counted from 1, not after {self.after!r}.")
        if self.structure not in get_args(Structure):
            raise unknown_name("structure of a sub-network", self.structure, get_args(Structure))

    @property
    def name(self) -> str:
        """How the exit is called in outputs and results."""
        return f"exit{self.after}"


def parse_exits(text: str) -> list[Exit]:
    """Exits from how settings write them: `2:fc`, `1:fc,2:same`, or `none`."""
    if not isinstance(text, str):
        raise UsageError(f"exits are written as STAGE:STRUCTURE, such as 2:fc, not {text!r}.")
    if text in ("", "none"):
        return []
    exits = []
    for part in text.split(","):
        after, _, structure = part.strip().partition(":")
        if not (after.isascii() and after.isdigit() and len(after) <= _LONGEST):
            raise UsageError(
                f"exits are written as STAGE:STRUCTURE, such as 2:fc or 1:fc,2:same, not {part.strip()!r}."
            )
        exits.append(Exit(int(after), structure or "fc"))  # type: ignore[arg-type]
    return exits
