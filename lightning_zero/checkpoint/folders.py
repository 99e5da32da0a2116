"""Saving, finding and removing checkpoint folders for a strategy."""

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_zero import host
from lightning_zero.checkpoint import folder, sharded, trust
from lightning_zero.checkpoint.background import Background
from lightning_zero.checkpoint.writer import write_folder
from lightning_zero.config import Settings
from lightning_zero.engine import Communicator


def local(path: Any) -> Path | None:
    """The path, if it is one of this host; None for an address."""
    text = os.fspath(path)
    return None if "://" in text or "::" in text else Path(text).expanduser()


def save(
    comm: Communicator,
    background: Background,
    checkpoint: dict[str, Any],
    filepath: Any,
    storage_options: Any,
    settings: Settings,
) -> None:
    """Write a checkpoint folder; with ``async_save`` only copy what goes into it, and write it later. Collective.

    Raises:
        RuntimeError: it cannot be written, on all ranks; what was at ``filepath`` stays.
    """
    background.wait()
    later = settings.training.async_save
    with host.together(comm):
        target = _target(filepath, storage_options)
        sections, meta = sharded.split(checkpoint)
        content = b""
        part = target
        if comm.rank == 0:
            content = sharded.pack(meta)
            trust.warn_of_objects(checkpoint)
            part = folder.new_part(target)
        if later:
            sections = sharded.snapshot(sections)
    part = comm.collect(part)[0]
    group = comm.background() if later else comm.meeting
    work = partial(_write, comm.rank, partial(write_folder, sections, content, part, target, group), part)
    if later:
        background.start(work)
    else:
        work()


def _write(rank: int, write: Any, part: Path) -> None:
    try:
        write()
    finally:
        if rank == 0:
            folder.remove(part)


def _target(filepath: Any, storage_options: Any) -> Path:
    target = local(filepath)
    if target is None:
        raise ValueError(f'{filepath} is not a local path: state_dict_type="sharded" needs one that all ranks reach.')
    if storage_options is not None:
        raise TypeError('storage_options are for a CheckpointIO, which state_dict_type="sharded" does not use.')
    target = target.absolute()
    if target.is_dir() and not target.is_symlink() and not folder.is_folder(target) and any(target.iterdir()):
        raise IsADirectoryError(f"{target} is a directory, and not a checkpoint: save under another name.")
    return target


def find(filepath: Any) -> Path | None:
    """The checkpoint folder that a path names; None if it names something else.

    Raises:
        FileNotFoundError: it is a link that leads nowhere, and there is no whole folder beside it.
    """
    path = local(filepath)
    if path is None or path.is_file():
        return None
    found = folder.find(path)
    return found if found.is_dir() else None


def refuse_dangling(paths: Iterable[str]) -> None:
    """Raise where a path is a link that leads nowhere.

    Raises:
        FileNotFoundError: the message names the newest whole folder beside it.
    """
    for path in map(local, paths):
        if path is not None and path.is_symlink() and not path.exists():
            try:
                advice = f"Resume with ckpt_path={str(folder.find(path))!r}, the newest whole one, or"
            except FileNotFoundError:
                advice = "Nothing beside it can be loaded:"
            raise FileNotFoundError(
                f"{path} leads nowhere: the process that made it was killed before its checkpoint was complete. "
                f"{advice} remove the link to start afresh."
            )


def remove(background: Background, filepath: Any) -> bool:
    """Remove a folder or a link, once what is being written is complete; False if it is something else."""
    path = local(filepath)
    if path is None or not (path.is_symlink() or folder.is_folder(path)):
        return False
    background.afterwards(partial(folder.remove, path.absolute()))
    return True
