"""Tensors whose values are not here: they know their shape and dtype, and where the values are."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Elements = Callable[[Sequence[int], int, int], Tensor]
"""Reads elements ``start`` to ``stop`` (1-D, on the CPU) of a tensor whose dimensions come in the given order."""


class Elsewhere(Tensor):
    """Metadata only; what happens to a use of the values is up to the subclass."""

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, *args: Any) -> "Elsewhere":
        """A CPU tensor without memory."""
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu"))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"


class StoredTensor(Elsewhere):
    """A tensor in a file. Who needs a part of it reads that with :attr:`elements`; any other use reads all of it.

    Args:
        shape, dtype: of the whole tensor.
        elements: reads a part.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, elements: Elements) -> None:
        super().__init__()
        self.elements = elements
        self.exact: StoredTensor | None = None
        """The same values in a wider dtype (master weights), if they are stored as well."""

    def whole(self) -> Tensor:
        """All values, in memory of their own."""
        return self.elements(range(self.dim()), 0, self.numel()).view(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Read, then go on as with any tensor."""
        args, kwargs = tree_map_only(StoredTensor, StoredTensor.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> "StoredTensor":
        """It is never written to: a copy is itself."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is pickled has values."""
        return self.whole().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
