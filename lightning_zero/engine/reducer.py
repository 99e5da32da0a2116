"""Gradients: from autograd's contributions to reduced shards."""

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.engine.buffer import Pool
from lightning_zero.engine.collector import SMALL, Collector
from lightning_zero.engine.comm import Communicator, mean_
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.guard import Place
from lightning_zero.engine.lanes import Handle
from lightning_zero.engine.life import GradState
from lightning_zero.engine.modes import unseen
from lightning_zero.engine.nonfinite import Watch
from lightning_zero.engine.order import ReductionOrder
from lightning_zero.engine.unit import Unit

Record = Callable[..., None]

PATIENCE = 1.0
"""Seconds that a reduction waits for the one before it, at most."""


@dataclass
class _InFlight:
    """A flat's reduction under way and the buffers that it uses."""

    flat: Flat
    handle: Handle
    local: Tensor
    summing: bool
    receive: Tensor


class Reducer:
    """Sums, reduces and hands out gradients, unit by unit, in one order on all ranks.

    Args:
        window: whether micro-batches are summed and reduced once.
        at_once: bytes of gradients that may be under way together; more than that: one unit at a time.

    A backward's life: :meth:`begin`, :meth:`grad_ready` for each gradient, :meth:`end`.
    """

    def __init__(
        self, units: Sequence[Unit], comm: Communicator, pool: Pool, window: bool, at_once: int, record: Record
    ) -> None:
        self.units, self.comm, self.pool = units, comm, pool
        self.window, self._at_once = window, at_once
        self.record = record
        self.active = False
        self.begin_own: Callable[[], None] = lambda: None
        """Called where a gradient comes without :meth:`begin`."""
        self.last = True
        self._flats = [flat for unit in units for flat in unit.flats]
        self._order = ReductionOrder(comm.first_of)
        self._turn: deque[Unit] = deque()
        self._patience = PATIENCE
        self.collector = Collector(pool)
        self.watch = Watch(comm)
        self._reused_here: set[Flat] = set()
        self._key = b""
        self._usual: dict[bytes, list[set[int]]] = {}
        self._in_flight: deque[tuple[Unit, list[_InFlight]]] = deque()
        self._last: Place | None = None

    def begin(self, last: bool, reused: set[Flat] | None = None) -> None:
        """Start a backward.

        Args:
            last: it ends the accumulation window.
            reused: buffers of parameters that this forward has used more than once; None where nobody counts.
        """
        self.active, self.last = True, last
        # the same on all ranks, whichever gradients they have: it decides the dtype on the wire
        self.collector.window_open |= not self.reduces
        self.collector.begin()
        self._turn.clear()
        takes = [any(takes_part(flat) for flat in unit.flats) for unit in self.units]
        members = [unit.index for unit, part in zip(self.units, takes, strict=True) if part]
        self._key = bytes(takes)
        for unit, usual in zip(self.units, self._usual.get(self._key) or map(trainable, self.units), strict=True):
            unit.awaited = set(usual)
        self._order.begin(self._key, members)
        if reused is not None and self._key not in self._usual:
            # the dtype on the wire depends on it, so all ranks must know before the first reduction
            self._learn_reused(self.comm.any_of([flat in reused for flat in self._flats], "reused layers"))
        self._reused_here = reused or set()

    def _learn_reused(self, bits: Sequence[bool]) -> None:
        self.collector.reused |= {flat for flat, bit in zip(self._flats, bits, strict=True) if bit}

    @property
    def reduces(self) -> bool:
        """Whether this backward's gradients are reduced, not only summed locally."""
        return self.last or not self.window

    def grad_ready(self, place: Place) -> None:
        """Autograd has added to a parameter's gradient."""
        if not self.active:
            self.begin_own()
        if self._last is not None:
            self._act_on_last()
        hooks = place.param._post_accumulate_grad_hooks
        if hooks is None or len(hooks) == 1:
            self._act_on(place)
        else:
            self._last = place  # the user's hooks run after the engine's

    def _act_on_last(self) -> None:
        """Take note of the gradient whose parameter has hooks of the user: they have all run by now."""
        if self._last is not None:
            place, self._last = self._last, None
            self._act_on(place)

    def _act_on(self, place: Place) -> None:
        unit = place.unit
        if place.numel <= SMALL or not (place.flat.local is not None or self._has_room(unit)):
            self.collector.defer(place)
        else:
            self._take(place)
        if unit.awaited:
            unit.awaited.discard(id(place.param))
            if not unit.awaited:
                self.ready(unit)

    @unseen
    @torch.no_grad()
    def use_ready(self, place: Place, grad: Tensor) -> None:
        """Autograd has the gradient of one more use of a parameter."""
        if not self.active:
            self.begin_own()
        self._act_on_last()
        self._reused_here.add(place.flat)
        self.collector.add_use(place, grad)

    @unseen
    @torch.no_grad()
    def _take(self, place: Place) -> None:
        self.collector.take_one(place)

    @unseen
    @torch.no_grad()
    def ready(self, unit: Unit) -> None:
        """A unit's gradients are in: start its reduction, and of those that waited for it, if it is their turn."""
        self.record("backward_done", unit.name)
        self._await_room(unit)
        self.collector.take(unit)
        if self.reduces:
            self._turn.extend(self.units[index] for index in self._order.ready(unit.index))
            self._launch_in_turn()

    def _launch_in_turn(self) -> None:
        """Start the reductions whose turn it is, each after those before have arrived, but for small ones.

        A rank with another graph may reduce only at its backward's end, and may need this rank's shards to get there:
        so this rank waits for a while, not for ever. The less often that pays, the shorter it waits.
        """
        while self._turn:
            if not self._await_room(self._turn[0]):
                return
            self._launch(self._turn.popleft())
        self._patience = min(2 * self._patience, PATIENCE)

    @torch.no_grad()
    def end(self, flag: bool = False) -> bool:
        """Reduce what is left and settle which parameters have a gradient; returns whether any rank passed ``flag``."""
        self._act_on_last()
        self.active = False
        self.collector.take_all(self._flats)
        if not self.reduces:
            return flag
        for unit in [*self._turn, *(self.units[index] for index in self._order.rest())]:
            self._launch(unit)
        self._finish_all()
        *bits, nonfinite, flag = self._union(flag)
        count = len(self._flats)
        present, leftover = bits[: -2 * count], bits[-2 * count : -count]
        self._learn_reused(bits[-count:])
        self.watch.everywhere |= nonfinite
        # gradients that came after their unit had gone (re-entrant checkpointing) go in a second round
        late = {id(flat) for flat, has in zip(self._flats, leftover, strict=True) if has}
        for unit in self.units:
            flats = [flat for flat in unit.flats if id(flat) in late]
            if flats:
                self._launch(unit, flats)
        self._finish_all()
        if late:
            self.watch.everywhere |= self.comm.any_of([self.watch.noticed()], "end of late reductions")[0]
        self._order.freeze()
        self._hand_out(present)
        self.collector.window_open = False
        return flag

    @property
    def nbytes(self) -> int:
        """Bytes of the reductions under way: this rank's gradients, and what it receives."""
        return sum(part.local.nbytes + part.receive.nbytes for _, parts in self._in_flight for part in parts)

    def abort(self) -> None:
        """Forget a backward that an exception has ended, with what it had begun to reduce."""
        self.record("backward_done", "")
        self.active = False
        self._in_flight.clear()
        self._last = None
        self._turn.clear()
        for unit in self.units:
            if unit.grad_state is GradState.REDUCING:
                unit.move_grad(GradState.EMPTY)
            for flat in unit.flats:
                flat.contributed = [False] * len(flat.params)

    def _launch(self, unit: Unit, flats: Sequence[Flat] | None = None) -> None:
        """Start a unit's reduction, after the end of those before, but for small ones."""
        while self._in_flight and not self._fits(unit):
            self._finish()
        self.collector.launched.add(unit.index)
        self.record("reduce", unit.name)
        unit.move_grad(GradState.PARTIAL)
        unit.move_grad(GradState.REDUCING)
        chosen = [flat for flat in unit.flats if takes_part(flat)] if flats is None else flats
        self._in_flight.append((unit, [self._reduce(flat) for flat in chosen]))
        self.record("reduce_done", unit.name)

    @torch.no_grad()
    def _reduce(self, flat: Flat) -> _InFlight:
        self.collector.open(flat)
        self.collector.take_pending(flat)
        local = self.collector.local(flat)
        for index, has in enumerate(flat.in_local):
            if not has:
                flat.slot(local, index).zero_()
        flat.contributed = [a or b for a, b in zip(flat.contributed, flat.in_local, strict=True)]
        # what comes now is late: it finds no buffer and gets one of its own
        flat.in_local = [False] * len(flat.params)
        flat.local, summing = None, flat.summing
        receive = self.pool.empty(self.comm.received_parts * flat.layout.shard_numel, local.dtype)
        handle = self.comm.exchange(local, receive, flat.layout.shards(), f"reduction of {flat.name}")
        return _InFlight(flat, handle, local, summing, receive)

    def _fits(self, unit: Unit) -> bool:
        """Whether the unit's reduction may be under way beside the others: one is, and what is small altogether."""
        return unit.nbytes + sum(other.nbytes for other, _ in self._in_flight) <= self._at_once

    def _await_room(self, unit: Unit) -> bool:
        """Wait for a while until the unit's reduction may be under way; returns whether it may."""
        while self._in_flight and not self._fits(unit):
            oldest, parts = self._in_flight[0]
            self.record("reduce_wait", oldest.name)
            arrived = all(part.handle.arrives(self._patience) for part in parts)
            self.record("reduce_wait_done", oldest.name)
            if not arrived:
                self._patience /= 4
                return False
            self._finish()
        return True

    @unseen
    def _has_room(self, unit: Unit) -> bool:
        """Whether the unit may have a buffer for its gradients now.

        Where parameters are sharded, memory is what counts: not beside the buffer of another unit that is on the wire;
        autograd's own tensors do until that has arrived.
        """
        if not unit.sharded:
            return True
        while self._in_flight and all(part.handle.arrives(0) for part in self._in_flight[0][1]):
            self._finish()
        if self._in_flight and not self._fits(unit):
            return False
        self.collector.take(unit)
        return True

    def _finish_all(self) -> None:
        while self._in_flight:
            self._finish()

    @torch.no_grad()
    def _finish(self) -> None:
        """Wait for the oldest reduction in flight and add its result to the unit's shard."""
        unit, parts = self._in_flight[0]
        self.record("reduce_wait", unit.name)
        for part in parts:
            part.handle.wait()
            self._store(part)
        self._in_flight.popleft()
        unit.move_grad(GradState.READY)
        self.record("reduce_wait_done", unit.name)

    def _store(self, part: _InFlight) -> None:
        """Add what has arrived to the gradient of this rank's shard."""
        flat, local, size = part.flat, part.local, part.flat.layout.shard_numel
        parts = self.comm.parts(local, part.receive, flat.layout.shards())
        if flat.is_reduced and flat.high - flat.low == size:
            with flat.mean_gradient(writes=True) as reduced:
                self.watch.look(flat, mean_(reduced, parts, add=True), parts)
            self.pool.free(local)
        else:
            mean = self.pool.empty(size, flat.dtypes.sum)
            self.watch.look(flat, mean_(mean, parts, add=False), parts)
            self._keep(part, self._widen(flat, mean))
            flat.rest_gradient()
        self.pool.free(part.receive)

    def _keep(self, part: _InFlight, mean: Tensor) -> None:
        """The first mean of a window; at stage 0, where it is the whole one, any."""
        flat, local = part.flat, part.local
        if flat.reduced is not None:
            flat.reduced.add_(mean)
            self.pool.free(mean)
            self.pool.free(local)
        elif part.summing:
            # the shard of a summed window stays where it is: no memory beside the sum's
            flat.reduced, flat.backing = local[flat.low : flat.high], local
            flat.reduced.copy_(mean)
            self.pool.free(mean)
        else:
            flat.reduced = flat.backing = mean
            self.pool.free(local)

    def _widen(self, flat: Flat, mean: Tensor) -> Tensor:
        """Stage 0: every rank needs the whole mean."""
        if flat.high - flat.low == mean.numel():
            return mean
        whole = self.pool.empty(flat.layout.numel, flat.dtypes.sum)
        low, high = flat.layout.shard(self.comm.rank)
        whole[low:high].copy_(mean)
        self.pool.free(mean)
        self.comm.all_gather(whole, flat.layout.shards(), f"sums of {flat.name}", kind="reduce").wait()
        return whole

    def _union(self, flag: bool) -> list[bool]:
        """What at least one rank has: a bit per parameter (a gradient), two per flat (a late gradient, a second use),
        one for gradients that are not finite, and the flag.
        """
        bits: list[bool] = []
        for flat in self._flats:
            bits += [a or b for a, b in zip(flat.contributed, flat.in_local, strict=True)]
        bits += [any(flat.in_local) for flat in self._flats]
        bits += [flat in self._reused_here for flat in self._flats]
        bits += [self.watch.noticed(), flag]
        return self.comm.any_of(bits, "end of backward")

    def _hand_out(self, present: list[bool]) -> None:
        """Set ``p.grad``: the stand-in where any rank has a gradient, None elsewhere; learn what is usual."""
        start = 0
        usual: list[set[int]] = []
        for unit in self.units:
            usual.append(set())
            for flat in unit.flats:
                count = len(flat.params)
                has = present[start : start + count]
                flat.in_reduced = [a or b for a, b in zip(flat.in_reduced, has, strict=True)]
                for param, mark in itertools.compress(zip(flat.params, flat.marks, strict=True), has):
                    param.grad = mark
                usual[-1].update(map(id, itertools.compress(flat.params, has)))
                flat.contributed = [False] * count
                start += count
        self._usual[self._key] = usual


def takes_part(flat: Flat) -> bool:
    """Whether a flat's gradients are reduced in a backward: the same answer on all ranks, whatever their graphs."""
    return any(param.requires_grad for param in flat.params)


def trainable(unit: Unit) -> set[int]:
    """The parameters of a unit that can have a gradient."""
    return {id(param) for flat in unit.flats for param in flat.params if param.requires_grad}
