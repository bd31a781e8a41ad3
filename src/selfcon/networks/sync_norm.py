"""Batch normalisation over the batches of all processes, on any device and with unequal shares.

PyTorch's own refuses tensors on a CPU, where it could not be tested.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm


def synchronise(module: nn.Module) -> None:
    """Let every batch normalisation in a module look at all processes; names and weights stay what they are."""
    for child in module.modules():
        if type(child) is nn.BatchNorm1d:
            child.__class__ = SyncBatchNorm1d
        elif type(child) is nn.BatchNorm2d:
            child.__class__ = SyncBatchNorm2d
        elif type(child) is BatchNormAct2d:
            child.__class__ = SyncBatchNormAct


class SyncBatchNorm1d(nn.BatchNorm1d):
    """As nn.BatchNorm1d, with the statistics of all processes in training."""

    def forward(self, x: Tensor) -> Tensor:
        return _normalise(self, x)


class SyncBatchNorm2d(nn.BatchNorm2d):
    """As nn.BatchNorm2d, with the statistics of all processes in training."""

    def forward(self, x: Tensor) -> Tensor:
        return _normalise(self, x)


class SyncBatchNormAct(BatchNormAct2d):
    """As timm's, with the statistics of all processes in training."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.drop(_normalise(self, x)))
        return out


def _normalise(norm: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor) -> Tensor:
    if not (norm.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return _BatchNorm.forward(norm, x)
    weight = torch.ones(norm.num_features, device=x.device) if norm.weight is None else norm.weight
    bias = torch.zeros(norm.num_features, device=x.device) if norm.bias is None else norm.bias
    out: Tensor
    out, mean, var, count = _Normalise.apply(x.flatten(2) if x.ndim > 2 else x[:, :, None], weight, bias, norm.eps)
    out = out.view_as(x)
    if norm.running_mean is not None and norm.running_var is not None:
        with torch.no_grad():
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
            share = norm.momentum if norm.momentum is not None else 1 / float(norm.num_batches_tracked)  # type: ignore[arg-type]
            norm.running_mean.lerp_(mean.to(norm.running_mean), share)
            norm.running_var.lerp_((var * count / (count - 1).clamp(min=1)).to(norm.running_var), share)
    return out


class _Normalise(torch.autograd.Function):
    """Of x [N, C, rest]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x if x.dtype == torch.float64 else x.float()
        var, mean = torch.var_mean(wide, dim=(0, 2), correction=0)
        own = torch.cat([mean, var, mean.new_full((1,), float(x.numel() // x.shape[1]))])
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        means, variances, counts = torch.stack(parts).split([len(mean), len(mean), 1], dim=1)
        count = counts.sum()
        # Means and variances of the parts make those of the whole without a difference of large sums.
        mean = (means * counts).sum(0) / count
        var = ((variances + (means - mean) ** 2) * counts).sum(0) / count
        scale = (var + eps).rsqrt()
        centred = (wide - mean[:, None]) * scale[:, None]
        ctx.save_for_backward(centred, weight, scale, count)
        ctx.kind = x.dtype
        ctx.mark_non_differentiable(mean, var, count)
        return (centred * weight[:, None] + bias[:, None]).to(x.dtype), mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        centred, weight, scale, count = ctx.saved_tensors
        above = above.to(centred.dtype)
        own = torch.stack([above.sum((0, 2)), (above * centred).sum((0, 2))])
        total = own.clone()
        dist.all_reduce(total)
        total = total / count
        inner = above - total[0][:, None] - centred * total[1][:, None]
        return ((weight * scale)[:, None] * inner).to(ctx.kind), own[1].to(weight), own[0].to(weight), None
