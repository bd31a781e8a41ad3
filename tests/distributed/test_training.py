"""Several processes train as one does: same samples, same weights, exact counts; and go on in other numbers."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import selfcon
from selfcon.config import make_settings
from selfcon.losses import Term, methods
from selfcon.losses.gather import join_rows
from selfcon.networks.sync_norm import synchronise
from selfcon.training.distributed import World
from selfcon.training.folder import RunFolder
from selfcon.training.loop import train
from selfcon.training.signals import Stop
from selfcon.training.trainer import Trainer
from selfcon.workflows.pipeline import make_pretraining
from selfcon.workflows.task import prepare
from tests.distributed.processes import start_processes
from tests.workflows.conftest import write_stripes

COMMAND = ["fit", "--data", "stripes.npz", "--width", "0.125", "--epochs", "2", "--batch-size", "24", "--device", "cpu"]
COMMAND += [
    "--probe.epochs",
    "2",
    "--probe.batch_size",
    "32",
    "--optim.name",
    "sgd",
    "--lr",
    "0.05",
    "--sync_bn",
    "true",
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_stripes(tmp_path / "stripes.npz", train=98, test=37)  # nothing divides
    return tmp_path


def start(
    place: Path, processes: int, *arguments: str, restarts: int = 0, script: str | None = None
) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    launcher += ["--max-restarts", str(restarts), *(["-m", "selfcon"] if script is None else [script])]
    command = [*launcher, *arguments] if processes > 1 else [sys.executable, "-m", "selfcon", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(place: Path, processes: int, *arguments: str, code: int = 0) -> str:
    process = start(place, processes, *arguments)
    out, errors = process.communicate(timeout=180)
    assert process.returncode == code, errors
    return out + errors


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_are_one(place: Path) -> None:
    for processes in (1, 2):
        said = run(place, processes, *COMMAND, "--precision", "fp64", "--out", f"run{processes}")
        assert said.count("accuracy, %") == 1
    one, two = (json.loads((place / f"run{n}" / "results.json").read_text()) for n in (1, 2))
    assert losses(place / "run2") == pytest.approx(losses(place / "run1"), rel=1e-8)
    weights = [load_file(place / f"run{n}" / "model.safetensors") for n in (1, 2)]
    for name, value in weights[0].items():
        assert (weights[1][name] - value).abs().max() <= 1e-8 * max(1.0, float(value.abs().max())), name
    counts = [round(result["accuracy"]["ensemble"]["top1"] * 37 / 100, 6) for result in (one, two)]
    assert counts[1] == round(counts[1])  # of 37 images, none twice
    assert (place / "run2" / "report.html").exists()


def take_steps(rank: int, size: int, folder: str) -> None:
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    torch.set_num_threads(1)
    given = {"data": "digits", "width": 0.125, "batch_size": 64, "lr": 0.05, "sync_bn": True, "optim.name": "sgd"}
    given["cutmix"] = 0.5
    world = World(rank, size)
    stage = make_pretraining(prepare(make_settings(given), torch.device("cpu"), world), lambda *_: None)
    trainer = Trainer(stage, torch.device("cpu"))
    seen, sums = [], [0.0]
    for step, batch in enumerate(itertools.islice(stage.batches(0, 0), 20)):
        trainer.update(batch.images, batch.labels, step)
        sums.append(float(world.mean(trainer.loss_sum)))
        seen.append(join_rows(batch.samples))
    if rank == 0:
        torch.save((torch.tensor(sums).diff(), torch.stack(seen)), f"{folder}/{size}.pt")
    if size > 1:
        dist.destroy_process_group()


def test_the_first_twenty_steps_on_the_digits(tmp_path: Path) -> None:
    take_steps(0, 1, str(tmp_path))
    start_processes(take_steps, (2, str(tmp_path)), nprocs=2)
    (one, samples), (two, same) = (torch.load(tmp_path / f"{size}.pt") for size in (1, 2))
    assert len(one) == 20
    assert torch.equal(samples, same)
    torch.testing.assert_close(two, one, rtol=1e-5, atol=1e-5)


class Kept(nn.Module):
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.proxies = nn.Linear(128, 10, bias=False)
        self.register_buffer("last", torch.ones(1, 128))


@dataclass(frozen=True, kw_only=True)
class Proxies(selfcon.Method):
    """A proxy of each class and a feature of the last batch beside SupCon-S."""

    kept: Kept

    def loss(self, features: Tensor, labels: Tensor | None = None, **options: Any) -> Tensor:
        assert labels is not None
        z, normalise = features[:, 0, 0], nn.functional.normalize
        near = normalise(z) @ normalise(self.kept.proxies.weight).T
        contrast = super().loss(features, labels, **options, memory=(self.kept.last, torch.zeros_like(labels[:1])))
        with torch.no_grad():
            self.kept.last.copy_(z[:1])  # which differ: those of the first process count
        return nn.functional.cross_entropy(near, labels) + contrast


def train_proxies(rank: int, size: int, folder: str, pieces: int | None) -> None:
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{pieces}", rank=rank, world_size=size)
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # each process draws its own: those of the first count
    terms = (Term("F", "F", "F"),)
    selfcon.add_method(Proxies(name="proxies", paper="", uses_exits=False, terms=terms, kept=Kept()))
    given = {"data": "digits", "width": 0.125, "batch_size": 16, "lr": 0.05, "norm": "group", "method": "proxies"}
    given |= {"precision": "fp64", "optim.name": "sgd", "micro_batch": pieces}
    world, device = World(rank, size), torch.device("cpu")
    stage = make_pretraining(prepare(make_settings(given), device, world), lambda *_: None)
    trainer = Trainer(stage, device)
    for step, batch in enumerate(itertools.islice(stage.batches(0, 0), 5)):
        trainer.update(batch.images, batch.labels, step)
    left_out = world.total(stage.counts["anchors_left_out"])
    world.level(stage.module)
    torch.save((stage.module.state_dict(), left_out), f"{folder}/{size}-{pieces}-{rank}.pt")
    if size > 1:
        dist.destroy_process_group()


@pytest.mark.parametrize("pieces", [None, 4])
def test_modules_of_a_method_are_trained_as_by_one_process(
    pieces: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("selfcon.losses.methods._METHODS", dict(methods._METHODS))
    monkeypatch.setattr("selfcon.losses.methods._ADDED", {})
    train_proxies(0, 1, str(tmp_path), pieces)
    start_processes(train_proxies, (2, str(tmp_path), pieces), nprocs=2)
    (one, left_out), *both = (
        torch.load(tmp_path / f"{name}.pt") for name in (f"1-{pieces}-0", *(f"2-{pieces}-{n}" for n in "01"))
    )
    assert left_out > 0
    for two, theirs in both:
        assert theirs == left_out
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, rtol=1e-8, atol=1e-9, msg=name)


def train_and_save(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    torch.set_num_threads(1)
    given = {"data": "digits", "width": 0.125, "batch_size": 256, "epochs": 2, "ema": 0.9, "watch.knn_every": 0}
    settings, device = make_settings(given), torch.device("cpu")
    stage = make_pretraining(prepare(settings, device, World(rank, size)), lambda *_: None)
    run = RunFolder.open(f"{folder}/run", settings, verb="fit") if rank == 0 else RunFolder.follow(f"{folder}/run")
    # By its own clock the second process would never save, and the first one after every step.
    trained = train(stage, run, device=device, stop=Stop(), minutes_between_saves=1e-9 if rank == 0 else 5.0)
    torch.save((dict(stage.module.named_buffers()), dict(trained.module.named_buffers())), f"{folder}/{rank}.pt")
    newest = load_file(max(Path(folder).glob("run/checkpoints/*/step-*/state.safetensors")))
    assert torch.equal(newest["random.cpu.1" if rank else "random.cpu"], torch.get_rng_state())
    assert not torch.equal(newest["random.cpu"], newest["random.cpu.1"])
    dist.destroy_process_group()


def test_all_save_when_the_first_does_and_end_with_one_network(tmp_path: Path) -> None:
    start_processes(train_and_save, (2, str(tmp_path)), nprocs=2)
    assert list((tmp_path / "run" / "checkpoints").glob("*/step-*"))
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for mine, other in zip(first, second, strict=True):
        assert any(name.endswith("running_mean") for name in mine)
        for name, value in mine.items():
            assert torch.equal(value, other[name]), name


def train_in_pieces(rank: int, size: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size)
    torch.set_num_threads(1)
    world, device = World(rank, size), torch.device("cpu")
    given = {"data": "digits", "width": 0.125, "batch_size": 16, "micro_batch": 4, "sync_bn": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that pieces have statistics of their own
        stage = make_pretraining(prepare(make_settings(given), device, world), lambda *_: None)
    trainer = Trainer(stage, device)
    for step, last in enumerate((9, 15)):  # of 16; in the latter the first share is that of a whole batch
        share = (last + 1 - rank) // 2
        trainer.update(torch.randn(share, 3, 16, 16), torch.arange(share) % 2, step)
    assert torch.isfinite(trainer.loss_sum)
    dist.destroy_process_group()


def test_unequal_shares_in_pieces(tmp_path: Path) -> None:
    start_processes(train_in_pieces, (2, str(tmp_path)), nprocs=2)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_going_on_with_another_number_of_processes(place: Path, first: int, then: int) -> None:
    run(place, 1, *COMMAND, "--out", "whole")
    folder = place / "run"
    process = start(place, first, *COMMAND, "--out", folder.name)
    deadline = time.monotonic() + 90
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert process.returncode != 0 or (folder / "results.json").exists()
    run(place, then, *COMMAND, "--out", folder.name)
    assert losses(folder) == pytest.approx(losses(place / "whole"), rel=1e-4)


@pytest.mark.slow
def test_mistakes_end_all_processes_at_once(place: Path) -> None:
    said = run(place, 2, *COMMAND, "--out", "x", "--lr", "nan", "--epoch", "3", code=1)
    assert said.count("lr should be a finite number") == said.count("did you mean '--epochs'?") == 1
    assert not (place / "x").exists()
    # torchrun ends with 1 whatever it was, and tells what the first process to end said.
    assert re.search(r"exitcode +: 64 ", said)
    said = run(place, 2, *COMMAND, "--out", "x", "--batch-size", "25", code=1)
    assert re.search(r"exitcode +: 64 ", said)
    assert "batch_size is 25, which 2 processes cannot share evenly" in said
    assert said.count("cannot share evenly") == 1
    said = run(place, 3, *COMMAND, "--out", "x", "--batch-size", "21", "--probe.batch_size", "48", code=1)
    assert "would hold 2 images for 3 processes: choose another probe.batch_size" in said


_LOSES_ONE = """
import os, signal, sys
from selfcon.training import loop
from selfcon.cli import main
rank, attempt, update = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"], loop.Trainer.update
lost, at = sys.argv[1:3]
def updated(self, images, labels, step):
    if self.stage.name == "pretrain":
        with open(f"steps-{rank}", "a") as file:
            file.write(f"{step}\\n")
        if (rank, attempt, step) == (lost, "0", int(at)):
            os.kill(os.getpid(), signal.SIGKILL)
    update(self, images, labels, step)
loop.Trainer.update = updated
loop._Saves.due = property(lambda self: True)  # a checkpoint after every step
main(sys.argv[3:])
"""


def lose(place: Path, rank: int, at: int, *, restarts: int) -> tuple[int, str, list[int]]:
    """A run of which a process kills itself in a step; within a minute all ended, or the run is done.

    Also the steps that the other process began.
    """
    (place / "script.py").write_text(_LOSES_ONE)
    noted = place / f"steps-{1 - rank}"
    noted.unlink(missing_ok=True)
    process = start(place, 2, str(rank), str(at), *COMMAND, "--out", "run", restarts=restarts, script="script.py")
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    return process.returncode, errors, list(map(int, noted.read_text().split()))


@pytest.mark.slow
def test_a_process_that_dies_ends_all_or_is_started_again(place: Path) -> None:
    run(place, 2, *COMMAND, "--out", "whole")
    code, errors, steps = lose(place, 0, 3, restarts=0)
    assert code == 1, errors
    assert steps == [0, 1, 2, 3]
    code, errors, steps = lose(place, 1, 7, restarts=1)
    assert code == 0, errors
    assert "Another process of this run was lost; the same command goes on" in errors
    assert errors.count("pretrain: goes on in epoch") == 2  # with the same command, and when torchrun started it again
    assert steps == [*range(3, 8), *range(7, 10)]
    same = [load_file(place / name / "model.safetensors") for name in ("whole", "run")]
    for name, value in same[0].items():
        assert torch.equal(same[1][name], value), name


def layers(*, synchronised: bool) -> nn.Module:
    torch.manual_seed(0)
    maps = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)]
    maps += [nn.BatchNorm2d(2, affine=False, momentum=None)]
    vectors = [nn.Flatten(2), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(32, 5), nn.BatchNorm1d(5)]
    net = nn.Sequential(*maps, *vectors).double()
    if synchronised:
        synchronise(net)
    return net.train()


def inputs() -> Tensor:
    return 5 + torch.randn(7, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def normalise_a_share(rank: int, sizes: list[int], folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=len(sizes))
    net = layers(synchronised=True)
    x = inputs().split(sizes)[rank].clone().requires_grad_()
    out = net(x)
    (out**3).sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    dist.all_reduce(gradients)
    kept: dict[str, Any] = {"out": out.detach(), "x": x.grad, "gradients": gradients, "state": net.state_dict()}
    torch.save(kept, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", [[4, 3], [1, 5, 1]])
def test_synchronised_batch_norm_is_that_of_one_process(sizes: list[int], tmp_path: Path) -> None:
    start_processes(normalise_a_share, (sizes, str(tmp_path)), nprocs=len(sizes))
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(len(sizes))]
    net = layers(synchronised=False)
    x = inputs().requires_grad_()
    out = net(x)
    (out**3).sum().backward()
    torch.testing.assert_close(torch.cat([part["out"] for part in parts]), out.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([part["x"] for part in parts]), x.grad, rtol=1e-9, atol=1e-9)
    gradients = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    torch.testing.assert_close(parts[0]["gradients"], gradients, rtol=1e-9, atol=1e-9)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(parts[-1]["state"][name], value, rtol=1e-10, atol=1e-10)


def test_synchronised_batch_norm_of_one_process_is_the_plain_one() -> None:
    plain, ours = layers(synchronised=False), layers(synchronised=True)
    for _ in range(2):
        torch.testing.assert_close(ours(inputs()), plain(inputs()))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
