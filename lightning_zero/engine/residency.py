"""Which units are whole at the moment: gathering, waiting, freeing, and gathering ahead."""

from collections.abc import Callable, Sequence

import torch

from lightning_zero.engine.flat import Flat
from lightning_zero.engine.guard import guard, unguard
from lightning_zero.engine.life import ParamState
from lightning_zero.engine.trace import Pass, Trace
from lightning_zero.engine.unit import Unit

Record = Callable[..., None]


def in_backward() -> bool:
    """Whether autograd is running a backward in this thread (a recompute included)."""
    return torch._C._current_graph_task_id() != -1


class Residency:
    """Makes units readable when they are needed and frees them when they are not.

    Args:
        units: all of them.
        prefetch: how many are gathered ahead.
        keeps: whether graphs hold the weights themselves, unseen (no saved-tensors hooks): then what a forward with
            gradients has used stays until the optimizer step or the next training step.
        record: told what happens.
    """

    def __init__(self, units: Sequence[Unit], prefetch: int, keeps: bool, record: Record) -> None:
        self.units = units
        self.prefetch = prefetch
        self.keeps = keeps
        self.record = record
        self.announce: Callable[[Unit], None] | None = None  # told before each gather (see ``uneven``)
        self.trace = Trace(len(units))
        self._live: list[Unit] = []
        self._waiting_use: set[int] = set()
        self._kept: set[int] = set()
        self._viewed: set[Unit] = set()  # sharded, but with the memory of the whole, for somebody holds a view

    def launch(self, unit: Unit) -> None:
        """Start to gather a sharded unit."""
        if unit.state is ParamState.SHARDED:
            if self.announce is not None:
                self.announce(unit)
            self.record("gather", unit.name)
            unit.move(ParamState.GATHERING)
            unit.handles = [flat.gather() for flat in unit.flats]
            self.record("gather_done", unit.name)
            if not unit.is_root:
                self._live.append(unit)
                self._waiting_use.add(unit.index)

    def arrive(self, unit: Unit) -> None:
        """Wait until a unit that is being gathered is whole."""
        if unit.state is ParamState.GATHERING:
            self.record("wait", unit.name)
            for handle in unit.handles:
                handle.wait()
            unit.handles = []
            unit.move(ParamState.UNSHARDED)
            unguard(unit)
            for flat in unit.flats:
                flat.written.restart()
            self.record("wait_done", unit.name)

    def unshard(self, unit: Unit) -> None:
        """Make a unit readable, now."""
        self.launch(unit)
        self.arrive(unit)
        self._waiting_use.discard(unit.index)

    def leave(self, unit: Unit) -> None:
        """A forward has ended that is the unit's last one for now."""
        if torch.is_grad_enabled():
            if self.keeps:
                self._kept.add(unit.index)
            if self.trace.is_last("train", unit.index):
                return
        if unit.index not in self._kept:
            self.reshard(unit)

    def reshard(self, unit: Unit, stale: bool = False) -> None:
        """Free a unit's whole parameters; ``stale``: the shards have moved on, and what is in the whole is not kept."""
        self.arrive(unit)
        if not unit.sharded or unit.state is not ParamState.UNSHARDED or unit.active:
            return
        if not stale:
            unit.keep_writes()
        self.record("reshard", unit.name)
        guard(unit)
        unit.move(ParamState.SHARDED)
        self._free(unit)
        if unit in self._live:
            self._live.remove(unit)
        self._waiting_use.discard(unit.index)
        self.record("reshard_done", unit.name)

    def _free(self, unit: Unit) -> None:
        """Give a sharded unit's memory back, unless somebody holds a view: then a wrong number or a crash would be
        somewhere.

        Views are this rank's own business: the unit is sharded all the same, and the next gather, which all ranks take
        part in, writes into the memory that is still there.
        """
        for flat in unit.flats:
            if not flat.escaped:
                flat.buffer.release()
        if any(flat.buffer.allocated for flat in unit.flats):
            self._viewed.add(unit)
        else:
            self._viewed.discard(unit)

    def _free_viewed(self) -> None:
        """Look again whether the views have gone: those of a recompute, of a block that is cut, with its backward."""
        for unit in list(self._viewed):
            if unit.state is ParamState.SHARDED:
                self._free(unit)
            else:
                self._viewed.discard(unit)

    def reshard_all(self) -> None:
        """Free whatever can be freed, also what views have kept so far."""
        self._kept.clear()
        for unit in self.units:
            self.reshard(unit)
            if unit.state is ParamState.SHARDED:
                self._free(unit)

    def refresh(self, unit: Unit, flats: Sequence[Flat]) -> None:
        """The optimizer has changed the shards of ``flats``: a unit that rests whole is gathered again, now; the next
        reader waits.
        """
        if not flats:
            return
        self.reshard(unit, stale=True)
        if unit.state is ParamState.SHARDED:
            return
        self.arrive(unit)
        unit.move(ParamState.GATHERING)
        guard(unit)
        self.record("gather", unit.name)
        unit.handles = [flat.gather() for flat in flats]
        self.record("gather_done", unit.name)

    def kind(self) -> Pass:
        """The pass that is running."""
        if in_backward():
            return "backward"
        return "train" if torch.is_grad_enabled() else "eval"

    def need(self, unit: Unit) -> None:
        """A unit is about to be used by a module or by autograd: gather it, and the next one behind it."""
        if not unit.sharded or unit.is_root:
            self.unshard(unit)
            return
        kind = self.kind()
        if unit.state is ParamState.UNSHARDED and self.trace.is_current(kind, unit.index):
            return
        ahead = self.trace.visit(kind, unit.index, self.prefetch)
        self.launch(unit)
        self._make_room(unit)
        for index in ahead:
            if self.units[index].sharded and len(self._live) - len(self._kept) <= 1 + self.prefetch:
                self.launch(self.units[index])
        self.unshard(unit)

    def launch_first(self) -> None:
        """A forward begins, on all ranks: gather what it is expected to use first."""
        first = [self.units[index] for index in self.trace.expected(self.kind()) if not self.units[index].is_root]
        for unit in first[: self.prefetch and 1]:
            if unit.sharded:
                self.launch(unit)

    def _make_room(self, unit: Unit) -> None:
        """Free what the pass has left behind.

        Here and everywhere in this class a decision follows from the sequence of uses alone, which is the same on all
        ranks, and not from which gradients this rank has.
        """
        for other in list(self._live):
            if other is not unit and other.index not in self._waiting_use | self._kept:
                self.reshard(other)
        self._free_viewed()
