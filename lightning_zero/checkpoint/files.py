"""Reads parts of a folder's files, and checks what it reads against the manifest."""

import os
import weakref
import zlib
from pathlib import Path

import torch
from torch import Tensor

from lightning_zero.checkpoint.manifest import BLOCK, FileSum


class CheckedFile:
    """A file of a checkpoint. Parts that are read are whole blocks where there are checksums.

    Args:
        path: of the file.
        expected: what it must be; None: nobody knows.
    """

    def __init__(self, path: Path, expected: FileSum | None) -> None:
        self.path, self._expected = path, expected
        self._descriptor = os.open(path, os.O_RDONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._size = os.fstat(self._descriptor).st_size
        self._last: tuple[int, Tensor] = 0, torch.empty(0, dtype=torch.uint8)
        """The end of what was read last: small neighbours lie in one block."""

    def close(self) -> None:
        """Let go of the file now, and not when the last tensor that can be read from it is gone."""
        self._close()

    def read(self, start: int, size: int) -> Tensor:
        """Bytes ``start`` to ``start + size``, 1-D ``uint8``; of small parts not to be written to.

        Raises:
            ValueError: the file is too short, or is not what has been written.
        """
        first, values = self._last
        if not first <= start <= start + size <= first + values.numel():
            first = start if self._expected is None else start - start % BLOCK
            stop = start + size if self._expected is None else min(self._size, -(-(start + size) // BLOCK) * BLOCK)
            values = self._read(first, stop)
            self._check(first, values)
            tail = max(values.numel() - 1, 0) // BLOCK * BLOCK
            self._last = first + tail, values[tail:] if tail == 0 else values[tail:].clone()
        return values[start - first : start - first + size]

    def _read(self, start: int, stop: int) -> Tensor:
        values = torch.empty(max(stop - start, 0), dtype=torch.uint8)
        view, done = values.numpy().data, 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], start + done)
            if count == 0:
                raise ValueError(f"{self.path} is too short: it has {self._size:,} bytes, and {stop:,} are needed.")
            done += count
        return values

    def _check(self, start: int, values: Tensor) -> None:
        if self._expected is None:
            return
        view = values.numpy().data
        for number, low in enumerate(range(0, len(view), BLOCK), start // BLOCK):
            if zlib.crc32(view[low : low + BLOCK]) != self._expected.sums[number]:
                raise ValueError(
                    f"{self.path} is damaged between bytes {number * BLOCK:,} and "
                    f"{min((number + 1) * BLOCK, self._size):,}: its checksum is another. Use another checkpoint."
                )
