"""Processes of a test, forked from one that has imported everything and computed nothing: they start at once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

from torch.multiprocessing.spawn import start_processes as start


def start_processes(work: Callable[..., None], args: tuple[Any, ...], *, nprocs: int) -> None:
    """Run `work(rank, *args)` in every process, to the end."""
    multiprocessing.set_forkserver_preload(["pytest", "hypothesis", "timm", "selfcon.workflows.pipeline"])
    start(work, args, nprocs=nprocs, start_method="forkserver")
