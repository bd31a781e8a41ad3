"""What a step costs by method, network, image size and batch: parameters, multiply-adds, memory and time.

Tables 15 and 16 of the paper. A step is forward, loss, backward and SGD on random images that lie on the device, in
bfloat16 and channels last on a GPU, without compilation; memory is what it has allocated at most (on a GPU).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from selfcon.errors import UsageError
from selfcon.evaluation.cost import count_multiply_adds, zero_image
from selfcon.losses.methods import Method, get_method
from selfcon.losses.parts import with_own_parts
from selfcon.networks.exits import Exit
from selfcon.networks.multi_exit import MultiExitNetwork
from selfcon.networks.registry import create_model
from selfcon.training.loop import memory_format

_CLASSES = 100


@dataclass(frozen=True)
class Cost:
    """Of one method on one network; multiply-adds of one sample with all its views, forward."""

    model: str
    method: str
    exits: tuple[Exit, ...]
    image_size: int
    batch_size: int
    parameters: int
    multiply_adds: int
    seconds: float | None
    memory_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        leaves = ",".join(f"{leave.after}:{leave.structure}" for leave in self.exits) or "none"
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "exits": leaves}


def measure(
    model: str,
    method: str,
    *,
    exits: Sequence[Exit] = (),
    image_size: int = 32,
    batch_size: int = 256,
    width: float = 1.0,
    network: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    steps: int = 10,
) -> Cost:
    """One step of a method, measured; where it does not fit the memory, its time and memory stay unknown.

    `network` are further arguments of `create_model`; heads that the method does not train are left out.
    """
    if batch_size < 2:
        raise UsageError(f"A batch must hold at least 2 samples, not {batch_size}.")
    if steps < 1:
        raise UsageError(f"At least 1 step must be timed, not {steps}.")
    device, chosen = torch.device(device), get_method(method)
    chosen = with_own_parts(chosen, device)
    leaves = tuple(exits) if chosen.uses_exits else ()
    more: dict[str, Any] = {"num_classes": _CLASSES, **(network or {})}
    classes = int(more["num_classes"])
    if chosen.one_stage is not None and not chosen.one_stage.contrast > 0:
        more["projection_dim"] = None
    if chosen.stages != 1:
        more["num_classes"] = None
    net = create_model(model, exits=list(leaves), image_size=image_size, width=width, **more)
    macs = count_multiply_adds(net, zero_image(net, image_size)) * chosen.views
    parameters = sum(each.numel() for each in net.parameters())
    net = net.to(device, memory_format=memory_format(device))  # type: ignore[call-overload]
    try:
        seconds, memory = _time_step(net, chosen, size=image_size, batch_size=batch_size, classes=classes, steps=steps)
    except torch.OutOfMemoryError:
        seconds, memory = None, None
    return Cost(model, method, leaves, image_size, batch_size, parameters, macs, seconds, memory)


def _time_step(
    net: MultiExitNetwork, method: Method, *, size: int, batch_size: int, classes: int, steps: int
) -> tuple[float, int | None]:
    device = next(net.parameters()).device
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    images = torch.randn(batch_size * method.views, 3, size, size, device=device)
    images = images.contiguous(memory_format=memory_format(device))
    labels = torch.arange(batch_size, device=device) % max(2, min(classes, batch_size // 2))
    optimiser = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=on_gpu):
            loss = method.loss_from_output(net(images), labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    for _ in range(max(1, steps // 3)):
        step()
    wait()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - start)
    memory = None
    if on_gpu:
        weights = sum(each.numel() * each.element_size() for each in net.parameters())
        memory = torch.cuda.max_memory_allocated(device) - before + weights
    return sorted(times)[len(times) // 2], memory
