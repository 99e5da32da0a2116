"""Gradients that are infinite or NaN: noticed as they are reduced, and traced to a parameter and a rank.

The sum of each reduced shard is taken while it is in the cache; only where that is not finite does anybody look closer.
"""

import torch
from torch import Tensor

from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.flat import Flat

Findings = dict[str, set[int]]
"""Parameters, and the ranks on which their gradient was not finite (none: not known)."""


class Watch:
    """Keeps what one rank has noticed, until :meth:`forget`."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self.everywhere = False
        """Whether any rank has noticed something: the same on all ranks, once a backward has ended."""
        self.found: Findings = {}
        self._unread: list[tuple[Flat, Tensor]] = []

    def forget(self, names: set[str]) -> None:
        """What these parameters' gradients were has been acted upon. Collective; others' are still to be looked at."""
        self.found = {name: ranks for name, ranks in self.found.items() if name not in names}
        self.everywhere = any(self.comm.collect(bool(self.found)))

    def look(self, flat: Flat, total: Tensor, parts: list[Tensor]) -> None:
        """A shard has been reduced: the mean of ``parts`` (by rank), whose elements add up to ``total``."""
        if not flat.dtypes.sum.is_floating_point and not flat.dtypes.sum.is_complex:
            return
        if total.device.type != "cpu":
            self._unread.append((flat, total))  # reading it now would stop the stream
        elif not torch.isfinite(total):
            for rank, part in enumerate(parts):
                self._note(flat, part, {rank})

    def noticed(self) -> bool:
        """Whether this rank has noticed something."""
        unread, self._unread = self._unread, []
        if unread and not torch.isfinite(torch.stack([total.double() for _, total in unread])).all():
            for flat, _ in unread:
                if flat.is_reduced and not flat.owns_all:
                    with flat.mean_gradient(writes=False) as reduced:
                        self._note(flat, reduced, set())
        return bool(self.found)

    def _note(self, flat: Flat, part: Tensor, ranks: set[int]) -> None:
        low = self.comm.rank * flat.layout.shard_numel
        for name, slot in zip(flat.names, flat.layout.slots, strict=True):
            own = part[max(slot.start - low, 0) : max(slot.stop - low, 0)]
            if not torch.isfinite(own).all():
                self.found.setdefault(name, set()).update(ranks)

    def report(self, names: set[str]) -> str:
        """In words, what any rank has found of the parameters ``names``; if it is nothing, those. Collective."""
        merged: Findings = {}
        for found in self.comm.collect({name: ranks for name, ranks in self.found.items() if name in names}):
            for name, ranks in found.items():
                merged.setdefault(name, set()).update(ranks)
        merged = merged or {name: set() for name in names}
        words = [f"{name!r}{_on(ranks)}" for name, ranks in sorted(merged.items())]
        more = f" and {len(words) - 3} more" if len(words) > 3 else ""
        return ", ".join(words[:3]) + more


def _on(ranks: set[int]) -> str:
    return f" (on rank {', '.join(map(str, sorted(ranks)))})" if ranks else ""
