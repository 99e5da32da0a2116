"""Reads a checkpoint folder, of ours or of another strategy of Lightning's: tensors by parts, when they are used."""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.utils import _create_file_view
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._pytree import tree_map_only

from lightning_zero.checkpoint import folder, manifest, metadata
from lightning_zero.checkpoint.boxes import Box, boxes
from lightning_zero.checkpoint.files import CheckedFile
from lightning_zero.engine.elsewhere import StoredTensor

HEAD = 4096
"""Bytes, more than what comes before the elements in an item of ours."""
RECORD = b"archive/data/0"
"""The name of the elements in what ``torch.save`` makes of a tensor."""


class Folder:
    """What a checkpoint folder holds.

    Args:
        path: of the folder.

    Raises:
        ValueError: something is missing or damaged; the message names it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in (folder.METADATA, folder.META):
            if not (path / name).is_file():
                raise ValueError(f"{path} is not a whole checkpoint: {name} is missing. Use another checkpoint.")
        self.files = manifest.read(path)
        self._open: dict[str, CheckedFile] = {}
        self._tensors: dict[int, StoredTensor] = {}
        self._refuse(manifest.missing(path, self.files or {}))
        for name in (folder.METADATA, folder.META):
            self._check(name)
        self.metadata = metadata.read(path / folder.METADATA)
        self._refuse(manifest.missing(path, self._needed()) if self.files is None else [])

    def _refuse(self, wrong: list[str]) -> None:
        if wrong:
            raise ValueError(f"{self.path} is not a whole checkpoint: {'; '.join(wrong)}. Use another checkpoint.")

    def _check(self, name: str) -> None:
        """Compare a small file that will be read by others with its checksums."""
        if name in (self.files or {}):
            file = CheckedFile(self.path / name, (self.files or {})[name])
            file.read(0, memoryview(bytearray((self.path / name).stat().st_size)))
            file.close()

    def _needed(self) -> dict[str, manifest.FileSum]:
        """Of a folder without a manifest: files, with the bytes that they have if nothing is behind their items."""
        sizes: dict[str, int] = {}
        for info in self.metadata.storage_data.values():
            sizes[info.relative_path] = max(sizes.get(info.relative_path, 0), info.offset + info.length)
        return {name: manifest.FileSum(size, []) for name, size in sizes.items()}

    def names(self) -> dict[str, tuple[Any, ...]]:
        """The items, each with its path in nested dicts and lists."""
        paths = self.metadata.planner_data or {}
        return {name: tuple(paths.get(name, (name,))) for name in self.metadata.state_dict_metadata}

    def item(self, name: str, weights_only: bool | None = None) -> Any:
        """A tensor, of which nothing is read yet, or another value.

        Raises:
            ValueError: a value cannot be loaded with ``weights_only``, which is True unless it is said to be False.
        """
        stored = self.metadata.state_dict_metadata[name]
        if isinstance(stored, TensorStorageMetadata):
            if id(stored) not in self._tensors:  # tied ones are one
                place = stored.size, stored.properties.dtype
                self._tensors[id(stored)] = StoredTensor(*place, partial(self._elements, name, stored))
            return self._tensors[id(stored)]
        info = self.metadata.storage_data[MetadataIndex(name)]
        data = bytearray(info.length)
        self._file(info.relative_path).read(info.offset, memoryview(data))
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
        except Exception as error:
            raise ValueError(f"{name!r} in {self.path} cannot be loaded: {error}") from error

    def nested(self, section: str, weights_only: bool | None = None) -> Any:
        """The items of a section (``state_dict``, ``optimizer_0``) as they were; ``{}`` if there are none."""
        root: dict[str, Any] = {}
        for name, path in self.names().items():
            if path[0] == section and len(path) > 1:
                set_element(root, path, self.item(name, weights_only))
        return root.get(section, {})

    def sections(self) -> list[str]:
        """The names of the sections, in order."""
        return list(dict.fromkeys(path[0] for path in self.names().values()))

    def _elements(
        self,
        name: str,
        stored: TensorStorageMetadata,
        dims: Sequence[int],
        start: int,
        stop: int,
        out: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty(stop - start, dtype=stored.properties.dtype) if out is None else out
        back = [list(dims).index(dim) for dim in range(len(dims))]
        done = 0
        for box in boxes([stored.size[dim] for dim in dims], start, stop):
            target = out[done : done + box.numel].view(box.sizes).permute(back)
            self._fill(target, name, stored, box.permuted(back))
            done += box.numel
        return out

    def _fill(self, target: Tensor, name: str, stored: TensorStorageMetadata, wanted: Box) -> None:
        """Read a box of a tensor from the items that have parts of it."""
        found = 0
        for chunk in stored.chunks:
            there = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            common = there.overlap(wanted)
            if common is not None:
                index = MetadataIndex(name, chunk.offsets)
                self._read(index, there.sizes, common.seen_from(there), common.seen_from(wanted).of(target))
                found += common.numel
        if found != wanted.numel:
            raise ValueError(f"{self.path} has only parts of {name!r}.")

    def _read(self, index: MetadataIndex, shape: Sequence[int], part: Box, out: Tensor) -> None:
        """Read a part of an item: the bytes from its first element to its last, into ``out`` if those are all of it."""
        info = self.metadata.storage_data[index]
        start, strides = self._layout(info, shape)
        first = sum(offset * stride for offset, stride in zip(part.offsets, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True))
        exactly = out.is_contiguous() and last + 1 - first == out.numel() and _in_order(part.sizes, strides)
        values = out if exactly else torch.empty(last + 1 - first, dtype=out.dtype)
        flat = values.as_strided((values.numel(),), (1,))  # one element may have any stride
        data = flat.view(torch.uint8).numpy().data
        self._file(info.relative_path).read(info.offset + start + first * out.element_size(), data)
        if not exactly:
            out.copy_(values.as_strided(part.sizes, strides))

    def _layout(self, info: Any, shape: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Where in an item its elements begin (bytes), and the strides of its dimensions (elements)."""
        file = self._file(info.relative_path)
        if self.files is not None:  # ours are in order
            head = bytearray(min(info.length, HEAD))
            file.read(info.offset, memoryview(head))
            return _data_offset(head), torch.empty(tuple(shape), device="meta").stride()
        view: Any = _create_file_view(file.file, info.offset, info.length)  # type: ignore[arg-type]
        try:
            with FakeTensorMode():
                fake = torch.load(view, weights_only=True)
        except Exception as error:  # torch has many
            raise ValueError(f"{file.path} is damaged: {error}. Use another checkpoint.") from error
        offset = fake.untyped_storage()._checkpoint_offset
        return offset + fake.storage_offset() * fake.element_size(), fake.stride()

    def _file(self, name: str) -> CheckedFile:
        if name not in self._open:
            self._open[name] = CheckedFile(self.path / name, (self.files or {}).get(name))
        return self._open[name]

    def close(self) -> None:
        """Let go of the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


def _data_offset(head: bytearray) -> int:
    """Where the elements begin in what ``torch.save`` has made of a tensor: a zip file, whose list is at its end. To go
    there first would take the disk from its way.
    """
    name = head.index(RECORD)
    return name + len(RECORD) + int.from_bytes(head[name - 2 : name], "little")  # after a field of padding


def _in_order(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie in row-major order."""
    pairs = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
    return all(outer[1] >= inner[1] for outer, inner in zip(pairs, pairs[1:], strict=False))


def meta(source: Folder, weights_only: bool | None) -> dict[str, Any]:
    """What is neither module nor optimizer.

    Raises:
        ValueError: it holds objects, and ``weights_only`` is not False.
    """
    try:
        found: dict[str, Any] = torch.load(source.path / folder.META, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{source.path / folder.META} holds objects that may run code when they are loaded: {error}. If you trust "
            "it, use weights_only=False (on the command line: --trust)."
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{source.path / folder.META} is damaged: {error}. Use another checkpoint.") from error
    return found


def weights(source: Folder, weights_only: bool | None = None) -> dict[str, Any]:
    """The module's state; tensors know their master weights."""
    section = "state_dict" if "state_dict" in source.sections() else "model"
    found = {name: _read_extra_state(name, value) for name, value in source.nested(section, weights_only).items()}
    for name, exact in source.nested("master").items():
        found[name].exact = exact
    return found


def exact(state: Mapping[str, Any]) -> dict[str, Any]:
    """The same with master weights in the place of those that are rounded."""
    masters = {id(v): v.exact for v in state.values() if isinstance(v, StoredTensor) and v.exact is not None}
    return {name: masters.get(id(value), value) for name, value in state.items()}


def told(state: Mapping[str, Any], progress: Callable[[int], Any]) -> dict[str, Any]:
    """The same, in which a tensor says how many bytes it has when it is read."""

    def watched(stored: StoredTensor) -> StoredTensor:
        def elements(dims: Sequence[int], start: int, stop: int, out: Tensor | None = None) -> Tensor:
            found = stored.elements(dims, start, stop, out)
            progress(found.nbytes)
            return found

        return StoredTensor(stored.shape, stored.dtype, elements)

    copies = {id(value): watched(value) for value in state.values() if isinstance(value, StoredTensor)}
    return {name: copies.get(id(value), value) for name, value in state.items()}


def checkpoint(source: Folder, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint that was saved, as Lightning knows it. Its tensors are read when they are used.

    Optimizer states name their parameters; :func:`state.load_optimizer_state` takes that.
    """
    found = meta(source, weights_only)
    sections = source.sections()
    found["state_dict"] = weights(source, weights_only)
    optimizers = sorted((name for name in sections if _is_optimizer(name)), key=lambda name: int(name.split("_")[1]))
    if optimizers:
        found["optimizer_states"] = [source.nested(name, weights_only) for name in optimizers]
    for name in sections:
        if name not in ("state_dict", "model", "master", *optimizers):
            found[name] = source.nested(name, weights_only)
    return found


def _read_extra_state(name: str, value: Any) -> Any:
    """What modules get as their extra state they may keep, and it must not depend on the folder."""
    if isinstance(value, StoredTensor) and not name.endswith(_EXTRA_STATE_KEY_SUFFIX):
        return value
    return tree_map_only(StoredTensor, StoredTensor.whole, value)


def _is_optimizer(section: str) -> bool:
    return section.startswith("optimizer_") and section.removeprefix("optimizer_").isdigit()


def tensors(source: Folder) -> Iterator[tuple[str, TensorStorageMetadata]]:
    """The tensors of a folder by name, each once."""
    seen: set[int] = set()
    for name, stored in source.metadata.state_dict_metadata.items():
        if isinstance(stored, TensorStorageMetadata) and id(stored) not in seen:
            seen.add(id(stored))
            yield name, stored
