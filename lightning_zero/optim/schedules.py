"""Learning rate schedulers by their names in DeepSpeed's JSON or in torch, for ``ZeroStrategy(scheduler=)``."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from lightning_zero.config.checks import nearest
from lightning_zero.optim.auto import is_auto, number
from lightning_zero.optim.deepspeed_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

_FUNCTIONS = "it needs functions"
_OTHERS = "it is made of other schedulers"
REFUSED = {
    "LambdaLR": _FUNCTIONS,
    "MultiplicativeLR": _FUNCTIONS,
    "SequentialLR": _OTHERS,
    "ChainedScheduler": _OTHERS,
    "ReduceLROnPlateau": "it needs a metric, and an optimizer step has none",
}
"""Schedulers of torch that numbers do not make, and why."""

CLASSES: dict[str, type[LRScheduler]] = {
    **{cls.__name__: cls for cls in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)},
    **{name: getattr(lr_scheduler, name) for name in lr_scheduler.__all__ if name not in (*REFUSED, "LRScheduler")},
}

BEGINNINGS = ("last_epoch", "last_batch_iteration")
"""Where a schedule begins: DeepSpeed's and torch's params, which may say nothing but the beginning."""

AUTO = ("total_num_steps", "warmup_num_steps", "warmup_min_lr", "warmup_max_lr")
WORDS = ("mode", "anneal_strategy", "scale_mode", "warmup_type")
PER_GROUP = (
    *("warmup_min_lr", "warmup_max_lr", "lr_range_test_min_lr"),
    *("cycle_min_lr", "cycle_max_lr", "cycle_min_mom", "cycle_max_mom"),
    *("base_lr", "max_lr", "base_momentum", "max_momentum", "min_lr"),
)
"""Params that may be a list with a value for each group."""


def check_scheduler(chosen: Mapping[str, Any] | Callable[..., Any]) -> None:
    """Refuse what :func:`make_scheduler` would refuse of any optimizer.

    Raises:
        TypeError: an unknown param, one that is missing, or a value of a wrong type.
        ValueError: an unknown or refused scheduler, or a value that cannot be.
    """
    if not callable(chosen):
        cls, params = _parsed(chosen)
        lists = (value for key, value in params.items() if key in PER_GROUP and not _is_single(value))
        groups = [
            {"params": [nn.Parameter(torch.zeros(1, device="cpu"))]} for _ in range(max(map(len, lists), default=1))
        ]
        optimizer = torch.optim.AdamW(groups)
        _build(cls, _filled(params, optimizer, lambda: 2**31, lambda name: 1), optimizer)


def make_scheduler(
    chosen: Mapping[str, Any] | Callable[..., Any],
    optimizer: Optimizer,
    total_steps: Callable[[], int],
    module: nn.Module,
) -> LRScheduler:
    """A scheduler of the optimizer that is to step after each of the optimizer's steps.

    Names are those of DeepSpeed and of ``torch.optim.lr_scheduler``, params and defaults as there. "auto", as in
    Hugging Face's: ``total_num_steps`` is ``total_steps()``, ``warmup_min_lr`` 0, ``warmup_max_lr`` the optimizer's;
    ``warmup_num_steps`` what ``module.hparams`` or the module has as ``warmup_steps``, or as ``warmup_ratio`` of all.

    Args:
        chosen: ``{"type": name, "params": {...}}``, or a function that makes a scheduler of the optimizer.
        optimizer: whose learning rates it sets, at once for the first step.
        total_steps: tells the optimizer steps of the whole run; called only for "auto".
        module: the one that is trained.

    Raises:
        TypeError: an unknown param, one that is missing, a value of a wrong type, or a function that makes something
            else.
        ValueError: an unknown or refused scheduler, a value that cannot be, or an "auto" that is not resolved.
    """
    if callable(chosen):
        made = chosen(optimizer)
        if not isinstance(made, LRScheduler):
            raise TypeError(f"scheduler={chosen!r} made a {type(made).__name__}, which is no LRScheduler of torch.")
        if isinstance(made, lr_scheduler.ReduceLROnPlateau):
            raise ValueError(_refusal("ReduceLROnPlateau"))
        return made
    cls, params = _parsed(chosen)
    return _build(cls, _filled(params, optimizer, total_steps, lambda name: number(module, name)), optimizer)


def _parsed(chosen: Mapping[str, Any]) -> tuple[type[LRScheduler], dict[str, Any]]:
    name, given = chosen["type"], chosen["params"]
    if name in REFUSED:
        raise ValueError(_refusal(name))
    if name not in CLASSES:
        raise ValueError(f"scheduler.type={name!r} is no scheduler.{nearest(name, list(CLASSES))}")
    cls = CLASSES[name]
    known = [key for key in inspect.signature(cls.__init__).parameters if key not in ("self", "optimizer", *BEGINNINGS)]
    for key, value in given.items():
        if key in BEGINNINGS and value != -1:
            raise ValueError(f"scheduler.params.{key}={value!r}: a schedule begins at -1, and goes on by a checkpoint.")
        if key not in known and key not in BEGINNINGS:
            raise TypeError(f"scheduler.params.{key}: {name} has no such setting.{nearest(key, known)}")
        if isinstance(value, str) and key not in WORDS and not (is_auto(value) and key in AUTO):
            raise ValueError(f"scheduler.params.{key}={value!r} is text and must be a number.")
    return cls, {key: _whole(key, value) for key, value in given.items() if key in known}


def _whole(key: str, value: Any) -> Any:
    """JSON's 1e5 is a whole number where steps are counted."""
    counts = key.endswith(("_steps", "_size", "_count"))
    return int(value) if counts and isinstance(value, float) and value.is_integer() else value


def _filled(
    params: dict[str, Any],
    optimizer: Optimizer,
    total_steps: Callable[[], int],
    said: Callable[[str], float | None],
) -> dict[str, Any]:
    """The params with a value in each place of "auto"; ``said`` tells what the module says."""
    params = dict(params)
    for key in [key for key, value in params.items() if is_auto(value)]:
        if key == "total_num_steps":
            params[key] = _total(key, total_steps)
        elif key == "warmup_num_steps":
            params[key] = _warmup(total_steps, said)
        else:
            params[key] = 0.0 if key == "warmup_min_lr" else [group["lr"] for group in optimizer.param_groups]
    return params


def _total(key: str, total_steps: Callable[[], int]) -> int:
    total = total_steps()
    if not 0 < total < float("inf"):
        raise ValueError(
            f"scheduler.params.{key}='auto', and the run has no known end ({total} steps): give a number, or "
            "Trainer(max_steps=) or Trainer(max_epochs=)."
        )
    return int(total)


def _warmup(total_steps: Callable[[], int], said: Callable[[str], float | None]) -> int:
    """As ``TrainingArguments.get_warmup_steps``; DeepSpeed wants 1 at least."""
    steps, ratio = said("warmup_steps"), said("warmup_ratio")
    if steps is None and ratio is None:
        raise ValueError(
            "scheduler.params.warmup_num_steps='auto', and the module has neither warmup_steps nor warmup_ratio, in "
            "its hparams or as an attribute. Give a number, 1 or more."
        )
    if not steps and ratio:
        steps = math.ceil(ratio * _total("warmup_num_steps", total_steps))
    return max(1, int(steps or 0))


def _build(cls: type[LRScheduler], params: dict[str, Any], optimizer: Optimizer) -> LRScheduler:
    try:
        return cls(optimizer, **params)
    except (TypeError, ValueError) as error:
        raise type(error)(f"scheduler.params of {cls.__name__} are {params}: {error}") from error


def _refusal(name: str) -> str:
    return f"scheduler.type={name!r} cannot be made here: {REFUSED[name]}. Return it from configure_optimizers."


def _is_single(value: Any) -> bool:
    return not isinstance(value, Sequence) or isinstance(value, str)
