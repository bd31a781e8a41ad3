"""One data set for several processes: which samples of a batch are whose, and images that are spread over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from selfcon.errors import SelfconError, UsageError


@dataclass(frozen=True)
class Part:
    """One of several processes; alone unless there are more."""

    rank: int = 0
    size: int = 1

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        """Every process's share of rows that all have, in the order of ranks; shares differ by at most one."""
        return rows.tensor_split(self.size)

    def share(self, rows: Tensor) -> Tensor:
        """This process's share."""
        return self.split(rows)[self.rank]


WHOLE = Part()


def current_part() -> Part:
    """Who this process is among those it met; alone if it met none."""
    if not (dist.is_available() and dist.is_initialized()):
        return WHOLE
    return Part(dist.get_rank(), dist.get_world_size())


def all_agree(here: bool, device: torch.device) -> bool:
    """Whether it is so in every process."""
    flag = torch.tensor(float(here), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def sum_of_all(values: Tensor, device: torch.device) -> Tensor:
    """The sum over all processes, where the values were."""
    total = values.to(device)
    dist.all_reduce(total)
    return total.to(values.device)


def told_by_first(text: str) -> str:
    """What the first process says, in all of them."""
    said = [text]
    dist.broadcast_object_list(said)
    return said[0]


@contextmanager
def raise_together() -> Iterator[None]:
    """What goes wrong for one process goes wrong for all, in its words: none is left to wait for it."""
    mine: SelfconError | None = None
    try:
        yield
    except SelfconError as error:
        mine = error
    every: list[SelfconError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    first = next((error for error in every if error is not None), None)
    if first is not None:
        first.of_all = True
        raise first


def exchange(rows: Tensor, wanted: Sequence[Tensor], part: Part, device: torch.device) -> Tensor:
    """The rows of the samples that this process wants, in their order, on a device.

    Sample s is row s // W of process s % W. Each process must call this with the wishes of all, which are in main
    memory so that nobody waits for a GPU to know how many rows go where.
    """
    if len(wanted) != part.size:
        raise UsageError("Images that are spread over processes are asked for by all of them, each with its part.")
    owners = [samples % part.size for samples in wanted]
    mine = owners[part.rank]
    going = [samples[owner == part.rank] // part.size for samples, owner in zip(wanted, owners, strict=True)]
    coming = torch.bincount(mine, minlength=part.size).tolist()
    outgoing = rows[torch.cat(going).to(rows.device)].to(device)
    incoming = outgoing.new_empty(len(mine), *rows.shape[1:])
    dist.all_to_all_single(incoming, outgoing, coming, [len(each) for each in going])
    # They come sorted by owner.
    places = torch.empty_like(mine)
    places[mine.argsort(stable=True)] = torch.arange(len(mine))
    return incoming[places.to(device)]
