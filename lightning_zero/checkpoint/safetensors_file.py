"""The format of safetensors files: a header that says where each tensor's row-major bytes lie, and nothing to execute.

Eight bytes have the header's length (little endian), which is JSON, padded with spaces. Offsets begin at its end.
"""

import ctypes
import json
import mmap
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.checkpoint import folder
from lightning_zero.checkpoint.boxes import boxes
from lightning_zero.engine.elsewhere import StoredTensor

DTYPES = {
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F32": torch.float32,
    "U32": torch.uint32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By their names in a header, in the order in which tensors lie in a file that the safetensors library writes."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ORDER = {dtype: number for number, dtype in enumerate(DTYPES.values())}

_LONGEST = 100_000_000
"""Bytes of a header that the safetensors library reads at most."""


class Piece(NamedTuple):
    """Where a tensor lies in a file; ``start`` and ``stop`` in bytes from the file's beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, dict[str, Piece]]:
    """The beginning of a file as the safetensors library writes it, to the byte, and where each tensor goes.

    Args:
        tensors: dtype and shape by name.
    """
    text: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without it, transformers refuses the file
    cursor = 0
    spans = {}
    for name in sorted(tensors, key=lambda name: (_ORDER[tensors[name][0]], name)):
        dtype, shape = tensors[name]
        stop = cursor + prod(shape) * dtype.itemsize
        text[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [cursor, stop]}
        spans[name] = cursor, stop
        cursor = stop
    encoded = json.dumps(text, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    begin = 8 + len(encoded)
    pieces = {
        name: Piece(tensors[name][0], tuple(tensors[name][1]), begin + start, begin + stop)
        for name, (start, stop) in spans.items()
    }
    return len(encoded).to_bytes(8, "little") + encoded, pieces


class SafetensorsFile:
    """A file that is open for reading; its header has been checked against its size.

    Tensors that come from it keep it open: if another one takes its place, they still have their values.

    Attributes:
        path: of the file.
        pieces: by name.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is not a safetensors file, or a part of it is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)
        self.pieces = self._header()

    def stored(self, name: str) -> StoredTensor:
        """A tensor of the file; none of it is read yet."""
        piece = self.pieces[name]

        def elements(dims: Sequence[int], start: int, stop: int, out: Tensor | None = None) -> Tensor:
            out = torch.empty(stop - start, dtype=piece.dtype, device="cpu") if out is None else out
            self._fill(out, piece, dims, start)
            return out

        return StoredTensor(piece.shape, piece.dtype, elements)

    def _fill(self, out: Tensor, piece: Piece, dims: Sequence[int], start: int) -> None:
        if tuple(dims) == tuple(range(len(piece.shape))):
            self._read(memory_of(out), piece.start + start * piece.dtype.itemsize)
        elif out.numel():
            out.copy_(self._elements_in(piece, dims, start, start + out.numel()))

    def _elements_in(self, piece: Piece, dims: Sequence[int], start: int, stop: int) -> Tensor:
        """Some in another order than that of the file, which is mapped: it is the page cache that holds it."""
        size = piece.dtype.itemsize
        mapped = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
        data = torch.frombuffer(mapped, dtype=torch.uint8, count=piece.stop - piece.start, offset=piece.start)
        turned = data.view(*piece.shape, size).permute(*dims, len(piece.shape))
        parts = [box.of(turned).reshape(-1) for box in boxes(turned.shape, start * size, stop * size)]
        return torch.cat(parts).view(piece.dtype)

    def _read(self, memory: memoryview, offset: int) -> None:
        done = 0
        while done < len(memory):
            count = os.preadv(self._fd, [memory[done:]], offset + done)
            if count == 0:
                raise ValueError(f"{self.path} has become shorter since its header was read.")
            done += count

    def _header(self) -> dict[str, Piece]:
        try:
            return self._pieces(os.fstat(self._fd).st_size)
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            why = error if type(error) is ValueError else f"{type(error).__name__} in its header: {error}"
            raise ValueError(f"{self.path} is not a whole safetensors file: {why}.") from None

    def _pieces(self, size: int) -> dict[str, Piece]:
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
        if size < 8 or length > min(size - 8, _LONGEST):
            raise ValueError(f"its header would have {length:,} bytes, and the file has {size:,}")
        entries = json.loads(os.pread(self._fd, length, 8))
        pieces = {name: _piece(name, entry, 8 + length) for name, entry in entries.items() if name != "__metadata__"}
        end = max((piece.stop for piece in pieces.values()), default=8 + length)
        if end != size:
            raise ValueError(f"by its header it ends at byte {end:,}, and it has {size:,} bytes")
        return pieces


def _piece(name: str, entry: Mapping[str, Any], begin: int) -> Piece:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int and number >= 0 for number in (start, stop, *shape)):
        raise ValueError(f"{name!r} has an offset or a dimension that is none")
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"{name!r} has the dtype {entry['dtype']!r}, which is not known here")
    dtype = DTYPES[entry["dtype"]]
    if stop - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{name!r} should have {prod(shape) * dtype.itemsize:,} bytes, and has {stop - start:,}")
    return Piece(dtype, shape, begin + start, begin + stop)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which must outlive the view."""
    if not tensor.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def write_all(fd: int, memory: memoryview, offset: int) -> None:
    """``os.pwrite``, until everything is written.

    Raises:
        OSError: as the system has it.
    """
    done = 0
    while done < len(memory):
        done += os.pwrite(fd, memory[done:], offset + done)


INDEX = ".safetensors.index.json"


def open_files(path: Path) -> list[SafetensorsFile]:
    """The files that hold the weights at ``path``: itself, or in a folder ``model.safetensors``, the files that
    ``model.safetensors.index.json`` names, or the only ones there under other names.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: a file is wrong; or it cannot be told which ones are meant.
    """
    if not path.is_dir():
        return [SafetensorsFile(path)] if not path.name.endswith(INDEX) else _indexed(path)
    for name in ("model.safetensors", "model" + INDEX):
        if (path / name).is_file():
            return open_files(path / name)
    indices = sorted(path.glob("*" + INDEX))
    found = indices or sorted(path.glob("*.safetensors"))
    if not found:
        raise FileNotFoundError(f"{path} has no file whose name ends in .safetensors.")
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path} has several weights ({names}) and no model.safetensors: name the file that you mean.")
    return open_files(found[0])


def _indexed(path: Path) -> list[SafetensorsFile]:
    try:
        names: dict[str, str] = dict(json.loads(path.read_bytes())["weight_map"])
        files = {name: SafetensorsFile(path.parent / name) for name in sorted(set(names.values()))}
    except (KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not an index of safetensors files ({type(error).__name__}: {error}).") from None
    absent = [name for name, file in names.items() if name not in files[file].pieces]
    if absent:
        raise ValueError(f"{path} is wrong: {absent[0]!r} is not in {names[absent[0]]}.")
    return list(files.values())


def all_stored(files: Iterable[SafetensorsFile]) -> dict[str, StoredTensor]:
    """All tensors of the files by name.

    Raises:
        ValueError: two files have a tensor of the same name.
    """
    found: dict[str, StoredTensor] = {}
    for file in files:
        twice = found.keys() & file.pieces.keys()
        if twice:
            raise ValueError(f"{file.path} has {min(twice)!r}, which another file beside it has as well.")
        found.update({name: file.stored(name) for name in file.pieces})
    return found


def local_path(path: str | os.PathLike[str]) -> Path:
    """Where files are read and written here.

    Raises:
        ValueError: it is somewhere else.
    """
    found = folder.local(path)
    if found is None:
        raise ValueError(f"{os.fspath(path)} is no local path: read and write safetensors in a folder of this host.")
    return found
