"""Modules that were built on ``meta``: their values come unit by unit, so that the whole need never be there.

A module is filled by its own ``reset_parameters`` (torch's convention), then by the ``_init_weights`` of the nearest
module above that has one (the convention of ``transformers`` and nanoGPT), children before parents, as in a
constructor. So with the same seed, a module whose constructor does just that gets the same numbers. Two exceptions:
what else a constructor does to values is lost, and a module without tensors of its own that is too large to be whole
is not given to ``_init_weights``. (If it has a ``reset_parameters`` of its own, as ``nn.Transformer`` has, all that is
below is whole for that.) What nothing fills is an error, never garbage. Parameters whose values lie in a file are left
alone (see ``expected``).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.expected import forget, give_memory, lacks
from lightning_zero.engine.grouping import UnitSpec


def is_meta(module: nn.Module) -> bool:
    """Whether anything in the module is on ``meta``."""
    return any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))


def _lacks(module: nn.Module) -> bool:
    return any(lacks(tensor) for tensor in (*module.parameters(), *module.buffers()))


def assign_state(module: nn.Module, state_dict: Mapping[str, Tensor], strict: bool) -> None:
    """Load a module on ``meta`` without a copy: its tensors become those of ``state_dict``.

    Parameters keep their identity, and tied ones stay tied, which ``load_state_dict(assign=True)`` alone does not do.

    Raises:
        RuntimeError: names or shapes do not fit, in torch's words.
    """
    places = [(inner, key, param) for inner in module.modules() for key, param in inner._parameters.items()]
    module.load_state_dict(state_dict, strict=strict, assign=True)
    filled: set[int] = set()
    for inner, key, param in places:
        new = inner._parameters[key]
        if param is not None and new is not None and new is not param and id(param) not in filled:
            filled.add(id(param))
            give_memory(param, new.detach())
            forget(param)
        inner._parameters[key] = param


class Materializer:
    """Fills a module that is on ``meta``, wholly or in part.

    Args:
        module: the whole of it.
        specs: the units that it will be cut into.
        most: bytes that may be whole at a time for an ``_init_weights``, if no unit is larger.
    """

    def __init__(self, module: nn.Module, specs: Sequence[UnitSpec], most: int) -> None:
        most = max([most, *(spec.nbytes for spec in specs)])
        above = {child: parent for parent in module.modules() for child in parent.children()}
        order = list(_post_order(module, ""))
        self._calls = {inner: self._initialisers(inner, most, above) for _, inner in order if _lacks(inner)}
        self._names = {inner: name for name, inner in order}
        self._owners = {inner for inner in self._calls if any(lacks(tensor) for _, tensor in _tensors(inner))}
        last = {id(p): inner for inner in self._calls for p in inner.parameters() if _acts_on(self._calls, inner, p)}
        self._given = {id(tensor) for _, inner in order for _, tensor in _tensors(inner) if not tensor.is_meta}
        self._waits = [{last[id(p)] for p in spec.params.values() if id(p) in last} for spec in specs]

    def units(self) -> Iterator[int]:
        """Fill the module step by step; yields the index of each unit as soon as all its values are there.

        Parameters keep their identity.

        Raises:
            ValueError: nothing initialises a tensor; the message names it.
        """
        waiting = dict(enumerate(self._waits))
        for inner in [None, *self._calls]:
            if inner is not None:
                self._fill(inner)
                for needed in waiting.values():
                    needed.discard(inner)
            for index in [index for index, needed in waiting.items() if not needed]:
                del waiting[index]
                yield index

    def _fill(self, inner: nn.Module) -> None:
        own = [key for key, tensor in _tensors(inner) if lacks(tensor)]
        if inner in self._owners and not own:
            return  # tied: the module that came first has filled it
        _allocate(inner)
        with torch.no_grad():
            # what has values, from a checkpoint say, keeps them
            tensors = (*inner.parameters(), *inner.buffers()) if self._calls[inner] else ()
            given = [(tensor, tensor.clone()) for tensor in tensors if id(tensor) in self._given]
            for initialise in self._calls[inner]:
                initialise()
            for tensor, value in given:
                tensor.copy_(value)
        for key, tensor in _tensors(inner):
            if key in own and not _is_filled(tensor, is_buffer=key in inner._buffers):
                name = self._names[inner]
                raise ValueError(
                    f"{name + '.' + key if name else key!r} was built on meta, and neither "
                    f"{type(inner).__name__}.reset_parameters() nor an _init_weights(module) above it has given it "
                    "values. Write one, or build the module on the CPU, or load its weights: "
                    "load_state_dict(..., assign=True)."
                )

    @staticmethod
    def _initialisers(inner: nn.Module, most: int, above: dict[nn.Module, nn.Module]) -> list[Callable[[], Any]]:
        """What fills a module: of its own tensors, and of those below where nothing there has values yet."""
        found: list[Callable[[], Any]] = []
        owns = any(lacks(tensor) for _, tensor in _tensors(inner))
        everything = all(lacks(tensor) for tensor in (*inner.parameters(), *inner.buffers()))
        reset = getattr(inner, "reset_parameters", None) or getattr(inner, "_reset_parameters", None)
        if callable(reset) and (owns or everything):
            found.append(reset)
        fits = sum(p.numel() * p.element_size() for p in inner.parameters()) <= most
        owner: nn.Module | None = inner
        while owner is not None and (owns or (everything and fits)):
            init_weights = getattr(owner, "_init_weights", None)
            if callable(init_weights):
                found.append(partial(init_weights, inner))
                break
            owner = above.get(owner)
        return found


def _acts_on(calls: dict[nn.Module, list[Callable[[], Any]]], inner: nn.Module, param: nn.Parameter) -> bool:
    """Whether a module's turn must come before a parameter below it is complete."""
    return bool(calls[inner]) or any(param is own for own in inner._parameters.values())


def _post_order(module: nn.Module, name: str, seen: set[nn.Module] | None = None) -> Iterator[tuple[str, nn.Module]]:
    """Modules with their names, children before parents, each once."""
    seen = set() if seen is None else seen
    seen.add(module)
    for key, child in module.named_children():
        if child not in seen:
            yield from _post_order(child, f"{name}.{key}" if name else key, seen)
    yield name, module


def _tensors(inner: nn.Module) -> list[tuple[str, Tensor]]:
    own: dict[str, Tensor | None] = {**inner._parameters, **inner._buffers}
    return [(key, tensor) for key, tensor in own.items() if tensor is not None]


def _is_filled(tensor: Tensor, is_buffer: bool) -> bool:
    """Whether no NaN is left; of integers it cannot be told, and for a parameter any will do."""
    if tensor.is_floating_point() or tensor.is_complex():
        return not torch.isnan(tensor).any()
    return not is_buffer or bool((tensor != _UNTOUCHED).any()) or not tensor.numel()


_UNTOUCHED = 113
"""What integer tensors are filled with before they are initialised."""


def _allocate(inner: nn.Module) -> None:
    """Give a module's own tensors memory on the host, with values that show whether somebody has set them."""
    for key, tensor in _tensors(inner):
        if not lacks(tensor):
            continue
        floating = tensor.is_floating_point() or tensor.is_complex()
        values = torch.full_like(tensor.detach(), torch.nan if floating else _UNTOUCHED, device="cpu")
        if isinstance(tensor, nn.Parameter):
            give_memory(tensor, values)
        else:
            inner._buffers[key] = values
