"""From a folder to one file that any strategy of Lightning's loads, one tensor in memory at a time."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zero.checkpoint import reader
from lightning_zero.checkpoint.boxes import is_dense
from lightning_zero.engine.elsewhere import StoredTensor

Progress = Callable[[int], Any]
"""Is told of bytes that are done."""


def consolidate(source: reader.Folder, target: Path, trust: bool, progress: Progress) -> None:
    """Write what a folder holds as one ``.ckpt``, in the form in which ``ddp`` writes it.

    Tensors in the file have their place first, and are written there one after the other.

    Args:
        source: the folder.
        target: the file.
        trust: whether objects of the user's are loaded, which may run code.
        progress: is told.

    Raises:
        FileExistsError: there is something at ``target``.
        ValueError: the folder is damaged.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists: choose another name or remove it.")
    checkpoint = reader.checkpoint(source, weights_only=not trust)
    states = checkpoint.get("optimizer_states", [])
    if states:
        checkpoint["optimizer_states"] = [numbered(state) if state else state for state in states]
    part = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.touch(exist_ok=False)  # torch's writer does not say what is wrong with the place
        _write_frame(checkpoint, part)
        _fill(checkpoint, part, progress)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state by the numbers of its parameters, as torch's ``state_dict()`` has it, from one by names."""
    numbers: dict[Any, int] = {}
    groups = []
    for group in state["param_groups"]:
        own = [numbers.setdefault(name, len(numbers)) for name in group["params"]]
        groups.append({**group, "params": own})
    return {
        "state": {numbers[name]: entries for name, entries in state.get("state", {}).items()},
        "param_groups": groups,
    }


def _write_frame(checkpoint: Any, path: Path) -> None:
    """Write the file with room for the tensors' values."""
    fakes: dict[int, Tensor] = {}

    def fake(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not is_dense(value):
            raise ValueError(
                f"There is a tensor of layout {value.layout} and dtype {value.dtype}, and only dense ones have a place "
                "in a file that is written part by part. lightning.pytorch.utilities.consolidate_checkpoint writes it."
            )
        if id(value) not in fakes:
            fakes[id(value)] = torch.empty(value.shape, dtype=value.dtype)
        return fakes[id(value)]

    with FakeTensorMode(), torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(tree_map(fake, checkpoint), path)


def _fill(checkpoint: Any, path: Path, progress: Progress) -> None:
    with FakeTensorMode():
        places = torch.load(path, weights_only=False)  # what has been loaded before
    done: set[int] = set()
    with path.open("r+b") as file:
        for value, place in zip(tree_leaves(checkpoint), tree_leaves(places), strict=True):
            if isinstance(value, Tensor) and id(value) not in done:
                done.add(id(value))
                whole = value.whole() if isinstance(value, StoredTensor) else value.detach().cpu().contiguous()
                file.seek(place.untyped_storage()._checkpoint_offset)
                file.write(whole.view(-1).view(torch.uint8).numpy().data)
                progress(whole.nbytes)
        file.flush()
        os.fsync(file.fileno())
