"""Objects in a checkpoint that ``torch.load(weights_only=True)`` refuses."""

import io
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

_told: set[str] = set()


def warn_of_objects(meta: Mapping[str, Any], content: bytes) -> None:
    """Say once which of the user's objects will not load without ``weights_only=False``.

    Args:
        meta: what a checkpoint holds beside tensors.
        content: the same as a file.
    """
    if not torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(content)):
        return
    found = [words for words in _refused(meta, "") if words not in _told]
    _told.update(found)
    if found:
        rank_zero_warn(
            f"The checkpoint holds objects that torch.load refuses unless it is told weights_only=False: "
            f"{', '.join(found)}. Keep plain values there (str(path), OmegaConf.to_container(config), float(number))."
        )


def _refused(value: Any, place: str) -> Iterator[str]:
    """In words, the innermost values that cannot be loaded."""
    if _loads(value):
        return
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    below = [words for key, item in inner for words in _refused(item, f"{place}[{key!r}]")]
    yield from below or [f"checkpoint{place} ({type(value).__module__}.{type(value).__qualname__})"]


def _loads(value: Any) -> bool:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return not torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
