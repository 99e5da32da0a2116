"""Weights as ordinary safetensors, written by all ranks at once: each of them the bytes that it owns.

A shard has a contiguous range of each parameter's elements, and so of the file's bytes: nothing is gathered, and nobody
holds more than a part of one unit.
"""

import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_zero import host
from lightning_zero.checkpoint import temporary
from lightning_zero.checkpoint.boxes import boxes
from lightning_zero.checkpoint.named import Names, engine_of, name_in_file, named_state
from lightning_zero.checkpoint.safetensors_file import NAMES, header, local_path
from lightning_zero.checkpoint.safetensors_output import (
    Output,
    Place,
    Writer,
    publish,
    publish_folder,
)
from lightning_zero.engine import Communicator, Engine, TierError
from lightning_zero.engine.elsewhere import OwnPart, StoredTensor
from lightning_zero.engine.expected import lacks

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

MAX_FILE_BYTES = 50 * 10**9
"""Of transformers' ``save_pretrained``."""


class Source(NamedTuple):
    """A tensor that is to be saved: in what dtype, and as which of the engine's parameters."""

    value: Tensor
    dtype: torch.dtype
    number: int | None

    @property
    def nbytes(self) -> int:
        """In the file."""
        return prod(self.value.shape) * self.dtype.itemsize


class Plan(NamedTuple):
    """What rank 0 has decided, for all ranks: the files, and where each of the engine's parameters goes."""

    outputs: list[Output]
    params: dict[int, Place]


class Files(NamedTuple):
    """What rank 0 alone needs: the files' headers, where each tensor goes, and whether they are in a folder."""

    headers: list[bytes]
    places: dict[str, Place]
    in_folder: bool


def save_safetensors(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: float | None = None,
    exclude_frozen: bool = False,
    names: Names = None,
) -> None:
    """Write the weights of a module, sharded or not, as safetensors: what ``module.state_dict()`` has, in files that
    are equal to the byte to those of ``safetensors.torch.save_file``. Collective: all ranks call it.

    Of a sharded module each rank writes its own part; of another one rank 0 writes all. Old files stay until the new
    ones are complete. Tied parameters are written once, under the first of their names, as ``transformers`` does.

    Args:
        module: the whole LightningModule or a part of it (``self.model``); in a run or outside one.
        path: a file, if it ends in ``.safetensors``; else a folder that gets a ``model.safetensors`` or, above
            ``max_file_bytes``, files ``model-00001-of-00002.safetensors`` ... with ``model.safetensors.index.json``, as
            ``from_pretrained`` of ``transformers`` reads them (beside a ``config.json``). All hosts must share it.
            Rank 0's counts.
        dtype: of what is saved of floating-point tensors (fp32, bf16 or fp16), from the master weights; None: each in
            its own.
        max_file_bytes: of the tensors in one file of a folder; None: 50 GB, as ``save_pretrained``.
        exclude_frozen: leave out parameters that require no gradient.
        names: from the names of ``module.state_dict()`` (without what ``torch.compile`` puts into them) to those in the
            file, None for what is left out: a mapping, in which other names stay as they are, or a function.

    Raises:
        ValueError: an argument is wrong, or something in the state is not what such a file can hold.
        OSError: the files cannot be written. An error of one rank is raised on the others as a RuntimeError.
        RuntimeError: the last run ended with an exception, and the module has stayed sharded.
    """
    engine = engine_of(module)
    comm = engine.comm if engine is not None else host.any_communicator()
    first = comm is None or comm.rank == 0
    sources: dict[str, Source] = {}
    plan: Plan | None = None
    files: Files | None = None
    with host.together(comm):
        sources = _sources(named_state(module), engine, dtype, exclude_frozen, names)
        if first:
            plan, files = _plan(sources, local_path(path), max_file_bytes)
    # state_dict() may differ between ranks, and so may a path that is named after the time
    plan = comm.collect(plan)[0] if comm is not None else plan
    if plan is None:
        raise RuntimeError("Rank 0 has no plan.")
    _write(plan, files, sources, engine, comm)


def save_state(state: Mapping[str, Any], path: Path, dtype: torch.dtype | None, max_file_bytes: float | None) -> None:
    """The same of a state dict, in one process; tensors in a file are read one after the other.

    Raises:
        ValueError, OSError: as :func:`save_safetensors`.
    """
    sources = _sources(state, None, dtype, exclude_frozen=False, names=None)
    _write(*_plan(sources, path, max_file_bytes), sources, None, None)


def _write(
    plan: Plan, files: Files | None, sources: Mapping[str, Source], engine: Engine | None, comm: Communicator | None
) -> None:
    """Make the files, fill them, give them their names: what fails on one rank, fails on all. Collective."""
    writer = Writer(plan.outputs, None if files is None else files.headers)
    try:
        with host.together(comm):
            writer.create()
        with host.together(comm):
            writer.open()
        with host.together(comm):
            if engine is not None:
                _write_params(engine, plan.params, writer)
            for name, place in files.places.items() if files is not None else ():
                if sources[name].number is None:
                    writer.write(place, 0, sources[name].value.detach().reshape(-1))
            writer.finish()
        with host.together(comm):
            if files is not None:
                _publish(plan.outputs, files)
    finally:
        writer.close()


def _publish(outputs: list[Output], files: Files) -> None:
    if files.in_folder:
        publish_folder(outputs, files.places)
    else:
        publish(outputs)


def _sources(
    state: Mapping[str, Any], engine: Engine | None, dtype: torch.dtype | None, exclude_frozen: bool, names: Names
) -> dict[str, Source]:
    """What is to be saved, by its name in the file, in the order of the state dict.

    Raises:
        ValueError: something cannot be saved.
    """
    if dtype is not None and dtype not in FLOATING[1:]:
        raise ValueError(f"dtype={dtype} must be torch.float32, torch.bfloat16, torch.float16 or None.")
    numbers = {} if engine is None else {id(param): number for number, param in enumerate(_params(engine))}
    found: dict[str, Source] = {}
    keys: dict[str, str] = {}
    seen: set[Any] = set()
    for key, value in state.items():
        name = name_in_file(key, names)
        if name is None or (exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad):
            continue
        if not isinstance(value, Tensor) or value.layout is not torch.strided or lacks(value):
            what = (
                "has no values (it is on meta)" if isinstance(value, Tensor) and value.is_meta else "is no dense tensor"
            )
            raise ValueError(
                f"{key!r} {what}: a safetensors file cannot hold it. Leave it out with names={{{key!r}: None}}."
            )
        number = numbers.get(id(value))
        kept = value.dtype if engine is None or number is None else _user_dtype(engine, value)
        wanted = dtype if dtype is not None and kept in FLOATING else kept
        if wanted not in NAMES:
            raise ValueError(f"{key!r} is {wanted}, which safetensors files do not know.")
        same = number if number is not None else _memory(value)
        if value.numel() and same in seen:
            continue  # tied
        if name in found:
            raise ValueError(f"{keys[name]!r} and {key!r} would both be called {name!r} in the file.")
        seen.add(same)
        keys[name] = key
        found[name] = Source(value, wanted, number)
    return found


def _memory(value: Tensor) -> Any:
    """What tied tensors have in common."""
    if isinstance(value, StoredTensor):
        return id(value)
    return value.data_ptr(), value.shape, value.stride(), value.dtype


def _params(engine: Engine) -> Iterator[nn.Parameter]:
    """The engine's parameters in the order of its own parts."""
    for unit in engine.units:
        for flat in unit.flats:
            yield from flat.params


def _user_dtype(engine: Engine, param: Any) -> torch.dtype:
    home = engine.locate(param)
    return param.dtype if home is None else home[0].dtypes.user


def _plan(sources: Mapping[str, Source], path: Path, max_file_bytes: float | None) -> tuple[Plan, Files]:
    """The files, and what goes where.

    Raises:
        ValueError: path and ``max_file_bytes`` do not go together.
    """
    in_folder = path.suffix != ".safetensors"
    if max_file_bytes is not None and not in_folder:
        raise ValueError("max_file_bytes is for a folder: a path that ends in .safetensors is one file.")
    if max_file_bytes is not None and not max_file_bytes > 0:
        raise ValueError(f"max_file_bytes={max_file_bytes} must be above 0.")
    if path.is_dir() != in_folder and path.exists():
        raise ValueError(f"{path} is a {'file' if in_folder else 'folder'}, and its name says the other.")
    sizes = {name: source.nbytes for name, source in sources.items()}
    groups = split(sizes, MAX_FILE_BYTES if max_file_bytes is None else max_file_bytes) if in_folder else [list(sizes)]
    outputs: list[Output] = []
    headers: list[bytes] = []
    places: dict[str, Place] = {}
    for number, group in enumerate(groups):
        begin, pieces = header({name: (sources[name].dtype, sources[name].value.shape) for name in group})
        count = f"-{number + 1:05d}-of-{len(groups):05d}" if len(groups) > 1 else ""
        target = path / f"model{count}.safetensors" if in_folder else path
        outputs.append(Output(target, temporary.name(target), len(begin) + sum(sizes[name] for name in group)))
        headers.append(begin)
        places |= {name: Place(number, piece) for name, piece in pieces.items()}
    params = {source.number: places[name] for name, source in sources.items() if source.number is not None}
    return Plan(outputs, params), Files(headers, places, in_folder)


def split(sizes: Mapping[str, int], limit: float) -> list[list[str]]:
    """Names in groups of at most ``limit`` bytes, as Hugging Face forms them: in order; what is larger is alone."""
    groups: list[list[str]] = []
    current: list[str] = []
    total = 0
    for name, size in sizes.items():
        if size > limit:
            groups.append([name])
            continue
        if total + size > limit:
            groups.append(current)
            current, total = [], 0
        current.append(name)
        total += size
    return [*groups, current] if current or not groups else groups


@torch.no_grad()
def _write_params(engine: Engine, places: Mapping[int, Place], writer: Writer) -> None:
    """This rank's part of every parameter. Collective, whatever happens to the files."""
    for number, (param, part, _) in enumerate(engine.own_parts()):
        if number in places:
            for start, values in _row_major(engine, param, part, writer):
                writer.write(places[number], start, values)


def _row_major(engine: Engine, param: nn.Parameter, part: OwnPart, writer: Writer) -> Iterator[tuple[int, Tensor]]:
    """Row-major ranges of one parameter that this rank writes, in its masters' dtype, with their first elements."""
    flat, index = engine.homes[id(param)]
    slot, start = flat.layout.slots[index], part.start
    try:
        own = part.read(start, part.stop)
    except (OSError, TierError) as error:
        writer.fail(error)
        own = torch.empty(part.stop - start, dtype=flat.dtypes.master, device=engine.comm.device)
    if slot.in_order:
        yield start, own
        return
    # its own elements are all over the file: ranks exchange them, and each takes a range
    whole = flat.assemble(index, own, f"parameter {part.label}")
    for box in boxes(slot.shape, start, part.stop):
        values = box.of(slot.view(whole)).reshape(-1)
        yield start, values
        start += values.numel()
