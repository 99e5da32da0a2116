"""Temporary names beside the place where a checkpoint is to be, and what becomes of those that nobody needs any more.

A name says who has made it (host, process), so that the next save can tell what a killed process has left behind.
"""

import os
import re
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Literal
from uuid import uuid4

Kind = Literal["part", "old", "link"]
"""What is being written or removed, what gives its place to something newer, a link."""

_NAME = re.compile(r"\.(?P<target>.+)\.(?P<host>[^.]+)-(?P<pid>\d+)-[0-9a-f]+\.(?P<kind>part|old|link)")

_in_use: set[str] = set()
"""Names of this process, in whatever directory. (One that was killed may have had the same number, in a container.)"""


def name(target: Path, kind: Kind = "part") -> Path:
    """A new name beside ``target``, in use until :func:`drop`."""
    found = target.parent / f".{_called(target)}.{_host()}-{os.getpid()}-{uuid4().hex[:8]}.{kind}"
    _in_use.add(found.name)
    return found


def _called(target: Path) -> str:
    """Lightning takes every name with ``ckpt_`` in it, and all digits behind that, for a checkpoint of SLURM's."""
    return target.name.replace("ckpt_", "ckpt-")


def _host() -> str:
    """Without dots, so that it can be told from the target's name, which may have some."""
    return socket.gethostname().replace(".", "_")


def is_temporary(path: Path) -> bool:
    """Whether a name is one of these."""
    return _NAME.fullmatch(path.name) is not None


def drop(path: Path) -> OSError | None:
    """Remove what has a temporary name, if it is there; what does not go now goes at a later save.

    Returns:
        Why it does not.
    """
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.exists():
            shutil.rmtree(path)
    except OSError as error:
        return error
    finally:
        _in_use.discard(path.name)
    return None


def olds(target: Path) -> list[Path]:
    """What was at ``target``, where a process was killed after it had moved that aside and before the new was there."""
    return [old for old, name in all_olds(target.parent) if name == _called(target)]


def all_olds(directory: Path) -> list[tuple[Path, str]]:
    """All such things in a directory, each with the name that it had."""
    names: list[tuple[Path, re.Match[str] | None]] = []
    with suppress(OSError):
        names = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir()]
    return [(path, match["target"]) for path, match in names if match and match["kind"] == "old"]


def sweep(target: Path) -> None:
    """Remove what killed processes have left beside ``target``. What belongs there and was moved aside comes back.

    Of another host nobody can tell whether its processes are alive: only what was to become ``target`` itself goes, for
    nobody else is writing that.
    """
    for old in olds(target):
        if not os.path.lexists(target) and _is_left(old, target):
            with suppress(OSError):
                old.rename(target)
    with suppress(OSError):
        for path in [path for path in target.parent.iterdir() if _is_left(path, target)]:
            drop(path)


def _is_left(path: Path, target: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    if match is None or path.name in _in_use:
        return False
    same = match["target"] == _called(target)
    if match["kind"] == "old" and not same:
        return False
    if match["host"] == _host():
        return int(match["pid"]) == os.getpid() or not _is_alive(int(match["pid"]))
    return same


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # killed, and nobody has asked for its exit status: the first process of a container may never do so
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's, or there is no /proc
        return True
