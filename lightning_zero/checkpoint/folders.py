"""Saving, finding and removing checkpoint folders for a strategy."""

import os
import socket
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_zero import host
from lightning_zero.checkpoint import folder, sharded, temporary, trust
from lightning_zero.checkpoint.background import Background
from lightning_zero.checkpoint.writer import write_folder
from lightning_zero.engine import Communicator


def save(
    comm: Communicator,
    background: Background,
    checkpoint: dict[str, Any],
    filepath: Any,
    storage_options: Any,
    *,
    later: bool,
    add: Callable[[Path], None] | None,
) -> None:
    """Write a checkpoint folder; or only copy what goes into it, and write it ``later``. Collective.

    Args:
        comm, background, checkpoint, filepath, storage_options: the strategy's, and what Lightning passes.
        later: whether to write in the background.
        add: writes more files into the folder, at once. Collective.

    Raises:
        RuntimeError: it cannot be written, on all ranks; what was at ``filepath`` stays.
    """
    part: Path | None = None
    try:
        with host.together(comm):
            background.wait()
            target = _target(filepath, storage_options)
            sections, meta = sharded.split(checkpoint)
            content = b""
            if comm.rank == 0:
                content = sharded.pack(meta)
                trust.warn_of_objects(checkpoint)
                part = folder.new_part(target)
            if later:
                sections = sharded.snapshot(sections)
        place: Path = comm.collect(part)[0]
        with host.together(comm):
            _refuse_unseen(place, target)
        if add is not None:
            add(place)
        group = comm.background() if later else comm.meeting
        work = partial(_write, comm.rank, partial(write_folder, sections, content, place, target, group), place)
        if later:
            background.start(work, target)
    except BaseException:
        if part is not None:
            temporary.drop(part)
        raise
    if not later:
        work()


def _write(rank: int, write: Callable[[], None], part: Path) -> None:
    try:
        write()
    finally:
        if rank == 0:
            temporary.drop(part)


def _refuse_unseen(part: Path, target: Path) -> None:
    if not part.is_dir():
        raise FileNotFoundError(
            f"{target} was not saved: the directory {part.parent} of rank 0 is not that of {socket.gethostname()}. "
            'state_dict_type="sharded" needs a path that all ranks reach, on a file system that the hosts share.'
        )


def _target(filepath: Any, storage_options: Any) -> Path:
    target = folder.local(filepath)
    if target is None:
        raise ValueError(f'{filepath} is not a local path: state_dict_type="sharded" needs one that all ranks reach.')
    if storage_options is not None:
        raise TypeError('storage_options are for a CheckpointIO, which state_dict_type="sharded" does not use.')
    target = target.absolute()
    folder.refuse_foreign(target)
    return target


def find(filepath: Any) -> Path | None:
    """The checkpoint folder that a path names; None if it names something else.

    Raises:
        FileNotFoundError: there is nothing; it is a directory with other things; it is a link that leads nowhere, and
            there is no whole folder beside it.
    """
    path = folder.local(filepath)
    if path is None or path.is_file():
        return None
    found = folder.find(path)
    if not found.is_dir():
        return None
    if not folder.is_folder(found):
        inside = sorted(item.name for item in found.iterdir())
        there = f"It holds {', '.join(inside[:5])}{', ...' if len(inside) > 5 else ''}" if inside else "It is empty"
        raise FileNotFoundError(f"{found} is a directory, and not a checkpoint. {there}.")
    return found


def refuse_dangling(paths: Iterable[str]) -> None:
    """Raise where a path is a link that leads nowhere.

    Raises:
        FileNotFoundError: the message names the newest whole folder beside it.
    """
    for path in map(folder.local, paths):
        if path is not None and path.is_symlink() and not path.exists():
            try:
                advice = f"Resume with ckpt_path={str(folder.find(path))!r}, the newest whole one, or"
            except FileNotFoundError:
                advice = "Nothing beside it can be loaded:"
            raise FileNotFoundError(
                f"{path} leads nowhere: the process that made it was killed before its checkpoint was complete. "
                f"{advice} remove the link to start afresh."
            )


def refuse_moved(directory: Path | None, begin: str) -> None:
    """Raise where a checkpoint whose name begins so has been moved aside, and nothing has come into its place.

    Raises:
        FileNotFoundError: the message says what it is called now.
    """
    for old, name in temporary.all_olds(directory) if directory is not None else ():
        path = old.with_name(name)
        if name.startswith(begin) and not os.path.lexists(path):
            raise FileNotFoundError(
                f"{path} is called {old.name} now: the process that was about to put a newer one into its place was "
                f"killed. Rename it, or resume with ckpt_path={str(path)!r}, which finds it."
            )


def remove(background: Background, filepath: Any, otherwise: Callable[[], None]) -> None:
    """Remove a checkpoint, once what is being written is complete; ``otherwise`` removes what is no folder and no link
    of this host: files are the CheckpointIO plugin's.
    """
    path = folder.local(filepath)

    def now() -> None:
        if path is not None and (path.is_symlink() or folder.is_folder(path)):
            folder.remove(path.absolute())
        else:
            otherwise()

    background.afterwards(now)
