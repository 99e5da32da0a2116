"""The optimizer Lion, which torch does not have."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Steps by the sign of a momentum (Chen et al. 2023, arXiv 2302.06675, algorithm 2); element-wise.

    Where the momentum is 0 the sign is 0, as in the paper. State: ``exp_avg`` for each parameter, of its shape and
    dtype. The defaults are DeepSpeed's; the paper takes betas (0.9, 0.99).

    Args:
        params: parameters, or groups of them.
        lr: length of each element's step.
        betas: how much momentum counts in this step's sign, and how much of it is kept.
        weight_decay: decoupled, so each step multiplies a weight with ``1 - lr * weight_decay``.

    Raises:
        ValueError: a value is out of its range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        if lr < 0 or weight_decay < 0:
            raise ValueError(f"lr={lr!r} and weight_decay={weight_decay!r} must be 0 or more.")
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas!r} must be two numbers from 0 to below 1.")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change all parameters that have a gradient; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["exp_avg"] = torch.zeros_like(p)
                    _step(p, p.grad, state["exp_avg"], group["lr"], group["betas"], group["weight_decay"])
        return loss


def _step(
    p: torch.Tensor, grad: torch.Tensor, mean: torch.Tensor, lr: float, betas: tuple[float, float], decay: float
) -> None:
    sign = mean.mul(betas[0]).add_(grad, alpha=1 - betas[0]).sign_()
    p.mul_(1 - lr * decay).add_(sign, alpha=-lr)
    mean.mul_(betas[1]).add_(grad, alpha=1 - betas[1])
