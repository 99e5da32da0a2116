"""Which optimizers may run on slices of parameters.

An optimizer that treats every element by itself gives the same bits on slices. Others (norms of a matrix,
orthogonalisation, line searches) do not, and are refused.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
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


def _numbers(group: dict[str, Any]) -> tuple[Tensor, list[Tensor], int]:
    """A matrix, gradients of three steps, and where to cut them: a norm or a mean of half of the rows is another."""
    generator = torch.Generator("cpu").manual_seed(0)
    device = group["params"][0].device
    whole, *grads = (torch.randn(16, 64, generator=generator, device="cpu").to(device) for _ in range(4))
    return whole, grads, 8 * 64


def _try(optimizer: Optimizer, group: dict[str, Any]) -> str | None:
    whole, grads, cut = _numbers(group)
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


def takes_one_by_one(optimizer: Optimizer) -> bool:
    """Whether a step may be offered its groups in parts, each of which is gone when it asks for the next: nothing is
    written to groups, no part is looked at again, and a step counts as one.

    Unknown classes are tried, as in :func:`check_elementwise`.
    """
    if is_stock(optimizer):
        return True
    with _without_gradients(optimizer):
        return all(_takes_one_by_one(optimizer, group) for group in optimizer.param_groups if group["params"])


def _takes_one_by_one(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    whole, grads, cut = _numbers(group)
    twin = _twin(optimizer, group)
    parts = twin.param_groups = _PassingParts(group, torch.split(whole.clone().reshape(-1), cut), twin.state)
    try:
        for grad in grads:
            parts.grads = torch.split(grad.reshape(-1), cut)
            twin.step()
    except Exception:  # whatever it misses in them
        return False
    _run(optimizer, group, [whole], [[grad] for grad in grads])
    return not parts.written and torch.equal(whole.reshape(-1), torch.cat(parts.values))


class _PassingParts:
    """Groups with one part of a tensor each. Once the next is asked for, part, gradient and state are NaN."""

    def __init__(self, group: dict[str, Any], values: Sequence[Tensor], state: Any) -> None:
        self.values = list(values)
        self.grads: Sequence[Tensor] = ()
        self.written = False
        self._group, self._state = group, state
        self._kept: list[dict[str, Any]] = [{} for _ in values]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, grad in enumerate(self.grads):
            part = self.values[number].clone()
            part.grad = grad.clone()
            if self._kept[number]:
                self._state[part] = self._kept[number]
            offered = {**self._group, "params": [part]}
            yield offered
            self.written |= any(offered.get(key) is not value for key, value in self._group.items() if key != "params")
            entries = self._state.pop(part, {})
            self._kept[number] = {key: _copied(value) for key, value in entries.items()}
            self.values[number] = part.clone()
            for tensor in (part, part.grad, *entries.values()):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    tensor.fill_(torch.nan)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


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
    """Steps of a copy of the optimizer on ``params``; returns the state."""
    twin = _twin(optimizer, {**group, "params": params})
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        twin.step()
    state: Mapping[Tensor, dict[str, Any]] = twin.state
    return state


def _twin(optimizer: Optimizer, group: dict[str, Any]) -> Any:
    """A copy of the optimizer: its options, none of its state, and one group."""
    twin: Any = object.__new__(type(optimizer))
    twin.__dict__.update({key: _shallow(value) for key, value in optimizer.__dict__.items() if key != "step"})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    twin.param_groups = [group]
    twin.state = defaultdict(dict)
    return twin


def _shallow(value: Any) -> Any:
    return value.copy() if isinstance(value, dict | list | set) else value
