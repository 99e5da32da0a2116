"""The state of a sharded module and its optimizers as entries of a folder: each rank has its own parts."""

import hashlib
import io
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.utils._pytree import keystr, tree_any, tree_flatten_with_path, tree_leaves, tree_map, tree_structure

from lightning_zero.checkpoint.full import Undetached
from lightning_zero.engine import Communicator, Engine
from lightning_zero.engine.elsewhere import OwnPart
from lightning_zero.engine.names import clean_name


def module_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """``module.state_dict()`` with this rank's parts in the place of parameters, under the names of a module that is
    not compiled. Buffers and extra state are as the module gives them.
    """
    with Undetached(engine):
        state: dict[str, Any] = module.state_dict()
    wanted = {id(value) for value in state.values()}
    parts = {id(param): (part, master) for param, part, master in engine.own_parts() if id(param) in wanted}
    found: dict[str, Any] = {}
    for name, value in state.items():
        if id(value) in parts:
            part, master = parts[id(value)]
            part.exact = master
            found[clean_name(name)] = part
        else:
            found[clean_name(name)] = value.detach() if isinstance(value, Tensor) else value
    return found


ALIGNED = 64
"""Bytes, a multiple of what an element of any dtype has."""

_OURS = re.compile(r"model|master|optimizer_\d+")
"""Sections of a folder beside ``state_dict``: its second name, master weights, optimizers."""


class Sealed:
    """A value that becomes one item of a folder, whatever it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value


def agree_on_parts(comm: Communicator, checkpoint: Mapping[str, Any]) -> None:
    """Make sure that what ranks have parts of is the same on all of them, in the same order. Collective.

    Raises:
        RuntimeError: it is not, on all ranks: a hook has done something on some ranks only.
    """
    leaves, _ = tree_flatten_with_path(dict(checkpoint))
    names = [keystr(path) for path, value in leaves if isinstance(value, OwnPart)]
    digest = hashlib.sha256("\n".join(names).encode()).digest()
    if len(set(comm.collect(digest))) == 1:
        return
    everyone = comm.collect(names)
    shared = set(everyone[0]).intersection(*everyone)
    lines = [f"rank {rank} alone has {', '.join(own[:3])}" for rank, other in enumerate(everyone)
             if (own := [name for name in other if name not in shared])]  # fmt: skip
    raise RuntimeError(
        "In a sharded checkpoint each rank has a part of every parameter, so that hooks (on_save_checkpoint, "
        "state_dict) must do the same on all ranks. They have not: "
        f"{'; '.join(lines) or 'the order of parameters is another'}."
    )


def split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint of Lightning's in two: what goes into the folder's data, by section, and what into ``meta.pt``.

    Raises:
        ValueError: a hook has put parts of parameters under a name that the folder's own data have.
    """
    sections: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key == "optimizer_states" and any(value):  # without optimizers Lightning has none, or an empty one
            sections |= {f"optimizer_{number}": state for number, state in enumerate(value)}
        elif key == "state_dict":
            sections[key] = _sealed(value)
        elif tree_any(_is_part, value):
            if _OURS.fullmatch(str(key)):
                raise ValueError(f"A hook has put parameters into the checkpoint as {key!r}: use another name.")
            sections[key] = _sealed(value)
        else:
            meta[key] = value
    masters = {
        name: part.exact
        for name, part in checkpoint.get("state_dict", {}).items()
        if isinstance(part, OwnPart) and part.exact is not None
    }
    if masters:
        sections["master"] = masters
    return sections, meta


def _sealed(value: Any) -> Any:
    """The same with what torch would give back in another form (empty dicts, keys that are no strings) as one item."""
    if not isinstance(value, dict | list):
        return value
    if not tree_any(_is_part, value):
        return value if _keeps_its_form(value) else Sealed(value)
    if isinstance(value, list):
        return [_sealed(item) for item in value]
    if others := [key for key in value if not isinstance(key, str)]:
        raise TypeError(
            f"A sharded checkpoint cannot hold a dict with the key {others[0]!r} and a part of a parameter below: keys "
            "must be strings there."
        )
    return {key: _sealed(item) for key, item in value.items()}


def _keeps_its_form(value: Any) -> bool:
    try:
        items, paths = flatten_state_dict({"it": value})
    except ValueError:  # two items by the same name
        return False
    return bool(tree_structure(unflatten_state_dict(items, paths).get("it")) == tree_structure(value))


def snapshot(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The same with copies of all values, which training does not change; what is shared stays shared.

    This rank's parts are copied into one piece of memory, which goes back to the system with the last of them: many
    small ones would leave holes.
    """
    parts = {id(value): value for value in tree_leaves(dict(sections)) if isinstance(value, OwnPart)}
    sizes = [-(-(part.stop - part.start) * part.dtype.itemsize // ALIGNED) * ALIGNED for part in parts.values()]
    memory = torch.split(torch.empty(sum(sizes), dtype=torch.uint8), sizes)
    copies: dict[int, Any] = {
        key: part.snapshot(piece.view(part.dtype)[: part.stop - part.start])
        for (key, part), piece in zip(parts.items(), memory, strict=True)
    }

    found: dict[str, Any] = tree_map(partial(_copied, copies), dict(sections))
    return found


def _copied(copies: dict[int, Any], value: Any) -> Any:
    # not a function inside the other: one that calls itself would keep the copies until the next garbage collection
    if isinstance(value, Sealed):
        return Sealed(tree_map(partial(_copied, copies), value.value))
    if not isinstance(value, Tensor):
        return deepcopy(value)
    if id(value) not in copies:
        copies[id(value)] = value.detach().cpu().clone()
    return copies[id(value)]


def _is_part(value: Any) -> bool:
    return isinstance(value, OwnPart)


def pack(meta: Mapping[str, Any]) -> bytes:
    """The content of ``meta.pt``."""
    buffer = io.BytesIO()
    torch.save(dict(meta), buffer)
    return buffer.getvalue()
