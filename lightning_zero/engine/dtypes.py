"""The dtypes that a parameter goes through: in the forward, in the optimizer, on the wire."""

from dataclasses import dataclass

import torch
from torch import nn

from lightning_zero.config import ZeroConfig

NAMES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of parameters that live together."""

    user: torch.dtype
    """What the user's module holds, before and after the run and in checkpoints."""
    compute: torch.dtype
    """What forward and backward see."""
    master: torch.dtype
    """What the optimizer updates, and its state."""
    wire: torch.dtype
    """What a gradient is sent in."""
    sum: torch.dtype
    """What gradients are summed and kept in."""


def dtypes_of(param: nn.Parameter, compute: torch.dtype, config: ZeroConfig, trainable: bool) -> Dtypes:
    """The dtypes of one parameter.

    Args:
        param: as the user made it.
        compute: what forward and backward want.
        config: ``master_dtype`` and ``gradient_dtype``; they are about real floating-point parameters.
        trainable: a frozen parameter needs no more precision than it has.
    """
    user = param.dtype
    if not user.is_floating_point:
        return Dtypes(user, compute, user, compute, compute)
    master, gradient = NAMES.get(config.master_dtype or ""), NAMES.get(config.gradient_dtype or "")
    if master is None or not trainable:
        master = torch.float32 if user in HALF and trainable else user
    wide = torch.float32 if compute in HALF else compute
    return Dtypes(user, compute, master, wire=gradient or compute, sum=gradient or wide)
