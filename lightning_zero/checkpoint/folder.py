"""A checkpoint folder is there as a whole or not at all.

It is made under a temporary name beside its place, brought to the disk, and put into its place by one rename. An old
one is exchanged for it in the same instant and removed afterwards. The same for a file or a link where a folder is.
"""

import ctypes
import errno
import os
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_zero.checkpoint import manifest, temporary

META = "meta.pt"
"""All that is neither module nor optimizer: loops, callbacks, schedulers, hyperparameters. Lightning's name."""

METADATA = ".metadata"
"""Which tensors there are and where they lie. The name of ``torch.distributed.checkpoint``."""


def local(path: Any) -> Path | None:
    """The path, if it is one of this host; None for an address."""
    text = os.fspath(path)
    return None if "://" in text or "::" in text else Path(text).expanduser()


def is_folder(path: Path) -> bool:
    """Whether a path is a checkpoint folder, of Lightning's strategies or ours, whole or not."""
    return path.is_dir() and (any((path / name).exists() for name in (META, METADATA)) or _lists(path) is not None)


def _lists(path: Path) -> set[str] | None:
    """The files of which a folder's manifest speaks; None if it has none that is ours."""
    try:
        files = manifest.read(path)
    except ValueError:
        return None
    return files if files is None else {*files}


def refuse_foreign(target: Path) -> None:
    """Make sure that nothing is lost when a checkpoint takes the place of what is there.

    Raises:
        IsADirectoryError: it is a directory, and holds what is no part of a checkpoint.
    """
    if os.path.islink(target) or not os.path.isdir(target):  # not Path's: they raise where this user may not look
        return
    names = sorted(path.name for path in target.iterdir())
    if is_folder(target):
        own = {META, manifest.NAME, *(_lists(target) or ())}
        names = [name for name in names if name not in own and not fnmatch(name, "*.distcp") and name[0] != "."]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise IsADirectoryError(
            f"{target} is a directory with other things than a checkpoint ({', '.join(names[:3])}{more}), which would "
            "be lost: save under another name, or move them."
        )


def new_part(target: Path, *, file: bool = False) -> Path:
    """Make a folder, or a file, in which what will be ``target`` is written. :func:`temporary.drop` it afterwards.

    Raises:
        OSError: there can be none.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.sweep(target)
        part = temporary.name(target)
        if file:
            part.touch(exist_ok=False)
        else:
            part.mkdir()
    except OSError as error:
        words = f"{target} was not saved: {target.parent} takes nothing new ({error.strerror}). Save elsewhere"
        raise OSError(error.errno, f"{words}, see ModelCheckpoint(dirpath=...) or save_checkpoint(path).") from error
    return part


def commit(part: Path, target: Path) -> None:
    """Put a complete folder, file or link into its place; what was there goes, and not before.

    Raises:
        OSError: it cannot be.
    """
    if not part.is_symlink():
        sync(part)
    aside = None
    if _is_directory(part) and not os.path.lexists(target):
        part.rename(target)
    elif _is_directory(part) or _is_directory(target):
        aside = part if _exchange(part, target) else _move_aside(part, target)
    else:
        part.replace(target)
    sync(target.parent)
    if aside is not None and (error := temporary.drop(aside)):
        rank_zero_warn(f"{target} is saved. What was there before could not be removed: {error}. It is {aside} now.")


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _move_aside(part: Path, target: Path) -> Path:
    """For file systems that cannot exchange: between the two renames the old one has another name, and is whole."""
    aside = temporary.name(target, "old")
    target.rename(aside)
    try:
        part.rename(target)
    except BaseException:
        aside.rename(target)
        raise
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
    if not path.is_symlink():
        _redirect_links(path)
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        doomed = temporary.name(path)  # half of a folder must not look like a checkpoint
        path.rename(doomed)
        if error := temporary.drop(doomed):
            rank_zero_warn(f"{path} could not be removed: {error}. What is left of it is {doomed} now.")


def link(path: Path, target: Path) -> None:
    """Make ``path`` a link to ``target``, in one instant."""
    new = temporary.name(path, "link")
    new.symlink_to(os.path.relpath(target, path.parent))
    try:
        commit(new, path)
    finally:
        temporary.drop(new)


def _redirect_links(gone: Path) -> None:
    links = [path for path in gone.parent.iterdir() if path.is_symlink() and path != gone]
    for path in (path for path in links if path.resolve() == gone.resolve() and not temporary.is_temporary(path)):
        if others := _whole_beside(gone):
            link(path, others[-1])


def _whole_beside(path: Path) -> list[Path]:
    """Whole folders in the same directory, the newest last."""
    found = [other for other in path.parent.iterdir() if other != path and not other.is_symlink() and is_whole(other)]
    return sorted(found, key=lambda other: (other / manifest.NAME).stat().st_mtime)


def sync(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise  # some file systems have no such thing for directories
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
    if moved := temporary.olds(path):
        return moved[0]
    if path.is_symlink():
        if whole := _whole_beside(path):
            return whole[-1]
        raise FileNotFoundError(f"{path} is a link to {os.readlink(path)}, which does not exist.")
    raise FileNotFoundError(f"There is no checkpoint at {path}.")


def is_whole(path: Path) -> bool:
    """Whether a path is a folder of ours in which nothing is missing."""
    if temporary.is_temporary(path):
        return False
    try:
        files = manifest.read(path)
    except ValueError:
        return False
    return files is not None and not manifest.missing(path, files)
