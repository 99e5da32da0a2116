"""Lightning's own callbacks that read or change parameters between steps.

Outside a step the values of a sharded module are not there, and nobody can tell whether all ranks are about to read
them. Of these callbacks it is known that they do: their hooks run on whole parameters.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

from torch import nn

from lightning_zero.engine import Engine


class _Visitor(NamedTuple):
    """Hooks of one callback class, by whether they only read."""

    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


_VISITORS = {
    "WeightAveraging": _Visitor(
        reads=("on_train_batch_end", "on_train_epoch_end"),
        writes=("on_validation_epoch_start", "on_validation_epoch_end", "on_train_end", "on_load_checkpoint"),
    ),
    "StochasticWeightAveraging": _Visitor(writes=("on_train_epoch_start", "on_train_end")),
    "BaseFinetuning": _Visitor(reads=("on_train_epoch_start",)),
}


_REFUSED = {"ModelPruning": "replaces parameters by masked copies outside of steps, and takes them to be whole there"}
"""At stage 3."""


def let_in(callbacks: Sequence[Any], engine: Engine, module: nn.Module) -> Callable[[], None]:
    """Make the hooks of such callbacks run on whole parameters of ``module``; returns what takes it back.

    Raises:
        ValueError: a callback would write values that are rounder than the master weights, or needs parameters that are
            always whole.
    """
    sharded = any(unit.sharded for unit in engine.units)
    for callback in callbacks if sharded else ():
        for name in {cls.__name__ for cls in type(callback).__mro__} & set(_REFUSED):
            raise ValueError(f"{name} {_REFUSED[name]}; at stage 3 they are not. Use strategy='zero2'.")
    flats = [flat for unit in engine.units for flat in unit.flats]
    rounded = any(flat.dtypes.compute != flat.dtypes.master for flat in flats)
    visits = [
        (callback, _VISITORS[name])
        for callback in callbacks
        for name in {cls.__name__ for cls in type(callback).__mro__} & set(_VISITORS)
    ]
    for callback, visitor in visits:
        if visitor.writes and rounded:
            raise ValueError(
                f"{type(callback).__name__} (EMA, SWA) exchanges weights in the precision of the forward, which"
                " here is lower than that of the master weights: they would lose their low bits. Use"
                " precision='32-true', or strategy='ddp'."
            )
    wrapped: list[tuple[Any, str]] = []
    for callback, visitor in visits if sharded else ():
        for hook in visitor.reads + visitor.writes:
            setattr(callback, hook, _on_whole(getattr(callback, hook), engine, module, hook in visitor.writes))
            wrapped.append((callback, hook))

    def take_back() -> None:
        for callback, hook in wrapped:
            delattr(callback, hook)

    return take_back


def _on_whole(hook: Callable[..., Any], engine: Engine, module: nn.Module, changes: bool) -> Callable[..., Any]:
    @wraps(hook)
    def on_whole(*args: Any, **kwargs: Any) -> Any:
        with engine.gathered(module, modifier_rank=0 if changes else None):
            return hook(*args, **kwargs)

    return on_whole
