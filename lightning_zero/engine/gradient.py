"""What ``p.grad`` is once gradients are reduced: a tensor that knows where its pieces are.

It stands for the whole, reduced gradient. Shape, dtype and identity are free; ``None`` means that no rank has a
gradient; setting ``p.grad = None`` drops it. Any use of the values gathers them, on all ranks, and an in-place change
goes back into the shards. The same object is put back backward after backward, so that "the user dropped it" is "it is
no longer there".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from lightning_zero.engine.unit import Flat

aten = torch.ops.aten
_ACCUMULATE = (aten.add_.Tensor, aten.add.Tensor)
_ZERO = (aten.zero_.default, aten._foreach_zero_.default)


class ShardedGrad(Tensor):
    """The gradient of one parameter, spread over the ranks."""

    _flat: Flat
    _index: int
    _pending: Tensor | None

    @staticmethod
    def __new__(cls, param: Tensor, flat: Flat, index: int) -> ShardedGrad:
        """A stand-in of the parameter's shape, dtype and device, without memory."""
        mark = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, param.stride(), dtype=param.dtype, device=param.device
        )
        mark._flat, mark._index, mark._pending = flat, index, None
        return mark

    def __init__(self, param: Tensor, flat: Flat, index: int) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def take_pending(self) -> Tensor:
        """What autograd has just added; the caller takes it over."""
        pending, self._pending = self._pending, None
        assert pending is not None
        return pending

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keep autograd's contribution aside, zero in place, or gather and compute on the whole."""
        if func in _ACCUMULATE and isinstance(args[0], cls) and torch._C._current_graph_task_id() != -1:
            args[0]._pending = args[1] if args[0]._pending is None else args[0]._pending + args[1]
            return args[0]
        if func is aten.detach.default:
            return args[0]
        if func in _ZERO:
            for mark in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                mark._flat.zero_gradient(mark._index)
            return args[0] if func is aten.zero_.default else None
        return _on_whole(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without its values: they would have to be gathered."""
        return f"ShardedGrad({self._flat.names[self._index]!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    wholes: dict[int, tuple[ShardedGrad, Tensor]] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, ShardedGrad):
            return value
        if id(value) not in wholes:
            wholes[id(value)] = (value, value._flat.whole_gradient(value._index))
        return wholes[id(value)][1]

    result = func(*tree_map(whole, args), **tree_map(whole, kwargs))
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            for mark in value if isinstance(value, list | tuple) else [value]:
                if isinstance(mark, ShardedGrad):
                    mark._flat.store_gradient(mark._index, wholes[id(mark)][1])
    back = {id(values): mark for mark, values in wholes.values()}
    return tree_map(lambda value: back.get(id(value), value), result)
