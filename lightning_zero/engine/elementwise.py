"""Which optimizers may run on slices of parameters.

An optimizer that treats every element by itself gives the same bits on slices. Others (norms of a matrix,
orthogonalisation, line searches) do not, and are refused.
"""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lightning_zero.engine.trials import NewParts, PassingParts, numbers, run, same_with, undisturbed

STOCK = {
    cls
    for name in "SGD Adam AdamW Adagrad Adadelta Adamax NAdam RAdam RMSprop Rprop ASGD".split()
    if (cls := getattr(torch.optim, name, None)) is not None
}
"""torch's own element-wise optimizers. They keep their state in ``state[p]`` and never write to their groups."""

SCALARS = ("step", "mu_product", "eta", "mu")
"""Entries of torch's optimizers that are one number a parameter, also where the parameter is one number itself."""

REASONS = {
    "LBFGS": "its line search needs inner products of whole gradients and calls the closure several times a step",
    "SparseAdam": "it needs sparse gradients, and reduced gradients are dense",
    "Muon": "it orthogonalises whole matrices",
    "Adafactor": "it factors whole matrices",
}


def is_stock(optimizer: Optimizer) -> bool:
    """Whether the optimizer is exactly one of torch's element-wise ones."""
    return type(optimizer) in STOCK


def check_elementwise(optimizer: Optimizer) -> None:
    """Refuse an optimizer that would compute something else on slices than on the whole.

    Unknown classes are tried: three steps on a small matrix against the same on its tiles.

    Raises:
        ValueError: names the class and the reason.
    """
    kind = type(optimizer)
    if is_stock(optimizer):
        return
    inner = next((value for value in vars(optimizer).values() if isinstance(value, Optimizer)), None)
    known = (base.__name__ for base in kind.__mro__ if base.__module__.startswith("torch.optim"))
    reason = next((REASONS[name] for name in known if name in REASONS), None)
    if inner is not None:
        reason = f"it wraps another optimizer ({type(inner).__name__}), which would step on whole parameters"
    with undisturbed(optimizer):
        for group in optimizer.param_groups:
            if reason is None and group["params"]:
                reason = _try(optimizer, group)
    if reason is not None:
        raise ValueError(
            f"{kind.__name__} cannot run on sharded parameters: {reason}. Use an element-wise optimizer "
            "(SGD, Adam, AdamW, Adagrad, RMSprop, NAdam, Lion, ...), or strategy='ddp'."
        )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether somebody's hooks see its steps."""
    of_all = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    return bool(of_all or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def _try(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    whole, grads, cut = numbers(group)
    before, flat = whole.clone(), whole.clone().reshape(-1)
    tiles = [flat[:cut], flat[cut:]]
    try:
        run(optimizer, group, [whole], [[grad] for grad in grads])
        run(optimizer, group, tiles, [[grad.reshape(-1)[:cut], grad.reshape(-1)[cut:]] for grad in grads])
    except Exception as error:  # whatever a foreign optimizer raises is the reason
        return f"a trial step on slices of a tensor failed with {type(error).__name__}: {error}"
    if torch.equal(whole, before):
        return "a trial step changes nothing, so nothing is known of what it does on slices"
    if not torch.equal(whole.reshape(-1), flat):
        return "a trial step gives other numbers on slices of a tensor than on the whole: it is not element-wise"
    return None


def takes_one_by_one(optimizer: Optimizer) -> bool:
    """Whether a step may be offered its groups in parts, each of which is gone when it asks for the next: nothing is
    written to groups, no part is looked at again, and a step counts as one.

    Unknown classes are tried, as in :func:`check_elementwise`.
    """
    return is_stock(optimizer) or same_with(PassingParts, optimizer)


def check_state_moves(optimizer: Optimizer) -> None:
    """Refuse an optimizer whose state cannot rest elsewhere between two steps.

    Unknown classes are tried: in each step the parameters are other tensors, and ``optimizer.state`` has what belongs
    to them.

    Raises:
        ValueError: names the class and the reason.
    """
    if not is_stock(optimizer) and not same_with(NewParts, optimizer):
        raise ValueError(
            f"The state of {type(optimizer).__name__} cannot be offloaded: it keeps something for a parameter "
            "elsewhere than in optimizer.state. Keep it there, or use offload_optimizer='none'."
        )


def state_bytes(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> int:
    """Bytes of state that the optimizer will keep for each element of a parameter of ``dtype`` on the host."""
    param = torch.zeros(64, dtype=dtype, device="cpu")
    with undisturbed(optimizer):
        state = run(optimizer, group, [param], [[param]])[param]
    return sum(value.dtype.itemsize for value in state.values() if is_per_element(value, param.numel()))


def is_per_element(value: Any, numel: int) -> bool:
    """Whether an entry of a state has a number for each element of a 1-D parameter."""
    return isinstance(value, Tensor) and value.shape == (numel,)
