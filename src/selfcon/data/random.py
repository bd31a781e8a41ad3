"""Random numbers that belong to a sample, not to a moment: Philox-4x32-10 keyed by (seed, epoch, sample, view).

What a whole batch draws has the number of the update for its sample.

The same key gives the same draw whatever the batch, the worker, the process, the device or the point of resuming.
Words are kept in int64 tensors with values in [0, 2^32), since PyTorch has no arithmetic on unsigned ones; they are bit
for bit those of Triton's generator (`triton.language.philox`).
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10


class Stream(IntEnum):
    """What a draw is for, so that no two purposes share a number. Views of a sample follow from `AUGMENT`, `OWN` on."""

    ORDER = 0
    SPLIT = 1
    AUGMENT = 2
    CLASSES = 1 << 20
    MIX = 1 << 21
    OWN = 1 << 22


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for a counter of four words; all of them int64 tensors of values in [0, 2^32)."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(_ROUNDS):
        high_a, low_a = _multiply(c0, _ROUND_A)
        high_b, low_b = _multiply(c2, _ROUND_B)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEY_A) & _MASK, (k1 + _KEY_B) & _MASK
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 64-bit product, from halves of the factor, so that nothing overflows.

    Halves also because compilers may take a small word for a 32-bit integer, which must then not meet a larger factor.
    """
    upper, lower = word * (factor >> 16), word * (factor & 0xFFFF)
    return (upper + (lower >> 16)) >> 16, (((upper & 0xFFFF) << 16) + lower) & _MASK


def draw_words(samples: Tensor, *, seed: int, epoch: int, stream: int, words: int) -> Tensor:
    """Random words [B, words] for samples [B] (their indices in the data set)."""
    blocks = torch.arange(-(-words // 4), device=samples.device)
    c0 = blocks.expand(len(samples), -1)
    c1 = samples.to(torch.int64)[:, None].expand_as(c0)
    c2, c3 = torch.full_like(c0, epoch & _MASK), torch.full_like(c0, stream & _MASK)
    drawn = philox((c0, c1 & _MASK, c2, c3), seed)
    return torch.stack(drawn, dim=2).flatten(1)[:, :words]


def to_uniform(words: Tensor) -> Tensor:
    """Words as float32 in [0, 1): their upper 24 bits, so that every value is exact on every device."""
    return (words >> 8).to(torch.float32) * 2.0**-24


def to_integer(words: Tensor, below: int | Tensor) -> Tensor:
    """Words as integers in [0, below), by the multiply-and-shift that needs no division."""
    return (words * below) >> 32


def permute(
    count: int, *, seed: int, epoch: int, stream: int = Stream.ORDER, device: torch.device | str = "cpu"
) -> Tensor:
    """The order of `count` samples in an epoch: a permutation that depends on seed and epoch alone."""
    words = draw_words(torch.arange(count, device=device), seed=seed, epoch=epoch, stream=stream, words=2)
    # 63 bits, so that equal keys are as good as impossible; a stable sort settles them all the same everywhere.
    return torch.argsort((words[:, 0] << 31) | (words[:, 1] >> 1), stable=True)
