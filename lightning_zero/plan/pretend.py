"""Ranks, tiers and a kernel that a dry run has in the place of real ones: nothing is sent, written or computed."""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_zero.engine import Communicator, Tier, TierArray, Transfer
from lightning_zero.engine.comm import Bounds
from lightning_zero.engine.lanes import Handle, Lane, Round
from lightning_zero.engine.tiers import Done, HostTier
from lightning_zero.plan.ledger import ACCELERATOR


@contextmanager
def ranks(world_size: int) -> Iterator[None]:
    """A default process group of so many ranks, of which this process is the first, and there is no other.

    Raises:
        RuntimeError: this process is a rank already.
    """
    if dist.is_initialized():
        raise RuntimeError("A dry run has a process group of its own, and this process has one already.")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class PlannedCommunicator(Communicator):
    """Counts what would be sent, and has the buffers that it would be sent from and to."""

    def _has_nccl(self) -> bool:
        return self.device.type != "cpu"

    def _lane(self, name: str, backend: str, timeout: timedelta) -> Lane:
        return _Lane(name, "fake", timeout, self.peers)

    def any_of(self, bits: Sequence[bool], what: str) -> list[bool]:
        """This rank's: all do the same."""
        super().any_of(bits, what)
        return list(bits)

    def first_of(self, numbers: Sequence[int]) -> list[int]:
        """This rank's."""
        super().first_of(numbers)
        return list(numbers)

    def parts(self, full: Tensor, receive: Tensor, bounds: Bounds) -> list[Tensor]:
        """Two of them at most: the sum of thousands takes no more memory."""
        low, high = bounds[self.rank]
        return [full[low:high], receive[: high - low]][: self.world_size]

    def _exchange(self, full: Tensor, receive: Tensor, bounds: Bounds, what: str) -> Handle:
        return self.nothing()

    def collect(self, value: Any) -> list[Any]:
        """The same of every rank."""
        return [value] * self.world_size


class _Lane(Lane):
    def submit_rounds(self, rounds: Sequence[Round], what: str, finish: Any = None) -> Handle:
        return super().submit_rounds([], what, finish)


class PlannedHost(HostTier):
    """Host memory without end; its arrays are among the tensors that the ledger counts."""

    def reserve(self, nbytes: int, what: str) -> None:
        """There is room."""


class PlannedDisk(Tier):
    """Counts the bytes of its arrays, which hold nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0

    def empty(self, numel: int, dtype: torch.dtype, what: str) -> TierArray:
        """A new array."""
        array = _DiskArray(self, numel, dtype, what)
        self.live += array.nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(array, self._forget, array.nbytes)
        return array

    def _forget(self, nbytes: int) -> None:
        self.live -= nbytes

    def nbytes(self) -> int:
        """Bytes that its arrays would take."""
        return self.live


class _DiskArray(TierArray):
    def _fetch(self, start: int, out: Tensor) -> Transfer:
        return Done()

    def _store(self, start: int, values: Tensor) -> Transfer:
        return Done()


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Have torch take the kernels for the accelerator of a dry run that it takes for a GPU: attention that makes no
    matrix of scores, and fused and foreach optimizers.
    """
    plain: Any = F.scaled_dot_product_attention

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if query.device.type == "cpu":
            return plain(query, key, value, *args, **kwargs)  # type: ignore[no-any-return]
        return _Flash.apply(query, key, value)  # type: ignore[no-any-return, no-untyped-call]

    def with_accelerator(kinds: Callable[[], list[str]]) -> Callable[[], list[str]]:
        return lambda: [*kinds(), ACCELERATOR.type]

    with ExitStack() as stack:
        # not a TorchFunctionMode: a block that is computed again in the backward would not see it
        stack.enter_context(patch.object(F, "scaled_dot_product_attention", attention))
        for place in (sys.modules[torch.optim.Optimizer.__module__], sys.modules["torch.utils._foreach_utils"]):
            for name in ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices"):
                stack.enter_context(patch.object(place, name, with_accelerator(getattr(place, name))))
        if not hasattr(torch, ACCELERATOR.type):
            torch._register_device_module(ACCELERATOR.type, _Accelerator)  # type: ignore[no-untyped-call] # checkpointing asks for it
        yield


class _Accelerator:
    """torch's module for the accelerator: without random state."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def is_initialized() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0


class _Flash(torch.autograd.Function):
    """Saves inputs, output and a row of sums; its backward sums the query's gradient in fp32."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        query, key, value = ctx.saved_tensors[:3]
        wide = torch.empty_like(query, dtype=torch.float32)
        return wide.to(query.dtype), torch.empty_like(key), torch.empty_like(value)
