"""Optimisers by name: SGD as in the paper, AdamW, and LARS for large batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from selfcon.config import Optim


def create_optimizer(
    parameters: Iterable[nn.Parameter], settings: Optim, lr: float, device: torch.device | str = "cpu"
) -> Optimizer:
    """The optimiser that the settings name; on a GPU in its fused form, with the learning rate there too."""
    trained: list[Any] = [parameter for parameter in parameters if parameter.requires_grad]
    decay = settings.weight_decay
    if decay is None:
        decay = 0.05 if settings.name == "adamw" else 1e-4
    if kept := [parameter for parameter in trained if getattr(parameter, "no_decay", False)]:
        rest = [parameter for parameter in trained if not getattr(parameter, "no_decay", False)]
        trained = [{"params": rest}, {"params": kept, "weight_decay": 0.0}]
    on_gpu = torch.device(device).type == "cuda"
    rate: float | Tensor = torch.tensor(lr, device=device) if on_gpu else lr
    if settings.name == "adamw":
        betas = (settings.momentum, settings.beta2)
        return AdamW(trained, lr=rate, betas=betas, weight_decay=decay, fused=on_gpu, capturable=on_gpu)
    if settings.name == "lars":
        return LARS(trained, lr=rate, momentum=settings.momentum, weight_decay=decay)
    optimizer = SGD(
        trained, lr=rate, momentum=settings.momentum, nesterov=settings.nesterov, weight_decay=decay, fused=on_gpu
    )
    if on_gpu and settings.momentum:
        # The fused form would take memory as it finds it where float16's scaler skips the first step.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


class LARS(Optimizer):
    """SGD with momentum whose step is, for each matrix or kernel, in proportion to the length of its weights.

    You, Gitman and Ginsburg (2017) in the form of SimCLR: the length of a gradient includes its weight decay, and the
    rate is outside the momentum. Vectors (biases, normalisation) are neither scaled nor decayed. Where `found_inf`,
    a tensor, is set to something else than 0, as in torch's fused optimisers, nothing is changed.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float | Tensor,
        *,
        momentum: float,
        weight_decay: float,
        trust: float = 1e-3,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all weights."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self._update(weights, weights.grad, group)
        return loss

    def _update(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if weights.ndim > 1:
            gradient = gradient + group["weight_decay"] * weights
            lengths = weights.norm(), gradient.norm()
            ratio = group["trust"] * lengths[0] / lengths[1]
            gradient = gradient * torch.where((lengths[0] > 0) & (lengths[1] > 0), ratio, 1.0)
        state = self.state[weights]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weights)
        buffer = state["momentum_buffer"]
        moved = group["momentum"] * buffer + gradient
        step = group["lr"] * moved
        if self.found_inf is not None:
            left_out = self.found_inf != 0
            moved, step = torch.where(left_out, buffer, moved), torch.where(left_out, 0.0, step)
        buffer.copy_(moved)
        weights.sub_(step)
