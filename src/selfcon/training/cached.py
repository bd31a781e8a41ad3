"""Large batches in little memory: the network in pieces, the loss over all of them, then the pieces' gradients.

The network runs twice over each piece, the second time with the random numbers of the first; what is kept in between is
its output alone. The gradient is that of the whole batch, as long as no layer looks beyond its own sample. Batch
normalisation does: with it, the statistics are those of each piece, and the result is that of a network with such
statistics. `norm="group"` has none of this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from selfcon.losses.objective import raised
from selfcon.networks.multi_exit import MultiExitNetwork, Output

Loss = Callable[[Output], Tensor]


def cached_loss(
    net: MultiExitNetwork,
    images: Tensor,
    loss: Loss,
    *,
    views: int,
    piece: int,
    shares: tuple[int, int] | None = None,
    beside: Sequence[Tensor] = (),
) -> Tensor:
    """`loss(net(images))` for images [V·B, 3, S, S], no more than `piece` samples in the network at a time.

    `shares` are the samples of the processes that have fewest and most of them, since all must cut theirs into as many
    pieces: layers may look at those of the others. (Where pieces are of one sample and shares differ, one is of two.)
    `beside` are tensors that the loss is to be differentiated by, too.
    """
    samples = len(images) // views
    parts = list(cut_pieces(samples, piece, shares or (samples, samples)))
    if len(parts) <= 1:
        return loss(net(images))
    hook = torch.zeros((), device=images.device, requires_grad=True)  # so that autograd asks for the gradient
    value: Tensor = _Cached.apply(hook, net, images, loss, views, parts, *beside)
    return value


def cut_pieces(samples: int, piece: int, shares: tuple[int, int]) -> Iterator[slice]:
    """So many samples in pieces of nearly the same size, as many of them in every process."""
    fewest, most = shares
    pieces = max(1, min(fewest, math.ceil(most / piece)))
    ends = [samples * number // pieces for number in range(pieces + 1)]  # none is smaller than another by two
    return (slice(first, last) for first, last in itertools.pairwise(ends))


class _Cached(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any,
        hook: Tensor,
        net: MultiExitNetwork,
        images: Tensor,
        loss: Loss,
        views: int,
        parts: list[slice],
        *beside: Tensor,
    ) -> Tensor:
        buffers = [buffer.clone() for buffer in net.buffers()]
        states, outputs = [], []
        for part in parts:
            states.append(_random_state(images.device))
            with torch.no_grad():
                outputs.append(_flat(net(_cut(images, part, views))))
        for buffer, value in zip(net.buffers(), buffers, strict=True):
            buffer.copy_(value)  # running statistics are for the second time
        keys = list(outputs[0])
        joined = {key: _join([output[key] for output in outputs], views) for key in keys}
        # In at least float32: float16's scaler multiplies only what comes after.
        leaves = {key: raised(value.detach()).requires_grad_() for key, value in joined.items()}
        with torch.enable_grad():
            value = loss(_unflat(leaves))
        gradients = torch.autograd.grad(value, [*leaves.values(), *beside], allow_unused=True)
        ctx.net, ctx.images, ctx.views, ctx.parts, ctx.states = net, images, views, parts, states
        ctx.gradients, ctx.beside = dict(zip(keys, gradients, strict=False)), gradients[len(keys) :]
        ctx.autocast = torch.is_autocast_enabled(images.device.type), torch.get_autocast_dtype(images.device.type)
        return value.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        enabled, dtype = ctx.autocast
        device = ctx.images.device
        for part, state in zip(ctx.parts, ctx.states, strict=True):
            with (
                torch.enable_grad(),
                _replaying(device, state),
                torch.autocast(device.type, dtype=dtype, enabled=enabled),
            ):
                output = _flat(ctx.net(_cut(ctx.images, part, ctx.views)))
            wanted = [key for key in output if ctx.gradients[key] is not None and output[key].requires_grad]
            gradients = [(above * _cut(ctx.gradients[key], part, ctx.views)).to(output[key].dtype) for key in wanted]
            torch.autograd.backward([output[key] for key in wanted], gradients)
        return *(None,) * 6, *(None if each is None else above * each for each in ctx.beside)


def _cut(stacked: Tensor, part: slice, views: int) -> Tensor:
    """All views of some samples, stacked view by view again."""
    return stacked.view(views, -1, *stacked.shape[1:])[:, part].flatten(0, 1)


def _join(pieces: list[Tensor], views: int) -> Tensor:
    return torch.cat([piece.view(views, -1, *piece.shape[1:]) for piece in pieces], dim=1).flatten(0, 1)


def _flat(output: Output) -> dict[tuple[str, str], Tensor]:
    return {
        (kind, name): value
        for kind, values in (("projections", output.projections), ("logits", output.logits))
        for name, value in values.items()
    }


def _unflat(values: dict[tuple[str, str], Tensor]) -> Output:
    kinds: dict[str, dict[str, Tensor]] = {"projections": {}, "logits": {}}
    for (kind, name), value in values.items():
        kinds[kind][name] = value
    names = list(kinds["projections"] or kinds["logits"])
    return Output(names=names, features={}, projections=kinds["projections"], logits=kinds["logits"])


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextmanager
def _replaying(device: torch.device, state: tuple[Tensor, Tensor | None]) -> Iterator[None]:
    """The random numbers that were drawn from this state on; afterwards the generators are where they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.set_rng_state(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], device)
        yield


def uses_batch_norm(module: nn.Module) -> bool:
    """Whether statistics of a piece would stand for those of the batch."""
    return any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in module.modules())
