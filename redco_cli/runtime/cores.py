"""How many processes of this program can compute side by side: what cores and memory are there, and are allowed."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

_QUOTA, _MEMORY = Path("/sys/fs/cgroup/cpu.max"), Path("/proc/meminfo")


def own_cores() -> int:
    """How many cores this process may run on, which a job's may be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processes_at_once(each: int) -> int:
    """How many processes can compute at the same time; at least one.

    Args:
        each: bytes of memory that one takes.
    """
    found = [own_cores()]
    with contextlib.suppress(OSError, ValueError):  # where there is a limit of a container
        quota, period = _QUOTA.read_text().split()
        found.append(int(quota) // int(period))
    with contextlib.suppress(OSError):
        free = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMORY.read_text(), re.MULTILINE)
        found += [int(free[1]) * 1024 // each] if free else []
    return max(min(found), 1)
