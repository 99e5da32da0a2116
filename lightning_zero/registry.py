"""Classes and names of the strategies, for each Lightning namespace.

There are two namespaces, ``lightning.pytorch`` and ``pytorch_lightning``, whose classes have nothing to do with each
other. Each gets a strategy class of its own, made from the same methods.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import product
from types import ModuleType
from typing import Any

from lightning_zero.strategy import ZeroMethods, ZeroStrategy

_DISK = {"device": "nvme", "nvme_path": "/local_nvme"}  # Lightning's default for DeepSpeed, too
_SETTINGS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero1_offload": {"stage": 1, "offload_optimizer": "cpu"},
    "zero2_offload": {"stage": 2, "offload_optimizer": "cpu"},
    "zero3_offload": {"stage": 3, "offload_optimizer": "cpu", "offload_params": "cpu"},
    "zero3_nvme": {"stage": 3, "offload_optimizer": _DISK, "offload_params": _DISK},
}
# How ranks of this machine are started, by the ending of the name, as for ``ddp``.
_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
_PREFIX = "ZeroStrategy_of_"


@cache
def make_strategy(namespace: str) -> type[ZeroMethods]:
    """The strategy class for a namespace, ``lightning.pytorch`` or ``pytorch_lightning``."""
    if namespace == "lightning.pytorch":
        return ZeroStrategy
    base = import_module(f"{namespace}.strategies").DDPStrategy
    names = {"__module__": __name__, "__qualname__": _PREFIX + namespace, "__doc__": ZeroStrategy.__doc__}
    return type("ZeroStrategy", (ZeroMethods, base), names)


def __getattr__(name: str) -> Any:
    # Where pickle looks for such a class, in a process that may not have made it yet.
    if name.startswith(_PREFIX):
        return make_strategy(name.removeprefix(_PREFIX))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register(namespace: str) -> None:
    """Register the names of ``_SETTINGS``, and each with ``_spawn``, ``_fork`` and ``_notebook``, in a namespace.

    Doing it again is harmless.

    Raises:
        ValueError: a name is taken by somebody else's strategy.
    """
    registry = import_module(f"{namespace}.strategies").StrategyRegistry
    strategy = make_strategy(namespace)
    for (name, settings), (ending, start_method) in product(_SETTINGS.items(), _START_METHODS.items()):
        name += ending
        ours = name in registry and registry[name]["strategy"].__module__.startswith("lightning_zero.")
        registry.register(
            name,
            strategy,
            description=f"ZeRO: {settings}; ranks started by {start_method!r}",
            override=ours,
            start_method=start_method,
            **settings,
        )


def register_everywhere() -> None:
    """Register with ``lightning.pytorch``, and once the program has imported them with the others that we are for."""
    register("lightning.pytorch")
    for name, action in (("pytorch_lightning", register), ("hydra", _register_with_hydra)):
        if name in sys.modules:
            action(name)
        elif not any(isinstance(finder, _AfterImport) and finder.name == name for finder in sys.meta_path):
            sys.meta_path.insert(0, _AfterImport(name, action))


def _register_with_hydra(_: str) -> None:
    import_module("lightning_zero.config.hydra").register_with_hydra()


class _AfterImport(MetaPathFinder):
    """Registers with a package at the end of its import, which would cost other programs up to seconds."""

    def __init__(self, name: str, action: Callable[[str], None]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The module as other finders see it, with a loader that registers afterwards."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)  # for who asks may not be who imports
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                sys.meta_path.remove(self)
                self.action(name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
