"""How much main memory there is for this process."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path


def free_memory() -> int:
    """Bytes that can still be taken: of the machine, of the container and of the process, whichever is least."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, StopIteration):
        found.append(_line_of("/proc/meminfo", "MemAvailable:"))
    with contextlib.suppress(OSError, ValueError):
        limit, used = (
            int(Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current")
        )
        found.append(limit - used)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, StopIteration):
            found.append(limit - _line_of("/proc/self/status", "VmSize:"))
    return max(0, min(found))


def _line_of(path: str, name: str) -> int:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])
