"""Dry runs of a user's LightningModule."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.optim import Optimizer

from lightning_zero.plan.dry_run import Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64}


def named(place: str) -> Callable[[], LightningModule]:
    """What makes the module that ``package.module:Name`` names: a class or function that needs no arguments.

    Raises:
        ValueError: there is none.
    """
    path, colon, name = place.partition(":")
    if not colon or not name:
        raise ValueError(f"{place!r} names no module: write package.module:Class, or a function's name for the class.")
    try:
        make = getattr(importlib.import_module(path), name)
    except ImportError as error:
        raise ValueError(
            f"{path!r} cannot be imported: {error}. Is its folder the present one, or installed?"
        ) from error
    except AttributeError as error:
        raise ValueError(f"{path!r} has no {name!r}.") from error
    if not callable(make):
        raise ValueError(f"{place!r} is a {type(make).__name__}, neither a class nor a function.")
    return make  # type: ignore[no-any-return]


def batch(text: str, precision: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of ``8x3x224x224:fp32,8``: a tensor each; without a dtype, tokens (int64).

    Raises:
        ValueError: that is no shape or no dtype.
    """
    found = []
    for part in text.split(","):
        shape, _, dtype = part.strip().partition(":")
        try:
            found.append((tuple(int(size) for size in shape.split("x")), DTYPES[dtype or "int64"]))
        except (ValueError, KeyError):
            raise ValueError(
                f"{part!r} is no tensor of a batch: write sizes and a dtype ({', '.join(DTYPES)}), 8x3x224x224:fp32."
            ) from None
    half = precision == "bf16-true"
    return [(shape, torch.bfloat16 if half and dtype.is_floating_point else dtype) for shape, dtype in found]


def workload(make: Callable[[], LightningModule], shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Workload:
    """A module with its optimizer and its ``training_step`` on a batch of such tensors.

    Raises:
        ValueError: the module cannot be made without memory, or has several optimizers.
    """
    try:
        module = make()
        module.configure_model()
        tensors = [torch.zeros(shape, dtype=dtype) for shape, dtype in shapes]
    except Exception as error:  # whatever a constructor raises
        raise ValueError(
            f"The module could not be made without memory and data: {type(error).__name__}: {error}. A dry run calls"
            " its constructor and configure_model with tensors that hold nothing: give a function that makes it without"
            " files and without looking at values."
        ) from error

    def loss() -> Tensor:
        out = module.training_step(tensors[0] if len(tensors) == 1 else tensors, 0)
        found = out["loss"] if isinstance(out, Mapping) else out
        if not isinstance(found, Tensor):
            raise ValueError(f"training_step has returned {type(found).__name__}, and not a loss.")
        return found

    return Workload(module, lambda: _optimizer(module.configure_optimizers()), loss)


def _optimizer(given: Any) -> Optimizer:
    """The one optimizer in what ``configure_optimizers`` may return."""
    found = given[0] if isinstance(given, tuple) and given and isinstance(given[0], list) else given
    found = [found] if isinstance(found, Optimizer | Mapping) else list(found or [])
    optimizers = [entry["optimizer"] if isinstance(entry, Mapping) else entry for entry in found]
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        raise ValueError(f"A dry run takes one optimizer, and configure_optimizers returns {len(optimizers)}.")
    return optimizers[0]
