"""Weights from safetensors, of which each rank reads what it needs."""

import os
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from lightning_zero import host
from lightning_zero.checkpoint.named import Names, engine_of, name_in_file, named_state
from lightning_zero.checkpoint.safetensors_file import all_stored, local_path, open_files
from lightning_zero.engine.elsewhere import StoredTensor
from lightning_zero.engine.expected import Copies, catch, take


def load_safetensors(
    module: nn.Module, path: str | os.PathLike[str], *, names: Names = None, strict: bool = True
) -> _IncompatibleKeys:
    """``module.load_state_dict`` from safetensors; dtypes become the module's.

    Of a sharded module each rank reads its own part, and all ranks must call it (collective). What is on ``meta``, as
    in a ``configure_model`` under stage 3, is read when it is sharded, each rank its part; until then only the header
    is. A plain module is loaded at once, one tensor after the other.

    Args:
        module: the whole LightningModule or a part of it (``self.model``).
        path: a file, an index, or a folder with a ``model.safetensors``, a ``model.safetensors.index.json``, or one of
            either under another name.
        names: from the names of ``module.state_dict()`` (without what ``torch.compile`` puts into them) to those in the
            file, None for what is not in it: a mapping, in which other names stay as they are, or a function.
        strict: whether names that are missing or unexpected are an error. The second name of a tied parameter is not
            missing.

    Returns:
        ``missing_keys`` and ``unexpected_keys``, as ``load_state_dict``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file is damaged, or it is not clear which one is meant. Nothing has changed then.
        RuntimeError: names or shapes do not fit; the message has them. No parameter has changed then.
    """
    engine = engine_of(module)
    comm = None if engine is None else engine.comm
    copies: Copies = {}
    found = _IncompatibleKeys([], [])
    with host.together(comm):
        stored = all_stored(open_files(local_path(path)))
        copies, found = _match(module, stored, names)
        if strict and (found.missing_keys or found.unexpected_keys):
            raise RuntimeError(_words(module, path, found))
    if engine is None:
        take(module, copies, later=False)
        return found
    with host.together(comm):
        own = {key: value for key, (_, value) in copies.items() if key in engine.homes}
        take(module, {key: pair for key, pair in copies.items() if key not in own}, later=False)
        engine.load_parameters(own)
    return found


def _match(module: nn.Module, stored: Mapping[str, StoredTensor], names: Names) -> tuple[Copies, _IncompatibleKeys]:
    """What is to be copied into what, and the names that are left over on both sides.

    Raises:
        RuntimeError: shapes do not fit.
    """
    params = dict(module.named_parameters(remove_duplicate=False))
    in_file = {key: name_in_file(key, names) for key in (*named_state(module), *params)}
    state: dict[str, Any] = {key: stored[name] for key, name in in_file.items() if name is not None and name in stored}
    # under their own names: the module's hooks may know what was called otherwise once
    others = stored.keys() - in_file.values()
    state |= {name: stored[name] for name in stored if name in others and name not in in_file}
    copies, found = catch(module, state, strict=False)
    missing, unexpected = ([], []) if found is None else (found.missing_keys, found.unexpected_keys)
    # a name that is meant for no tensor of the module is so also where the module has one of that name
    unexpected = [*unexpected, *(name for name in stored if name in others and name in in_file)]
    missing = [key for key in missing if in_file.get(key, key) is not None and id(params.get(key)) not in copies]
    return copies, _IncompatibleKeys(missing, unexpected)


def _words(module: nn.Module, path: str | os.PathLike[str], found: _IncompatibleKeys) -> str:
    """As torch has them."""
    text = f"Error(s) in loading state_dict for {type(module).__name__} from {os.fspath(path)}:"
    for kind in ("missing", "unexpected"):
        keys = getattr(found, f"{kind}_keys")
        if keys:
            text += f"\n\t{kind.capitalize()} key(s) in state_dict: " + ", ".join(f'"{key}"' for key in keys) + ". "
    return text
