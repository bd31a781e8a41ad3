"""How much gradient reaches the layers of an encoder, by method: Figure 4 of the paper.

Methods are compared in one network with the same weights on the same batch; a method of the backbone alone does not
look at the exits that the network has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from selfcon.errors import UsageError
from selfcon.losses.methods import Method
from selfcon.networks.multi_exit import MultiExitNetwork


@dataclass(frozen=True)
class LayerGradient:
    """The length of the loss's gradient in one layer's weight; block 0 is the stem."""

    block: str
    layer: str
    norm: float


def gradient_norms(
    net: MultiExitNetwork, images: Tensor, labels: Tensor, method: Method, **options: Any
) -> list[LayerGradient]:
    """Of every convolution of the encoder (of every matrix, where it has none), in the order of the forward.

    `images` hold the method's views one below the other, `labels` are those of the samples; `options` go to the loss.
    The network is left without gradients, and its running statistics as they were.
    """
    if len(images) != method.views * len(labels):
        raise UsageError(
            f"{method.name} takes {method.views} views: {len(labels)} labels go with {method.views * len(labels)} "
            f"images, not {len(images)}."
        )
    if method.uses_exits and len(net.names) < 2:
        raise UsageError(f"{method.name} needs a sub-network, and this network has none.")
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    was_training = net.training
    net.train().zero_grad(set_to_none=True)
    try:
        with torch.enable_grad():
            method.loss_from_output(net(images), labels, **options).backward()
        return [
            LayerGradient(block, name, float(module.weight.grad.norm()))
            for name, block, module in _layers(net)
            if module.weight.grad is not None
        ]
    finally:
        net.zero_grad(set_to_none=True)
        net.train(was_training)
        for name, value in net.named_buffers():
            value.copy_(buffers[name])


def block_norms(layers: Sequence[LayerGradient]) -> dict[str, float]:
    """The length of the gradient in all layers of a block together."""
    squares: dict[str, float] = {}
    for layer in layers:
        squares[layer.block] = squares.get(layer.block, 0.0) + layer.norm**2
    return {block: square**0.5 for block, square in squares.items()}


def compare_blocks(norms: Mapping[str, Sequence[LayerGradient]]) -> dict[str, float]:
    """By block, how many times as long the second of two methods' gradient is as the first's."""
    first, second = (block_norms(layers) for layers in norms.values())
    return {block: second[block] / first[block] for block in first if first[block] > 0}


def _layers(net: MultiExitNetwork) -> list[tuple[str, str, Any]]:
    """Name, block and module of the layers that are looked at."""
    stages = net.stage_of_modules()
    wide: tuple[type[nn.Module], ...] = (nn.Conv2d,)
    if sum(isinstance(module, nn.Conv2d) for module in net.encoder.modules()) < 2:
        wide = (nn.Conv2d, nn.Linear)
    return [
        (name, str(stages[name]) if name in stages else _guess_block(name), module)
        for name, module in net.encoder.named_modules()
        if isinstance(module, wide)
    ]


def _guess_block(name: str) -> str:
    """`blocks.3` of `blocks.3.attn.qkv`."""
    numbered = re.match(r".*?\.\d+", name)
    return numbered[0] if numbered else name
