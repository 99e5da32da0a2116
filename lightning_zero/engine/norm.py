"""Gradient norms, clipping and unscaling over shards.

The norm is an fp64 sum over all ranks, rounded to fp32 once: the same value for every way of sharding, where norms of
fp32 norms are not. The scaling is ``torch.nn.utils.clip_grad_norm_``'s.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.comm import Communicator

CHUNK = 256 * 1024
"""Elements that are converted to fp64 at a time on CPU."""


class GradientNorm(NamedTuple):
    """The global norm of an optimizer's gradients, 0-dim fp32 each."""

    before: Tensor
    after: Tensor


@torch.no_grad()
def sum_of_powers(tensors: Iterable[Tensor], power: float) -> Tensor:
    """0-dim fp64 sum of ``|x| ** power`` over tensors (the largest ``|x|`` for inf), in a fixed order."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for tensor in tensors:
        real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        size = CHUNK if real.device.type == "cpu" else 64 * CHUNK
        for start in range(0, real.numel(), size):
            wide = real[start : start + size].double()
            total = total.to(wide.device)
            if power == math.inf:
                total = torch.maximum(total, wide.abs().max())
            else:
                total = total + (wide.dot(wide) if power == 2 else wide.abs().pow(power).sum())
    return total


@torch.no_grad()
def total_norm(
    shared: Iterable[Tensor], private: Iterable[Tensor], comm: Communicator, norm_type: float = 2.0
) -> Tensor:
    """0-dim fp32 norm: ``shared`` are this rank's parts of sharded gradients, ``private`` whole ones that all ranks
    have. Collective.
    """
    largest = norm_type == math.inf
    parts = sum_of_powers(shared, norm_type).cpu().reshape(1)
    comm.all_reduce(parts, "max" if largest else "sum", "gradient norm").wait()
    whole = sum_of_powers(private, norm_type).cpu()
    if largest:
        return torch.maximum(parts[0], whole).float()
    total = parts[0] + whole
    return (total.sqrt() if norm_type == 2 else total.pow(1 / norm_type)).float()


@torch.no_grad()
def scale_(tensors: Iterable[Tensor], norm: Tensor, max_norm: float) -> Tensor:
    """Multiply by ``max_norm / (norm + 1e-6)``, at most 1, in place; returns the norm that is left.

    A factor of 1 touches nothing: ``tensors`` are not asked for.
    """
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    if factor != 1:
        for tensor in tensors:
            tensor.mul_(factor.to(tensor.device))
    return norm * factor


@torch.no_grad()
def unscale_(batches: Iterable[Sequence[Tensor]], inverse: float) -> bool:
    """Multiply by ``inverse`` in place, batch by batch; returns whether an element is infinite or NaN."""
    flags: dict[torch.device, Tensor] = {}
    for batch in batches:
        groups: defaultdict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
        for tensor in batch:
            if tensor.numel():
                groups[tensor.device, tensor.dtype].append(tensor)
        for (device, _), group in groups.items():
            flag = flags.setdefault(device, torch.zeros(1, device=device))
            torch._amp_foreach_non_finite_check_and_unscale_(group, flag, torch.full((1,), inverse, device=device))
    return any(bool(flag.item()) for flag in flags.values())
