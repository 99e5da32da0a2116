"""Memory that comes and goes: a pool of storages by size, and flat buffers whose storage is swapped in and out.

On CPU an allocation above glibc's mmap threshold costs a page fault for every 4 KiB, each time. A pool keeps such
memory and moves it in and out of a tensor's storage; views of the tensor stay valid. On other devices torch's own
caching allocator does that, and the storage is resized.
"""

import ctypes
import mmap
import os
from collections import defaultdict
from functools import cache
from weakref import WeakSet

import torch
from torch import Tensor, UntypedStorage

from lightning_zero.engine.modes import pretends


class NanPages:
    """Address space that reads as NaN (all bits set) however large, for storages that hold nothing at the moment.

    Code that reads a freed parameter from C++, past the guard, then computes NaN instead of crashing. The pages are
    private: a stray write goes to a copy, not to another parameter.
    """

    CHUNK = 4 * 2**20

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        number = ctypes.c_int
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
        self._file = os.memfd_create("lightning_zero_nan")
        os.pwrite(self._file, b"\xff" * self.CHUNK, 0)
        self._base, self._size = 0, 0

    def storage(self, nbytes: int) -> UntypedStorage:
        """A storage of ``nbytes`` over the pages; it owns nothing."""
        if nbytes > self._size:
            self._map(max(nbytes, 2 * self._size))
        memory = (ctypes.c_char * nbytes).from_address(self._base)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def _map(self, nbytes: int) -> None:
        # older, smaller mappings stay: storages point into them
        size = -(-nbytes // self.CHUNK) * self.CHUNK
        private, anonymous, fixed, no_reserve = 0x02, 0x20, 0x10, 0x4000
        access = mmap.PROT_READ | mmap.PROT_WRITE
        base = self._libc.mmap(None, size, 0, private | anonymous | no_reserve, -1, 0)
        for offset in range(0, size, self.CHUNK):
            flags = private | fixed | no_reserve
            if self._libc.mmap(base + offset, self.CHUNK, access, flags, self._file, 0) != base + offset:
                raise MemoryError(f"mmap of {nbytes} bytes of address space failed: errno {ctypes.get_errno()}")
        self._base, self._size = base, size


@cache
def nan_pages() -> NanPages:
    """The process' NaN pages."""
    return NanPages()


class Pool:
    """Free storages of one device, by size in bytes.

    ``trim`` drops what was not needed since the last trim, so that the pool follows the need.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.swaps = device.type == "cpu" and os.name == "posix" and hasattr(os, "memfd_create")
        self.nan = nan_pages() if self.swaps and not pretends() else None
        self._free: dict[int, list[UntypedStorage]] = defaultdict(list)
        self._low: dict[int, int] = {}

    def take(self, nbytes: int) -> UntypedStorage:
        """A storage with uninitialised memory."""
        free = self._free[nbytes]
        if not free:
            self._low[nbytes] = 0
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device).untyped_storage()
        storage = free.pop()
        self._low[nbytes] = min(self._low.get(nbytes, len(free)), len(free))
        return storage

    def give(self, storage: UntypedStorage) -> None:
        """Take back the memory of a storage that nobody reads any more."""
        if self.swaps and storage.nbytes():
            self._free[storage.nbytes()].append(storage)

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised 1-D tensor; hand it back with :meth:`free`."""
        if not self.swaps or not numel:
            return torch.empty(numel, dtype=dtype, device=self.device)
        tensor = torch.empty(0, dtype=dtype, device="cpu")
        tensor.set_(self.take(numel * dtype.itemsize), 0, (numel,))  # type: ignore[call-overload]
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Hand back a tensor made by :meth:`empty`; it must not be used afterwards."""
        self.give(tensor.untyped_storage())

    def trim(self) -> None:
        """Drop the free storages that have not been taken since the last call."""
        for nbytes, free in self._free.items():
            unused = self._low.get(nbytes, len(free))
            del free[:unused]
            self._low[nbytes] = len(free)

    def clear(self) -> None:
        """Drop all free storages."""
        self._free.clear()
        self._low.clear()

    def nbytes(self) -> int:
        """Bytes that lie free in the pool."""
        return sum(nbytes * len(free) for nbytes, free in self._free.items())


def _swap(a: UntypedStorage, b: UntypedStorage) -> None:
    """Exchange the memory of two storages (one of them empty); views follow."""
    a._swap_data_ptr_(b)  # type: ignore[attr-defined]


class FlatBuffer:
    """One flat tensor that exists for ever; its memory is there between ``allocate`` and ``release`` only."""

    _all: "WeakSet[FlatBuffer]" = WeakSet()

    @classmethod
    def owns(cls, tensor: Tensor) -> bool:
        """Whether the tensor is a view of some flat buffer."""
        storage = tensor.untyped_storage()._cdata
        return any(buffer.storage._cdata == storage for buffer in cls._all)

    def __init__(self, numel: int, dtype: torch.dtype, pool: Pool) -> None:
        self._all.add(self)
        self.pool = pool
        self.nbytes = numel * dtype.itemsize
        self.tensor = pool.empty(numel, dtype)
        self.storage = self.tensor.untyped_storage()
        self.allocated = True
        self._swaps = pool.swaps and numel > 0
        self._nan = pool.nan.storage(self.nbytes) if pool.nan is not None and numel else None

    def allocate(self) -> None:
        """Give the tensor uninitialised memory; nothing happens if it has some."""
        if self.allocated:
            return
        self.allocated = True
        if not self._swaps:
            self.storage.resize_(self.nbytes)
            return
        memory = self.pool.take(self.nbytes)
        if self._nan is not None:
            _swap(self.storage, self._nan)
        _swap(self.storage, memory)

    def release(self) -> None:
        """Take the memory away; views of the tensor read NaN on CPU and must not be read elsewhere."""
        if not self.allocated:
            return
        self.allocated = False
        if not self._swaps:
            self.storage.resize_(0)
            return
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").untyped_storage()
        _swap(self.storage, memory)
        self.pool.give(memory)
        if self._nan is not None:
            _swap(self.storage, self._nan)

    def discard(self) -> None:
        """Let go of the memory for good; views that others hold keep it."""
        self.allocated = False
        self.tensor = self.tensor.new_empty(0)
        self.storage = self.tensor.untyped_storage()

    def is_viewed(self, own_views: int) -> bool:
        """Whether somebody holds a view beside the engine's ``own_views``: a graph, a variable, an attribute."""
        # this object's tensor and storage are two more
        return int(torch._C._storage_Use_Count(self.storage._cdata)) > own_views + 2
