"""The gradients of one optimizer, as this rank's parts of reduced shards."""

from collections.abc import Iterator, Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.gradient import ShardedGrad
from lightning_zero.engine.norm import total_norm

Homes = Mapping[int, tuple[Flat, int]]
"""By the id of a parameter, its flat buffer and its index there."""


class Gradients:
    """What of an optimizer's parameters has a gradient; what the user has written to one is taken over.

    Attributes:
        places: by flat buffer, the indices of its parameters with a gradient.

    Raises:
        RuntimeError: a gradient is not reduced yet.
    """

    def __init__(self, optimizer: Optimizer, homes: Homes) -> None:
        self.places: dict[Flat, list[int]] = {}
        self._foreign: list[Tensor] = []  # of parameters that the engine does not know
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if (home := homes.get(id(param))) is None:
                    self._foreign.append(param.grad.detach())
                    continue
                flat, index = home
                _settle(flat, index, param)
                self.places.setdefault(flat, []).append(index)

    def norm(self, comm: Communicator, norm_type: float = 2.0) -> Tensor:
        """The global norm, 0-dim fp32. Collective."""
        shared = (own for flat, _, own in self.by_parameter() if not flat.owns_all)
        private = [own for flat, _, own in self.by_parameter(only_whole=True)]
        return total_norm(shared, [*self._foreign, *private], comm, norm_type)

    def by_parameter(self, only_whole: bool = False) -> Iterator[tuple[Flat, int, Tensor]]:
        """Flat buffer, index and this rank's part of each gradient, to be read before the next one is asked for.

        Args:
            only_whole: of those alone that every rank has whole.
        """
        for flat, indices in self.places.items():
            if flat.owns_all or not only_whole:
                with flat.mean_gradient(writes=False) as reduced:
                    parts = flat.own_parts(reduced)
                    yield from ((flat, index, parts[index]) for index in indices)

    def all(self, writes: bool) -> Iterator[list[Tensor]]:
        """This rank's parts, a flat buffer's at a time; what is written to them is kept if ``writes`` is set."""
        yield self._foreign
        for flat, indices in self.places.items():
            with flat.mean_gradient(writes) as reduced:
                parts = flat.own_parts(reduced)
                yield [parts[index] for index in indices]


def _settle(flat: Flat, index: int, param: nn.Parameter) -> None:
    """What the user has written to a gradient, or put in its place, goes into the shard."""
    grad, mark = param.grad, flat.marks[index]
    if grad is not mark and not isinstance(grad, ShardedGrad):
        flat.adopt_gradient(index)
    if index in flat.noted:
        mark.flush()
    if not flat.is_reduced or flat.in_local[index]:
        raise RuntimeError(
            f"The gradient of {flat.names[index]!r} is not reduced yet: the accumulation window has not ended. "
            "Step after a backward outside block_backward_sync (no_sync)."
        )
