"""From the configuration to tiers: where state, gradients, master weights and parameters of each unit rest."""

import socket
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.engine.buffer import Pool
from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.dtypes import Dtypes
from lightning_zero.engine.nvme import NvmeTier
from lightning_zero.engine.rested import Rests, Writes
from lightning_zero.engine.swapped import Swap
from lightning_zero.engine.tiers import HostTier, Tier

WINDOW = 2**20
"""Elements of optimizer state that are brought in at a time."""


class Offload:
    """The tiers of an engine. Collective.

    Raises:
        TierError: one cannot be used.
        TypeError: what makes the user's own tier has made something else.
    """

    def __init__(self, config: ZeroConfig, comm: Communicator, pool: Pool) -> None:
        where = config.offload_optimizer, config.offload_params
        on_host = any(_is_elsewhere(place, comm.device) for place in where)
        ranks = _ranks_here(comm) if on_host else 1
        self.optimizer, self.params = (make_tier(place, comm.device, ranks) for place in where)
        self.host = HostTier(ranks=ranks)
        self.swap = Swap(WINDOW, config.offload_optimizer.buffer_count)
        self._ratio = config.offload_optimizer.ratio
        self.writes = Writes(pool)

    def rests(self, sizes: Sequence[int], sharded: Sequence[bool]) -> list[Rests]:
        """The tiers of units with so many elements each: ``ratio`` of all elements rest in the optimizer's, evenly
        spread over the module; units whose parameters are ``sharded`` rest in the parameters'.
        """
        found = []
        seen = inside = 0
        for size, shards in zip(sizes, sharded, strict=True):
            seen += size
            takes = self._ratio > 0 and inside + size / 2 <= self._ratio * seen
            inside += size * takes
            tiers = self.optimizer if takes else None, self.params if shards else None
            found.append(Rests(*tiers, self.host, self.writes))
        return found

    def reserve(self, shards: Iterable[tuple[Rests, int, Dtypes, bool]]) -> None:
        """Make room for all but the optimizers' state.

        Args:
            shards: tiers, elements, dtypes, and whether they are trained.

        Raises:
            TierError: there is none.
        """
        needs: Counter[Tier] = Counter()
        for rests, numel, dtypes, trained in shards:
            rounds = dtypes.compute != dtypes.master
            if rests.optimizer is not None:
                needs[rests.optimizer] += numel * (trained * dtypes.sum.itemsize + rounds * dtypes.master.itemsize)
            if rests.params is not None and (rests.optimizer is not None or not rounds):
                needs[rests.params] += numel * dtypes.compute.itemsize
        for tier, nbytes in needs.items():
            tier.reserve(nbytes, "parameters, master weights and gradients")

    @property
    def tiers(self) -> list[Tier]:
        """All of them."""
        return [tier for tier in (self.optimizer, self.params, self.host) if tier is not None]

    def nbytes(self) -> dict[str, int]:
        """Bytes of this rank in host memory and on disk, by what asked for them."""
        tiers = {"offload_optimizer": self.optimizer, "offload_params": self.params}
        found = {name: tier.nbytes() for name, tier in tiers.items() if tier is not None}
        if self.params is not None:
            found["offload_optimizer"] = found.get("offload_optimizer", 0) + self.host.nbytes()
        return found


def make_tier(config: OffloadConfig, device: torch.device, ranks: int = 1) -> Tier | None:
    """The tier that a configuration names; None for the device itself, also where that is the host.

    Raises:
        TierError: the tier cannot be used.
        TypeError: what makes the user's own tier has made something else.
    """
    if not _is_elsewhere(config, device):
        return None
    if callable(config.device):
        tier = config.device()
        if not isinstance(tier, Tier):
            raise TypeError(
                f"device={config.device!r} has made {type(tier).__name__}, which is no lightning_zero.Tier."
            )
        return tier
    if config.device == "cpu":
        return HostTier(config.pin_memory and device.type == "cuda", ranks)
    return NvmeTier(str(config.nvme_path), config.block_size, config.queue_depth * config.threads)


def _is_elsewhere(config: OffloadConfig, device: torch.device) -> bool:
    return callable(config.device) or config.device == "nvme" or (config.device == "cpu" and device.type != "cpu")


def _ranks_here(comm: Communicator) -> int:
    """How many ranks this host has."""
    return comm.collect(socket.gethostname()).count(socket.gethostname())
