"""Bytes of tensors that have no memory: torch's FakeTensorMode, with a ledger of their storages."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensorMode

ACCELERATOR = torch.device("lazy")
"""Stands for a GPU in a dry run: of the devices that this torch may have no driver for it is the one whose backward
needs none."""


class Ledger(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Inside, tensors have shapes, dtypes and devices but no memory, and what they would take is counted.

    A value that code asks a tensor for is 1 (True): nothing is known, and a check for finite numbers passes.

    Attributes:
        live: bytes at present, by the type of the device.
        peak: the most since :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._depth = 0
        self._known: dict[int, tuple[weakref.ref[UntypedStorage], str, int]] = {}

    def restart(self) -> None:
        """Look for the peak from now on."""
        self.peak = self.live.copy()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else args[0].dtype == torch.bool or 1
        if func.__name__.startswith("_fused_"):
            return None  # an optimizer's step in place; not all of them are known to FakeTensorMode
        self._depth += 1
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs or {})
        finally:
            self._depth -= 1
        # what torch makes on its way to an output it makes once, and then knows the output: a kernel makes none of it
        if not self._depth:
            for value in out if isinstance(out, list | tuple) else (out,):
                if isinstance(value, Tensor):
                    self._note(value)
        return out

    @contextmanager
    def counting(self) -> Iterator[Self]:
        """Enter the mode, and notice what changes a storage without an operation of torch's."""
        storages: Any = UntypedStorage
        resize, swap = storages.resize_, storages._swap_data_ptr_

        def resize_(storage: UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self._resize(storage)
            return out

        def swap_(storage: UntypedStorage, other: UntypedStorage) -> None:
            swap(storage, other)
            smaller, larger = sorted((storage, other), key=UntypedStorage.nbytes)
            self._resize(smaller)  # first, so that nothing is counted twice
            self._resize(larger)

        storages.resize_, storages._swap_data_ptr_ = resize_, swap_
        try:
            with self, torch.autograd.set_multithreading_enabled(False):
                yield self
        finally:
            storages.resize_, storages._swap_data_ptr_ = resize, swap

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known[storage._cdata] = (weakref.ref(storage, self._forget(storage._cdata)), tensor.device.type, 0)
            self._resize(storage)

    def _forget(self, key: int) -> Any:
        book = weakref.ref(self)

        def forget(_: Any) -> None:
            ledger = book()
            if ledger is not None and key in ledger._known:
                _, device, nbytes = ledger._known.pop(key)
                ledger.live[device] -= nbytes

        return forget

    def _resize(self, storage: UntypedStorage) -> None:
        if storage._cdata in self._known:
            reference, device, before = self._known[storage._cdata]
            nbytes = storage.nbytes()
            self._known[storage._cdata] = (reference, device, nbytes)
            self.live[device] += nbytes - before
            if self.live[device] > self.peak[device]:
                self.peak[device] = self.live[device]
