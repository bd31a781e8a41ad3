"""`selfcon serve` in a process of its own, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """The service of the run in `folder/run`: its port, and its process, which is ended in the end."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = int(found.getsockname()[1])
    words = [sys.executable, "-m", "selfcon", "serve", "run", "--port", str(port), "--device", "cpu", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, cwd=folder, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, "the service did not begin"
                time.sleep(0.2)
        yield port, process
    finally:
        process.kill()
        process.communicate()
