"""The one contrastive objective: from features [B, V, E, D] to a loss, by way of whichever implementation is asked for.

Shapes: B samples, V views, E exits (0 is the backbone), D dimensions, N = B·V·E features.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor

from selfcon.errors import NonFiniteError, SelfconWarning, UsageError, unknown_name
from selfcon.losses import dense, ring, tiled
from selfcon.losses.gather import count_rows, gather_rows, own_rows, world_size
from selfcon.losses.sets import Contrast, Term
from selfcon.losses.temperature import LEAST, check_number, check_temperature

Memory = tuple[Tensor, Tensor | None]
Implementation = Callable[[Contrast, Sequence[Term], float | Tensor], tuple[Tensor, Tensor]]
IMPLEMENTATIONS = ("dense", "tiled", "triton")
Gather = bool | Literal["ring"] | None

_AXES = {"B": "samples", "V": "views", "E": "exits", "K": "features of each", "D": "dimensions"}
_DENSE_UP_TO, _DENSE_UP_TO_ON_GPU = 4096, 2048  # features
_SHORTEST = {
    torch.float64: torch.finfo(torch.float64).tiny ** 0.5,
    torch.float16: torch.finfo(torch.float16).tiny,  # below it float16 loses digits, and its gradient would overflow
}


@dataclass
class Tally:
    """Counts over many calls of a loss, kept on the device so that nothing waits for it; reading one does wait.

    Pass one to `loss(..., tally=tally)`; without one nothing is counted. It counts the features of this process.
    """

    _counts: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def on(cls, device: torch.device) -> Self:
        """One that counts in the same tensors from the start, for calls that are compiled or recorded."""
        names = ("anchors", "left_out", "empty_batches", "non_finite")
        return cls({name: torch.zeros((), dtype=torch.int64, device=device) for name in names})

    def count(self, name: str) -> Tensor:
        """The tensor that is counted in, of a tally that has one."""
        return self._counts[name]

    def add(self, **counts: Tensor) -> None:
        for name, count in counts.items():
            if name in self._counts:
                self._counts[name].add_(count.detach())
            else:
                self._counts[name] = count.detach().clone()

    def _read(self, name: str) -> int:
        return int(self._counts[name]) if name in self._counts else 0

    @property
    def anchors(self) -> int:
        """Features that were to be anchors, over all terms."""
        return self._read("anchors")

    @property
    def left_out(self) -> int:
        """Of those, how many had no positive and were left out."""
        return self._read("left_out")

    @property
    def empty_batches(self) -> int:
        """Calls in which no anchor of any process was left: their loss is 0."""
        return self._read("empty_batches")

    @property
    def non_finite(self) -> int:
        """Feature values that were NaN or infinite (on a CPU those are refused at once)."""
        return self._read("non_finite")


def contrastive_loss(
    features: Tensor,
    labels: Tensor | None,
    terms: Sequence[Term],
    *,
    temperature: float | Tensor = 0.1,
    alpha: float = 1.0,
    base_temperature: float | None = None,
    implementation: str = "auto",
    gather: Gather = None,
    process_group: dist.ProcessGroup | None = None,
    tally: Tally | None = None,
    views_apart: bool = False,
    memory: Memory | None = None,
) -> Tensor:
    """The weighted sum of `terms` over features [B, V, E, D], as a scalar of at least float32.

    Features are normalised here. Without labels each sample is a class of its own. `base_temperature` multiplies by
    temperature/base_temperature, as the released code of SupCon and SelfCon does with 0.07. With `gather` (by default
    wherever a process group is) the features of all processes are contrasted, and the mean over processes of this loss
    and of its gradient are those of one process with the whole batch; `gather="ring"` passes blocks of features around,
    so that no process holds all of them. With `views_apart`, and without labels, each view
    is a class of its own. A label is the name of a class and nothing more: -1 is one, too.

    `memory`, features [M, D] or [M, E, D] and their labels [M], are further features to contrast with, of earlier
    batches for one: normalised likewise, positives and negatives by their labels, but no anchors, and without gradient.
    Features [M, D] count as the backbone's. Without labels (None, or those of a method that uses none) they are
    negatives of everyone. Each process contrasts its own anchors with its own memory, whatever `gather` says; where all
    hold the same, the loss is still that of one process.
    """
    temperature, alpha = check_temperature(temperature), check_number("alpha", alpha, least=0)
    if base_temperature is not None:
        base_temperature = check_number("base_temperature", base_temperature, least=LEAST)
    if gather not in (True, False, None, "ring"):
        raise UsageError(f"gather must be True, False, None or 'ring', not {gather!r}.")
    check_features(features, "BVED")
    if labels is not None:
        check_labels(labels, len(features), features.device)
    if memory is not None:
        memory = check_memory(memory, features, labels)
    with torch.autocast(features.device.type, enabled=False):
        world = world_size(process_group) if gather is not False else 1
        if gather is True and world == 1 and not (dist.is_available() and dist.is_initialized()):
            raise UsageError("gather=True needs an initialised process group: start the processes with torchrun.")
        contrast = _contrast(
            normalise(features),
            labels,
            process_group if world > 1 else None,
            gathered=world > 1 and gather != "ring",
            views_apart=views_apart,
        )
        if world == 1 or gather != "ring":  # in a ring nobody sees all features, and none may leave the others waiting
            _check_finite(contrast.features, a_sample=features.shape[1] * features.shape[2])
        if memory is not None:
            contrast = _remember(contrast, memory, alone=world == 1)
        if world > 1 and gather == "ring":
            if labels is None:  # samples of other processes must not be taken for ours
                before = sum(count_rows(contrast.features, process_group)[: dist.get_rank(process_group)])
                contrast = replace(contrast, groups=contrast.groups + before)
            sums, counts = ring.term_sums(contrast, terms, temperature, process_group)
        else:
            sums, counts = _find_implementation(implementation, contrast, terms)(contrast, terms, temperature)
        valid = counts.clone()
        if world > 1:
            dist.all_reduce(valid, group=process_group)
        _report(features, terms, counts, valid, tally)

        weights = [term.weight(alpha) for term in terms]
        # Not a tensor of the weights: that would be a copy from the host in every step.
        loss = torch.stack([w * s for w, s in zip(weights, sums / valid.clamp(min=1), strict=True)]).sum() * world
        if base_temperature is None:
            return loss
        # The factor is a matter of scale: through it a learnt temperature would only ever fall.
        scale = temperature.detach().to(loss) if isinstance(temperature, Tensor) else temperature
        return loss * (scale / base_temperature)


def normalise(features: Tensor) -> Tensor:
    """Features of unit length along the last dimension, in float32 or float64; zero stays zero and gets no gradient.

    As zero counts what is too short to have a direction in the precision it came in: a largest entry below 1e-19 in
    float32, below 6e-5 in float16.
    """
    shortest = _SHORTEST.get(features.dtype, torch.finfo(torch.float32).tiny ** 0.5)
    unit: Tensor = _Normalise.apply(raised(features), shortest)
    return unit


class _Normalise(torch.autograd.Function):
    """Keeps the unit features for the backward pass, beside those it was given, and no other copy of them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(features: Tensor, shortest: float) -> Tensor:
        # Dividing by the largest entry first keeps squares from over- and underflowing.
        largest = torch.linalg.vector_norm(features, ord=math.inf, dim=-1, keepdim=True)
        nonzero = ~(largest <= shortest)  # true for NaN, which must stay visible
        unit = features / torch.where(nonzero, largest, 1)
        return unit * torch.where(nonzero, 1 / torch.linalg.vector_norm(unit, dim=-1, keepdim=True), 0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor, None]:
        features, unit = ctx.saved_tensors
        length = (features * unit).sum(-1, keepdim=True)
        along = (above * unit).sum(-1, keepdim=True)
        across = torch.addcmul(above, along, unit, value=-1)
        over_length = torch.where(length == 0, 0, 1 / length)
        return across * over_length if torch.is_grad_enabled() else across.mul_(over_length), None


def raised(values: Tensor) -> Tensor:
    """Values in at least float32; float64 stays."""
    return values if values.dtype == torch.float64 else values.float()


def check_labels(labels: Tensor, samples: int, device: torch.device, *, what: str = "labels") -> None:
    """Refuse labels that are not one integer a sample on the device of the features."""
    if not isinstance(labels, Tensor):
        raise UsageError(f"{what} must be a tensor, not {type(labels).__name__}.")
    if labels.shape != (samples,):
        raise UsageError(f"{what} must have the shape [{samples}], one for each sample, not {list(labels.shape)}.")
    if labels.is_floating_point() or labels.is_complex():
        raise UsageError(f"{what} must be integers, not {labels.dtype}.")
    if labels.device != device:
        raise UsageError(f"{what} are on {labels.device} and features on {device}: move them to the same device.")


def check_memory(memory: Memory, features: Tensor, labels: Tensor | None) -> Memory:
    """Remembered features as [M, E, D] beside features that end in D, and their labels where those have some."""
    if not isinstance(memory, tuple | list) or len(memory) != 2:
        raise UsageError("memory must be two things, features [M, D] or [M, E, D] and their labels [M] or None.")
    remembered, known = memory
    dim = features.shape[-1]
    if not isinstance(remembered, Tensor) or remembered.ndim not in (2, 3) or remembered.shape[-1] != dim:
        shape = list(remembered.shape) if isinstance(remembered, Tensor) else type(remembered).__name__
        raise UsageError(f"features of memory must be a tensor of the shape [M, {dim}] or [M, E, {dim}], not {shape}.")
    if not remembered.is_floating_point():
        raise UsageError(f"features of memory must be floating point, not {remembered.dtype}.")
    if remembered.device != features.device:
        raise UsageError(
            f"memory is on {remembered.device} and features on {features.device}: move them to the same device."
        )
    if labels is not None:
        if known is None:
            raise UsageError("memory needs labels where the features have some.")
        check_labels(known, len(remembered), features.device, what="labels of memory")
    return remembered if remembered.ndim == 3 else remembered[:, None], None if labels is None else known


def _contrast(
    z_BVED: Tensor,
    labels: Tensor | None,
    process_group: dist.ProcessGroup | None,
    *,
    gathered: bool,
    views_apart: bool,
) -> Contrast:
    own = slice(0, len(z_BVED))
    if gathered:
        sizes = count_rows(z_BVED, process_group)
        own = own_rows(sizes, process_group)
        z_BVED = gather_rows(z_BVED, sizes, process_group)
        labels = None if labels is None else gather_rows(labels, sizes, process_group)
    samples, views, exits, dim = z_BVED.shape
    a_sample = views * exits
    alone = samples * views if views_apart else samples
    groups = torch.arange(alone, device=z_BVED.device) if labels is None else labels
    return Contrast(
        features=z_BVED.reshape(-1, dim),
        groups=groups.repeat_interleave(samples * a_sample // len(groups)),
        exits=torch.arange(exits, device=z_BVED.device).repeat(samples * views),
        own=slice(own.start * a_sample, own.stop * a_sample),
    )


def _remember(contrast: Contrast, memory: Memory, *, alone: bool) -> Contrast:
    """The same anchors among further features."""
    z_MED, labels = normalise(memory[0].detach()).to(contrast.features.dtype), memory[1]
    rows, exits, dim = z_MED.shape
    z, groups = z_MED.reshape(-1, dim), contrast.groups
    if alone:  # of several processes, none may be alone in raising
        _check_finite(z, exits, what="features of memory")
    # Without labels groups are numbered from 0 on, so that -1 is nobody's.
    theirs = groups.new_full((rows,), -1) if labels is None else labels
    return replace(
        contrast,
        features=torch.cat([contrast.features, z]),
        groups=torch.cat([groups, theirs.repeat_interleave(exits)]),
        exits=torch.cat([contrast.exits, torch.arange(exits, device=z.device).repeat(rows)]),
    )


def check_features(features: Tensor, shape: str) -> None:
    """Refuse what is not a floating-point tensor with these axes, none of them empty."""
    if not isinstance(features, Tensor):
        raise UsageError(f"features must be a tensor, not {type(features).__name__}.")
    if features.ndim != len(shape) or 0 in features.shape:
        axes, words = ", ".join(shape), ", ".join(_AXES[axis] for axis in shape)
        words += "; one feature each is features[:, None]" if shape == "BKD" and features.ndim == 2 else ""
        raise UsageError(
            f"features must have the shape [{axes}] ({words}) with no part empty, not {list(features.shape)}."
        )
    if not features.is_floating_point():
        raise UsageError(f"features must be floating point, not {features.dtype}.")


def _check_finite(z_ND: Tensor, a_sample: int, what: str = "features") -> None:
    # On a GPU the answer would make the host wait in every step; there a tally counts instead. These are the features
    # of all processes, so that all of them stop and none is left waiting for the others.
    if z_ND.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad_rows = (~z_ND.detach().isfinite()).any(1).nonzero().flatten()
    if len(bad_rows):
        bad_samples = (bad_rows // a_sample).unique().tolist()
        raise NonFiniteError(
            f"{what} hold NaN or infinity in {len(bad_samples)} of {len(z_ND) // a_sample} samples "
            f"(first: sample {bad_samples[0]})."
        )


def _find_implementation(name: str, contrast: Contrast, terms: Sequence[Term]) -> Implementation:
    if name == "auto":
        name = choose_implementation(contrast, terms)
    if name == "dense":
        return dense.term_sums
    if name == "tiled":
        return tiled.term_sums
    if name != "triton":
        raise unknown_name("implementation", name, ["auto", *IMPLEMENTATIONS])
    if reason := _why_not_triton(contrast, terms):
        raise UsageError(f"implementation='triton' {reason}: take 'tiled'.")
    from selfcon.losses import contrast_triton

    return contrast_triton.term_sums


def choose_implementation(contrast: Contrast, terms: Sequence[Term]) -> str:
    """What `auto` takes: the dense form while its matrices are small.

    On a GPU the kernels are faster from 2,048 features on, but there by less than their compilation takes.
    """
    on_gpu = contrast.features.device.type == "cuda"
    if len(contrast.features) <= (_DENSE_UP_TO_ON_GPU if on_gpu else _DENSE_UP_TO):
        return "dense"
    return "tiled" if _why_not_triton(contrast, terms) else "triton"


def _why_not_triton(contrast: Contrast, terms: Sequence[Term]) -> str | None:
    z = contrast.features
    if find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if z.device.type != "cuda" and not os.environ.get("TRITON_INTERPRET"):
        return f"runs on a GPU, and these features are on {z.device}"
    from selfcon.losses import contrast_triton

    if z.dtype != torch.float32 or z.shape[1] > contrast_triton.LARGEST_DIMENSION:
        most = contrast_triton.LARGEST_DIMENSION
        return f"is for float32 (or half) features of up to {most} dimensions, not {z.dtype} with {z.shape[1]}"
    if len(terms) > contrast_triton.MOST_TERMS:
        return f"takes {contrast_triton.MOST_TERMS} terms, not {len(terms)}"
    if not contrast_triton.fits(z.shape[1], z.device):
        return f"finds too little shared memory on this GPU for {z.shape[1]} dimensions"
    return None


def _report(features: Tensor, terms: Sequence[Term], counts: Tensor, valid: Tensor, tally: Tally | None) -> None:
    if tally is not None:
        exits = features.shape[2]
        samples = features.shape[0] * features.shape[1]
        anchors = sum({"F": 1, "G": exits - 1, "F+G": exits}[term.anchors] for term in terms) * samples
        tally.add(
            anchors=torch.full_like(valid[0], anchors),
            left_out=anchors - counts.sum(),
            empty_batches=(valid.sum() == 0).to(valid.dtype),
            non_finite=(~features.detach().isfinite()).sum(),
        )
    if torch.compiler.is_compiling():
        return
    if features.shape[2] == 1 and any(term.anchors == "G" for term in terms):
        warnings.warn(
            "this loss has anchors at sub-networks, and these features are the backbone's alone: that part of it is 0.",
            SelfconWarning,
            stacklevel=2,
        )
    if features.device.type == "cpu" and not valid.any():
        warnings.warn(
            "no anchor of this batch has a positive, so its loss is 0 and trains nothing: no two features that are "
            "contrasted share a label (or, without labels, a sample).",
            SelfconWarning,
            stacklevel=2,
        )
