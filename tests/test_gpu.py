"""What must hold on a GPU; these tests run where there is one."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import selfcon
from selfcon.config import Optim, Schedule
from selfcon.data.augment import augment
from selfcon.data.draws import draw
from selfcon.data.mixing import cut_mix
from selfcon.data.policies import POLICIES
from selfcon.data.random import permute
from selfcon.data.resident import make_resident
from selfcon.data.sources import load
from selfcon.data.split import Batch
from selfcon.data.streamed import make_streamed
from selfcon.data.views import make_views
from selfcon.errors import NonFiniteError, StoppedError
from selfcon.losses import Tally
from selfcon.training.replay import Replayed
from selfcon.training.trainer import Stage, Trainer
from tests.data.test_streamed import FileLike
from tests.data.test_views import compare, some_images, some_look
from tests.losses.test_implementations import check_kernels, check_remembered, check_rows, check_temperature
from tests.losses.test_methods import CONTRASTIVE
from tests.workflows.conftest import write_stripes

contrast_triton: Any = pytest.importorskip("selfcon.losses.contrast_triton")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype"),
    pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated:DeprecationWarning"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be:DeprecationWarning"),  # likewise
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Anything that makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CONTRASTIVE)
def test_losses_equal_the_cpus_and_never_wait(name: str) -> None:
    method = selfcon.get_method(name)
    features = torch.randn(32, method.views, 3, 64, dtype=torch.float64)
    labels = torch.randint(0, 5, (32,))
    on_gpu, gpu_labels, tally = features.cuda().requires_grad_(), labels.cuda(), Tally()
    method.loss(on_gpu, gpu_labels, tally=tally)  # sets up the library
    with no_waiting():
        loss = method.loss(on_gpu, gpu_labels, tally=tally)
        (gradient,) = torch.autograd.grad(loss, on_gpu)
    features.requires_grad_()
    expected = method.loss(features, labels)
    (expected_gradient,) = torch.autograd.grad(expected, features)
    torch.testing.assert_close(loss.cpu(), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(gradient.cpu(), expected_gradient, rtol=1e-9, atol=1e-11)
    assert tally.anchors > 0


def test_a_loss_in_a_cuda_graph() -> None:
    method, tally = selfcon.get_method("selfcon-star"), Tally()
    features, labels = torch.randn(64, 1, 2, 32, device="cuda", requires_grad=True), torch.arange(64).cuda() % 7
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            method.loss(features, labels, tally=tally).backward()
    torch.cuda.current_stream().wait_stream(stream)
    features.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = method.loss(features, labels, tally=tally)
        loss.backward()
    before = tally.anchors
    with torch.no_grad():
        features.copy_(torch.randn_like(features))
    graph.replay()
    torch.testing.assert_close(loss.detach(), method.loss(features, labels).detach())
    assert tally.anchors == before + 128


@pytest.mark.parametrize("name", POLICIES)
def test_augmentation_and_its_draws_equal_the_cpus(name: str) -> None:
    images = torch.randint(0, 256, (500, 3, 32, 32), dtype=torch.uint8)
    policy, samples = POLICIES[name], torch.randperm(50_000)[:500]
    keys = {"height": 32, "width": 32, "seed": 5, "epoch": 9}
    here, there = draw(policy, samples, **keys), draw(policy, samples.cuda(), **keys)
    for part in vars(here):
        torch.testing.assert_close(getattr(there, part).cpu(), getattr(here, part), rtol=0, atol=1e-7)
    ours, expected = augment(images.cuda(), policy, there, 32).cpu(), augment(images, policy, here, 32)
    difference = (ours - expected).abs()
    if policy.randaugment:
        assert (difference > 2e-3).float().mean() < 0.005
    else:
        assert difference.max() < 2e-3


def test_the_order_of_samples_is_the_cpus() -> None:
    assert torch.equal(permute(50_000, seed=3, epoch=4, device="cuda").cpu(), permute(50_000, seed=3, epoch=4))


def test_the_augmentation_kernel_equals_the_plain_form_and_never_waits() -> None:
    compare("triton", "cuda", count=60, tolerance=2e-4)
    images, rows = some_images(32, 32).cuda(), torch.arange(60).cuda()
    for name in ("standard", "randaugment-standard"):
        look = some_look(name, 32, "cuda")
        make_views(images, rows, rows, look)  # sets up
        with no_waiting():
            make_views(images, rows, rows, look)


def test_compiled_augmentation() -> None:
    images, rows, look = some_images(150, 150).cuda(), torch.arange(60).cuda(), some_look("standard", 140, "cuda")
    difference = make_views(images, rows, rows, look) - make_views(images, rows, rows, look, "plain")
    assert difference.abs().max() < 2e-3


class Line(Stage):
    """A small network on random images: enough steps for plain updates, a recording and its replays."""

    name, epochs, batch_size, samples, seed = "line", 4, 16, 72, 0

    def __init__(self, optimiser: str, *, ema: float | None = None, clip: float | None = None) -> None:
        torch.manual_seed(0)
        self.module = selfcon.create_model("resnet18", exits=[selfcon.Exit(after=2)], stem="small", width=0.25).cuda()
        self.module.to(memory_format=torch.channels_last)
        self.optim, self.ema = Optim.model_validate({"name": optimiser, "clip_norm": clip}), ema
        self.lr = 0.002 if optimiser == "adamw" else 0.05
        self.schedule = Schedule()
        self.images = torch.randn(self.samples, 3, 16, 16, device="cuda")
        self.labels = torch.arange(self.samples, device="cuda") % 5

    def batches(self, epoch: int, first: int) -> Iterator[Batch]:
        for part in torch.arange(self.samples, device="cuda").split(self.batch_size)[first:]:
            yield Batch(self.images[part], self.labels[part], part)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        # Mixed, so that something differs from step to step beside the batch.
        images, others, share = cut_mix(images, labels, self.step, probability=0.5, seed=0)
        output, loss = self.module(images), selfcon.get_method("selfcon").loss_from_output
        return share * loss(output, labels) + (1 - share) * loss(output, others)


def run_line(stage: Line, *, replayed: bool, compiled: bool = False) -> Trainer:
    trainer = Trainer(stage, torch.device("cuda"), compiled=compiled)
    if not replayed:
        trainer._run = trainer._advance
    step = 0
    for epoch in range(stage.epochs):
        for batch in stage.batches(epoch, 0):
            trainer.update(batch.images, batch.labels, step)
            step += 1
    return trainer


@pytest.mark.parametrize("optimiser", ["sgd", "adamw", "lars"])
def test_replayed_and_compiled_updates_are_the_plain_ones(optimiser: str) -> None:
    plain = run_line(Line(optimiser, ema=0.9, clip=1.0), replayed=False)
    expected = torch.cat([p.detach().flatten() for p in plain.result.parameters()])
    start = torch.cat([p.detach().flatten() for p in Line(optimiser).module.parameters()])
    for compiled in (False, True):
        fast = run_line(Line(optimiser, ema=0.9, clip=1.0), replayed=True, compiled=compiled)
        assert isinstance(fast._run, Replayed)
        assert len(fast._run._recorded) == 2
        ours = torch.cat([p.detach().flatten() for p in fast.result.parameters()])
        # Other kernels round differently, which twenty steps (AdamW's by their sign) amplify.
        assert (ours - expected).norm() < 0.1 * (expected - start).norm()
        torch.testing.assert_close(fast.loss_sum, plain.loss_sum, rtol=1e-3, atol=0)


@pytest.mark.parametrize("optimiser", ["sgd", "adamw", "lars"])
def test_from_a_step_that_is_not_finite_nothing_changes(optimiser: str) -> None:
    stage = Line(optimiser)
    stage.epochs = 2  # ten steps: the kernel is replayed when it happens
    good = run_line(stage, replayed=True)
    good.check()
    kept = {name: value.clone() for name, value in stage.module.named_parameters()}
    for step in range(10, 16):
        good.update(stage.images[:16] * (float("nan") if step == 11 else 1), stage.labels[:16], step)
        if step == 10:
            kept = {name: value.clone() for name, value in stage.module.named_parameters()}
    assert all(torch.equal(value, kept[name]) for name, value in stage.module.named_parameters())
    with pytest.raises(NonFiniteError, match="at step 12 of line"):
        good.check()


@pytest.mark.parametrize("dim", [24, 128, 200, 512])
def test_the_kernels_of_the_loss(dim: int) -> None:
    check_kernels("cuda", 333, [dim])


@pytest.mark.parametrize("tile", [tile for _, tile in contrast_triton._TILES], ids=str)
@pytest.mark.parametrize("dim", [64, 128, 200, 512])
def test_the_kernels_with_every_tile(dim: int, tile: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contrast_triton, "_TILES", ((0, tile),))
    if not contrast_triton.fits(dim, torch.device("cuda")):
        pytest.skip("these tiles are not used for this dimension")
    check_kernels("cuda", 333, [dim], ["selfcon", "selfcon-su-star"])


def test_many_features_in_the_kernels() -> None:
    for dim in (64, 128):
        check_kernels("cuda", 11_111, [dim], ["selfcon"])


def test_the_kernels_with_some_rows_as_anchors() -> None:
    check_rows("cuda")


def test_the_temperatures_gradient_and_memory_in_the_kernels() -> None:
    check_temperature("cuda")
    check_remembered("cuda")


def test_not_a_number_stays_visible() -> None:
    features = torch.randn(64, 1, 2, 32, device="cuda")
    features[3] = float("nan")
    loss = selfcon.get_method("selfcon").loss(features, torch.arange(64).cuda() % 4, implementation="triton")
    assert not loss.isfinite()


def test_updates_never_wait() -> None:
    stage = Line("sgd", clip=1.0)
    trainer = run_line(stage, replayed=True)
    with no_waiting():
        for step in range(20, 30):
            trainer.update(stage.images[:16], stage.labels[:16], step)


def test_a_run_on_the_gpu_goes_on(tmp_path: Path) -> None:
    write_stripes(tmp_path / "x.npz", train=240)
    keys: dict[str, Any] = {
        "data": str(tmp_path / "x.npz"),
        "width": 0.25,
        "batch_size": 32,
        "probe.epochs": 10,
        "optim.name": "sgd",
    }
    whole = selfcon.fit(out=tmp_path / "whole", epochs=6, **keys)
    loop = importlib.import_module("selfcon.training.loop")
    original = loop.Trainer.update

    def update(self: Trainer, images: Tensor, labels: Tensor, step: int) -> None:
        original(self, images, labels, step)
        if step == 20:
            os.kill(os.getpid(), signal.SIGTERM)

    loop.Trainer.update = update
    try:
        with pytest.raises(StoppedError):
            selfcon.fit(out=tmp_path / "run", epochs=6, **keys)
    finally:
        loop.Trainer.update = original
    again = selfcon.fit(out=tmp_path / "run", epochs=6, **keys)
    assert abs(again["accuracy"]["ensemble"]["top1"] - whole["accuracy"]["ensemble"]["top1"]) < 15
    assert again["accuracy"]["ensemble"]["top1"] > 50


def test_images_that_do_not_fit_stay_in_main_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_stripes(tmp_path / "x.npz", train=240)
    source = load(str(tmp_path / "x.npz"))
    there = make_resident(source.train, device="cuda")
    monkeypatch.setattr("selfcon.data.resident.has_room", lambda device, wanted: False)
    here = make_resident(source.train, device="cuda")
    assert (there.pixels.device.type, here.pixels.device.type) == ("cuda", "cpu")
    keys: dict[str, Any] = {"batch_size": 50, "seed": 1, "epoch": 2, "views": 2}
    policy = POLICIES["standard"]
    for one, other in zip(there.batches(policy, **keys), here.batches(policy, **keys), strict=True):
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)


def test_streamed_crops_equal_those_of_the_cpu() -> None:
    rng = np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (200 + 30 * row, 300 - 20 * row, 3), dtype=np.uint8) for row in range(8)]
    images = FileLike(pixels)
    options: Any = {"batch_size": 8, "seed": 0, "epoch": 1, "views": 2}
    for policy in ("simple", "standard"):
        seen = []
        for device in ("cpu", "cuda"):
            data = make_streamed(images, size=112, device=device)
            (batch,) = data.batches(POLICIES[policy], **options)
            seen.append(batch.images.cpu())
        assert float((seen[0] - seen[1]).abs().max()) < 3e-3
