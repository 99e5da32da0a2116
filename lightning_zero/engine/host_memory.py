"""How much memory the host has left."""

import os
from contextlib import suppress
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int | None:
    """Bytes of host memory that can be had without swapping, a container's limit included; None where the system does
    not say.
    """
    found = [free for free in (_of_the_machine(), _of_the_cgroup()) if free is not None]
    return min(found, default=None)


def _of_the_machine() -> int | None:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _of_the_cgroup() -> int | None:
    with suppress(OSError, ValueError):  # ValueError: "max"
        return int((_CGROUP / "memory.max").read_text()) - int((_CGROUP / "memory.current").read_text())
    return None
