"""Work on a GPU that is recorded once and then replayed: a CUDA graph for each shape of its inputs.

A step of a small network is hundreds of kernels that the host launches more slowly than the GPU runs them. Replaying
the recorded step costs the host next to nothing.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from selfcon.errors import SelfconWarning

_PLAIN_CALLS = 3  # before recording, so that libraries have chosen their algorithms and buffers are there

Shapes = tuple[torch.Size, ...]


class Replayed:
    """A function of tensors that works by its side effects alone, on tensors that stay where they are."""

    def __init__(self, work: Callable[..., None], device: torch.device) -> None:
        self._work = work
        self._stream = torch.cuda.Stream(device)
        self._calls: dict[Shapes, int] = {}
        self._recorded: dict[Shapes, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._works = True

    def __call__(self, *inputs: Tensor) -> None:
        """Do the work: by itself at first, as a replay later."""
        shapes = tuple(each.shape for each in inputs)
        calls = self._calls[shapes] = self._calls.get(shapes, 0) + 1
        if self._works and calls > _PLAIN_CALLS and shapes not in self._recorded:
            self._record(shapes, inputs)
        if shapes not in self._recorded:
            self._run(inputs)
            return
        graph, held = self._recorded[shapes]
        for place, value in zip(held, inputs, strict=True):
            place.copy_(value)
        graph.replay()

    def _run(self, inputs: tuple[Tensor, ...]) -> None:
        # On the stream of the recording, to which autograd ties what it keeps from one step to the next.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._work(*inputs)
        torch.cuda.current_stream().wait_stream(self._stream)

    def _record(self, shapes: Shapes, inputs: tuple[Tensor, ...]) -> None:
        held = tuple(each.clone() for each in inputs)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # what the plain calls held in reserve is wanted by the recording
        graph = torch.cuda.CUDAGraph()
        pool = next((other.pool() for other, _ in self._recorded.values()), None)  # never two of them at a time
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                self._work(*held)
        except RuntimeError as error:
            self._works = False
            reason = str(error).splitlines()[0]
            warnings.warn(
                f"The step cannot be recorded as a CUDA graph and runs as it is ({reason}).",
                SelfconWarning,
                stacklevel=2,
            )
            return
        self._recorded[shapes] = graph, held
