"""The net under autograd: what a graph saves of a unit is where it lies, not the bytes.

Saved weights would keep a unit's memory alive from forward to backward. The hooks keep a description instead, and
gather the unit when the backward asks for it. Activations are kept as they are, with the check of versions that
autograd does without hooks, or are left to the user's own hooks, where there are some: of all hooks autograd calls the
innermost only.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.flat import Flat
from lightning_zero.engine.modes import unseen
from lightning_zero.engine.unit import Unit


class _Kept(NamedTuple):
    """An activation: detached, since keeping an output in its own graph would be a cycle."""

    tensor: Tensor
    version: int


class _Where(NamedTuple):
    """A view of a unit's flat buffer."""

    unit: Unit
    flat: Flat
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    versions: tuple[tuple[int, int], ...]


class Net(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks for a step; ``need`` makes a unit readable in the backward. Without units there are none."""

    def __init__(self, units: Sequence[Unit], need: Callable[[Unit], None]) -> None:
        self._home = {flat.buffer.storage._cdata: (unit, flat) for unit in units for flat in unit.flats}
        self._need = need
        self._covers: list[bool] = []
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        if self._home:
            super().__enter__()

    def __exit__(self, *args: object) -> None:
        if self._home:
            super().__exit__(*args)

    def cover(self) -> None:
        """A unit's forward begins: where the user's hooks (to offload activations, say) are the innermost, they go on
        with activations, and do not get to see the unit's weights, which they may hand through.

        Not torch's own hooks for recomputation: they count what is saved.
        """
        theirs = torch._C._autograd._top_saved_tensors_default_hooks(True) if self._home else None
        covers = theirs is not None and not _is_known(theirs[0])
        self._covers.append(covers)
        if theirs is not None and covers:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._before(*theirs))

    def uncover(self) -> None:
        """It has ended."""
        if self._covers and self._covers.pop():
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _before(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> tuple[Any, Any]:
        """Hooks that serve weights and leave the rest to ``pack`` and ``unpack``."""

        def pack_or_where(tensor: Tensor) -> Any:
            return self._where(tensor) or pack(tensor)

        def unpack_or_gather(saved: Any) -> Tensor:
            return self._unpack(saved) if isinstance(saved, _Where) else unpack(saved)

        pack_or_where._of_net = True  # type: ignore[attr-defined]
        return pack_or_where, unpack_or_gather

    @unseen
    def _pack(self, tensor: Tensor) -> _Kept | _Where:
        return self._where(tensor) or _Kept(tensor.detach(), tensor._version)

    @unseen
    def _where(self, tensor: Tensor) -> _Where | None:
        home = self._home.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        if home is None or tensor.dtype != home[1].dtypes.compute or tensor.is_conj() or tensor.is_neg():
            return None
        unit, flat = home
        size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        return _Where(unit, flat, size, stride, offset, _versions(flat, size, stride, offset))

    @unseen
    def _unpack(self, saved: _Kept | _Where) -> Tensor:
        if isinstance(saved, _Kept):
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a {tuple(saved.tensor.shape)} tensor is at version {saved.tensor._version}; expected version "
                    f"{saved.version} instead."
                )
            return saved.tensor
        for index, version in saved.versions:
            if saved.flat.params[index]._version != version:
                raise RuntimeError(
                    f"Parameter {saved.flat.names[index]!r} has been modified since the forward whose backward this "
                    "is, by an optimizer step or in place: run the forward again after a step."
                )
        self._need(saved.unit)
        return saved.flat.full.as_strided(saved.size, saved.stride, saved.offset)


def _is_known(pack: Callable[[Tensor], Any]) -> bool:
    """Whether hooks need no cover: a net's own, and those of ``torch.utils.checkpoint``."""
    inner = getattr(pack, "__func__", pack)
    return inner is Net._pack or hasattr(pack, "_of_net") or getattr(pack, "__module__", "") == "torch.utils.checkpoint"


def _versions(flat: Flat, size: Sequence[int], stride: Sequence[int], first: int) -> tuple[tuple[int, int], ...]:
    """The versions of the parameters that a view begins and ends in."""
    last = first + sum([(n - 1) * s for n, s in zip(size, stride, strict=True) if n])
    return tuple([(i, flat.params[i]._version) for i in flat.layout.touched(first, last)])
