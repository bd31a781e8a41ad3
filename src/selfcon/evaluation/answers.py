"""What a network answers with: its exits, of which the backbone is one, and their ensemble."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

ENSEMBLE = "ensemble"


def distinct(by_answer: Mapping[str, T]) -> dict[str, T]:
    """What is known of each answer, but for the ensemble of one exit, which is that exit."""
    exits = [name for name in by_answer if name != ENSEMBLE]
    return {name: value for name, value in by_answer.items() if name != ENSEMBLE or len(exits) > 1}


def final_answer(by_answer: Mapping[str, object]) -> str:
    """Return the name of the network's final prediction: the ensemble, or the only exit of a network with one exit."""
    names = list(distinct(by_answer))
    return names[0] if len(names) == 1 else ENSEMBLE
