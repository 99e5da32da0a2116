"""Lightning's ModelCheckpoint with saves that go on while training does.

Its link (``save_last="link"``) it removes and makes anew, at once. Were the process killed meanwhile, the next run
would find no last checkpoint, and ``ckpt_path="last"`` starts afresh then.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_zero.checkpoint import folder, folders
from lightning_zero.checkpoint.background import Background

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def let_in(trainer: "Trainer", background: Background) -> Callable[[], None]:
    """Have the Trainer's callbacks make links in one instant, when that to which they lead is there, and take what is
    being written for a checkpoint that exists; returns what takes it back.
    """
    callbacks: list[Any] = [callback for callback in trainer.checkpoint_callbacks if hasattr(callback, "file_exists")]
    for callback in callbacks:
        callback._link_checkpoint = partial(_link, background, callback._link_checkpoint)
        callback.file_exists = partial(_exists, background, callback.file_exists)

    def take_back() -> None:
        for callback in callbacks:
            del callback._link_checkpoint, callback.file_exists

    return take_back


def _link(background: Background, plain: Callable[..., None], trainer: "Trainer", filepath: str, linkpath: str) -> None:
    target, path = Path(os.path.abspath(filepath)), Path(os.path.abspath(linkpath))
    if trainer.is_global_zero and target != path:
        try:
            background.afterwards(partial(folder.link, path, target))
        except OSError:  # a file system without links: Lightning copies
            plain(trainer, filepath, linkpath)
            return
    trainer.strategy.barrier()


def _exists(background: Background, exists: Callable[..., bool], filepath: Any, trainer: "Trainer") -> bool:
    path = folder.local(filepath)
    writing = trainer.is_global_zero and path is not None and background.is_writing(path.absolute())
    return trainer.strategy.reduce_boolean_decision(writing, all=False) or exists(filepath, trainer)


def refuse_what_killed_processes_left(trainer: "Trainer") -> None:
    """Lightning takes ``ckpt_path="last"`` for None where it finds no last checkpoint: a fit would start afresh.

    Raises:
        FileNotFoundError: there is one, and a killed process has left it under another name, or a link to it that leads
            nowhere.
    """
    fresh = trainer.ckpt_path is None and trainer.state.fn == "fit"
    callbacks: list[Any] = trainer.checkpoint_callbacks if fresh else []
    for callback in callbacks:
        if hasattr(callback, "_find_last_checkpoints"):
            folders.refuse_dangling(callback._find_last_checkpoints(trainer))
            place = folder.local(callback.dirpath or os.path.join(trainer.default_root_dir, "checkpoints"))
            folders.refuse_moved(place, callback.CHECKPOINT_NAME_LAST)
