"""The tiers of a unit, and gradients in theirs between backward and step (ZeRO-Infinity, section 5.1)."""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.buffer import Pool
from lightning_zero.engine.tiers import HostTier, Tier, TierArray, Transfer

MOST = 2
"""Gradients on their way to a tier before the backward waits for the first."""


class Writes:
    """Memory that is being written to tiers: back to the pool when it has arrived there."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._under_way: deque[tuple[Transfer, Tensor]] = deque()

    def add(self, transfer: Transfer, memory: Tensor) -> None:
        """Take charge of ``memory``; waits while too much is under way."""
        self._under_way.append((transfer, memory))
        self.settle(MOST)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that waits for that."""
        return sum(memory.nbytes for _, memory in self._under_way)

    def settle(self, most: int = 0) -> None:
        """Wait until at most so many are under way."""
        while len(self._under_way) > most:
            transfer, memory = self._under_way.popleft()
            transfer.wait()
            self._pool.free(memory)


class Rests(NamedTuple):
    """The tiers of one unit; None: the device.

    Attributes:
        optimizer: of master weights, gradients and the optimizer's state.
        params: of what parameters are gathered from.
        host: of the optimizer's state where only the weights that it steps on are in a tier: there the step runs.
        writes: what is under way to ``optimizer``.
    """

    optimizer: Tier | None
    params: Tier | None
    host: HostTier
    writes: Writes


class RestedGradient:
    """The mean gradient of one flat's shard, in a tier.

    Attributes:
        holds: whether there is one.
    """

    def __init__(self, tier: Tier, numel: int, dtype: torch.dtype, what: str, writes: Writes, pool: Pool) -> None:
        self.holds = False
        self._tier, self._numel, self.dtype, self._what = tier, numel, dtype, what
        self._writes, self._pool = writes, pool
        self._array: TierArray | None = None

    @property
    def array(self) -> TierArray:
        """Its place in the tier."""
        if self._array is None:
            self._array = self._tier.empty(self._numel, self.dtype, self._what)
        return self._array

    def store(self, values: Tensor, memory: Tensor) -> None:
        """Start to write the gradient; ``memory``, of which it may be a part, goes back to the pool."""
        host = values if isinstance(self._tier, HostTier) else values.cpu()
        if host is not values:
            self._pool.free(memory)
        self._writes.add(self.array.store(0, host), memory if host is values else host)
        self.holds = True

    def load(self) -> Tensor:
        """The gradient, on the device, in memory of the pool."""
        values = self._pool.empty(self._numel, self.dtype)
        near = values.device.type == "cpu" or isinstance(self._tier, HostTier)
        host = values if near else torch.empty_like(values, device="cpu")
        self.array.fetch(0, host).wait()
        return values if host is values else values.copy_(host)


def fetch_whole(array: TierArray, out: Tensor) -> Transfer | None:
    """Start to read a whole array; None: it is there."""
    if out.device.type == "cpu":
        return array.fetch(0, out)
    if isinstance(array.tier, HostTier):
        array.fetch(0, out).wait()
        return None
    host = torch.empty(out.shape, dtype=out.dtype, device="cpu", pin_memory=out.device.type == "cuda")
    array.fetch(0, host).wait()
    out.copy_(host)
    return None


def put(tier: Tier, values: Tensor, what: str) -> TierArray:
    """A new array with ``values``."""
    array = tier.empty(values.numel(), values.dtype, what)
    array.store(0, values.cpu()).wait()
    return array
