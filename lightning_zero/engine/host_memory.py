"""How much memory the host has left, what this process takes of it, and the way to leave it more."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MOUNT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class _Names(NamedTuple):
    """What a version of control groups calls things."""

    controller: str
    folder: str
    limit: str
    usage: str
    reclaimable: str


_VERSIONS = (
    _Names("", "", "memory.max", "memory.current", "inactive_file"),
    _Names("memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def free_memory() -> int | None:
    """Bytes of host memory that can be had without swapping, within the limits of this process' control groups (a
    container is one); None where the system does not say.
    """
    found = [_of_the_machine(), *(_of_a_group(group, names) for group, names in _groups())]
    return min((free for free in found if free is not None), default=None)


def _of_the_machine() -> int | None:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _groups() -> Iterator[tuple[Path, _Names]]:
    """The control groups that this process is in, and those that these are in: each may have a limit. In a container
    the inner ones may not be there, for its own group is mounted as the outermost.
    """
    with suppress(OSError):
        for line in _OWN.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for names in _VERSIONS:
                if names.controller in controllers.split(","):
                    for group in (Path(path), *Path(path).parents):
                        yield _MOUNT / names.folder / str(group).lstrip("/"), names


def _of_a_group(group: Path, names: _Names) -> int | None:
    with suppress(OSError, ValueError):  # ValueError: "max"
        limit, usage = (int((group / name).read_text()) for name in (names.limit, names.usage))
        # files that have been read count as used, and are dropped when memory is asked for
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - usage + int(stat.get(names.reclaimable, 0))
    return None


def give_back() -> None:
    """Return what has been freed to the system. glibc by itself returns the end of its heap alone: where small objects
    that stay come between large ones that do not, it keeps many times what is used.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


class _Mallinfo(ctypes.Structure):
    """What glibc 2.33 and newer tell of their heaps."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def allocated() -> int | None:
    """Bytes that this process has allocated and not freed, by the C library's count, in its heaps and in maps of their
    own; None where it does not count.
    """
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None) if os.name == "posix" else None
    if mallinfo is None:
        return None
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    return int(info.uordblks + info.hblkhd)
