"""The list of a folder's files, with sizes and checksums, which is written last: what it names is complete."""

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

NAME = "manifest.json"

BLOCK = 2**20
"""Bytes under one checksum (CRC-32), so that a part of a file can be checked, too."""


class FileSum(NamedTuple):
    """What a file must be."""

    size: int
    """Bytes."""
    sums: list[int]
    """Of each block; the last one may be shorter."""


class SummedFile:
    """A file that is written from front to back; it sums what goes through, and sends it to the disk meanwhile."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._size = 0
        self._sums = [0]
        self._to_disk = ThreadPoolExecutor(1, "lightning_zero disk")
        self._on_its_way: Future[None] | None = None

    def write(self, data: Any) -> int:
        """Append bytes."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            piece = view[done : done + BLOCK - self._size % BLOCK]
            piece = piece[: self._file.write(piece)]
            self._sums[-1] = zlib.crc32(piece, self._sums[-1])
            self._size += len(piece)
            done += len(piece)
            if self._size % BLOCK == 0:
                self._sums.append(0)
                self._flush_behind()
        return len(view)

    def _flush_behind(self) -> None:
        if self._on_its_way is None or self._on_its_way.done():
            self._raise_early()
            flush = getattr(os, "fdatasync", os.fsync)  # macOS has none
            self._on_its_way = self._to_disk.submit(flush, self._file.fileno())

    def _raise_early(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way.result()

    def tell(self) -> int:
        """Bytes written so far."""
        return self._size

    def flush(self) -> None:
        """There is no buffer."""

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def finish(self) -> FileSum:
        """Bring everything to the disk, and close."""
        try:
            self._to_disk.shutdown()
            self._raise_early()
            os.fsync(self._file.fileno())
        finally:
            self._file.close()
        return FileSum(self._size, self._sums if self._size % BLOCK else self._sums[:-1])


def write_file(path: Path, data: bytes) -> FileSum:
    """Write a small file, to the disk."""
    file = SummedFile(path)
    file.write(data)
    return file.finish()


def sum_file(path: Path) -> FileSum:
    """Sum a file that others have written."""
    with path.open("rb", buffering=0) as file:
        sums = [zlib.crc32(block) for block in iter(lambda: file.read(BLOCK), b"")]
    return FileSum(path.stat().st_size, sums)


def write(folder: Path, files: Mapping[str, FileSum]) -> None:
    """Write the manifest."""
    content = {"block": BLOCK, "files": {name: {"size": s.size, "crc32": s.sums} for name, s in sorted(files.items())}}
    write_file(folder / NAME, json.dumps(content).encode())


def read(folder: Path) -> dict[str, FileSum] | None:
    """The files that a folder must have; None where somebody else has written it.

    Raises:
        ValueError: the manifest is damaged.
    """
    path = folder / NAME
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
        if content["block"] != BLOCK:
            raise ValueError(f"blocks of {content['block']} bytes")
        files = {name: FileSum(entry["size"], entry["crc32"]) for name, entry in content["files"].items()}
        for name, (size, sums) in files.items():
            if not all(type(number) is int for number in (size, *sums)) or len(sums) != -(-size // BLOCK):
                raise ValueError(f"what it says of {name!r} cannot be")
        return files
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): use another checkpoint.") from error


def missing(folder: Path, files: Mapping[str, FileSum]) -> list[str]:
    """In words, which of the files are not there, or not whole. Their content is not read."""
    found = []
    for name, expected in files.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size is None:
            found.append(f"{name} is missing")
        elif size != expected.size:
            found.append(f"{name} has {size:,} bytes instead of {expected.size:,}")
    return found
