"""Features and labels of all processes, with the gradient that leads back to the process they came from."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from selfcon.errors import UsageError


def world_size(process_group: dist.ProcessGroup | None) -> int:
    """The number of processes that would take part; 1 without a process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    world = dist.get_world_size(process_group)
    if world < 1:
        raise UsageError(f"Process {dist.get_rank()} is not in the process group that it was given.")
    return world


def count_rows(rows: Tensor, process_group: dist.ProcessGroup | None) -> list[int]:
    """How many rows each process holds, in the order of ranks: they may differ."""
    count = torch.full((1,), len(rows), device=rows.device)
    counts = [torch.empty_like(count) for _ in range(world_size(process_group))]
    dist.all_gather(counts, count, group=process_group)
    return [int(count) for count in counts]


def weigh_share(loss: Tensor, rows: int, process_group: dist.ProcessGroup | None) -> Tensor:
    """A loss that is a mean over this process's rows, so that the mean of all processes is that over all rows."""
    world = world_size(process_group)
    if world == 1:
        return loss
    total = torch.full((), float(rows), dtype=torch.float64, device=loss.device)
    dist.all_reduce(total, group=process_group)
    return loss * (rows * world / total).to(loss.dtype)


def join_rows(rows: Tensor) -> Tensor:
    """The parts of all processes together again; without gradient."""
    if world_size(None) == 1:
        return rows
    return gather_rows(rows.detach(), count_rows(rows, None), None)


def own_rows(sizes: list[int], process_group: dist.ProcessGroup | None) -> slice:
    """Where the rows of this process stand among those of all."""
    rank = dist.get_rank(process_group)
    start = sum(sizes[:rank])
    return slice(start, start + sizes[rank])


def gather_rows(rows: Tensor, sizes: list[int], process_group: dist.ProcessGroup | None) -> Tensor:
    """The rows of all processes, one below the other in the order of ranks."""
    gathered: Tensor = _GatherRows.apply(rows, sizes, process_group)
    return gathered


class _GatherRows(torch.autograd.Function):
    """Forward concatenates; backward returns to each process the sum of all processes' gradients of its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sizes: list[int], process_group: dist.ProcessGroup | None) -> Tensor:
        ctx.sizes, ctx.process_group = sizes, process_group
        # Collectives want equal shapes, so rows are padded to the longest and cut again.
        padded = rows.new_zeros(max(sizes), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=process_group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        grad = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.process_group)
        return grad.split(ctx.sizes)[dist.get_rank(ctx.process_group)], None, None
