"""What tells one object of a script from another."""

from __future__ import annotations

import json
from collections.abc import Callable
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from selfcon.described import _plain


class Kind(Enum):
    A = 1
    B = 2


def adding(number: int) -> Callable[[int], int]:
    return lambda x: x + number


def counting_down() -> Callable[[int], int]:
    def count(number: int) -> int:
        return count(number - 1) if number else 0

    return count


def through(number: int) -> Callable[[int], int]:
    inner = adding(number)
    return lambda x: inner(x) + 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 2
        self.act = lambda x: self.scale * x


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Kind.A, Kind.B),
        (partial(max, 1), partial(max, 2)),
        (adding(1), adding(2)),
        (through(1), through(2)),
        (Path("a"), Path("b")),
        (b"a", b"b"),
        (1j, 2j),
        (torch.float32, torch.float16),
    ],
    ids=["enum", "partial", "closure", "closure of a closure", "path", "bytes", "complex", "dtype"],
)
def test_values_are_told_apart(one: Any, other: Any) -> None:
    assert _plain(one) != _plain(other)
    assert json.loads(json.dumps(_plain(one))) == _plain(one)  # as it is kept


def test_a_function_that_calls_itself_has_an_end() -> None:
    assert _plain(counting_down()) == _plain(counting_down())
    assert _plain(Scaled()) == _plain(Scaled())

    def early() -> int:
        return later

    assert _plain(early) == _plain(early), "nothing is in its cell yet"
    later = 1
