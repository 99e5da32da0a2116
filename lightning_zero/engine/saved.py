"""What is saved of an engine and loaded into it: whole, or each rank its part."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine import state
from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.elsewhere import OwnPart
from lightning_zero.engine.life import ParamState
from lightning_zero.engine.optim import ShardedOptimizer
from lightning_zero.engine.residency import Residency
from lightning_zero.engine.unit import Unit


class StateAccess(ABC):
    """The engine's part in checkpoints."""

    units: Sequence[Unit]
    residency: Residency
    comm: Communicator

    @abstractmethod
    def sharded(self, optimizer: Optimizer) -> ShardedOptimizer:
        """The sharded side of a user's optimizer."""

    def named_full_parameters(self, dst: int = 0) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
        """Every parameter and its whole master value, on the CPU in the user's dtype; None on ranks other than ``dst``.
        Collective.
        """
        for unit in self.units:
            self.residency.arrive(unit)
            for flat in unit.flats:
                yield from state.full_parameters(flat, dst, unit.state is ParamState.UNSHARDED)

    def own_parts(self) -> Iterator[tuple[nn.Parameter, OwnPart, OwnPart | None]]:
        """Every parameter with this rank's part of it, in the user's dtype; and in the masters', if that is another."""
        for unit in self.units:
            self.residency.arrive(unit)
            for flat in unit.flats:
                yield from state.own_parts(flat, unit.state is ParamState.UNSHARDED)

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Its state by parameters' names, this rank's part of it. Collective."""
        return state.sharded_optimizer_state(self.sharded(optimizer), self.comm)

    def load_parameters(self, values: Mapping[int, Tensor]) -> None:
        """Overwrite parameters: ``id(param)`` -> whole tensor, the same on all ranks. Collective."""
        for unit in self.units:
            self.residency.arrive(unit)
            for flat in unit.flats:
                state.load(flat, values, unit.state is ParamState.UNSHARDED)

    def optimizer_state(self, optimizer: Optimizer, dst: int = 0) -> dict[str, Any] | None:
        """What ``optimizer.state_dict()`` would be without sharding, on rank ``dst``; None elsewhere. Collective."""
        return state.optimizer_state(self.sharded(optimizer), self.comm, dst)

    def load_optimizer_state(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`optimizer_state` or ``optimizer.state_dict()`` gave, the same on all ranks.

        Raises:
            ValueError: groups or their sizes differ from the optimizer's.
        """
        state.load_optimizer_state(self.sharded(optimizer), state_dict)
