"""A checkpoint folder is there as a whole or not at all.

It is made under a temporary name beside its place, brought to the disk, and put into its place by one rename. An old
one is exchanged for it in the same instant and removed afterwards.
"""

import ctypes
import os
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from lightning_zero.checkpoint import manifest

META = "meta.pt"
"""All that is neither module nor optimizer: loops, callbacks, schedulers, hyperparameters. Lightning's name."""

METADATA = ".metadata"
"""Which tensors there are and where they lie. The name of ``torch.distributed.checkpoint``."""


def is_folder(path: Path) -> bool:
    """Whether a path is a checkpoint folder, of Lightning's strategies or ours, whole or not."""
    return path.is_dir() and any((path / name).exists() for name in (META, METADATA, manifest.NAME))


def new_part(target: Path) -> Path:
    """Make a folder in which the one that will be ``target`` is written."""
    _sweep(target.parent)
    part = target.parent / f".{target.name}.{_owner()}-{uuid4().hex[:8]}.part"
    part.mkdir(parents=True)
    return part


def _owner() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


def _sweep(parent: Path) -> None:
    """Remove what processes of this host that have been killed were writing."""
    for part in parent.glob(f".*.{socket.gethostname()}-*-*.part"):
        with suppress(ValueError):
            pid = int(part.name.split("-")[-2])
            if not _is_alive(pid):
                remove(part)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def commit(part: Path, target: Path) -> None:
    """Put a complete folder into its place; what was there goes, and not before.

    Raises:
        OSError: it cannot be.
    """
    sync(part)
    aside = None
    if target.is_symlink() or target.exists():
        aside = part if _exchange(part, target) else _move_aside(part, target)
    else:
        part.rename(target)
    sync(target.parent)
    if aside is not None:
        remove(aside)


def _move_aside(part: Path, target: Path) -> Path:
    """For file systems that cannot exchange: between the two renames the old one has another name, and is whole."""
    aside = part.with_suffix(".old")
    target.rename(aside)
    part.rename(target)
    return aside


def _exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two things in one instant; False where the system cannot."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux
    return rename is not None and rename(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def remove(path: Path) -> None:
    """Remove a checkpoint: a folder with all that is in it, a file, or a link, and then not what it leads to.

    A link beside it that leads to it (``save_last="link"``) leads to the newest whole folder from now on.
    """
    if not path.name.endswith((".part", ".old")):
        _redirect_links(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        # under another name first: half of a folder must not look like a checkpoint
        doomed = path if path.name.endswith((".part", ".old")) else path.parent / f".{path.name}.{_owner()}-gone.part"
        if doomed is not path:
            path.rename(doomed)
        shutil.rmtree(doomed)


def _redirect_links(gone: Path) -> None:
    links = [link for link in gone.parent.iterdir() if link.is_symlink() and link != gone]
    for link in (link for link in links if link.resolve() == gone.resolve()):
        others = _whole_beside(gone)
        if others:
            new = link.with_name(f".{link.name}.{_owner()}.link")
            new.symlink_to(others[-1].name)
            new.replace(link)


def _whole_beside(path: Path) -> list[Path]:
    """Whole folders in the same directory, the newest last."""
    found = [other for other in path.parent.iterdir() if other != path and not other.is_symlink() and is_whole(other)]
    return sorted(found, key=lambda other: (other / manifest.NAME).stat().st_mtime)


def sync(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find(path: Path) -> Path:
    """The checkpoint that a path names.

    A link may lead nowhere, if the process was killed between a save and what removes older ones: then it is the newest
    whole folder beside it.

    Raises:
        FileNotFoundError: there is none.
    """
    if path.exists():
        return path
    moved = [old for old in path.parent.glob(f".{path.name}.*.old") if is_folder(old)]
    if moved:
        return moved[0]
    if path.is_symlink():
        if whole := _whole_beside(path):
            return whole[-1]
        raise FileNotFoundError(f"{path} is a link to {os.readlink(path)}, which does not exist.")
    raise FileNotFoundError(f"There is no checkpoint at {path}.")


def is_whole(path: Path) -> bool:
    """Whether a path is a folder of ours in which nothing is missing."""
    if path.name.endswith((".part", ".old")):
        return False
    try:
        files = manifest.read(path)
    except ValueError:
        return False
    return files is not None and not manifest.missing(path, files)
