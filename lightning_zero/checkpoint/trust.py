"""Objects in a checkpoint that ``torch.load(weights_only=True)`` refuses."""

import io
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import tree_map_only

_told: set[str] = set()


def warn_of_objects(checkpoint: Mapping[str, Any]) -> None:
    """Say once which of the user's objects will not load without ``weights_only=False``.

    Args:
        checkpoint: as it will be saved; its tensors are not looked at.
    """
    light = tree_map_only(Tensor, lambda _: None, dict(checkpoint))
    try:
        if _loads(light):
            return
        found = [words for words in _refused(light, "") if words not in _told]
    except Exception:  # it cannot be pickled, or only in the way of the user's CheckpointIO: that will say so
        return
    _told.update(found)
    if found:
        rank_zero_warn(
            f"The checkpoint holds objects that torch.load refuses unless it is told weights_only=False: "
            f"{', '.join(found)}. Keep plain values there (str(path), OmegaConf.to_container(config), float(number))."
        )


def _refused(value: Any, place: str) -> Iterator[str]:
    """In words, the innermost values in plain containers that cannot be loaded."""
    if _loads(value):
        return
    inner = value.items() if type(value) in (dict, OrderedDict) else enumerate(value) if _is_list(value) else ()
    below = [words for key, item in inner for words in _refused(item, f"{place}[{key!r}]")]
    kind = value if isinstance(value, type) else type(value)
    yield from below or [f"checkpoint{place} ({kind.__module__}.{kind.__qualname__})"]


def _is_list(value: Any) -> bool:
    return type(value) in (list, tuple)


def _loads(value: Any) -> bool:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return not torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
