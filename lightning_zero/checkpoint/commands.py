"""``python -m lightning_zero checkpoint``: look at checkpoint folders, check and convert them, in one process.

python -m lightning_zero checkpoint info PATH                      # what is in it
python -m lightning_zero checkpoint verify PATH [PATH ...]         # whether all of it is as it was written
python -m lightning_zero checkpoint consolidate PATH [--output FILE]     # one .ckpt, as ddp writes it
python -m lightning_zero checkpoint export PATH [--output PATH] [--dtype bf16]    # the weights as safetensors
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_zero.checkpoint import folder, reader
from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.files import CheckedFile
from lightning_zero.checkpoint.manifest import BLOCK


def add_parser(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser("checkpoint", help="look at checkpoint folders, check and convert them")
    actions = parser.add_subparsers(dest="action", required=True)
    for name, words in (
        ("info", "what is in a folder"),
        ("verify", "whether folders are complete, and all bytes as they were written"),
        ("consolidate", "one .ckpt that any strategy loads"),
    ):
        action = actions.add_parser(name, help=words)
        action.add_argument("path", type=Path, nargs="+" if name == "verify" else None)
        if name == "consolidate":
            action.add_argument("--output", type=Path, help="the file (default: beside PATH, .consolidated.ckpt)")
        if name != "verify":
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
    else:
        target = options.output or options.path.with_name(f"{options.path.stem}.consolidated.ckpt")
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
