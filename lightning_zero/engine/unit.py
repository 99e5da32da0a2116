"""A unit: parameters that are gathered, reduced and freed together."""

from collections.abc import Sequence
from enum import Enum

from lightning_zero.engine.flat import Flat
from lightning_zero.engine.grouping import UnitSpec
from lightning_zero.engine.lanes import Handle
from lightning_zero.engine.life import LEGAL, GradState, ParamState


class Unit:
    """Flats that live together. All changes of state go through :meth:`move` and :meth:`move_grad`."""

    def __init__(self, index: int, spec: UnitSpec, flats: Sequence[Flat], sharded: bool) -> None:
        self.index, self.name = index, spec.name or "(root)"
        self.modules, self.is_root = spec.modules, spec.is_root
        self.flats = list(flats)
        self.sharded = sharded
        self.state = ParamState.UNSHARDED
        self.grad_state = GradState.EMPTY
        self.handles: list[Handle] = []
        self.active = 0
        self.nbytes = sum(flat.layout.numel * flat.dtypes.sum.itemsize for flat in flats)
        """Of the unit's gradients, in the sum's dtype."""
        self.awaited: set[int] = set()

    def keep_writes(self) -> None:
        """Take what the user wrote into whole parameters over into the shards."""
        for flat in self.flats:
            if flat.written or flat.escaped:
                flat.keep_writes()

    def move(self, state: ParamState) -> None:
        """Change the parameters' state."""
        self._check(self.state, state)
        self.state = state

    def move_grad(self, state: GradState) -> None:
        """Change the gradients' state."""
        if state is not self.grad_state:
            self._check(self.grad_state, state)
            self.grad_state = state

    def _check(self, old: Enum, new: Enum) -> None:
        if (old, new) not in LEGAL:
            raise AssertionError(f"Unit {self.name!r} cannot go from {old.value} to {new.value}.")
