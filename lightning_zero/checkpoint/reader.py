"""Reads a checkpoint folder, of ours or of another strategy of Lightning's: tensors by parts, when they are used."""

import io
from collections.abc import Iterator, Sequence
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
        self.metadata = metadata.read(path / folder.METADATA)
        if wrong := manifest.missing(path, self.files or self._needed()):
            raise ValueError(f"{path} is not a whole checkpoint: {'; '.join(wrong)}. Use another checkpoint.")
        self._open: dict[str, CheckedFile] = {}

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

    def item(self, name: str) -> Any:
        """A tensor, of which nothing is read yet, or another value.

        Raises:
            ValueError: a value cannot be loaded with ``weights_only=True``.
        """
        stored = self.metadata.state_dict_metadata[name]
        if isinstance(stored, TensorStorageMetadata):
            return StoredTensor(stored.size, stored.properties.dtype, partial(self._elements, name, stored))
        info = self.metadata.storage_data[MetadataIndex(name)]
        data = self._file(info.relative_path).read(info.offset, info.length)
        try:
            return torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
        except Exception as error:
            raise ValueError(f"{name!r} in {self.path} cannot be loaded: {error}") from error

    def nested(self, section: str) -> Any:
        """The items of a section (``state_dict``, ``optimizer_0``) as they were; ``{}`` if there are none."""
        root: dict[str, Any] = {}
        for name, path in self.names().items():
            if path[0] == section and len(path) > 1:
                set_element(root, path, self.item(name))
        return root.get(section, {})

    def sections(self) -> list[str]:
        """The names of the sections, in order."""
        return list(dict.fromkeys(path[0] for path in self.names().values()))

    def _elements(self, name: str, stored: TensorStorageMetadata, dims: Sequence[int], start: int, stop: int) -> Tensor:
        out = torch.empty(stop - start, dtype=stored.properties.dtype)
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
                values = self._read(MetadataIndex(name, chunk.offsets), there.sizes, common.seen_from(there), target)
                common.seen_from(wanted).of(target).copy_(values)
                found += common.numel
        if found != wanted.numel:
            raise ValueError(f"{self.path} has only parts of {name!r}.")

    def _read(self, index: MetadataIndex, shape: Sequence[int], part: Box, like: Tensor) -> Tensor:
        """A part of an item: the bytes from its first element to its last are read."""
        info = self.metadata.storage_data[index]
        start, strides = self._layout(info, shape)
        first = sum(offset * stride for offset, stride in zip(part.offsets, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(part.sizes, strides, strict=True))
        width = like.element_size()
        file = self._file(info.relative_path)
        data = file.read(info.offset + start + first * width, (last + 1 - first) * width)
        if data.storage_offset() % width:
            data = data.clone()
        return data.view(like.dtype).as_strided(part.sizes, strides)

    def _layout(self, info: Any, shape: Sequence[int]) -> tuple[int, Sequence[int]]:
        """Where in an item its elements begin (bytes), and the strides of its dimensions (elements)."""
        with (self.path / info.relative_path).open("rb") as file:
            view: Any = _create_file_view(file, info.offset, info.length)
            if self.files is not None:  # ours are in order
                offset: int = torch._C.PyTorchFileReader(view).get_record_offset("data/0")  # type: ignore[attr-defined]
                return offset, torch.empty(tuple(shape), device="meta").stride()
            with FakeTensorMode():
                fake = torch.load(view, weights_only=True)
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


def checkpoint(source: Folder, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint that was saved, as Lightning knows it. Its tensors are read when they are used.

    Optimizer states name their parameters; :func:`state.load_optimizer_state` takes that.
    """
    found: dict[str, Any] = torch.load(source.path / folder.META, map_location="cpu", weights_only=weights_only)
    sections = source.sections()
    weights = "state_dict" if "state_dict" in sections else "model"
    found["state_dict"] = {name: _read_extra_state(name, value) for name, value in source.nested(weights).items()}
    for name, exact in source.nested("master").items():
        found["state_dict"][name].exact = exact
    optimizers = sorted((name for name in sections if _is_optimizer(name)), key=lambda name: int(name.split("_")[1]))
    if optimizers:
        found["optimizer_states"] = [source.nested(name) for name in optimizers]
    for name in sections:
        if name not in ("state_dict", "model", "master", *optimizers):
            found[name] = source.nested(name)
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
