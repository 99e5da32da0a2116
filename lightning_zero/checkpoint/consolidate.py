"""From a folder to one file that any strategy of Lightning's loads, one tensor in memory at a time."""

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from lightning_zero.checkpoint import folder, reader, temporary
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
    part = folder.new_part(target, file=True)
    try:
        _write_frame(checkpoint, part)
        _fill(checkpoint, part, progress)
        folder.commit(part, target)
    finally:
        temporary.drop(part)


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

    def fake(value: Tensor) -> Tensor:
        if not is_dense(value):
            raise ValueError(
                f"There is a tensor of layout {value.layout} and dtype {value.dtype}, and only dense ones have a place "
                "in a file that is written part by part. lightning.pytorch.utilities.consolidate_checkpoint writes it."
            )
        if not isinstance(value, StoredTensor):
            return value
        if id(value) not in fakes:
            fakes[id(value)] = torch.empty(value.shape, dtype=value.dtype)
        return fakes[id(value)]

    with FakeTensorMode():
        frame = tree_map_only(Tensor, fake, checkpoint)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(frame, path)


def _fill(checkpoint: Any, path: Path, progress: Progress) -> None:
    with FakeTensorMode():
        places = torch.load(path, weights_only=False)  # what has been loaded before
    done: set[int] = set()
    with path.open("r+b") as file:
        for value, place in zip(_tensors(checkpoint), _tensors(places), strict=True):
            offset: int = place.untyped_storage()._checkpoint_offset  # type: ignore[assignment]
            if offset not in done:
                done.add(offset)
                values = value.whole() if isinstance(value, StoredTensor) else value
                memory = torch.empty(0, dtype=torch.uint8).set_(values.untyped_storage())
                file.seek(offset)
                file.write(memory.numpy().data)
                progress(memory.nbytes)


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in it, in the order in which they are pickled: those in the user's objects, too."""
    found: list[Tensor] = []

    class Finder(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if not isinstance(obj, Tensor):
                return NotImplemented
            found.append(obj)
            return int, ()

    Finder(io.BytesIO()).dump(value)
    return found
