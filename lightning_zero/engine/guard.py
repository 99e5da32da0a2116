"""What a parameter is while its values are not here.

While a unit is sharded its parameters change class. The class answers questions about the parameter (shape, dtype,
gradient, hooks, identity) as before; anything that needs the values asks the engine first, which gathers the unit
inside a step and raises outside one.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_zero.engine.flat import Flat
from lightning_zero.engine.metadata import METADATA
from lightning_zero.engine.unit import Unit


class Owner(Protocol):
    """The engine, as a parameter sees it."""

    def read(self, unit: Unit, name: str) -> None:
        """Make the unit's parameters readable or raise."""


class Place:
    """Where a parameter belongs; it hangs on the parameter as ``_zero_place``."""

    __slots__ = ("flat", "index", "numel", "owner", "param", "plain", "unit")

    def __init__(self, owner: Owner, unit: Unit, flat: Flat, index: int) -> None:
        self.owner, self.unit, self.flat, self.index = owner, unit, flat, index
        self.param = flat.params[index]
        self.plain = type(self.param)
        self.numel = flat.layout.slots[index].numel

    @property
    def name(self) -> str:
        """The parameter's name in the module."""
        return self.flat.names[self.index]

    def __deepcopy__(self, memo: Any) -> None:
        """A copied parameter belongs to no engine."""

    def __reduce__(self) -> Any:
        """Nor does an unpickled one."""
        return (_nothing, ())


def _nothing() -> None:
    return None


def _torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if func not in METADATA:
        for place in _places(args, kwargs):
            place.owner.read(place.unit, place.name)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _places(args: Any, kwargs: Any) -> list[Place]:
    found: list[Place] = []

    def look(value: Any) -> None:
        if isinstance(value, Tensor):
            if getattr(type(value), "_zero_guarded", False):
                found.append(value._zero_place)  # type: ignore[attr-defined]
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            for item in value.values():
                look(item)

    look(args)
    look(kwargs)
    return found


def _repr(self: Any) -> str:
    facts = f"shape={tuple(self.shape)}, dtype={self.dtype}, requires_grad={self.requires_grad}"
    return f"Parameter {self._zero_place.name!r} (sharded, {facts})"


def _read_first(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        place = self._zero_place
        place.owner.read(place.unit, place.name)
        return getattr(self, name)(*args)

    return method


_classes: dict[type, type] = {}


def guarded_class(plain: type) -> type:
    """The class that a parameter of class ``plain`` has while it is sharded."""
    if plain not in _classes:
        body = {
            "__torch_function__": classmethod(_torch_function),
            "__repr__": _repr,
            "__deepcopy__": _read_first("__deepcopy__"),
            "__reduce_ex__": _read_first("__reduce_ex__"),
            "_zero_guarded": True,
            "__module__": __name__,  # a class of torch.nn.parameter would be looked for there by compiled code
        }
        _classes[plain] = type(plain)(f"Sharded{plain.__name__}", (plain,), body)
    return _classes[plain]


def holds_all(module: nn.Module) -> bool:
    """Whether the values of all parameters of a module are here: none is sharded, none on ``meta``."""
    return not any(getattr(type(param), "_zero_guarded", False) or param.is_meta for param in module.parameters())


def guard(unit: Unit) -> None:
    """Put the guard on all parameters of a unit."""
    for flat in unit.flats:
        for param in flat.params:
            param.__class__ = guarded_class(param._zero_place.plain)  # type: ignore[attr-defined]


def unguard(unit: Unit) -> None:
    """Give the parameters their own class back."""
    for flat in unit.flats:
        for param in flat.params:
            param.__class__ = param._zero_place.plain  # type: ignore[attr-defined]
