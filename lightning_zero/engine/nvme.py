"""A tier in a file: blocks are read and written by threads, past the page cache where the file system allows it.

The file has no name: it is gone with the process, however that ends, nobody else can open it, and two runs in one
directory do not meet.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import IO, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.modes import pretends
from lightning_zero.engine.tiers import Tier, TierArray, TierError, Transfer

PAGE = 4096
"""Bytes: what direct I/O wants offsets, lengths and addresses to be multiples of."""

_Jobs = SimpleQueue[Callable[[memoryview], None] | None]


class _Blocks(Transfer):
    """A transfer that is so many blocks long."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._error: TierError | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        if not count:
            self.ended = time.perf_counter()
            self._over.set()

    def done(self, error: TierError | None) -> None:
        """A block has gone through, or not."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if not self._left:
                self.ended = time.perf_counter()
                self._over.set()

    def over_and_done(self) -> None:
        """Return when no block is under way any more, whatever has become of them."""
        self._over.wait()

    @property
    def over(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._over.is_set()

    def wait(self) -> None:
        """Return when all blocks are through."""
        self.over_and_done()
        if self._error is not None:
            raise self._error


class _FileArray(TierArray):
    def __init__(self, tier: "NvmeTier", numel: int, dtype: torch.dtype, what: str, offset: int) -> None:
        super().__init__(tier, numel, dtype, what)
        self._file, self._offset = tier, offset
        self._stores: list[tuple[int, int, _Blocks]] = []

    def _range(self, start: int, values: Tensor) -> tuple[int, int]:
        begin = self._offset + start * self.dtype.itemsize
        return begin, begin + values.numel() * self.dtype.itemsize

    def _fetch(self, start: int, out: Tensor) -> Transfer:
        begin, end = self._range(start, out)
        self._settle(begin, end)
        return self._file.submit(self._file.read_block, begin, end, out, self.what)

    def _store(self, start: int, values: Tensor) -> Transfer:
        begin, end = self._range(start, values)
        self._settle(begin, end)
        transfer = self._file.submit(self._file.write_block, begin, end, values, self.what)
        self._stores.append((begin, end, transfer))
        return transfer

    def _settle(self, begin: int, end: int) -> None:
        """Wait for stores under way that touch the pages of a range; a page is written as a whole."""
        low, high = begin // PAGE * PAGE, -(-end // PAGE) * PAGE
        still = []
        for a, b, transfer in self._stores:
            if a < high and low < b:
                transfer.wait()
            elif not transfer.over:
                still.append((a, b, transfer))
        self._stores[:] = still


class _Place(NamedTuple):
    """Where an array of the file was, and what may still be on its way there."""

    offset: int
    stores: list[tuple[int, int, _Blocks]]


class NvmeTier(Tier):
    """One file in a directory, private to this process.

    Args:
        path: a directory, on a disk of this host; it is made if it does not exist.
        block_size: bytes of one request; a multiple of 4096.
        requests: how many are under way at a time; each has a thread.

    Raises:
        TierError: the directory cannot be made or written to.
    """

    def __init__(self, path: str | os.PathLike[str], block_size: int, requests: int) -> None:
        super().__init__()
        self.path = os.path.expanduser(path)
        self.block_size = block_size
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.path, buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise TierError(
                f"No file can be made in nvme_path={self.path!r}: {error.strerror}. Give a directory that you may write"
                " to."
            ) from error
        self._fd = self._file.fileno()
        self.direct = False
        with suppress(OSError, AttributeError):  # a file system without direct I/O, or not Linux
            fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) | os.O_DIRECT)
            self.direct = True
        self._size = self._reserved = 0
        self._promised = 0  # bytes that were reserved, and are not taken yet
        self._free: defaultdict[int, list[_Place]] = defaultdict(list)  # of arrays that have gone, by their bytes
        self._jobs: _Jobs = SimpleQueue()
        running = [
            threading.Thread(target=_serve, args=(self._jobs, block_size), name=f"zero-nvme-{n}", daemon=True)
            for n in range(requests)
        ]
        for thread in running:
            thread.start()
        # the threads do not know the tier, so that it ends, and the file with it, when nobody needs it any more
        self._end = weakref.finalize(self, _shut, self._jobs, running, self._file)

    def reserve(self, nbytes: int, what: str) -> None:
        """Have the file system set so many bytes aside.

        Raises:
            TierError: the disk is full.
        """
        self._grow(self.nbytes() + self._promised + nbytes, what)
        self._promised += nbytes

    def _grow(self, size: int, what: str) -> None:
        missing = size - self._reserved
        if missing <= 0:
            return
        try:
            self._set_aside(missing)
        except OSError as error:
            free = shutil.disk_usage(self.path).free
            raise TierError(
                f"nvme_path={self.path!r} has no room for {what}: this rank has {self._reserved:,} bytes there and"
                f" needs {missing:,} more, {free:,} are free ({error.strerror}). Free some, or give another nvme_path."
            ) from error
        self._reserved = size

    def _set_aside(self, missing: int) -> None:
        try:
            os.posix_fallocate(self._fd, self._reserved, missing)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            os.ftruncate(self._fd, self._reserved + missing)  # no such call here: a full disk shows when it is written

    def empty(self, numel: int, dtype: torch.dtype, what: str) -> TierArray:
        """A new array, not initialised; its place on the disk is reserved."""
        nbytes = max(-(-numel * dtype.itemsize // PAGE) * PAGE, PAGE)
        self._promised = max(0, self._promised - nbytes)
        free = self._free[nbytes]
        if not free:
            self._grow(self._size + nbytes, what)
            free.append(_Place(self._size, []))
            self._size += nbytes
        offset, stores = free.pop()
        for _, _, transfer in stores:
            transfer.over_and_done()
        array = _FileArray(self, numel, dtype, what, offset)
        weakref.finalize(array, free.append, _Place(offset, array._stores)).atexit = False
        return array

    def nbytes(self) -> int:
        """Bytes that its arrays take, on the disk."""
        return self._size - sum(nbytes * len(places) for nbytes, places in self._free.items())

    def close(self) -> None:
        """End the threads and give the disk space back."""
        self._end()

    def submit(
        self, work: Callable[[int, int, memoryview, memoryview], None], begin: int, end: int, tensor: Tensor, what: str
    ) -> _Blocks:
        """Cut the bytes ``begin`` to ``end`` of the file at multiples of the block size and queue the pieces."""
        memory = _bytes_of(tensor)
        cuts = [begin, *range(begin - begin % self.block_size + self.block_size, end, self.block_size), end]
        pieces = list(zip(cuts, cuts[1:], strict=False)) if end > begin else []
        transfer = _Blocks(len(pieces))
        for a, b in pieces:
            self._jobs.put(partial(self._run, work, a, b, memory[a - begin : b - begin], transfer, what))
        return transfer

    def _run(
        self,
        work: Callable[[int, int, memoryview, memoryview], None],
        begin: int,
        end: int,
        memory: memoryview,
        transfer: _Blocks,
        what: str,
        bounce: memoryview,
    ) -> None:
        error = None
        try:
            work(begin, end, memory, bounce)
        except Exception as failure:  # whatever it is: who waits for the transfer must hear of it
            doing = "written to" if work == self.write_block else "read from"
            reason = getattr(failure, "strerror", None) or failure
            error = TierError(
                f"{what} could not be {doing} the file in nvme_path={self.path!r} (bytes {begin:,} to {end:,}):"
                f" {reason}. Look at the disk; checkpoints that were written before are whole."
            )
        transfer.done(error)

    def read_block(self, begin: int, end: int, memory: memoryview, bounce: memoryview) -> None:
        """Bytes ``begin`` to ``end`` of the file, which lie in one block, into ``memory``."""
        if _is_aligned(begin, memory):
            self._read(memory, begin)
            return
        low, high = begin // PAGE * PAGE, -(-end // PAGE) * PAGE
        self._read(bounce[: high - low], low)
        _copy(memory, bounce[begin - low : end - low])

    def write_block(self, begin: int, end: int, memory: memoryview, bounce: memoryview) -> None:
        """``memory`` to the bytes ``begin`` to ``end`` of the file, which lie in one block; pages are written whole."""
        if _is_aligned(begin, memory):
            self._write(memory, begin)
            return
        low, high = begin // PAGE * PAGE, -(-end // PAGE) * PAGE
        if begin > low or end < high:
            self._read(bounce[: high - low], low)
        _copy(bounce[begin - low : end - low], memory)
        self._write(bounce[: high - low], low)

    def _read(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._fd, [memory[done:]], offset + done)
            if not count:
                raise OSError(errno.EIO, "the file is shorter than it was made")
            done += count

    def _write(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            done += os.pwritev(self._fd, [memory[done:]], offset + done)
        if not self.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, len(memory), os.POSIX_FADV_DONTNEED)


def _serve(jobs: _Jobs, block_size: int) -> None:
    bounce = memoryview(mmap.mmap(-1, block_size))  # at a page
    while (job := jobs.get()) is not None:
        job(bounce)
        del job  # it holds a tensor


def _shut(jobs: _Jobs, threads: Sequence[threading.Thread], file: IO[bytes]) -> None:
    running = [thread for thread in threads if thread.is_alive()]  # none in a process that was forked from theirs
    for _ in running:
        jobs.put(None)
    for thread in running:
        if thread is not threading.current_thread():  # which has dropped the last reference
            thread.join()
    file.close()


def aligned_empty(numel: int, dtype: torch.dtype) -> Tensor:
    """Uninitialised host memory that begins at a page: blocks go between it and the disk without a copy."""
    if pretends():
        return torch.empty(numel, dtype=dtype, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, (numel + 1) * dtype.itemsize), dtype=dtype)[:numel]


def _bytes_of(tensor: Tensor) -> memoryview:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"{tuple(tensor.shape)} on {tensor.device} is not a contiguous tensor in host memory.")
    if not tensor.numel():
        return memoryview(b"")
    return memoryview(tensor.detach().view(torch.uint8).numpy())  # type: ignore[arg-type] # keeps the memory


def _address(memory: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _is_aligned(offset: int, memory: memoryview) -> bool:
    return not (offset % PAGE or len(memory) % PAGE or _address(memory) % PAGE)


def _copy(target: memoryview, source: memoryview) -> None:
    # a slice assignment would hold the GIL for the whole block
    ctypes.memmove(_address(target), _address(source), len(source))
