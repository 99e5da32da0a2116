"""The engine's own operations are nobody's business: user's dispatch modes must not see them.

Selective activation checkpointing, for one, counts the operations of a forward and expects the same ones in the
recompute; ``torch.compile`` would trace the collectives of a gather.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def _no_user_modes() -> Iterator[None]:
    with torch._C._DisableFuncTorch(), _disable_current_modes() as modes, ExitStack() as stack:
        for mode in modes:
            if isinstance(mode, FakeTensorMode):
                stack.enter_context(mode)
        yield


def pretends() -> bool:
    """Whether tensors are made without memory at present: a dry run, under FakeTensorMode."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function as it is: a graph of ``torch.compile`` ends before it, and another one begins after it."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call, no-any-return]


def unseen(method: Callable[P, R]) -> Callable[P, R]:
    """Run a function outside all transforms of ``torch.func`` and all dispatch modes, FakeTensorMode excepted."""

    @uncompiled
    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None:
            return method(*args, **kwargs)
        with _no_user_modes():
            return method(*args, **kwargs)

    return call
