from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from selfcon.data.random import Stream, draw_words, permute, philox, to_integer, to_uniform

# Known answers that the generator's authors publish with Random123: counter, key, result.
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: int, expected: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor([word]) for word in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), key)) == expected


TRITON = """
import torch, triton, triton.language as tl
from selfcon.data.random import draw_words

@triton.jit
def kernel(samples, out, seed, epoch, stream, SIZE: tl.constexpr, BLOCKS: tl.constexpr):
    rows = tl.arange(0, SIZE)
    sample = tl.load(samples + rows)
    for block in tl.static_range(BLOCKS):
        c0 = tl.zeros_like(sample) + block
        w0, w1, w2, w3 = tl.philox(seed, c0, sample, tl.zeros_like(sample) + epoch, tl.zeros_like(sample) + stream)
        place = out + rows * (4 * BLOCKS) + 4 * block
        tl.store(place, w0.to(tl.int64)); tl.store(place + 1, w1.to(tl.int64))
        tl.store(place + 2, w2.to(tl.int64)); tl.store(place + 3, w3.to(tl.int64))

seed = 0x9E3779B97F4A7C15 >> 1
samples = torch.arange(64, dtype=torch.int32) * 1000003
out = torch.zeros(64, 32, dtype=torch.int64)
kernel[(1,)](samples, out, seed, 17, 2, SIZE=64, BLOCKS=8)
ours = draw_words(samples.long(), seed=seed, epoch=17, stream=2, words=32)
assert torch.equal(out & 0xFFFFFFFF, ours), (out[0], ours[0])
"""


@pytest.mark.medium
def test_words_are_those_of_triton() -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    # Triton's interpreter runs its language without a GPU.
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    script = "import tempfile, pathlib, runpy, sys\n"
    script += (
        f"path = pathlib.Path(tempfile.mkdtemp()) / 'kernel.py'\npath.write_text({TRITON!r})\nrunpy.run_path(str(path))"
    )
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, timeout=120)


def test_a_draw_belongs_to_its_key() -> None:
    samples = torch.tensor([5, 9, 70000])
    base = draw_words(samples, seed=1, epoch=2, stream=Stream.AUGMENT, words=32)
    alone = torch.cat([draw_words(s[None], seed=1, epoch=2, stream=Stream.AUGMENT, words=32) for s in samples])
    assert torch.equal(base, alone)
    for change in ({"seed": 3}, {"epoch": 3}, {"epoch": -1}, {"stream": Stream.AUGMENT + 1}, {"stream": Stream.SPLIT}):
        other = draw_words(samples, **{"seed": 1, "epoch": 2, "stream": Stream.AUGMENT, "words": 32, **change})
        assert not (base == other).any()
        assert other.min() >= 0


def test_uniform_and_integer() -> None:
    words = draw_words(torch.arange(100_000), seed=0, epoch=0, stream=1, words=1)[:, 0]
    uniform = to_uniform(words)
    assert uniform.dtype == torch.float32
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert abs(float(uniform.mean()) - 0.5) < 0.005
    counts = torch.bincount(to_integer(words, 14), minlength=14)
    assert len(counts) == 14
    assert counts.min() > 0.93 * 100_000 / 14
    assert int(to_integer(torch.tensor([0xFFFFFFFF]), 7)) == 6


@pytest.mark.medium
def test_order_of_samples() -> None:
    first, again = permute(1000, seed=0, epoch=0), permute(1000, seed=0, epoch=0)
    assert torch.equal(first, again)
    assert torch.equal(first.sort().values, torch.arange(1000))
    assert not torch.equal(first, permute(1000, seed=0, epoch=1))
    assert not torch.equal(first, permute(1000, seed=1, epoch=0))
    # Every place is as likely for every sample.
    places = torch.stack([permute(10, seed=seed, epoch=0).argsort() for seed in range(4000)]).float()
    assert (places.mean(0) - 4.5).abs().max() < 0.2
