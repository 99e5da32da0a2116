"""From autograd's gradients to this rank's flat ones.

A large gradient is copied into its unit's buffer at once, while it is in the cache. Small ones wait for the last
gradient of the unit and are taken together: a call each would cost more than the copy.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from lightning_zero.engine.buffer import Pool
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.guard import Place
from lightning_zero.engine.layout import Slot
from lightning_zero.engine.life import GradState
from lightning_zero.engine.unit import Unit

SMALL = 4 * 1024
"""Elements up to which a gradient waits for the others of its unit."""


class Collector:
    """Collects one backward's contributions: :meth:`begin`, then :meth:`defer` or :meth:`take_one` for each gradient,
    :meth:`take` for each unit before it is reduced, and :meth:`take_all` at the end.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.window_open = False
        """Whether micro-batches are being summed: then buffers have the sum's dtype."""
        self.reused: set[Flat] = set()
        """Buffers of parameters that a forward uses more than once; they have the sum's dtype, too."""
        self.launched: set[int] = set()
        """Units whose reduction has begun in this backward."""
        self._opened: set[Flat] = set()
        self._waiting: defaultdict[Unit, list[Place]] = defaultdict(list)

    def begin(self) -> None:
        """A backward begins."""
        self.launched = set()
        self._opened = set()
        self._waiting.clear()

    def defer(self, place: Place) -> None:
        """Note that autograd has added to ``p.grad``. Runs no operation."""
        self._waiting[place.unit].append(place)

    def take(self, unit: Unit) -> None:
        """Copy the unit's waiting gradients into its buffers; ``p.grad`` becomes the stand-in."""
        fresh: defaultdict[Flat, dict[int, Tensor]] = defaultdict(dict)
        for place in self._waiting.pop(unit, ()):
            flat, index, grad = place.flat, place.index, place.param.grad
            self.open(flat)
            plain = grad is not None and grad is not flat.marks[index] and grad.layout is torch.strided
            if grad is not None and plain and not flat.in_local[index]:
                fresh[flat][index] = grad
            else:
                self.take_one(place)
        for flat, grads in fresh.items():
            self._take_fresh(unit, flat, grads)

    def take_all(self, flats: Iterable[Flat]) -> None:
        """Copy all that waits, and what users' hooks have added after the engine's."""
        for unit in list(self._waiting):
            self.take(unit)
        for flat in flats:
            self.take_pending(flat)

    def take_pending(self, flat: Flat) -> None:
        """What users' hooks have added to ``p.grad`` after the engine's own hook."""
        for index in sorted(flat.noted):
            self._add(flat, index, flat.marks[index].take_pending())

    def add_use(self, place: Place, grad: Tensor) -> None:
        """Add what one more use of a parameter contributes."""
        flat, index = place.flat, place.index
        self.open(flat)
        self._add(flat, index, grad)
        place.param.grad = flat.marks[index]  # the first use's contribution comes on top
        self._partial(place.unit)

    def open(self, flat: Flat) -> None:
        """At a flat's first use in a backward: forget the earlier gradients that the user has dropped meanwhile."""
        if flat in self._opened:
            return
        self._opened.add(flat)
        kept = [param.grad is mark for param, mark in zip(flat.params, flat.marks, strict=True)]
        for index in flat.noted:
            if kept[index]:
                flat.marks[index].flush()
        flat.drop([index for index, keeps in enumerate(kept) if not keeps])

    def local(self, flat: Flat) -> Tensor:
        """The flat buffer that this rank's contributions go to."""
        if flat.local is None:
            # several micro-batches or uses are summed in the sum's dtype; a single one travels as it is
            flat.summing = self.window_open
            wide = flat.summing or flat in self.reused
            flat.local = self.pool.empty(flat.layout.numel, flat.dtypes.sum if wide else flat.dtypes.wire)
            if flat.layout.gaps:
                torch._foreach_zero_([flat.local[start:stop] for start, stop in flat.layout.gaps])
        return flat.local

    def take_one(self, place: Place) -> None:
        """Copy one gradient into its unit's buffer."""
        flat, index, param = place.flat, place.index, place.param
        mark, grad = flat.marks[index], param.grad
        self.open(flat)
        if grad is mark:
            grad = mark.take_pending()
        else:
            flat.drop([index])
        if grad is not None:  # a user's hook may have dropped it at once
            self._add(flat, index, grad)
            param.grad = mark
            self._partial(place.unit)

    def _take_fresh(self, unit: Unit, flat: Flat, grads: dict[int, Tensor]) -> None:
        local, slots = self.local(flat), flat.layout.slots
        for run in _neighbours(sorted(grads), slots):
            pieces = [slots[index].flatten(grads[index]) for index in run]
            torch.cat(pieces, out=local[slots[run[0]].start : slots[run[-1]].stop])
        for index in grads:
            flat.in_local[index] = True
            flat.params[index].grad = flat.marks[index]
        self._partial(unit)

    def _add(self, flat: Flat, index: int, grad: Tensor | None) -> None:
        """Add to this rank's gradient of a parameter."""
        if grad is None:
            return
        if flat.in_local[index]:
            flat.add_local(index, grad)
        else:
            dense = grad.to_dense() if grad.layout is not torch.strided else grad.detach()
            flat.slot(self.local(flat), index).copy_(flat.layout.slots[index].flatten(dense))
            flat.in_local[index] = True

    def _partial(self, unit: Unit) -> None:
        if unit.index not in self.launched:
            unit.move_grad(GradState.PARTIAL)


def _neighbours(indices: Iterable[int], slots: Sequence[Slot]) -> Iterator[list[int]]:
    """Runs of slots with no gap between them: one copy each."""
    run: list[int] = []
    for index in indices:
        if run and slots[run[-1]].stop != slots[index].start:
            yield run
            run = []
        run.append(index)
    if run:
        yield run
