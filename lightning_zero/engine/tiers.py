"""Tiers: where shards rest between two uses. In memory, or in a file on NVMe (ZeRO-Infinity, section 5.2).

An array of a tier is read and written in ranges, asynchronously. A range that is fetched has what was stored last,
whether or not that store has been waited for.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from lightning_zero.engine.host_memory import free_memory

Hook = Callable[["TierArray", int, Tensor], Any]
"""Called with an array, the first element of a range, and the tensor that it is read into or was written from."""


Watch = Callable[[str, str, int, float, "Transfer"], None]
"""Called with "read" or "write", the array's name, bytes, when it began, and the transfer."""


class TierError(RuntimeError):
    """A tier cannot hold or give back what it was given; the message names the place and says what to do."""


class Transfer(ABC):
    """A fetch or store under way.

    Attributes:
        ended: when it was over, by ``time.perf_counter()``; None: it is not, or the transfer does not know.
    """

    ended: float | None = None

    @abstractmethod
    def wait(self) -> None:
        """Return when it is done.

        Raises:
            TierError: it has failed.
        """


class Done(Transfer):
    """A transfer that was over when it began."""

    def __init__(self) -> None:
        self.ended = time.perf_counter()

    def wait(self) -> None:
        """Nothing."""


class TierArray(ABC):
    """A 1-D array in a tier.

    Attributes:
        numel: elements.
        dtype: of all of them, and of the tensors that they are read into and written from.
        what: a name for messages.
    """

    def __init__(self, tier: "Tier", numel: int, dtype: torch.dtype, what: str) -> None:
        self.tier, self.numel, self.dtype, self.what = tier, numel, dtype, what

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * self.dtype.itemsize

    def fetch(self, start: int, out: Tensor) -> Transfer:
        """Read elements from ``start`` on into ``out``, contiguous; it must not be used before the transfer is done."""
        for hook in self.tier.before_fetch:
            hook(self, start, out)
        return self._told("read", time.perf_counter(), out, self._fetch(start, out))

    def store(self, start: int, values: Tensor) -> Transfer:
        """Write ``values``, contiguous, from ``start`` on; they must not change before the transfer is done."""
        transfer = self._told("write", time.perf_counter(), values, self._store(start, values))
        for hook in self.tier.after_store:
            hook(self, start, values)
        return transfer

    def _told(self, verb: str, begin: float, values: Tensor, transfer: Transfer) -> Transfer:
        if self.tier.watch is not None:
            self.tier.watch(verb, self.what, values.nbytes, begin, transfer)
        return transfer

    @abstractmethod
    def _fetch(self, start: int, out: Tensor) -> Transfer: ...

    @abstractmethod
    def _store(self, start: int, values: Tensor) -> Transfer: ...


class Tier(ABC):
    """A place for arrays. Derive from it to bring a place of your own.

    Attributes:
        before_fetch: hooks that run before a range is read.
        after_store: hooks that run after a range has been handed over to be written.
        watch: who is told of transfers, if anybody is.
    """

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.before_fetch: list[Hook] = []
        self.after_store: list[Hook] = []

    @abstractmethod
    def empty(self, numel: int, dtype: torch.dtype, what: str) -> TierArray:
        """A new array, not initialised.

        Raises:
            TierError: there is no room for it.
        """

    def reserve(self, nbytes: int, what: str) -> None:
        """Make room for arrays of so many bytes in all, before any of them is made.

        Args:
            nbytes: beside what is in it.
            what: what they will hold, for messages.

        Raises:
            TierError: there is no room.
        """
        return None

    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that its arrays take; an array that nobody holds any more takes none."""

    def close(self) -> None:
        """Give everything back; arrays cannot be used any more.

        The engine does not call it: optimizers' states outlive the engine. A tier ends with the last of its arrays.
        """
        return None


class _HostArray(TierArray):
    def __init__(self, tier: Tier, numel: int, dtype: torch.dtype, what: str, pin: bool) -> None:
        super().__init__(tier, numel, dtype, what)
        self.values = torch.empty(numel, dtype=dtype, device="cpu", pin_memory=pin)

    def _fetch(self, start: int, out: Tensor) -> Transfer:
        out.copy_(self.values[start : start + out.numel()])  # also to a device
        return Done()

    def _store(self, start: int, values: Tensor) -> Transfer:
        self.values[start : start + values.numel()].copy_(values)
        return Done()


class HostTier(Tier):
    """Host memory.

    Args:
        pin: whether it is pinned, for quicker copies to and from a GPU.
        ranks: how many of this host will ask for as much.
    """

    def __init__(self, pin: bool = False, ranks: int = 1) -> None:
        super().__init__()
        self.pin, self.ranks = pin, ranks
        self._promised = 0  # bytes that were reserved, and are not taken yet
        self._arrays: WeakSet[_HostArray] = WeakSet()

    def reserve(self, nbytes: int, what: str) -> None:
        """See whether the host has so much memory for every rank.

        Raises:
            TierError: it has not.
        """
        free, needed = free_memory(), self._promised + nbytes
        if free is not None and needed * self.ranks > free:
            raise TierError(
                f"Host memory has no room for {what}: {self.ranks} ranks of this host need {needed:,} bytes each,"
                f" {free:,} are free. Offload to 'nvme', or use more hosts."
            )
        self._promised = needed

    def empty(self, numel: int, dtype: torch.dtype, what: str) -> TierArray:
        """A new array, not initialised."""
        array = _HostArray(self, numel, dtype, what, self.pin)
        self._promised = max(0, self._promised - array.nbytes)
        self._arrays.add(array)
        return array

    def nbytes(self) -> int:
        """Bytes that its arrays take."""
        return sum(array.nbytes for array in self._arrays)
