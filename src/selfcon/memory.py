"""How much main memory and how many cores there are for this process."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_memory() -> int:
    """Bytes that can still be taken: of the machine, of containers and jobs, and of the process, whichever is least."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_left_by_groups()]
    with contextlib.suppress(OSError, StopIteration):
        found.append(1024 * _number_of(Path("/proc/meminfo"), "MemAvailable:"))
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError, StopIteration):
            found.append(limit - 1024 * _number_of(Path("/proc/self/status"), "VmSize:"))
    return max(0, min(found))


def _left_by_groups() -> Iterator[int]:
    """What each control group above this process leaves to it; files that can be read anew count as free."""
    with contextlib.suppress(OSError):
        for line in _OWN_GROUPS.read_text(encoding="utf-8").splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:
                top, limit, used, files = _ROOT, "memory.max", "memory.current", "inactive_file"
            elif "memory" in kinds.split(","):
                top, limit, used = _ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                files = "total_inactive_file"
            else:
                continue
            own = top / path.lstrip("/")
            for group in (own, *own.parents):
                if not group.is_relative_to(top):
                    break
                with contextlib.suppress(OSError, ValueError, StopIteration):
                    most, taken = (int((group / name).read_text(encoding="utf-8")) for name in (limit, used))
                    yield most - taken + _number_of(group / "memory.stat", files)


def _number_of(path: Path, name: str) -> int:
    lines = path.read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.split()[:1] == [name]).split()[1])
