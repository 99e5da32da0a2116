"""Which optimizers may run on slices of parameters.

An optimizer that treats every element by itself gives the same bits on slices. Others (norms of a matrix,
orthogonalisation, line searches) do not, and are refused.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

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
    with _without_gradients(optimizer):
        for group in optimizer.param_groups:
            if reason is None and group["params"]:
                reason = _try(optimizer, group)
    if reason is not None:
        raise ValueError(
            f"{kind.__name__} cannot run on sharded parameters: {reason}. Use an element-wise optimizer "
            "(SGD, Adam, AdamW, Adagrad, RMSprop, NAdam, Lion, ...), or strategy='ddp'."
        )


@contextmanager
def _without_gradients(optimizer: Optimizer) -> Iterator[None]:
    """Whatever steps inside, be it an optimizer that nobody knows of, finds nothing to do on the user's parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    for param in params:
        param.grad = None
    try:
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad


def _try(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)
    device = group["params"][0].device
    whole, *grads = (torch.randn(16, 64, generator=generator, device="cpu").to(device) for _ in range(4))
    # half of the rows, so that a norm or a mean over the tensor shows
    cut = 8 * 64
    before, flat = whole.clone(), whole.clone().reshape(-1)
    tiles = [flat[:cut], flat[cut:]]
    try:
        _run(optimizer, group, [whole], [[grad] for grad in grads])
        _run(optimizer, group, tiles, [[grad.reshape(-1)[:cut], grad.reshape(-1)[cut:]] for grad in grads])
    except Exception as error:  # whatever a foreign optimizer raises is the reason
        return f"a trial step on slices of a tensor failed with {type(error).__name__}: {error}"
    if torch.equal(whole, before):
        return "a trial step changes nothing, so nothing is known of what it does on slices"
    if not torch.equal(whole.reshape(-1), flat):
        return "a trial step gives other numbers on slices of a tensor than on the whole: it is not element-wise"
    return None


def state_bytes(optimizer: Optimizer, group: dict[str, Any], dtype: torch.dtype) -> int:
    """Bytes of state that the optimizer will keep for each element of a parameter of ``dtype`` on the host."""
    param = torch.zeros(64, dtype=dtype, device="cpu")
    state = _run(optimizer, group, [param], [[param]])[param]
    return sum(value.dtype.itemsize for value in state.values() if is_per_element(value, param.numel()))


def is_per_element(value: Any, numel: int) -> bool:
    """Whether an entry of a state has a number for each element of a 1-D parameter."""
    return isinstance(value, Tensor) and value.shape == (numel,)


def _run(
    optimizer: Optimizer, group: dict[str, Any], params: list[Tensor], grads: list[list[Tensor]]
) -> Mapping[Tensor, dict[str, Any]]:
    """Steps of a copy of the optimizer (its options, none of its state) on ``params``; returns the state."""
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update({key: _shallow(value) for key, value in optimizer.__dict__.items() if key != "step"})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    twin.param_groups = [{**group, "params": params}]
    twin.state = defaultdict(dict)
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        twin.step()
    state: Mapping[Tensor, dict[str, Any]] = twin.state
    return state


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list | set) else value
