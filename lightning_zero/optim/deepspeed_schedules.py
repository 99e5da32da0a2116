"""DeepSpeed's learning rate schedules as torch's schedulers: the same rates at the same optimizer steps.

They are functions of the number of optimizer steps taken, and their state is that number, so that after a restart the
configuration counts and not what it was before. Formulas: DeepSpeed 0.19.8, ``deepspeed/runtime/lr_schedules.py``.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_zero.config import checks

PerGroup = float | Sequence[float]
WARMUPS = ("log", "linear")


class _Schedule(LRScheduler):
    """A schedule of DeepSpeed's. Step k of the optimizer, from 0, has the rates of ``last_epoch`` k."""

    def state_dict(self) -> dict[str, Any]:
        """How far it is; everything else is said by the configuration."""
        return {name: getattr(self, name) for name in ("last_epoch", "_step_count", "_last_lr")}


class LRRangeTest(_Schedule):
    """Rates that rise from ``lr_range_test_min_lr`` without end, to find the largest that trains.

    Args:
        optimizer: whose rates they are.
        lr_range_test_min_lr: the first rate, one for all groups or a list with one for each.
        lr_range_test_step_size: optimizer steps of one interval.
        lr_range_test_step_rate: how many times the first rate is added in each interval.
        lr_range_test_staircase: whether it is added at the end of an interval at once.

    Raises:
        ValueError: a value that cannot be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: PerGroup = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
    ) -> None:
        self.min_lrs = _each(optimizer, "lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size = checks.whole("lr_range_test_step_size", lr_range_test_step_size, 1)
        self.step_rate = checks.number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = checks.flag("lr_range_test_staircase", lr_range_test_staircase)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Rates of all groups at ``last_epoch``."""
        intervals = self.last_epoch // self.step_size if self.staircase else self.last_epoch / self.step_size
        return [lr * (1 + self.step_rate * intervals) for lr in self.min_lrs]


class OneCycle(_Schedule):
    """Rates that rise to ``cycle_max_lr`` and fall again once, then decay; the first of betas moves the other way.

    As in DeepSpeed, the second of betas becomes 0.99, the first step of all has ``cycle_min_mom`` although the cycle
    begins at ``cycle_max_mom``, and nothing happens to the momentum of an optimizer without betas.

    Args:
        optimizer: whose rates they are.
        cycle_min_lr: rate at both ends of the cycle, one for all groups or a list with one for each.
        cycle_max_lr: rate at its height.
        decay_lr_rate: by how much the divisor of ``cycle_min_lr`` grows per interval after the cycle.
        cycle_first_step_size: optimizer steps of the rise.
        cycle_second_step_size: those of the fall; None: as many.
        cycle_first_stair_count: stairs of the rise; 0: none.
        cycle_second_stair_count: those of the fall; None: as many.
        decay_step_size: optimizer steps of an interval after the cycle; 0: no decay.
        cycle_momentum: whether betas move.
        cycle_min_mom: first of betas at the height of the rate.
        cycle_max_mom: first of betas at both ends.
        decay_mom_rate: by how much the factor of ``cycle_max_mom`` grows per interval after the cycle.

    Raises:
        ValueError: a value that cannot be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: PerGroup,
        cycle_max_lr: PerGroup,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: PerGroup = 0.8,
        cycle_max_mom: PerGroup = 0.9,
        decay_mom_rate: float = 0.0,
    ) -> None:
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        stairs = cycle_first_stair_count if cycle_second_stair_count is None else cycle_second_stair_count
        self.first = checks.whole("cycle_first_step_size", cycle_first_step_size, 1)
        self.second = checks.whole("cycle_second_step_size", second, 0)
        self.stairs = (
            checks.whole("cycle_first_stair_count", cycle_first_stair_count, 0),
            checks.whole("cycle_second_stair_count", stairs, 0),
        )
        self.lrs = _both(optimizer, "cycle_min_lr", cycle_min_lr, "cycle_max_lr", cycle_max_lr)
        self.moms = _both(optimizer, "cycle_min_mom", cycle_min_mom, "cycle_max_mom", cycle_max_mom)
        self.decay_step_size = checks.whole("decay_step_size", decay_step_size, 0)
        self.decay_lr_rate = checks.number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = checks.number("decay_mom_rate", decay_mom_rate)
        self.moves_betas = checks.flag("cycle_momentum", cycle_momentum) and "betas" in optimizer.defaults
        if cycle_momentum and not self.moves_betas:
            rank_zero_warn(f"OneCycle leaves the momentum of {type(optimizer).__name__} alone: it has no betas.")
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Rates of all groups at ``last_epoch``."""
        if self._is_over():
            return [low / self._decay(self.decay_lr_rate) for low, _ in self.lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in self.lrs]

    def step(self, epoch: int | None = None) -> None:
        """Move on by one optimizer step."""
        super().step(epoch)
        if self.moves_betas:
            for group, momentum in zip(self.optimizer.param_groups, self._momenta(), strict=True):
                group["betas"] = (momentum, 0.99)

    def _momenta(self) -> list[float]:
        if self.last_epoch == 0:
            return [low for low, _ in self.moms]
        if self._is_over():
            return [high * self._decay(self.decay_mom_rate) for _, high in self.moms]
        height = self._height()
        return [high - (high - low) * height for low, high in self.moms]

    def _is_over(self) -> bool:
        return self.last_epoch > self.first + self.second

    def _decay(self, rate: float) -> float:
        if self.decay_step_size == 0:
            return 1.0
        return 1 + rate * ((self.last_epoch - self.first - self.second) / self.decay_step_size)

    def _height(self) -> float:
        """Of the cycle, from 0 to 1. Stairs are counted in whole steps, so that no rounding loses one."""
        total = self.first + self.second
        turn, done = self.first / total, self.last_epoch / total
        place = 1.0 + done - math.floor(1 + done)
        rises = place <= turn
        stairs = self.stairs[0 if rises else 1]
        if stairs == 0:
            return place / turn if rises else (place - 1) / (turn - 1)
        step = self.last_epoch % total
        return (step * stairs // self.first if step <= self.first else (total - step) * stairs // self.second) / stairs


class WarmupLR(_Schedule):
    """Rates that rise from ``warmup_min_lr`` to ``warmup_max_lr`` and stay there.

    As in DeepSpeed, the first two steps have ``warmup_min_lr``, and a warm-up takes 2 steps at least.

    Args:
        optimizer: whose rates they are.
        warmup_min_lr: the first rate, one for all groups or a list with one for each.
        warmup_max_lr: the last; None: the optimizer's own.
        warmup_num_steps: optimizer steps of the rise.
        warmup_type: ``log`` or ``linear``.

    Raises:
        ValueError: a value that cannot be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        highest = _own_lrs(optimizer) if warmup_max_lr is None else warmup_max_lr
        self.lrs = _both(optimizer, "warmup_min_lr", warmup_min_lr, "warmup_max_lr", highest)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Rates of all groups at ``last_epoch``."""
        part = self.warmup.part(self.last_epoch)
        part = self._after() if part is None else part
        return [low + (high - low) * part for low, high in self.lrs]

    def _after(self) -> float:
        """The part of the way from the lowest rate to the highest, after the warm-up."""
        return 1.0


class WarmupDecayLR(WarmupLR):
    """:class:`WarmupLR`, and then straight down to ``warmup_min_lr`` at ``total_num_steps``.

    Args:
        optimizer: whose rates they are.
        total_num_steps: optimizer steps of the whole run.
        warmup_min_lr: the first rate, one for all groups or a list with one for each.
        warmup_max_lr: the highest.
        warmup_num_steps: optimizer steps of the rise.
        warmup_type: ``log`` or ``linear``.

    Raises:
        ValueError: a value that cannot be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: PerGroup = 0.0,
        warmup_max_lr: PerGroup = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
    ) -> None:
        self.total = _total(total_num_steps, warmup_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type)

    def _after(self) -> float:
        left = self.total - (self.last_epoch - 1)
        return max(0.0, left / max(1, self.total - self.warmup.steps))


class WarmupCosineLR(_Schedule):
    """The optimizer's own rates times a factor that rises to 1 and falls by a cosine until ``total_num_steps``.

    As in DeepSpeed, the very first step has the rate 0, and the next ``warmup_min_ratio``.

    Args:
        optimizer: whose rates they are.
        total_num_steps: optimizer steps of the whole run.
        warmup_min_ratio: factor at the beginning of the rise.
        warmup_num_steps: optimizer steps of the rise.
        cos_min_ratio: factor at the end.
        warmup_type: ``log`` or ``linear``.

    Raises:
        ValueError: a value that cannot be.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
    ) -> None:
        self.total = _total(total_num_steps, warmup_num_steps)
        self.warmup = _Warmup(warmup_num_steps, warmup_type)
        self.lowest = checks.number("warmup_min_ratio", warmup_min_ratio)
        self.last = checks.number("cos_min_ratio", cos_min_ratio)
        self.own_lrs = _own_lrs(optimizer)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Rates of all groups at ``last_epoch``."""
        ratio = self._ratio() if self.last_epoch else 0.0
        return [lr * ratio for lr in self.own_lrs]

    def _ratio(self) -> float:
        part = self.warmup.part(self.last_epoch)
        if part is not None:
            return self.lowest + part * (1.0 - self.lowest)
        done = min(1.0, (self.last_epoch - self.warmup.steps) / max(1, self.total - self.warmup.steps))
        return max(0.0, self.last + (1.0 - self.last) * ((1 + math.cos(math.pi * done)) / 2))


class _Warmup:
    """How a rate rises, from 0 to 1."""

    def __init__(self, steps: int, kind: str) -> None:
        if kind not in WARMUPS:
            raise ValueError(f"warmup_type={kind!r} is unknown.{checks.nearest(str(kind), WARMUPS)}")
        self.steps = max(2, checks.whole("warmup_num_steps", steps, 1))
        self._kind, self._scale = kind, 1.0 / math.log(self.steps)

    def part(self, step: int) -> float | None:
        """Of the way up, before the optimizer's step ``step``, from 0; None: it is over."""
        if step > self.steps:
            return None
        if step == 0:
            return 0.0
        return self._scale * math.log(step) if self._kind == "log" else (step - 1) / self.steps


def _total(steps: Any, warmup: Any) -> int:
    total = checks.whole("total_num_steps", steps, 1)
    if total < max(2, checks.whole("warmup_num_steps", warmup, 1)):
        rank_zero_warn(f"total_num_steps={total} is less than warmup_num_steps={warmup}: the run ends in its warm-up.")
    return total


def _own_lrs(optimizer: Optimizer) -> list[Any]:
    rates = [group["lr"] for group in optimizer.param_groups]
    return [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]


def _each(optimizer: Optimizer, name: str, value: Any) -> list[Any]:
    """One value for each group."""
    count = len(optimizer.param_groups)
    if not isinstance(value, Sequence) or isinstance(value, str):
        value = [value] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values, and the optimizer {count} parameter groups.")
    return [one if isinstance(one, torch.Tensor) else checks.number(name, one) for one in value]


def _both(optimizer: Optimizer, low: str, least: Any, high: str, most: Any) -> list[tuple[Any, Any]]:
    """The lowest and the highest value for each group."""
    return list(zip(_each(optimizer, low, least), _each(optimizer, high, most), strict=True))
