"""From autograd's gradients to this rank's flat ones.

A large gradient is copied into its unit's buffer at once, while it is in the cache. Small ones wait for the last
gradient of the unit and are taken together: a call each would cost more than the copy.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_zero.engine.buffer import Pool
from lightning_zero.engine.unit import Flat, GradState, Unit

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
        self._waiting: dict[Unit, list[tuple[Flat, int]]] = {}

    def begin(self) -> None:
        """A backward begins."""
        self.launched = set()
        self._opened = set()
        self._waiting = {}

    def defer(self, unit: Unit, flat: Flat, index: int) -> bool:
        """Note that autograd has added to ``p.grad``; returns whether it may wait. Runs no operation."""
        if flat.layout.slots[index].numel > SMALL:
            return False
        waiting = self._waiting.get(unit)
        if waiting is None:
            waiting = self._waiting[unit] = []
        waiting.append((flat, index))
        return True

    def take(self, unit: Unit) -> None:
        """Copy the unit's waiting gradients into its buffers; ``p.grad`` becomes the stand-in."""
        fresh: dict[Flat, dict[int, Tensor]] = {}
        for flat, index in self._waiting.pop(unit, ()):
            self.open(flat)
            param = flat.params[index]
            grad = param.grad
            plain = grad is not None and grad is not flat.marks[index] and grad.layout is torch.strided
            if grad is not None and plain and not flat.in_local[index]:
                fresh.setdefault(flat, {})[index] = grad.detach()
            else:
                self.take_one(unit, flat, index)
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
        for index, mark in enumerate(flat.marks):
            if mark.has_pending:
                self._add(flat, index, mark.take_pending())

    def add_use(self, unit: Unit, flat: Flat, index: int, grad: Tensor) -> None:
        """Add what one more use of a parameter contributes."""
        self.open(flat)
        self._add(flat, index, grad)
        flat.params[index].grad = flat.marks[index]  # the first use's contribution comes on top
        self._partial(unit)

    def open(self, flat: Flat) -> None:
        """At a flat's first use in a backward: forget the earlier gradients that the user has dropped meanwhile."""
        if flat in self._opened:
            return
        self._opened.add(flat)
        dropped = []
        for index, (param, mark) in enumerate(zip(flat.params, flat.marks, strict=True)):
            if param.grad is mark:
                mark.flush()
            else:
                dropped.append(index)
        flat.drop(dropped)

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

    def take_one(self, unit: Unit, flat: Flat, index: int) -> None:
        """Copy one gradient into its unit's buffer."""
        param, mark = flat.params[index], flat.marks[index]
        grad = param.grad
        self.open(flat)
        if grad is mark:
            grad = mark.take_pending()
        else:
            flat.drop([index])
        if grad is not None:  # a user's hook may have dropped it at once
            self._add(flat, index, grad)
            param.grad = mark
            self._partial(unit)

    def _take_fresh(self, unit: Unit, flat: Flat, grads: dict[int, Tensor]) -> None:
        pieces = self.local(flat).split_with_sizes(flat.layout.piece_sizes)
        slots = flat.layout.slots
        torch._foreach_copy_(
            [pieces[2 * index + 1] for index in grads], [slots[index].flatten(grad) for index, grad in grads.items()]
        )
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
