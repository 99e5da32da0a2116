"""Hooks on modules and parameters: they tell the engine when a unit's forward begins and ends."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.events import Events
from lightning_zero.engine.guard import Place
from lightning_zero.engine.modes import uncompiled
from lightning_zero.engine.unit import Unit

if TYPE_CHECKING:
    from lightning_zero.engine.engine import Engine


class _Hook:
    """A hook that a copied or unpickled module forgets."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine

    def __deepcopy__(self, memo: Any) -> _Hook:
        return type(self).__new__(type(self))._forget()

    def __reduce__(self) -> Any:
        return (_forgotten, (type(self),))

    def _forget(self) -> _Hook:
        self.engine = None
        return self


def _forgotten(kind: type[_Hook]) -> _Hook:
    return kind.__new__(kind)._forget()


def _failed(output: Any) -> bool:
    """Whether a forward has ended in an exception: then its hooks are called with no output, while it is handled."""
    return output is None and sys.exc_info()[0] is not None


class _UnitHook(_Hook):
    unit: Unit
    last: bool

    def __init__(self, engine: Engine, unit: Unit, last: bool) -> None:
        super().__init__(engine)
        self.unit, self.last = unit, last


class _PreForward(_UnitHook):
    @uncompiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.engine is not None:
            self.engine.pre_forward(self.unit)


class _PostForward(_UnitHook):
    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.engine is not None:
            self.engine.post_forward(self.unit, self.last, failed=_failed(output))
            if self.engine.record.heard:
                _tell_of_backward(self.engine.record, self.unit, output)


def _tell_of_backward(record: Events, unit: Unit, output: Any) -> None:
    """Record when the unit's backward begins: when the gradient of what it has returned is there."""

    def begins(gradient: Tensor) -> None:
        record("backward", unit.name)

    for value in tree_leaves(output):
        if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
            value.register_hook(begins)  # type: ignore[no-untyped-call]


class _EnterScope(_Hook):
    """A forward called from anywhere is a step of its own."""

    scopes: list[AbstractContextManager[None]]

    def __init__(self, engine: Engine, scopes: list[AbstractContextManager[None]]) -> None:
        super().__init__(engine)
        self.scopes = scopes

    @uncompiled
    def __call__(self, module: nn.Module, args: Any) -> None:
        if self.engine is not None:
            scope = self.engine.called_forward()
            scope.__enter__()
            self.scopes.append(scope)


class _LeaveScope(_EnterScope):
    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any = None) -> None:
        if self.engine is not None and self.scopes:
            self.scopes.pop().__exit__(*(sys.exc_info() if _failed(output) else (None, None, None)))


class _GradHook(_Hook):
    place: Place

    def __init__(self, engine: Engine, place: Place) -> None:
        super().__init__(engine)
        self.place = place

    def __call__(self, param: nn.Parameter) -> None:
        if self.engine is not None:
            self.engine.reducer.grad_ready(self.place)


class Hooks:
    """All hooks of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()

    def attach(self, module: nn.Module) -> None:
        """Put hooks on the modules of the units, and a scope around the forward of ``module`` and of its children."""
        children = [child for child in module.children() if not isinstance(child, ScriptModule)]  # those take no hooks
        for outer in [module, *children]:
            scopes: list[AbstractContextManager[None]] = []
            self._handles.append(outer.register_forward_pre_hook(_EnterScope(self.engine, scopes), prepend=True))
            leave = _LeaveScope(self.engine, scopes)
            self._handles.append(outer.register_forward_hook(leave, always_call=True))
        for unit in self.engine.units:
            if not unit.is_root:
                for inner in unit.modules:
                    last = inner is unit.modules[-1]
                    pre, post = _PreForward(self.engine, unit, last), _PostForward(self.engine, unit, last)
                    self._handles.append(inner.register_forward_pre_hook(pre))
                    self._handles.append(inner.register_forward_hook(post, always_call=True))

    def watch_gradients(self) -> None:
        """Hook parameters that have become trainable since the last call."""
        for unit in self.engine.units:
            for flat in unit.flats:
                for param in flat.params:
                    if id(param) not in self._hooked and param.requires_grad:
                        flat.unfreeze()
                        hook = _GradHook(self.engine, param._zero_place)  # type: ignore[attr-defined]
                        self._handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
                        self._hooked.add(id(param))

    def detach(self) -> None:
        """Remove all of them."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
