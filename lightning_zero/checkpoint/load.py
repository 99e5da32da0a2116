"""``load_from_checkpoint`` for folders."""

import os
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from lightning_zero.checkpoint import folders, reader

Loaded = TypeVar("Loaded")


def load_from_checkpoint(
    cls: type[Loaded],
    checkpoint_path: str | Path,
    map_location: Any = None,
    hparams_file: str | Path | None = None,
    strict: bool | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Loaded:
    """``cls.load_from_checkpoint(...)`` that takes checkpoint folders, too, in one process; what Lightning's takes,
    it hands on.

    Tensors are read one after the other, the optimizer's state not at all.

    Args:
        cls: a LightningModule or LightningDataModule.
        checkpoint_path: a folder of ours or of Lightning's FSDP strategies; or a file, or the address of one.
        map_location: the module's device, in any form that ``torch.load`` takes; None: as its constructor makes it.
        hparams_file, strict, weights_only, kwargs: as for Lightning's.

    Raises:
        ValueError: the folder is damaged or not complete.
        RuntimeError: names or shapes do not fit, in torch's words.
    """
    package = _lightning(cls)
    given = {} if strict is None else {"strict": strict}  # a LightningDataModule has no such argument
    source = folders.find(checkpoint_path) if isinstance(checkpoint_path, str | os.PathLike) else None
    if source is None:
        own: Any = cls
        loaded: Loaded = own.load_from_checkpoint(
            checkpoint_path, map_location, hparams_file, weights_only=weights_only, **given, **kwargs
        )
        return loaded
    saving = import_module(f"{package}.core.saving")
    migration = import_module(f"{package}.utilities.migration")
    checkpoint = reader.checkpoint(reader.Folder(source), weights_only)
    checkpoint.pop("optimizer_states", None)
    checkpoint = migration.migrate_checkpoint(checkpoint)[0]
    key = cls.CHECKPOINT_HYPER_PARAMS_KEY  # type: ignore[attr-defined]
    if hparams_file is not None:
        checkpoint[key] = _hparams(saving, Path(hparams_file))
    checkpoint[key] = {**checkpoint.get(key, {}), **kwargs}
    loaded = saving._load_state(cls, checkpoint, **given, **kwargs)
    to = getattr(loaded, "to", None)
    return to(_device(map_location)) if to is not None and map_location is not None else loaded


def _device(map_location: Any) -> torch.device:
    """Where ``torch.load`` would put what lies in host memory."""
    restore = torch.serialization._get_restore_location(map_location)  # type: ignore[no-untyped-call]
    device: torch.device = restore(torch.empty(0).untyped_storage(), "cpu").device
    return device


def _hparams(saving: Any, path: Path) -> Any:
    readers = {
        ".csv": saving.load_hparams_from_tags_csv,
        ".yml": saving.load_hparams_from_yaml,
        ".yaml": saving.load_hparams_from_yaml,
    }
    if path.suffix.lower() not in readers:
        raise ValueError(f"hparams_file={str(path)!r} is none of {', '.join(readers)}.")
    return readers[path.suffix.lower()](path)


def _lightning(cls: type) -> str:
    """The package that a class of Lightning's comes from: ``lightning.pytorch`` or ``pytorch_lightning``."""
    names = [base.__module__ for base in cls.__mro__ if base.__name__ in ("LightningModule", "LightningDataModule")]
    if not names:
        raise TypeError(f"{cls.__name__} is no LightningModule and no LightningDataModule.")
    return names[-1].partition(".core.")[0]
