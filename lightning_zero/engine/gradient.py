"""What ``p.grad`` is once gradients are reduced: a tensor that knows where its pieces are.

It stands for the whole, reduced gradient. Shape, dtype and identity are free; ``None`` means that no rank has a
gradient; setting ``p.grad = None`` drops it. Any use of the values gathers them, on all ranks, and an in-place change,
also through a view, goes back into the shards. The same object is put back backward after backward, so that "the user
dropped it" is "it is no longer there".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from lightning_zero.engine.flat import Flat

aten = torch.ops.aten
_ACCUMULATE = (aten.add_.Tensor, aten.add.Tensor)
_ZERO = (aten.zero_.default, aten._foreach_zero_.default)


class ShardedGrad(Tensor):
    """The gradient of one parameter, spread over the ranks."""

    _flat: Flat
    _index: int
    _pending: Tensor | None
    _whole: tuple[Tensor, Tensor] | None

    @staticmethod
    def __new__(cls, param: Tensor, flat: Flat, index: int) -> ShardedGrad:
        """A stand-in of the parameter's shape, dtype and device, without memory (on CPU it reads as NaN)."""
        nan = flat.pool.nan
        if nan is None or not param.numel():
            mark = torch.Tensor._make_wrapper_subclass(
                cls, param.shape, param.stride(), dtype=param.dtype, device=param.device
            )
        else:
            memory = torch.empty(0, dtype=param.dtype, device="cpu")
            memory.set_(nan.storage(param.nbytes), 0, param.shape, param.stride())
            mark = torch.Tensor._make_subclass(cls, memory)
        mark._flat, mark._index = flat, index
        mark._pending = mark._whole = None
        return mark

    def __init__(self, param: Tensor, flat: Flat, index: int) -> None:
        super().__init__()

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def has_pending(self) -> bool:
        """Whether something has been added that nobody has taken over."""
        return self._pending is not None

    @property
    def holds_something(self) -> bool:
        """Whether the shard does not have everything yet."""
        return self._pending is not None or self._whole is not None

    def take_pending(self) -> Tensor | None:
        """What autograd, or a user's hook, has just added; the caller takes it over."""
        pending, self._pending = self._pending, None
        return pending

    def _add(self, value: Any, alpha: float = 1) -> None:
        if not isinstance(value, Tensor) or value.shape != self.shape:
            value = torch.as_tensor(value, dtype=self.dtype, device=self.device).expand(self.shape)
        value = value if alpha == 1 else alpha * value
        self._flat.noted.add(self._index)
        self._pending = value if self._pending is None else self._pending + value

    def whole(self) -> Tensor:
        """The whole gradient; the same tensor as before while somebody may hold a view of that."""
        if self._pending is not None and self._flat.in_local[self._index]:
            self._flat.add_local(self._index, self._pending)
            self._pending = None
        values = self._flat.whole_gradient(self._index) if self._whole is None else self._whole[0]
        return values if self._pending is None else values + self._pending

    def keep(self, values: Tensor) -> None:
        """Somebody may write to ``values``, which is the whole gradient."""
        if self._whole is None:
            self._flat.noted.add(self._index)
            self._whole = (values, values.clone())

    def flush(self) -> None:
        """Take over into the shard what has been written to the whole gradient since it was gathered."""
        if self._whole is not None:
            values, before = self._whole
            self._whole = None
            self._flat.store_gradient(self._index, values, before)

    def forget(self) -> None:
        """The gradient is dropped."""
        self._whole = self._pending = None

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Keep autograd's contribution aside, zero in place, or gather and compute on the whole."""
        if func in _ACCUMULATE and isinstance(args[0], cls) and torch._C._current_graph_task_id() != -1:
            args[0]._add(args[1], **(kwargs or {}))
            return args[0]
        if func is aten.detach.default:
            return args[0]
        if func in _ZERO:
            for mark in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                mark.forget()
                mark._flat.zero_gradient(mark._index)
            return args[0] if func is aten.zero_.default else None
        return _on_whole(func, args, kwargs or {})

    def data_ptr(self) -> int:
        """Nobody reads a gradient past torch.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            f"The gradient of {self._name!r} is spread over the ranks: there is no memory with all of it. Take a copy, "
            "`p.grad.clone()`, on all ranks."
        )

    def untyped_storage(self) -> Any:
        """As :meth:`data_ptr`."""
        return self.data_ptr()

    storage = untyped_storage

    def numpy(self, *, force: bool = False) -> Any:
        """A copy of the whole gradient. Collective, as whatever reads it."""
        return self.clone().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        """As :meth:`numpy`."""
        return self.clone().__array__(dtype)  # type: ignore[no-untyped-call]

    def tolist(self) -> Any:
        """The whole gradient as numbers. Collective."""
        return self.clone().tolist()

    def __dlpack__(self, **kwargs: Any) -> Any:
        """A copy of the whole gradient. Collective."""
        return self.clone().__dlpack__(**kwargs)

    def __deepcopy__(self, memo: Any) -> Tensor:
        """A copy of the whole gradient. Collective."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the whole gradient. Collective."""
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def _name(self) -> str:
        return self._flat.names[self._index]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Without its values: they would have to be gathered."""
        return f"ShardedGrad({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _on_whole(func: Any, args: Any, kwargs: Any) -> Any:
    wholes: dict[int, tuple[ShardedGrad, Tensor]] = {}

    def whole(value: Any) -> Any:
        if not isinstance(value, ShardedGrad):
            return value
        if id(value) not in wholes:
            wholes[id(value)] = (value, value.whole())
        return wholes[id(value)][1]

    args, kwargs = tree_map(whole, args), tree_map(whole, kwargs)
    # what is written now, or later through a view of it, has to find its way back
    if func._schema.is_mutable and any(mark.has_pending for mark, _ in wholes.values()):
        raise RuntimeError(
            f"A hook changes the gradient of {next(iter(wholes.values()))[0]._name!r} in place, of which the earlier "
            "micro-batches are reduced already. Sum them first: ZeroStrategy(reduce_at='window')."
        )
    if func._schema.is_mutable or any(output.alias_info is not None for output in func._schema.returns):
        for mark, values in wholes.values():
            mark.keep(values)
    result = func(*args, **kwargs)
    if func._schema.is_mutable:
        for mark, _ in wholes.values():
            mark.flush()
    back = {id(values): mark for mark, values in wholes.values()}
    return tree_map(lambda value: back.get(id(value), value), result)
