"""What a run will cost on this machine, from small batches: time goes with the images, memory with the batch.

On a CPU, whose times depend on what else it does, one network is timed and the others follow by their operations.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from selfcon.config import Settings
from selfcon.errors import MemoryShortageError, SelfconError, is_shortage
from selfcon.losses.methods import get_method
from selfcon.losses.parts import with_own_parts
from selfcon.memory import free_memory
from selfcon.networks.exits import parse_exits
from selfcon.networks.registry import create_model
from selfcon.training.loop import memory_format

_CLASSES = 100
_TIMED_OPERATIONS, _MOST_TIMED = 5e10, 64  # on a CPU, of a step that is timed, and its samples


@dataclass(frozen=True)
class Cost:
    """Of a whole run: seconds of both stages, and bytes in use at most."""

    seconds: float
    peak_bytes: int


class Estimator:
    """Measures each kind of network once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.samples = 128 if device.type == "cuda" else 4
        self._known: dict[tuple[object, ...], tuple[float, float, float, int]] = {}
        self._rate: float | None = None  # operations a second

    def estimate(self, settings: Settings, images: int) -> Cost:
        """For so many training images."""
        train, probe, kept, fixed = self._measure(settings)
        method = get_method(settings.method)
        seconds = settings.epochs * images * train
        if method.stages == 2:
            seconds += settings.probe_epochs * images * probe
        return Cost(seconds, int(fixed + kept * min(settings.batch_size, images)))

    def most_samples(self, settings: Settings) -> int:
        """How many samples should fit the free memory at a time, as a power of two."""
        _, _, kept, fixed = self._measure(settings, timed=False)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            free = torch.cuda.mem_get_info(self.device)[0]
        else:
            free = free_memory()
        most = int((0.9 * free - fixed) / max(kept, 1))
        return 1 << (min(most, settings.batch_size).bit_length() - 1) if most > 0 else 0

    def _measure(self, settings: Settings, *, timed: bool = True) -> tuple[float, float, float, int]:
        """Seconds an image of training and of a forward, bytes kept of an image, and bytes that are there anyway.

        Without `timed` no seconds, and no more memory than a few samples take.
        """
        method = with_own_parts(get_method(settings.method), self.device)
        size = settings.image_size or 32
        network = (
            settings.model,
            settings.width,
            settings.exits,
            settings.stem,
            settings.norm,
            settings.projection_dim,
        )
        options = tuple(sorted((name, str(value)) for name, value in settings.model_options.items()))
        key = (*network, options, size, method.name, settings.precision)
        if key in self._known:
            return self._known[key]
        net = create_model(
            settings.model,
            exits=parse_exits(settings.exits) if method.uses_exits else [],
            stem=settings.stem,
            image_size=size,
            width=settings.width,
            norm=settings.norm,
            projection_dim=settings.projection_dim,
            num_classes=_CLASSES if method.stages == 1 else None,
            **settings.model_options,
        ).to(self.device, memory_format=memory_format(self.device))  # type: ignore[call-overload]
        bf16 = settings.precision != "fp32" and self.device.type == "cuda"

        def step(samples: int) -> int:
            images = torch.randn(samples * method.views, 3, size, size, device=self.device)
            labels = torch.arange(samples, device=self.device) % (samples // 2)
            storages: dict[int, int] = {}

            def pack(tensor: Tensor) -> Tensor:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
                return tensor

            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
                torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16),
            ):
                loss = method.loss_from_output(net(images), labels, gather=False)  # other processes are elsewhere
            loss.backward()
            net.zero_grad(set_to_none=True)
            return sum(storages.values())

        def forward(samples: int) -> None:
            images = torch.randn(samples, 3, size, size, device=self.device)
            with torch.no_grad(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=bf16):
                net.eval()(images)

        with FlopCounterMode(display=False) as counted:
            step(2)
        operations = counted.get_total_flops() / 2
        kept = (step(2 * self.samples) - step(self.samples)) / self.samples
        fixed = 3 * sum(each.numel() for each in net.parameters()) * 4  # weights, gradients, momentum
        if not timed:
            return math.nan, math.nan, kept, fixed
        if self.device.type == "cuda":
            train = self._time(lambda: step(self.samples)) / self.samples
            probe = self._time(lambda: forward(self.samples)) / self.samples
        else:
            with FlopCounterMode(display=False) as counted:
                forward(2)
            if self._rate is None:
                samples = 2 * int(min(_MOST_TIMED, max(self.samples, _TIMED_OPERATIONS / operations)) / 2)
                self._rate = samples * operations / self._time(lambda: step(samples))
            train, probe = operations / self._rate, counted.get_total_flops() / 2 / self._rate
        self._known[key] = train, probe, kept, fixed
        return self._known[key]

    def _time(self, work: object) -> float:
        assert callable(work)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            work()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            times.append(time.perf_counter() - start)
        return min(times)


@contextlib.contextmanager
def explaining_shortage(settings: Settings, device: torch.device, *, probing: bool = False) -> Iterator[None]:
    """Where memory does not suffice, say what was too large, and what would fit."""
    try:
        yield
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        raise _explain_shortage(settings, device, error, probing=probing) from None


def _explain_shortage(
    settings: Settings, device: torch.device, error: RuntimeError, *, probing: bool
) -> MemoryShortageError:
    where = "the GPU" if device.type == "cuda" else "main memory"
    first = str(error).splitlines()[0].rstrip(".")
    traceback.clear_frames(error.__traceback__)  # they hold what filled the memory
    if probing:
        size = settings.probe.batch_size
        return MemoryShortageError(
            f"Batches of {size} of the probe do not fit {where} ({first}); "
            f"--probe.batch_size {max(1, size // 2)} takes half as much."
        )
    tried = f"Pieces of {settings.piece}" if settings.piece else f"Batches of {settings.batch_size}"
    advice = "--micro-batch trains a batch in pieces" if settings.piece is None else "smaller ones may"
    with contextlib.suppress(RuntimeError, SelfconError):
        most = min(Estimator(device).most_samples(settings), (settings.piece or settings.batch_size) // 2)
        advice = f"--micro-batch {most} should fit" if most else "not even one image would fit: take a smaller network"
    return MemoryShortageError(
        f"{tried} do not fit {where} ({first}); {advice}. "
        f"The batch stays what it is, since a smaller one would be another loss."
    )
