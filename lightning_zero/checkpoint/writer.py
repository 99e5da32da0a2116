"""Writes a checkpoint folder through ``torch.distributed.checkpoint``: every rank the parts that it has.

Planning and the ranks' agreement are torch's. Ours is how a rank's file is written (one tensor at a time, with
checksums; torch's own writer holds all of them until the end) and how the folder comes into its place.
"""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_zero.checkpoint import folder, manifest
from lightning_zero.checkpoint.boxes import Box, boxes, is_dense, whole
from lightning_zero.checkpoint.sharded import Sealed
from lightning_zero.engine.elsewhere import OwnPart

Aliases = Mapping[str, str]
"""Further names of items, with the name under which each is stored."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def write_folder(sections: Mapping[str, Any], meta: bytes, part: Path, target: Path, group: dist.ProcessGroup) -> None:
    """Write a checkpoint. Collective over ``group``, whose rank 0 has made the folder ``part``.

    Args:
        sections: nested dicts and lists of tensors and other values, alike on all ranks; of what is not an
            :class:`OwnPart` rank 0's is written.
        meta: the content of ``meta.pt``.
        part: where to write; in the end this is the folder ``target``.
        target: the path of the checkpoint.
        group: of a backend that sends CPU tensors.

    Raises:
        RuntimeError: it cannot be written, on all ranks, with the words of those that found why.
    """
    planner = PartPlanner()
    writer = FolderWriter(part, target, meta, planner)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # the manifest has checksums, and those of zip files are slow
    try:
        save(dict(sections), storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:  # not an Exception
        own, _ = error.failures.get(dist.get_rank(group), (None, None))
        if isinstance(own, KeyboardInterrupt | SystemExit):
            raise own from error
        words = {f"rank {rank}: {_words(failure)}" for rank, (failure, _) in error.failures.items()}
        there = "; what was there is as it was" if target.exists() else ""
        raise RuntimeError(f"The checkpoint {target} was not saved{there}. " + "; ".join(sorted(words))) from error
    finally:
        torch.serialization.set_crc32_options(before)


class _Failure(Exception):
    """An error in words. The ranks tell each other of errors as pickles, and not all of them can be read again."""


def _in_words(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    @wraps(method)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise _Failure(_words(error)).with_traceback(error.__traceback__) from None

    return call


def _words(error: BaseException) -> str:
    return str(error) if isinstance(error, _Failure) else f"{type(error).__name__}: {error}"


class PartPlanner(DefaultSavePlanner):
    """Plans what a rank writes: the boxes of its parts, and on rank 0 all other values."""

    def __init__(self) -> None:
        super().__init__()
        self.aliases: dict[str, str] = {}

    @_in_words
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Flatten; what comes under several names (tied parameters) is stored under the first."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        first: dict[Any, str] = {}
        for name, value in self.state_dict.items():
            if isinstance(value, OwnPart):
                self.aliases[name] = first.setdefault(id(value), name)
            elif isinstance(value, Tensor) and is_dense(value) and value.numel():
                memory = value.data_ptr(), value.shape, value.stride(), value.dtype
                self.aliases[name] = first.setdefault(memory, name)
        self.aliases = {name: stored for name, stored in self.aliases.items() if name != stored}

    @_in_words
    def create_local_plan(self) -> SavePlan:
        """This rank's items."""
        items: list[WriteItem] = []
        for name, value in self.state_dict.items():
            if name in self.aliases:
                continue
            if isinstance(value, OwnPart):
                items += [_item(name, value, box) for box, _ in _boxes(value, self.is_coordinator)]
            elif self.is_coordinator:
                items.append(_whole_item(name, value))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of an item."""
        value = self.state_dict[index.fqn]
        if isinstance(value, Sealed):
            return value.value
        if not isinstance(value, OwnPart):
            return _in_order(value) if isinstance(value, Tensor) else value
        place = tuple(index.offset or ())
        box, start = next(found for found in _boxes(value, True) if found[0].offsets == place)
        values = value.read(start, start + box.numel).to("cpu", value.dtype)
        there = values.view(box.permuted(value.dims).sizes)
        return there.permute([value.dims.index(dim) for dim in range(len(value.dims))]).contiguous()


def _in_order(tensor: Tensor) -> Tensor:
    """On the CPU, and row-major: our reader takes elements from where they are then, and does not look at strides."""
    there = tensor.detach().cpu()
    return there.resolve_conj().resolve_neg().contiguous() if is_dense(there) else there


def _boxes(part: OwnPart, is_coordinator: bool) -> list[tuple[Box, int]]:
    """What a rank has of a tensor, in boxes, each with the number of its first element; of nothing, rank 0 has it."""
    if 0 in part.shape:
        return [(whole(part.shape), 0)] if is_coordinator else []
    back = [part.dims.index(dim) for dim in range(len(part.dims))]
    found, start = [], part.start
    for box in boxes([part.shape[dim] for dim in part.dims], part.start, part.stop):
        found.append((box.permuted(back), start))
        start += box.numel
    return found


def _item(name: str, value: Tensor, box: Box, kind: WriteItemType = WriteItemType.SHARD) -> WriteItem:
    offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
    properties = TensorProperties(dtype=value.dtype)
    data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, value.shape)
    return WriteItem(MetadataIndex(name, offsets), kind, tensor_data=data)


def _whole_item(name: str, value: Any) -> WriteItem:
    if isinstance(value, Tensor) and is_dense(value):
        return _item(name, value, whole(value.shape), WriteItemType.TENSOR)
    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


@dataclass(frozen=True)
class _FileResult(WriteResult):
    """The last item of a file, and what the file is."""

    file: manifest.FileSum


class FolderWriter(FileSystemWriter):
    """One file per rank, then metadata, ``meta.pt`` and manifest, then the rename."""

    def __init__(self, part: Path, target: Path, meta: bytes, planner: PartPlanner) -> None:
        super().__init__(part)
        self._target, self._meta, self._planner = target, meta, planner

    @_in_words
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        """Write this rank's items one after the other, to the disk."""
        done: Future[list[WriteResult]] = Future()
        name = f"{plan.storage_data.prefix}0.distcp"
        results: list[WriteResult] = []
        if plan.items:
            file = manifest.SummedFile(Path(self.path) / name)
            try:
                for item in plan.items:
                    results.append(_write(file, name, item, planner.resolve_data(item)))
            finally:
                summed = file.finish()
            last = results[-1]
            results[-1] = _FileResult(last.index, last.size_in_bytes, last.storage_data, summed)
        done.set_result(results)
        return done

    @_in_words
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0, when all ranks have written: the files that say what the folder holds, and its name."""
        part = Path(self.path)
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        last = [of_rank[-1] for of_rank in results if of_rank]
        files = {result.storage_data.relative_path: result.file for result in last if isinstance(result, _FileResult)}
        for alias, name in self._planner.aliases.items():
            _add_alias(metadata, stored, alias, name)
        for name in [name for name in metadata.state_dict_metadata if name.startswith("state_dict.")]:
            alias = name.replace("state_dict.", "model.", 1)
            _add_alias(metadata, stored, alias, name)
            metadata.planner_data[alias] = ("model", *metadata.planner_data[name][1:])
        metadata = replace(metadata, storage_data=stored, storage_meta=self.storage_meta(), version="1.0.0")
        files[folder.METADATA] = manifest.write_file(part / folder.METADATA, pickle.dumps(metadata))
        files[folder.META] = manifest.write_file(part / folder.META, self._meta)
        if lost := manifest.missing(part, files):
            raise ValueError(f"{'; '.join(lost)} in {part}: rank 0 does not see what the others have written")
        others = [path for path in part.iterdir() if path.name not in files]
        files |= {path.name: manifest.sum_file(path) for path in others}
        manifest.write(part, files)
        folder.commit(part, self._target)


def _write(file: manifest.SummedFile, name: str, item: WriteItem, data: Any) -> WriteResult:
    start = file.tell()
    if isinstance(data, Tensor):
        torch.save(_alone(data), file)  # type: ignore[arg-type]
    else:
        file.write(data.getbuffer())
    length = file.tell() - start
    return WriteResult(item.index, length, _StorageInfo(name, start, length))


def _alone(tensor: Tensor) -> Tensor:
    """The same memory as a tensor whose storage ends with it: torch.save writes storages."""
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    as_bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(as_bytes).view(tensor.dtype).view(tensor.shape)


def _add_alias(metadata: Metadata, stored: dict[MetadataIndex, Any], alias: str, name: str) -> None:
    item = metadata.state_dict_metadata[name]
    metadata.state_dict_metadata[alias] = item
    offsets = [chunk.offsets for chunk in item.chunks] if isinstance(item, TensorStorageMetadata) else [None]
    for number, offset in enumerate(offsets):
        hint = None if offset is None else number
        stored[MetadataIndex(alias, offset, hint)] = stored[MetadataIndex(name, offset)]
