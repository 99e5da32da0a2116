"""Trial steps of optimizers that nobody knows of, on a few numbers of their own: the user's optimizer, parameters and
hooks see nothing of them.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


@contextmanager
def undisturbed(optimizer: Optimizer) -> Iterator[None]:
    """Whatever steps inside, be it an optimizer that nobody knows of, finds nothing to do on the user's parameters, and
    nobody's hooks on all optimizers see it.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    grads = [param.grad for param in params]
    hooks: Any = _global_optimizer_pre_hooks, _global_optimizer_post_hooks
    seen = [dict(of_all) for of_all in hooks]
    for param in params:
        param.grad = None
    for of_all in hooks:
        of_all.clear()
    try:
        yield
    finally:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        for of_all, before in zip(hooks, seen, strict=True):
            of_all.update(before)


def numbers(group: dict[str, Any]) -> tuple[Tensor, list[Tensor], int]:
    """A matrix, gradients of three steps, and where to cut them: a norm or a mean of half of the rows is another."""
    generator = torch.Generator("cpu").manual_seed(0)
    device = group["params"][0].device
    whole, *grads = (torch.randn(16, 64, generator=generator, device="cpu").to(device) for _ in range(4))
    return whole, grads, 8 * 64


def run(
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
    ours = ("step", "param_groups", "state")
    twin.__dict__.update({key: _copied(value) for key, value in optimizer.__dict__.items() if key not in ours})
    for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        twin.__dict__[hooks] = OrderedDict()
    twin.param_groups = [{**_options(group), "params": group["params"]}]
    twin.state = defaultdict(dict)
    return twin


def same_with(kind: "type[_Parts]", optimizer: Optimizer) -> bool:
    """Whether three steps give the same numbers where parameters are offered as such parts."""
    with undisturbed(optimizer):
        return all(_same_with_parts(kind, optimizer, group) for group in optimizer.param_groups if group["params"])


def _same_with_parts(kind: "type[_Parts]", optimizer: Optimizer, group: dict[str, Any]) -> bool:
    whole, grads, cut = numbers(group)
    twin = _twin(optimizer, group)
    parts = kind(group, torch.split(whole.clone().reshape(-1), cut), twin.state)
    try:
        for grad in grads:
            twin.param_groups = parts.groups(torch.split(grad.reshape(-1), cut))
            twin.step()
            parts.after_step()
    except Exception:  # whatever it misses in them
        return False
    run(optimizer, group, [whole], [[grad] for grad in grads])
    return not parts.written and torch.equal(whole.reshape(-1), torch.cat(parts.values))


class _Parts(ABC):
    """Parts of a tensor that are new tensors in each step; those of the step before, with their state, are NaN."""

    def __init__(self, group: dict[str, Any], values: Sequence[Tensor], state: Any) -> None:
        self.values = list(values)
        self.written = False
        self._group, self._state = _options(group), state
        self._kept: list[dict[str, Any]] = [{} for _ in values]

    @abstractmethod
    def groups(self, grads: Sequence[Tensor]) -> Any:
        """What the optimizer's ``param_groups`` are in a step."""

    @abstractmethod
    def after_step(self) -> None:
        """The step is over."""

    def _bring(self, number: int, grad: Tensor) -> Tensor:
        part = self.values[number].clone()
        part.grad = grad.clone()
        if self._kept[number]:
            self._state[part] = self._kept[number]
        return part

    def _take(self, number: int, part: Tensor) -> None:
        entries = self._state.pop(part, {})
        self._kept[number] = {key: _copied(value) for key, value in entries.items()}
        self.values[number] = part.clone()
        for tensor in (part, part.grad, *entries.values()):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                tensor.fill_(torch.nan)


class NewParts(_Parts):
    """All of them in one group, at once."""

    def groups(self, grads: Sequence[Tensor]) -> Any:
        """A list with the one group."""
        self._parts = [self._bring(number, grad) for number, grad in enumerate(grads)]
        self._group["params"] = self._parts
        return [self._group]

    def after_step(self) -> None:
        """They go."""
        for number, part in enumerate(self._parts):
            self._take(number, part)


class PassingParts(_Parts):
    """Groups with one part each, made one by one: when the next is asked for, the part has gone."""

    def groups(self, grads: Sequence[Tensor]) -> Any:
        """What can be iterated over, and nothing else."""
        self._grads = grads
        return self

    def after_step(self) -> None:
        """They have gone."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number, grad in enumerate(self._grads):
            part = self._bring(number, grad)
            offered = {**_copied(self._group), "params": [part]}
            yield offered
            self.written |= any(not _equal(offered.get(key), value) for key, value in self._group.items())
            self._take(number, part)


def _copied(value: Any) -> Any:
    """With tensors, containers and what is in them copied; but parameters are the user's, and stay what they are."""
    if isinstance(value, nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        made = value.copy()
        made.update({key: _copied(item) for key, item in value.items()})
        return made
    if isinstance(value, list | set):
        return type(value)(map(_copied, value))
    return value


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one is other or bool(one == other)
