"""Reads ``.metadata`` without running what somebody may have put there: a pickle that may only name what belongs there.

``torch.distributed.checkpoint`` reads it with plain pickle, which runs anything.
"""

import pickle
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

_ALLOWED = {
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    *((dcp_metadata.__name__, name) for name in ("_MEM_FORMAT_ENCODING", *dcp_metadata.__all__, "Metadata")),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Dtypes (``torch.float32``), and what DCP's metadata are made of."""
        import torch

        if (module, name) in _ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong there")


def read(path: Path) -> Metadata:
    """The metadata of a folder.

    Raises:
        FileNotFoundError: there are none.
        ValueError: they are damaged, or hold what does not belong there.
    """
    with path.open("rb") as file:
        try:
            found: Metadata = _Unpickler(file).load()
        except Exception as error:  # a damaged pickle may raise anything
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}.") from error
    stored = found.storage_data if isinstance(found, Metadata) else None
    if not isinstance(stored, dict) or not all(isinstance(info, _StorageInfo) for info in stored.values()):
        raise ValueError(f"{path} does not describe a checkpoint.")
    for name in {str(info.relative_path) for info in stored.values()}:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path} names a file outside of its folder: {name}.")
    return found
