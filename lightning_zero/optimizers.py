"""stub"""

from typing import Any


def make_optimizer(chosen: Any, module: Any) -> Any:
    """stub"""
    import torch

    return getattr(torch.optim, chosen["type"])(module.parameters(), **chosen["params"])
