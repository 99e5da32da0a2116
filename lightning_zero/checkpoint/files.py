"""Reads parts of a folder's files, and checks what it reads against the manifest."""

import os
import weakref
import zlib
from pathlib import Path
from typing import BinaryIO

from lightning_zero.checkpoint.manifest import BLOCK, FileSum


class CheckedFile:
    """A file of a checkpoint. Where there are checksums, whole blocks are read and checked.

    Args:
        path: of the file.
        expected: what it must be; None: nobody knows.
    """

    def __init__(self, path: Path, expected: FileSum | None) -> None:
        self.path, self._expected = path, expected
        self.file: BinaryIO = path.open("rb", buffering=0)
        weakref.finalize(self, self.file.close)
        if hasattr(os, "posix_fadvise"):  # the disk goes on while this rank sums what it has
            os.posix_fadvise(self.file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._size = os.fstat(self.file.fileno()).st_size
        self._last = -1, bytearray()
        """Number and content of the block of which a part was read last: small neighbours lie in one."""

    def close(self) -> None:
        """Let go of the file now, and not when the last tensor that can be read from it is gone."""
        self.file.close()

    def read(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from ``start`` on.

        Raises:
            ValueError: the file is too short, or is not what has been written.
        """
        if self._expected is None:
            self._read(start, out)
            return
        done = 0
        while done < len(out):
            number, offset = divmod(start + done, BLOCK)
            size = min(BLOCK, self._size - number * BLOCK)
            if offset == 0 and size <= len(out) - done:  # straight into its place
                block = out[done : done + size]
                self._read(number * BLOCK, block)
                self._check(number, block)
                done += size
                continue
            part = self._block(number, size)[offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)

    def _block(self, number: int, size: int) -> memoryview:
        if self._last[0] != number:
            values = bytearray(size)
            self._read(number * BLOCK, memoryview(values))
            self._check(number, values)
            self._last = number, values
        return memoryview(self._last[1])

    def _read(self, start: int, out: memoryview) -> None:
        done = 0
        while done < len(out):
            count = os.preadv(self.file.fileno(), [out[done:]], start + done)
            if count == 0:
                raise ValueError(
                    f"{self.path} is too short: it has {self._size:,} bytes, and {start + len(out):,} are needed."
                )
            done += count

    def _check(self, number: int, values: memoryview | bytearray) -> None:
        if self._expected is not None and zlib.crc32(values) != self._expected.sums[number]:
            raise ValueError(
                f"{self.path} is damaged between bytes {number * BLOCK:,} and "
                f"{min((number + 1) * BLOCK, self._size):,}: its checksum is another. Use another checkpoint."
            )
