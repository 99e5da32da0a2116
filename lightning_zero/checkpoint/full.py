"""Whole state in one file, as any strategy of Lightning writes it.

The names, order and shapes are those of the unsharded module and optimizer, so that the file loads anywhere. Rank 0
holds what the file holds; the others never hold more than one unit.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from lightning_zero.checkpoint import folder, temporary
from lightning_zero.engine import Engine


def module_state(module: nn.Module, engine: Engine, rank: int) -> dict[str, Any]:
    """``module.state_dict()`` with whole parameters, on the CPU and in the user's dtype. Collective.

    Tied names share one tensor; buffers and extra state are as the module gives them. Ranks other than 0 get ``{}``.
    """
    # a sharded parameter stands for itself, unread, until its value is put here
    with Undetached(engine):
        state: dict[str, Any] = module.state_dict()
    wanted = {id(value) for value in state.values()}
    whole: dict[int, Tensor] = {}
    for param, value in engine.named_full_parameters(dst=0):
        if value is not None and id(param) in wanted:
            whole[id(param)] = value
    if rank != 0:
        return {}
    for name, value in state.items():
        if id(value) in whole:
            state[name] = whole[id(value)]
        elif isinstance(value, Tensor):
            state[name] = value.detach().cpu()
    return state


def load_module_state(module: nn.Module, engine: Engine, state: Mapping[str, Any], strict: bool) -> None:
    """``module.load_state_dict(state, strict)`` for a sharded module. Every rank passes the same state.

    The module's own loading hooks run. If names or shapes do not fit, no parameter has changed.

    Raises:
        RuntimeError: as torch raises it, naming the keys.
    """
    with _CatchCopies(engine) as caught:
        module.load_state_dict(state, strict=strict)
    engine.load_parameters(caught.values)


class Undetached(TorchFunctionMode):
    """``detach`` returns the engine's parameters themselves (without an engine, all): ``keep_vars`` for a
    ``state_dict()`` of any signature.
    """

    def __init__(self, engine: Engine | None) -> None:
        super().__init__()
        self.engine = engine

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.detach and isinstance(args[0], nn.Parameter) and self._is_meant(args[0]):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _is_meant(self, param: nn.Parameter) -> bool:
        return self.engine is None or self.engine.locate(param) is not None


class _CatchCopies(TorchFunctionMode):
    """Keeps what would be copied into the engine's parameters, so that torch's own code decides what goes where."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.values: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_ and isinstance(args[0], nn.Parameter) and self.engine.locate(args[0]) is not None:
            self.values[id(args[0])] = args[1]
            return args[0]
        return func(*args, **(kwargs or {}))


def write(checkpoint: Mapping[str, Any], path: Path) -> None:
    """Write a checkpoint straight from its tensors to a local file; what is there stays until the new one is complete.

    Raises:
        OSError: it cannot be written; or ``path`` is a directory, and no checkpoint.
    """
    path = path.absolute()
    folder.refuse_foreign(path)
    part = folder.new_part(path, file=True)
    try:
        with part.open("wb") as file:
            torch.save(checkpoint, file)
        folder.commit(part, path)
    finally:
        temporary.drop(part)


def read(path: Path, map_location: Any, weights_only: bool | None) -> dict[str, Any]:
    """Read a local checkpoint whose weights and optimizer states stay on disk until they are used.

    All ranks of a host then share the file's pages, and an evaluation never reads the optimizer states. What callbacks
    and schedulers may keep is copied, so that nothing depends on the file later.
    """
    mapped = zipfile.is_zipfile(path)  # torch's older format can only be read whole
    checkpoint: Any = torch.load(path, map_location=map_location, weights_only=weights_only, mmap=mapped)
    if not isinstance(checkpoint, dict) or not mapped:
        return checkpoint  # type: ignore[no-any-return]
    for key, value in checkpoint.items():
        if key == "optimizer_states":
            for state in value:
                state.update(_copied({name: part for name, part in state.items() if name != "state"}))
        elif key != "state_dict":
            checkpoint[key] = _copied(value)
    return checkpoint


def _copied(value: Any) -> Any:
    return tree_map_only(Tensor, Tensor.clone, value)
