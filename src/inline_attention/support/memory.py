"""Memory of the machine."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Return the bytes of memory that programs can still take, within a container's limit; None if unknown.

    Memory that caches files counts as available: the system gives it up when a program asks.
    """
    found = [size for size in (_available_on_machine(), _left_in_container()) if size is not None]
    return min(found, default=None)


def _available_on_machine() -> int | None:
    with suppress(OSError, ValueError, KeyError):
        return 1024 * _numbers(MEMINFO)["MemAvailable:"]
    with suppress(OSError, ValueError, AttributeError):  # not Linux
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _left_in_container() -> int | None:
    """Return what is left of the limit of control groups, version 2; None without a limit."""
    with suppress(OSError, ValueError, KeyError):
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        return max(0, limit - used + _numbers(CGROUP / "memory.stat")["inactive_file"])
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Read lines of a name, a number, and perhaps a unit."""
    return {words[0]: int(words[1]) for words in map(str.split, path.read_text().splitlines()) if len(words) > 1}
