"""Evaluation in which ranks have different numbers of batches.

A gather needs every rank. A rank that has no more batches stays and gives its shards to those that have: they say which
unit they gather, and it gathers along.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.residency import Residency
from lightning_zero.engine.unit import Unit

_LISTENING, _DONE, _FIRST = -1, 0, 1  # what a rank says; a unit is its index, counted from _FIRST


class Uneven:
    """Steps of which ranks may run different numbers.

    Every rank calls :meth:`step` for each of its own, and :meth:`finish` once it has no more.

    Args:
        units: of the engine.
        residency: of the units.
        comm: of the ranks.
        share_buffers: what every forward begins with; collective.
    """

    def __init__(
        self, units: Sequence[Unit], residency: Residency, comm: Communicator, share_buffers: Callable[[], None]
    ) -> None:
        self.units, self.residency, self.comm = units, residency, comm
        self._share_buffers = share_buffers
        self.needed = comm.world_size > 1 and any(unit.sharded for unit in units)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one evaluation forward, outside of ``Engine.forward``."""
        if not self.needed or self._running(True) == self.comm.world_size:
            yield
            return
        self.residency.announce = lambda unit: self._say(_FIRST + unit.index)
        try:
            yield
        finally:
            self.residency.announce = None
        self._say(_DONE)

    def finish(self) -> None:
        """Serve the ranks that are still running, until there are none."""
        while self.needed and self._running(False):
            self._share_buffers()
            while (word := self._reduce(_LISTENING, "max", "unit of an uneven step")) != _DONE:
                unit = self.units[word - _FIRST]
                self.residency.unshard(unit)
                self.residency.reshard(unit)

    def _running(self, here: bool) -> int:
        return self._reduce(int(here), "sum", "uneven step")

    def _say(self, word: int) -> None:
        heard = self._reduce(word, "max", "unit of an uneven step")
        if heard != word:
            names = ["nothing more", *(f"unit {unit.name!r}" for unit in self.units)]
            raise RuntimeError(
                f"Rank {self.comm.rank} gathers {names[word]} where another rank gathers {names[heard]}: all ranks "
                "must run the same units in the same order."
            )

    def _reduce(self, word: int, op: str, what: str) -> int:
        words = torch.tensor([word], device="cpu")
        self.comm.all_reduce(words, op, what).wait()
        return int(words.item())
