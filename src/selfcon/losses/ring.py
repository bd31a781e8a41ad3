"""The objective over processes that never hold all features: blocks of them go around, and their gradients with them.

Each process keeps its own rows as anchors and sees one block of the others at a time, so that its memory does not grow
with the number of processes. A second round brings each block's gradient home.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from selfcon.losses.first_derivative import first_derivative_only
from selfcon.losses.gather import count_rows
from selfcon.losses.pairwise import NO_SECOND, Statistics, add_up
from selfcon.losses.sets import Contrast, Term
from selfcon.losses.tiled import Rectangle, Side


def term_sums(
    contrast: Contrast,
    terms: Sequence[Term],
    temperature: float | Tensor,
    process_group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor]:
    """As `dense.term_sums`, for a contrast that holds the features of this process alone, anchors first.

    What comes behind those is remembered, and does not go around.
    """
    z = contrast.features
    tau = (
        temperature.to(z)
        if isinstance(temperature, Tensor)
        else torch.full((), temperature, dtype=z.dtype, device=z.device)
    )
    sums: Tensor
    counts: Tensor
    sums, counts = _Ring.apply(z, tau, contrast, tuple(terms), process_group)
    return sums, counts


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any,
        z: Tensor,
        tau: Tensor,
        contrast: Contrast,
        terms: tuple[Term, ...],
        process_group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        own, remembered = _sides(z, contrast)
        sizes = count_rows(own.z, process_group)
        log_denominator = z.new_full((len(terms), len(own.z)), -torch.inf)
        attraction = z.new_zeros(len(terms), len(own.z))
        positives = torch.zeros(len(terms), len(own.z), dtype=torch.int64, device=z.device)
        blocks = _go_round(own, sizes, process_group, None)
        for _, block, itself in itertools.chain([(z, remembered, False)], blocks):
            found = Rectangle(own, block, 0 if itself else None, terms, tau).statistics()
            log_denominator = torch.logaddexp(log_denominator, found.log_denominator)
            attraction += found.attraction
            positives += found.positives
        ctx.contrast, ctx.terms, ctx.sizes, ctx.process_group = contrast, terms, sizes, process_group
        return add_up(ctx, z, tau, Statistics(log_denominator, attraction, positives), own.exits, terms)

    @staticmethod
    @first_derivative_only(NO_SECOND)
    def backward(ctx: Any, above: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        z, tau, log_denominator, positives, valid = ctx.saved_tensors
        own, remembered = _sides(z, ctx.contrast)
        pull = above[:, None] * valid
        push = pull / positives.clamp(min=1)
        gradient = torch.zeros_like(own.z)
        pulled = z.new_zeros(())  # sum of z_i . (G Z)_i / tau: what the temperature's gradient needs of this process
        home, nowhere = torch.zeros_like(own.z), torch.zeros_like(remembered.z)
        blocks = _go_round(own, ctx.sizes, ctx.process_group, home)
        for carried, block, itself in itertools.chain([(nowhere, remembered, False)], blocks):
            rectangle = Rectangle(own, block, 0 if itself else None, ctx.terms, tau)
            of_rows, of_block = rectangle.gradient(log_denominator, pull, push)
            gradient += of_rows
            pulled += (own.z * of_rows).sum()
            carried.add_(of_block)
        return torch.cat([gradient + home, nowhere]), -pulled / tau, None, None, None


def _sides(z: Tensor, contrast: Contrast) -> tuple[Side, Side]:
    """The anchors of this process, and what it remembers."""
    everything = Side(z, contrast.groups, contrast.exits)
    return everything.part(contrast.own), everything.part(slice(contrast.own.stop, None))


def _go_round(
    own: Side, sizes: list[int], process_group: dist.ProcessGroup | None, luggage: Tensor | None
) -> Iterator[tuple[Tensor, Side, bool]]:
    """Each process's block in turn, and whether it is the own one.

    What is added to the luggage goes along with its block, and is in `luggage` again after the last.
    """
    rank, world, longest = dist.get_rank(process_group), len(sizes), max(sizes)
    dim = own.z.shape[1]
    block = own
    carried = luggage if luggage is not None else own.z.new_zeros(len(own.z), 0)
    for step in range(world):
        yield carried, block, step == 0
        if step + 1 == world and luggage is None:
            return
        size = sizes[(rank - step - 1) % world]
        # One message: features, luggage, and the whole numbers as they are in another.
        message = own.z.new_zeros(longest, dim + carried.shape[1])
        message[: len(block.z)] = torch.cat([block.z, carried], dim=1)
        facts = torch.zeros(longest, 2, dtype=torch.int64, device=own.z.device)
        facts[: len(block.z)] = torch.stack([block.groups.long(), block.exits.long()], dim=1)
        message, facts = (_pass_on(each, process_group) for each in (message, facts))
        block = Side(message[:size, :dim], facts[:size, 0], facts[:size, 1])
        new = message[:size, dim:]
        if luggage is not None and step + 1 == world:
            luggage.copy_(new)
            return
        carried = new.clone()


def _pass_on(tensor: Tensor, process_group: dist.ProcessGroup | None) -> Tensor:
    """To the next process, and in exchange that of the one before."""
    rank, world = dist.get_rank(process_group), dist.get_world_size(process_group)
    received = torch.empty_like(tensor)
    ranks = dist.get_process_group_ranks(process_group) if process_group is not None else list(range(world))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor.contiguous(), ranks[(rank + 1) % world], process_group),
            dist.P2POp(dist.irecv, received, ranks[(rank - 1) % world], process_group),
        ]
    )
    for work in works:
        work.wait()
    return received
