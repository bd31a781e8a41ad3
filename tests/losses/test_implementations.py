"""Tiles and kernels give the dense form's loss and gradient, without its matrix."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import selfcon
from selfcon.errors import UsageError
from selfcon.losses import Term, contrastive_loss, pairwise, tiled
from selfcon.losses.objective import choose_implementation
from selfcon.losses.pairwise import Pairs, Statistics
from selfcon.losses.sets import Contrast
from tests.losses.test_methods import CONTRASTIVE


def clustered(samples: int, a_sample: int, dim: int, *, spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features [B, K, D] around the centres of their classes; a spread of 0.2 is a mean cosine of 0.96, 1e9 is none."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, max(2, samples // 8), (samples,), generator=rng)
    centres = torch.nn.functional.normalize(torch.randn(int(labels.max()) + 1, dim, generator=rng), dim=1)
    noise = torch.randn(samples, a_sample, dim, generator=rng) * spread / dim**0.5
    return centres[labels][:, None] + noise, labels


def loss_and_gradient(
    name: str, features: Tensor, labels: Tensor, implementation: str, **options: Any
) -> tuple[Tensor, Tensor]:
    x = features.detach().clone().requires_grad_()
    loss = selfcon.get_method(name).loss(x, labels, implementation=implementation, **options)
    (gradient,) = torch.autograd.grad(loss, x)
    return loss.detach(), gradient


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:no anchor of this batch", "ignore:this loss has anchors at sub-networks")
@given(
    name=st.sampled_from(CONTRASTIVE),
    samples=st.integers(1, 40),
    exits=st.integers(1, 3),
    dim=st.integers(2, 20),
    classes=st.integers(1, 12),
    side=st.integers(1, 17),
    temperature=st.floats(0.005, 5),
    alpha=st.floats(0, 2),
)
@settings(max_examples=int(os.environ.get("SELFCON_CASES", "200")), deadline=None)
def test_tiles_equal_the_dense_form(**case: Any) -> None:
    method = selfcon.get_method(case["name"])
    exits = case["exits"] if method.uses_exits else 1
    rng = torch.Generator().manual_seed(case["samples"])
    shape = (case["samples"], method.views, exits, case["dim"])
    features = torch.randn(*shape, dtype=torch.float64, generator=rng)
    labels = torch.randint(0, case["classes"], (case["samples"],), generator=rng)
    options = {"temperature": case["temperature"], "alpha": case["alpha"]}
    expected, gradient = loss_and_gradient(case["name"], features, labels, "dense", **options)
    before = tiled.SIDE
    tiled.Tiles.__init__.__defaults__ = (case["side"],)
    try:
        ours, our_gradient = loss_and_gradient(case["name"], features, labels, "tiled", **options)
    finally:
        tiled.Tiles.__init__.__defaults__ = (before,)
    assert abs(ours - expected) <= 1e-10 * max(1, abs(float(expected)))
    assert (our_gradient - gradient).abs().max() <= 1e-10 * max(1, float(gradient.abs().max()))


@pytest.mark.parametrize("implementation", ["dense", "tiled"])
@pytest.mark.parametrize("name", ["selfcon", "selfcon-star", "supcon"])
def test_the_temperature_has_a_gradient(name: str, implementation: str) -> None:
    method = selfcon.get_method(name)
    features, labels = torch.randn(6, method.views, 2, 5, dtype=torch.float64), torch.tensor([0, 0, 1, 1, 2, 2])

    def loss(tau: Tensor) -> Tensor:
        return method.loss(features, labels, temperature=tau, implementation=implementation)

    tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(loss, tau)
    torch.testing.assert_close(loss(tau).detach(), method.loss(features, labels, temperature=0.3))
    # The released scale is no way for the temperature to fall.
    scaled = method.loss(features, labels, temperature=tau, implementation=implementation, base_temperature=0.1)
    (ours,), (plain,) = torch.autograd.grad(scaled, tau), torch.autograd.grad(loss(tau), tau)
    torch.testing.assert_close(ours, 3 * plain)


def check_kernels(device: str, samples: int, dims: list[int], names: Sequence[str] = CONTRASTIVE) -> None:
    """Against float64, for every method, on random and on clustered features; N is a multiple of nothing."""
    for name in names:
        method = selfcon.get_method(name)
        exits = 3 if method.uses_exits else 1
        for dim in dims:
            for spread, most in ((0.2, 0.01), (1e6, 0.002)):
                flat, labels = clustered(samples, method.views * exits, dim, spread=spread)
                features = flat.view(samples, method.views, exits, dim).to(device)
                labels = labels.to(device)
                for temperature in (0.1, 0.02):
                    options = {"temperature": temperature, "alpha": 0.7}
                    expected, gradient = loss_and_gradient(name, features.double(), labels, "tiled", **options)
                    ours, our_gradient = loss_and_gradient(name, features, labels, "triton", **options)
                    case = (name, dim, spread, temperature)
                    close = 1e-5 if temperature > 0.05 else 5e-5
                    assert abs(ours - expected) <= close * abs(expected), (case, ours, expected)
                    off = (our_gradient - gradient).norm() / gradient.norm()
                    assert off <= most, (case, off)
    tau = torch.tensor(0.1, device=device, requires_grad=True)
    selfcon.get_method("selfcon").loss(features[:, :1], labels, temperature=tau, implementation="triton").backward()
    wide = tau.detach().double().requires_grad_()
    selfcon.get_method("selfcon").loss(
        features[:, :1].double(), labels, temperature=wide, implementation="tiled"
    ).backward()
    torch.testing.assert_close(tau.grad.double(), wide.grad, rtol=1e-2, atol=1e-3)  # type: ignore[union-attr]


def check_temperature(device: str) -> None:
    """The temperature's gradient against float64, where classes or all features are nearly equal."""
    rng = torch.Generator().manual_seed(0)
    alike = torch.randn(24, generator=rng) + 0.3 * torch.randn(101, 2, 24, generator=rng)
    cases = [clustered(101, 2, 24, spread=spread) for spread in (0.05, 0.1, 0.2, 1e6)]
    for name in ("selfcon", "selfcon-star", "supcon-s"):
        for features, labels in [*cases, (alike, cases[0][1])]:
            found = []
            for dtype, implementation in ((torch.float64, "tiled"), (torch.float32, "triton")):
                tau = torch.tensor(0.1, dtype=dtype, device=device, requires_grad=True)
                x = features[:, None].to(device, dtype)
                method = selfcon.get_method(name)
                method.loss(x, labels.to(device), temperature=tau, implementation=implementation).backward()
                assert tau.grad is not None
                found.append(float(tau.grad))
            assert found[1] == pytest.approx(found[0], rel=1e-3), name


def check_remembered(device: str) -> None:
    """Memory in the kernels, against float64."""
    for name in ("selfcon", "selfcon-star", "simclr"):
        method = selfcon.get_method(name)
        features, labels = clustered(37, 2, 24, spread=0.5)
        features = features.view(37, method.views, -1, 24).to(device)
        theirs, known = (each.to(device) for each in clustered(53, 2, 24, spread=0.5))
        for temperature in (0.1, 0.02):
            expected, gradient = loss_and_gradient(
                name,
                features.double(),
                labels.to(device),
                "dense",
                temperature=temperature,
                memory=(theirs.double(), known),
            )
            ours, our_gradient = loss_and_gradient(
                name, features, labels.to(device), "triton", temperature=temperature, memory=(theirs, known)
            )
            assert abs(ours - expected) <= 5e-5 * abs(expected), (name, ours, expected)
            assert (our_gradient - gradient).norm() <= 0.01 * gradient.norm(), name


def check_rows(device: str) -> None:
    """Anchors that are some of the rows, as in a process of several; places found by counting and by sorting."""
    from selfcon.losses import contrast_triton

    features, groups = clustered(101, 3, 24, spread=0.5)
    z = torch.nn.functional.normalize(features, dim=2).flatten(0, 1).to(device)
    groups, exits = groups.repeat_interleave(3).to(device), torch.arange(3, device=device).repeat(101)
    opposite = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], device=device)[:, None].expand(2, 1, 2).reshape(1, 1, 2, 2)
    _, gradient = loss_and_gradient("selfcon", opposite, torch.zeros(1).long().to(device), "triton", temperature=0.025)
    assert gradient.isfinite().all()
    for name in ("selfcon", "selfcon-star"):
        terms = selfcon.get_method(name).terms
        for own in (slice(0, 303), slice(0, 100), slice(100, 303)):
            for temperature in (0.1, 0.01):
                found = []
                for engine, x, counted in (
                    (tiled.Tiles(), z.double(), 0),
                    (contrast_triton.Kernels(), z, 0),
                    (contrast_triton.Kernels(), z, 4096),
                ):
                    contrast_triton._COUNTED = counted
                    tau = torch.tensor(temperature, dtype=x.dtype, device=device)
                    pairs = Pairs(x, groups, exits, own, tuple(terms), tau, stable=temperature > 0.05)
                    log_denominator, attraction, positives, _ = engine.statistics(pairs)
                    pull = torch.linspace(1, 2, log_denominator.numel(), device=device).view_as(log_denominator).to(x)
                    gradient = engine.gradient(pairs, log_denominator, pull, pull / positives.clamp(min=1))
                    found.append([log_denominator, attraction, positives, gradient])
                for ours in found[1:]:
                    for mine, expected in zip(ours, found[0], strict=True):
                        off = (mine - expected).double().norm() / expected.double().norm()
                        assert off < 2e-3, (name, own, temperature, off)


@pytest.mark.slow
def test_the_kernels_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    script = (
        "from tests.losses.test_implementations import check_kernels, check_remembered, check_rows, check_temperature\n"
        "check_kernels('cpu', 37, [24])\n"
        "check_rows('cpu')\n"
        "check_temperature('cpu')\n"
        "check_remembered('cpu')"
    )
    subprocess.run([sys.executable, "-c", script], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True, timeout=600)


_MEMORY = """
import resource, torch, selfcon
features = torch.randn(8_000, 1, 2, 32, requires_grad=True)
labels = torch.randint(0, 100, (8_000,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
selfcon.get_method("selfcon").loss(features, labels, implementation="tiled").backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20)
"""


@pytest.mark.slow
def test_tiles_need_little_memory() -> None:
    done = subprocess.run([sys.executable, "-c", _MEMORY], check=True, capture_output=True, text=True, timeout=300)
    assert float(done.stdout) < 0.5  # GiB; the dense form's matrices of 16,000 x 16,000 would take more than 4


def test_what_is_chosen_and_refused() -> None:
    features, labels = torch.randn(4, 1, 2, 600), torch.tensor([0, 0, 1, 1])
    method = selfcon.get_method("selfcon")
    with pytest.raises(UsageError, match="did you mean 'tiled'"):
        method.loss(features, labels, implementation="tild")
    with pytest.raises(UsageError, match="one floating-point number"):
        method.loss(features, labels, temperature=torch.ones(2))
    with pytest.raises(UsageError, match="runs on a GPU"):
        method.loss(features[..., :8], labels, implementation="triton")
    for rows, expected in ((4096, "dense"), (4097, "tiled")):
        z = torch.zeros(rows, 4)
        contrast = Contrast(z, torch.zeros(rows), torch.zeros(rows), slice(0, rows))
        assert choose_implementation(contrast, method.terms) == expected


class Listening(tiled.Tiles):
    """Tiles that keep what they were told."""

    def statistics(self, pairs: Pairs) -> Statistics:
        self.pairs = pairs
        return super().statistics(pairs)


def test_small_and_learnt_temperatures_are_not_called_stable() -> None:
    z = torch.nn.functional.normalize(torch.randn(4, 8), dim=1)
    contrast = Contrast(z, torch.tensor([0, 0, 1, 1]), torch.zeros(4, dtype=torch.long), slice(0, 4))
    engine = Listening()
    for temperature, stable in ((0.03, True), (0.1, True), (0.029, False), (torch.tensor(0.1), False)):
        pairwise.term_sums(contrast, selfcon.get_method("supcon").terms, temperature, engine)
        assert engine.pairs.stable is stable


class SaidToBeOnGpu:
    """What is looked at of features to choose an implementation for them."""

    device, dtype = torch.device("cuda"), torch.float32

    def __init__(self, rows: int) -> None:
        self.shape = (rows, 4)

    def __len__(self) -> int:
        return self.shape[0]


def test_what_the_kernels_take(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is made for Linux only")
    from selfcon.losses import contrast_triton  # before it would be made for the interpreter, and stay so

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    features, labels = torch.randn(4, 1, 2, 513), torch.tensor([0, 0, 1, 1])
    terms = selfcon.get_method("selfcon-star").terms

    def refused(words: str, features: Tensor, terms: Sequence[Term] = terms) -> None:
        with pytest.raises(UsageError, match=words):
            contrastive_loss(features, labels, terms, implementation="triton")

    z = torch.zeros(4097, 512)
    contrast = Contrast(z, torch.zeros(4097), torch.zeros(4097), slice(0, 4097))
    assert choose_implementation(contrast, terms) == "triton"
    refused("up to 512 dimensions, not torch.float32 with 513", features)
    refused("up to 512 dimensions, not torch.float64 with 8", features[..., :8].double())
    refused("takes 2 terms, not 3", features[..., :8], [*terms, terms[0]])
    monkeypatch.setattr(contrast_triton, "fits", lambda dimension, device: dimension != 8)
    refused("too little shared memory on this GPU for 8 dimensions", features[..., :8])
    monkeypatch.delenv("TRITON_INTERPRET")
    for rows, expected in ((2048, "dense"), (2049, "triton")):
        contrast = Contrast(SaidToBeOnGpu(rows), torch.zeros(rows), torch.zeros(rows), slice(0, rows))  # type: ignore[arg-type]
        assert choose_implementation(contrast, terms) == expected
