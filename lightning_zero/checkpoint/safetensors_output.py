"""Files that several ranks write at once, and that get their names when all of them are complete."""

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint import folder, temporary
from lightning_zero.checkpoint.safetensors_file import INDEX, Piece, memory_of, write_all

CHUNK = 2**24
"""Bytes that are converted at a time."""


class Output(NamedTuple):
    """A file to be written: ``part`` is its path until it is complete."""

    path: Path
    part: Path
    nbytes: int


class Place(NamedTuple):
    """Where a tensor goes: the number of its file, and its bytes there."""

    file: int
    piece: Piece


class Writer:
    """This rank's hold on the files.

    Errors of writing wait for :meth:`finish`: a rank whose disk is full still takes part in what ranks do together.

    Args:
        outputs: the files.
        headers: their beginnings, on the rank that makes and removes them; None on the others.
    """

    def __init__(self, outputs: Sequence[Output], headers: Sequence[bytes] | None) -> None:
        self._outputs, self._headers = outputs, headers
        self._fds: list[int] = []
        self._error: Exception | None = None

    def create(self) -> None:
        """Make the files, with their headers and lengths.

        Raises:
            OSError: a file cannot be made.
        """
        for output, begin in zip(self._outputs, self._headers, strict=True) if self._headers is not None else ():
            output.part.parent.mkdir(parents=True, exist_ok=True)
            temporary.sweep(output.path)
            fd = os.open(output.part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            self._fds.append(fd)
            os.ftruncate(fd, output.nbytes)
            write_all(fd, memoryview(begin), 0)

    def open(self) -> None:
        """Open what another rank has made.

        Raises:
            FileNotFoundError: it is not to be seen here.
        """
        if self._headers is not None:
            return
        try:
            for output in self._outputs:
                self._fds.append(os.open(output.part, os.O_WRONLY))
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{error.filename} is not there, but rank 0 has made it: all ranks write to the same files, so the"
                " folder must be one that all hosts share."
            ) from None

    @torch.no_grad()
    def write(self, place: Place, start: int, values: Tensor) -> None:
        """Write elements from ``start`` on (1-D, of any dtype, on any device)."""
        size, dtype = place.piece.dtype.itemsize, place.piece.dtype
        for first in range(0, values.numel(), CHUNK // size):
            if self._error is not None:
                return
            part = values[first : first + CHUNK // size].to("cpu", dtype).contiguous()
            fd, offset = self._fds[place.file], place.piece.start + (start + first) * size
            try:
                write_all(fd, memory_of(part), offset)
                begin_writing(fd, offset, part.nbytes)
            except OSError as error:
                self.fail(error)

    def fail(self, error: Exception) -> None:
        """Write nothing any more; :meth:`finish` raises the first error."""
        self._error = self._error or error

    def finish(self) -> None:
        """See that what was written is on the disk.

        Raises:
            Exception: what :meth:`fail` was given, or that something could not be written.
        """
        if self._error is not None:
            raise self._error
        for fd in self._fds:
            os.fsync(fd)

    def close(self) -> None:
        """Let go of the files, and remove those that have no name yet."""
        for fd in self._fds:
            with suppress(OSError):
                os.close(fd)
        for output in self._outputs if self._headers is not None else ():
            temporary.drop(output.part)


def begin_writing(fd: int, offset: int, nbytes: int) -> None:
    """Let the disk work while the next bytes are converted: this advice makes Linux write what is dirty."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def publish(outputs: Sequence[Output]) -> None:
    """Give complete files their names."""
    for output in outputs:
        output.part.replace(output.path)
    folder.sync(outputs[0].path.parent)


def publish_folder(outputs: Sequence[Output], places: Mapping[str, Place]) -> None:
    """The same for a folder as ``transformers`` has it, with an index if there is more than one file; what is left of
    an earlier save goes.

    Whoever reads the folder meanwhile, or after a crash, finds old weights, new ones, or none: a ``model.safetensors``
    is read before any index, and without one numbered files are not read.
    """
    there = outputs[0].path.parent
    index, single = there / f"model{INDEX}", there / "model.safetensors"
    if len(outputs) == 1:
        publish(outputs)
        index.unlink(missing_ok=True)
    else:
        index.unlink(missing_ok=True)
        publish(outputs)
        names = {name: outputs[place.file].path.name for name, place in places.items()}
        total = sum(place.piece.stop - place.piece.start for place in places.values())
        _write_index(index, {"metadata": {"total_size": total}, "weight_map": names})
        single.unlink(missing_ok=True)
    _remove_numbered(there, {output.path for output in outputs})
    folder.sync(there)


def _write_index(path: Path, content: Mapping[str, object]) -> None:
    part = temporary.name(path)
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
        folder.sync(path.parent)
    finally:
        temporary.drop(part)


def _remove_numbered(there: Path, kept: Iterable[Path]) -> None:
    for path in set(there.glob("model-*.safetensors")).difference(kept):
        if re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", path.name):
            path.unlink()
