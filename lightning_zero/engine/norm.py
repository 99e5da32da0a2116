"""Gradient norms and clipping over shards.

The norm is an fp64 sum of squares over all ranks, rounded to fp32 once: the same value for every way of sharding, where
norms of fp32 norms are not. The scaling is ``torch.nn.utils.clip_grad_norm_``'s.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_zero.engine.comm import Communicator

CHUNK = 256 * 1024
"""Elements that are converted to fp64 at a time."""


@torch.no_grad()
def sum_of_squares(tensors: Iterable[Tensor]) -> Tensor:
    """0-dim fp64 sum of |x|^2 over tensors, in a fixed order."""
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for tensor in tensors:
        real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        for start in range(0, real.numel(), CHUNK):
            wide = real[start : start + CHUNK].double()
            total = total.to(wide.device) + wide.dot(wide)
    return total


@torch.no_grad()
def total_norm(shared: Iterable[Tensor], private: Iterable[Tensor], comm: Communicator) -> Tensor:
    """0-dim fp32 2-norm: ``shared`` are this rank's parts of sharded gradients, ``private`` whole ones that all ranks
    have.
    """
    squares = sum_of_squares(shared).cpu().reshape(1)
    comm.all_reduce(squares, "sum", "gradient norm").wait()
    return (squares[0] + sum_of_squares(private).cpu()).sqrt().float()


@torch.no_grad()
def scale_(tensors: Iterable[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply by ``max_norm / (norm + 1e-6)``, at most 1, in place."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for tensor in tensors:
        tensor.mul_(factor.to(tensor.device))
