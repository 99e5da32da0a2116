"""What a fit will take, told when it starts, and at its end beside what it took. No collective, and no dry run."""

import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_zero.engine import Engine
from lightning_zero.engine.elementwise import state_bytes
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.stages import stage_row
from lightning_zero.engine.swapped import state_tier
from lightning_zero.plan.sizes import shown


def tell(engine: Engine, optimizers: Iterable[Optimizer], trainer: Any) -> Callable[[], None]:
    """Tell rank 0 where the Trainer tells it of the model (``enable_model_summary``); returns what tells the end."""
    if not trainer.is_global_zero or not any("ModelSummary" in type(c).__name__ for c in trainer.callbacks):
        return lambda: None
    sums = stage_row(engine.config.stage, engine.config.reduce_at).reduce_at == "window"  # type: ignore[arg-type]
    plan = FitPlan(engine, list(optimizers), sums and trainer.accumulate_grad_batches > 1)
    rank_zero_info(plan.announcement())
    return lambda: rank_zero_info(plan.comparison())


class FitPlan:
    """The states of an engine that has been built, by what its own buffers are; activations are not known.

    Args:
        engine: before the first step.
        optimizers: the user's.
        sums: whether micro-batches of a window are summed before they are reduced.
    """

    def __init__(self, engine: Engine, optimizers: Sequence[Optimizer], sums: bool) -> None:
        flats = [flat for unit in engine.units for flat in unit.flats]
        rates = _state_rates(engine, optimizers)
        whole = [flat for unit in engine.units for flat in unit.flats if not unit.sharded or unit.is_root]
        self.steady = {
            "parameters": sum(flat.buffer.nbytes for unit in engine.units for flat in unit.flats if not unit.sharded),
            "master weights": sum(flat.shard.nbytes for flat in flats if not flat.aliased),
            "gradients": sum(_gradient(flat, sums) for flat in flats if flat.rested is None),
            "optimizer": sum(rates.get(id(flat), 0) for flat in flats if state_tier(flat) is None),
        }
        self.offloaded = sum(_gradient(flat, False) for flat in flats if flat.rested is not None)
        self.offloaded += sum(rates.get(id(flat), 0) for flat in flats if state_tier(flat) is not None)
        self.offloaded += sum(array.nbytes for flat in flats for array in {flat.master, flat.rest} if array is not None)
        gathered = sorted(sum(flat.buffer.nbytes for flat in unit.flats) for unit in engine.units if unit.sharded)
        roots = sum(flat.buffer.nbytes for flat in whole) - self.steady["parameters"]
        reduced = max((unit.nbytes for unit in engine.units), default=0)
        self.working = roots + sum(gathered[-1 - engine.config.prefetch :]) + 2 * reduced
        """Units that are whole at a time, and the gradients of one, with what is received of them."""
        self._device = engine.comm.device
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        held = sum(nbytes for kind, nbytes in engine.memory().items() if not kind.startswith("offload"))
        self._before = _resident_now() - held

    def announcement(self) -> str:
        """For the start."""
        kinds = ", ".join(f"{kind} {shown(nbytes)}" for kind, nbytes in self.steady.items())
        total = sum(self.steady.values())
        lines = [
            f"Plan for rank 0: {shown(total)} of states ({kinds}),"
            f" up to {shown(total + self.working)} with what is gathered and reduced at a time, and activations."
        ]
        if self.offloaded:
            lines.append(f"{shown(self.offloaded)} rest in offload.")
        return " ".join(lines)

    def comparison(self) -> str:
        """For the end."""
        planned = sum(self.steady.values()) + self.working
        if self._device.type == "cuda":
            return (
                f"Rank 0 planned {shown(planned)} without activations; the peak on the device was"
                f" {shown(torch.cuda.max_memory_allocated(self._device))} with them."
            )
        return (
            f"Rank 0 planned {shown(planned)} without activations; its resident memory has risen by"
            f" {shown(max(0, _most_resident() - self._before))} with them, states that were there already among them."
        )


def _gradient(flat: Flat, sums: bool) -> int:
    if not any(param.requires_grad for param in flat.params):
        return 0
    return (flat.layout.numel if sums else flat.high - flat.low) * flat.dtypes.sum.itemsize


def _state_rates(engine: Engine, optimizers: Sequence[Optimizer]) -> dict[int, int]:
    """By the id of a flat, bytes that the optimizers will keep for this rank's part of it."""
    found: dict[int, int] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rates: dict[torch.dtype, int] = {}
            for param in group["params"]:
                home = engine.locate(param)
                if home is None or not param.requires_grad:
                    continue
                flat, index = home
                dtype = flat.dtypes.master
                if dtype not in rates:
                    rates[dtype] = 0
                    with suppress(Exception):  # a plan ends no run: an optimizer that cannot be tried is left out
                        rates[dtype] = state_bytes(optimizer, group, dtype)
                low, high = flat.own_range(index)
                found[id(flat)] = found.get(id(flat), 0) + rates[dtype] * (high - low)
    return found


def _resident_now() -> int:
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return _most_resident()


def _most_resident() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
