"""The state of a sharded module and its optimizers as entries of a folder: each rank has its own parts."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_any, tree_map

from lightning_zero.checkpoint.full import _Undetached
from lightning_zero.engine import Engine
from lightning_zero.engine.elsewhere import OwnPart
from lightning_zero.engine.names import clean_name


def module_state(module: nn.Module, engine: Engine) -> dict[str, Any]:
    """``module.state_dict()`` with this rank's parts in the place of parameters, under the names of a module that is
    not compiled. Buffers and extra state are as the module gives them.
    """
    with _Undetached(engine):
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


def split(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint of Lightning's in two: what goes into the folder's data, by section, and what into ``meta.pt``."""
    sections: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key == "optimizer_states":
            sections |= {f"optimizer_{number}": state for number, state in enumerate(value)}
        elif key == "state_dict" or tree_any(_is_part, value):
            sections[key] = value
        else:
            meta[key] = value
    masters = {
        name: part.exact
        for name, part in checkpoint["state_dict"].items()
        if isinstance(part, OwnPart) and part.exact is not None
    }
    if masters:
        sections["master"] = masters
    return sections, meta


def snapshot(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The same with copies of all values, which training does not change; what is shared stays shared."""
    copies: dict[int, Any] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.snapshot() if isinstance(value, OwnPart) else value.detach().cpu().clone()
        return copies[id(value)]

    found: dict[str, Any] = tree_map(copy, dict(sections))
    return found


def _is_part(value: Any) -> bool:
    return isinstance(value, OwnPart)


def pack(meta: Mapping[str, Any]) -> bytes:
    """The content of ``meta.pt``."""
    buffer = io.BytesIO()
    torch.save(dict(meta), buffer)
    return buffer.getvalue()
