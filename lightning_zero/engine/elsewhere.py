"""Tensors whose values are not here: they know their shape and dtype, and where the values are."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

AT_ONCE = 2**20
"""Elements that are read at once where all are copied."""


class Elements(Protocol):
    """Reads some elements of a tensor."""

    def __call__(self, dims: Sequence[int], start: int, stop: int, out: Tensor | None = None) -> Tensor:
        """Elements ``start`` to ``stop`` of the tensor whose dimensions come in the order ``dims``: 1-D on the CPU, in
        the tensor's dtype; in ``out``, if it is given, which is contiguous.
        """


class Elsewhere(Tensor):
    """Metadata only; what happens to a use of the values is up to the subclass."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, *args: Any) -> "Elsewhere":
        """A CPU tensor without memory."""
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class OwnPart(Elsewhere):
    """A tensor of which this rank has some elements, a contiguous range in the order of ``dims``.

    Args:
        shape, dtype: of the whole tensor.
        label: its name, for errors.
        dims: the order of dimensions in which the elements are counted.
        start, stop: the range that this rank has.
        pieces: gives elements from one index to another of the range (counted as ``start`` and ``stop`` are): 1-D
            tensors that follow one another, views where the values are in memory.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        label: str,
        dims: Sequence[int],
        start: int,
        stop: int,
        pieces: Callable[[int, int], Sequence[Tensor]],
    ) -> None:
        super().__init__()
        self.label, self.dims, self.start, self.stop, self._pieces = label, tuple(dims), start, stop, pieces
        self.exact: OwnPart | None = None
        """The same in a wider dtype (master weights), if the rank has that."""

    def read(self, start: int, stop: int) -> Tensor:
        """Elements of the range, 1-D; a view where they lie together."""
        pieces = self._pieces(start, stop)
        return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))

    def snapshot(self, values: Tensor) -> "OwnPart":
        """The same, from ``values``, into which the present ones are copied (1-D, of this dtype)."""
        for start in range(self.start, self.stop, AT_ONCE):
            place = start - self.start
            for piece in self._pieces(start, min(start + AT_ONCE, self.stop)):
                values[place : place + piece.numel()].copy_(piece.detach())
                place += piece.numel()
        first = self.start
        facts = self.shape, self.dtype, self.label, self.dims, first, self.stop
        return OwnPart(*facts, lambda start, stop: [values[start - first : stop - first]])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse: no rank has all the values."""
        names = {repr(leaf.label) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OwnPart)}
        raise RuntimeError(
            f"{', '.join(sorted(names))} cannot be read here: in a sharded checkpoint no rank has the whole. A hook "
            'may drop or rename it; to read or change its values use state_dict_type="full".'
        )

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse, too: these ask torch for the memory."""
        return self.__torch_dispatch__(None, None, (self,))

    numpy = tolist = __reduce_ex__ = _refuse


class StoredTensor(Elsewhere):
    """A tensor in a file. Who needs a part of it reads that with :attr:`elements`; any other use reads all of it.

    Once somebody writes to it or takes a view of it, its values stay in memory.

    Args:
        shape, dtype: of the whole tensor.
        elements: reads a part.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, elements: Elements) -> None:
        super().__init__()
        self.elements = self._stored = elements
        self._exact: StoredTensor | None = None
        self._kept: Tensor | None = None

    @property
    def exact(self) -> "StoredTensor | None":
        """The same values in a wider dtype (master weights), if they are stored, too, and nobody has changed these."""
        changed = self._kept is not None and not torch.equal(self._kept, self._read())
        return None if changed else self._exact

    @exact.setter
    def exact(self, stored: "StoredTensor | None") -> None:
        self._exact = stored

    def whole(self) -> Tensor:
        """All values, in memory of their own."""
        return self._read() if self._kept is None else self._kept.clone()

    def _read(self) -> Tensor:
        return self._stored(range(self.dim()), 0, self.numel()).view(self.shape)

    def _keep(self) -> Tensor:
        if self._kept is None:
            kept = self._kept = self._read()

            def elements(dims: Sequence[int], start: int, stop: int, out: Tensor | None = None) -> Tensor:
                values = kept.detach().permute(tuple(dims)).reshape(-1)[start:stop]
                return values.clone() if out is None else out.copy_(values)

            self.elements = elements
        return self._kept

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Read, then go on as with any tensor."""
        shared = {argument.name for argument in func._schema.arguments if argument.alias_info is not None}

        def read(value: StoredTensor, name: str) -> Tensor:
            return value._keep() if name in shared else value.whole() if value._kept is None else value._kept

        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        given = {k: tree_map_only(StoredTensor, partial(read, name=k), value) for k, value in given.items()}
        positional = [given.pop(name) for name in names[: len(args)]]
        return func(*positional, **given)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Of the values."""
        return self._keep().numpy(*args, **kwargs)

    def tolist(self) -> Any:
        """Of the values."""
        return self.whole().tolist()

    def __deepcopy__(self, memo: Any) -> "StoredTensor | Tensor":
        """One that nobody writes to is its own copy."""
        return self if self._kept is None else self._kept.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is pickled has values."""
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
