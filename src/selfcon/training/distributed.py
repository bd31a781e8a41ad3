"""Several processes as one: who we are, who speaks, and how all come to know what one of them found out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from selfcon.data.parts import Part
from selfcon.errors import SelfconError

Result = TypeVar("Result")
_LOST = "Another process of this run was lost; the same command goes on from the last checkpoint."
_MEETINGS = itertools.count()
_PATIENCE = timedelta(minutes=10)  # a collective that takes longer has lost a partner


class World(Part):
    """The processes of a run; alone unless torchrun started several."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0

    def tell(self, find: Callable[[], Result]) -> Result:
        """What the main process finds; where it raises, all do."""
        if self.size == 1:
            return find()
        told: list[Any] = [None]
        if self.is_main:
            try:
                told = [(find(), None)]
            except SelfconError as error:
                told = [(None, error)]
        dist.broadcast_object_list(told)
        found, raised = told[0]
        if raised is not None:
            raised.of_all = True
            raise raised
        return found  # type: ignore[no-any-return]

    def anywhere(self, *here: bool, device: torch.device) -> list[bool]:
        """Which of these are so in any process."""
        if self.size == 1:
            return list(here)
        flags = torch.tensor(here, dtype=torch.float32, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    def most(self, number: int, device: torch.device) -> int:
        """The largest of the numbers that the processes have."""
        if self.size == 1:
            return number
        found = torch.tensor(number, device=device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return int(found)

    def everywhere(self, flag: Tensor) -> Tensor:
        """Whether it is so in all processes, as a tensor that nobody has to wait for."""
        if self.size == 1:
            return flag
        least = flag.float()
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        return least > 0

    def total(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.size == 1:
            return value
        value = value.clone()
        dist.all_reduce(value)
        return value

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes."""
        return value if self.size == 1 else self.total(value) / self.size

    def collect(self, tensor: Tensor, device: torch.device) -> list[Tensor]:
        """The tensors of all processes, of one shape, in main memory."""
        if self.size == 1:
            return [tensor]
        found = [torch.empty_like(tensor, device=device) for _ in range(self.size)]
        dist.all_gather(found, tensor.to(device))
        return [each.cpu() for each in found]

    def level(self, module: nn.Module) -> None:
        """Give the main process's buffers to all: statistics of batches that each saw for itself differ."""
        if self.size > 1:
            for buffer in module.buffers():
                dist.broadcast(buffer, src=0)

    def broadcast(self, tensors: dict[str, Tensor] | None, device: torch.device) -> dict[str, Tensor]:
        """Tensors of the main process, in all of them, in main memory."""
        own = tensors or {}
        shapes = self.tell(lambda: {name: (value.shape, value.dtype) for name, value in own.items()})
        found = {}
        for name, (shape, dtype) in shapes.items():
            value = own[name] if name in own else torch.empty(shape, dtype=dtype)
            there = value.to(device)
            dist.broadcast(there, src=0)
            found[name] = there.cpu()
        return found


ALONE = World()


def under_torchrun() -> bool:
    """Whether torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def own_device(device: torch.device) -> torch.device:
    """The device of this process: on a machine with several GPUs each takes its own."""
    if str(device) == "cuda" and under_torchrun():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


def _meet(backend: str) -> None:
    store, rank, size = next(rendezvous("env://", timeout=_PATIENCE))
    # After a restart, or in a later run of this process, addresses that are gone must not be found.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    own = dist.PrefixStore(f"selfcon/{attempt}/{next(_MEETINGS)}", store)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=_PATIENCE)


def _lost() -> SelfconError:
    error = SelfconError(_LOST)
    error.of_all = True
    return error


@contextmanager
def join(device: torch.device) -> Iterator[World]:
    """Meet the other processes, if torchrun started any, and part from them in the end."""
    if not under_torchrun():
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    joined = not dist.is_initialized()
    if joined:
        _meet("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size())
    except dist.DistError as error:
        raise _lost() from error
    except RuntimeError as error:
        if "gloo" in str(error) or "NCCL" in str(error):
            raise _lost() from error
        raise
    finally:
        if joined:
            dist.destroy_process_group()
