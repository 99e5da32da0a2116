"""The tensors of a module by name, whether it is sharded or not, and what they are called in a file."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from lightning_zero.checkpoint.full import Undetached
from lightning_zero.engine import Engine
from lightning_zero.engine.names import clean_name

Names = Mapping[str, str | None] | Callable[[str], str | None] | None
"""From a name in the module to the name in the file; None drops the tensor."""


def engine_of(module: nn.Module) -> Engine | None:
    """The engine that shards the module, or a module that it is a part of; None if it is a plain one.

    Raises:
        RuntimeError: the module has stayed sharded when a run ended with an exception.
    """
    for param in module.parameters():
        place = getattr(param, "_zero_place", None)
        if place is not None and isinstance(place.owner, Engine):
            if place.owner.released:
                raise RuntimeError("The last run ended with an exception: its weights are lost. Build it again.")
            return place.owner
    return None


def named_state(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()``, in which parameters stand for themselves: none is read."""
    with Undetached(None):
        return dict(module.state_dict())


def name_in_file(name: str, names: Names) -> str | None:
    """What a tensor is called in a file; None if it is not to be there.

    What ``torch.compile`` puts into names is left out before ``names`` is asked.
    """
    name = clean_name(name)
    if names is None:
        return name
    return names(name) if callable(names) else names.get(name, name)
