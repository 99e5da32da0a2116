"""``python -m lightning_zero checkpoint``: look at checkpoint folders, check and convert them, in one process.

python -m lightning_zero checkpoint info PATH                      # what is in it
python -m lightning_zero checkpoint verify PATH [PATH ...]         # whether all of it is as it was written
python -m lightning_zero checkpoint consolidate PATH [--output FILE]     # one .ckpt, as ddp writes it
python -m lightning_zero checkpoint export PATH [--output PATH] [--dtype bf16]    # the weights as safetensors
"""

import argparse
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_zero.checkpoint import folder, reader
from lightning_zero.checkpoint.boxes import is_dense
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.files import CheckedFile
from lightning_zero.checkpoint.manifest import BLOCK
from lightning_zero.checkpoint.safetensors_write import save_state

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_parser(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser("checkpoint", help="look at checkpoint folders, check and convert them")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, words in (
        ("info", "what is in a folder"),
        ("verify", "whether folders are complete, and all bytes as they were written"),
        ("consolidate", "one .ckpt that any strategy loads"),
        ("export", "the weights as safetensors"),
    ):
        action = actions.add_parser(name, help=words)
        action.add_argument("path", type=Path, nargs="+" if name == "verify" else None)
        if name == "consolidate":
            action.add_argument("--output", type=Path, help="the file (default: beside PATH, .consolidated.ckpt)")
        if name == "export":
            action.add_argument("--output", type=Path, help="a .safetensors file, or a folder (default: beside PATH)")
            action.add_argument("--dtype", choices=tuple(DTYPES), help="of floating-point tensors (default: their own)")
            action.add_argument("--max-file-bytes", type=float, help="of a file in a folder (default: 50e9)")
        if name in ("info", "consolidate"):
            trust = "load objects of the user's in meta.pt, too, which may run code"
            action.add_argument("--trust", action="store_true", help=trust)


def run(options: argparse.Namespace) -> None:
    """Run one of the actions.

    Raises:
        ValueError: a folder is not complete, or damaged.
        OSError: it is not there, or the disk is full.
    """
    if options.action == "verify":
        for path in options.path:
            verify(path)
    elif options.action == "info":
        print(info(options.path, options.trust))
    elif options.action == "export":
        print(export(options.path, options.output, DTYPES.get(options.dtype), options.max_file_bytes))
    else:
        target = options.output or _beside(options.path, ".consolidated.ckpt")
        with _opened(options.path) as source, _bar("consolidate", _tensor_bytes(source)) as bar:
            consolidate(source, target, options.trust, bar.update)
        print(target)


def info(path: Path, trust: bool) -> str:
    """What a folder holds, as a table."""
    with _opened(path) as source:
        meta = reader.meta(source, weights_only=not trust)
        lines = [str(source.path), f"  epoch {meta.get('epoch')}, step {meta.get('global_step')}"]
        kind = "without a manifest: written by another strategy" if source.files is None else "with checksums"
        lines.append(f"  {len(list(source.path.glob('*.distcp')))} data files, {kind}")
        lines.append(f"  {'section':16s} {'tensors':>8s} {'elements':>16s} {'bytes':>18s}  dtypes")
        for section in source.sections():
            found = [
                stored
                for name, where in source.names().items()
                if where[0] == section
                and isinstance(stored := source.metadata.state_dict_metadata[name], TensorStorageMetadata)
            ]
            elements, nbytes = sum(prod(each.size) for each in found), sum(map(_nbytes, found))
            dtypes = Counter(str(each.properties.dtype).removeprefix("torch.") for each in found)
            alias = " (second names of state_dict)" if section == "model" and "state_dict" in source.sections() else ""
            lines.append(f"  {section:16s} {len(found):8,} {elements:16,} {nbytes:18,}  {', '.join(dtypes)}{alias}")
        lines.append(f"  {folder.META}: {', '.join(meta)}")
        return "\n".join(lines)


def verify(path: Path) -> None:
    """Read every byte of a folder, and compare.

    Raises:
        ValueError: something is missing or another than what has been written; the message says where.
    """
    with _opened(path) as source:
        for name, stored in reader.tensors(source):
            if sum(prod(chunk.sizes) for chunk in stored.chunks) != prod(stored.size):
                raise ValueError(f"{path} has only parts of {name!r}.")
        if source.files is None:
            print(f"{path}: all files are there; it has no checksums, for another strategy has written it")
            return
        with _bar("verify", sum(file.size for file in source.files.values())) as bar:
            for name, expected in source.files.items():
                file = CheckedFile(source.path / name, expected)
                for start in range(0, expected.size, BLOCK):
                    size = min(BLOCK, expected.size - start)
                    file.read(start, memoryview(bytearray(size)))
                    bar.update(size)
                file.close()
    print(f"{path}: complete, and as it was written")


def export(path: Path, output: Path | None, dtype: torch.dtype | None, max_file_bytes: float | None) -> Path:
    """Write the weights of a folder as safetensors; returns where.

    Raises:
        FileExistsError: there is something already.
        ValueError: the folder is damaged, or holds what safetensors cannot.
    """
    target = output or _beside(path, ".safetensors")
    if target.exists() and not (target.is_dir() and not list(target.glob("*.safetensors"))):
        raise FileExistsError(f"{target} exists: choose another name or remove it.")
    with _opened(path) as source:
        everything = reader.weights(source)
        everything = everything if dtype is None else reader.exact(everything)
        state = {name: value for name, value in everything.items() if isinstance(value, Tensor) and is_dense(value)}
        if others := [name for name in everything if name not in state]:
            print(f"left out, for a safetensors file holds dense tensors only: {', '.join(others)}")
        with _bar("export", sum(value.nbytes for value in state.values())) as bar:
            save_state(reader.told(state, bar.update), target, dtype, max_file_bytes)
    return target


def _beside(path: Path, ending: str) -> Path:
    """A name of its own for what is made of a folder, also of the one in which the user is."""
    path = Path(os.path.abspath(path)) if path.name in ("", "..") else path
    return path.with_name(path.name.removesuffix(".ckpt") + ending)


@contextmanager
def _opened(path: Path) -> Iterator[reader.Folder]:
    found = folder.find(path)
    if not found.is_dir():
        raise ValueError(f"{path} is a file: torch.load reads it.")
    source = reader.Folder(found)
    try:
        yield source
    finally:
        source.close()


def _bar(words: str, total: int) -> "tqdm[Any]":
    return tqdm(desc=words, total=total, unit="B", unit_scale=True, leave=False)


def _tensor_bytes(source: reader.Folder) -> int:
    return sum(_nbytes(stored) for _, stored in reader.tensors(source))


def _nbytes(stored: TensorStorageMetadata) -> int:
    return prod(stored.size) * stored.properties.dtype.itemsize
