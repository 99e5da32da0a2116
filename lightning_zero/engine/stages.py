"""The stages of ZeRO, as rows of one table. There is no other place where a stage is told from another."""

from dataclasses import dataclass, replace
from typing import Literal

ReduceAt = Literal["window", "micro_batch"]


@dataclass(frozen=True)
class Stage:
    """What stays sharded between steps, and when gradients are reduced."""

    shard_optimizer: bool
    """Master weights, optimizer state and the reduced gradients: 1/N on each rank (ZeRO paper, P_os)."""

    reduce_at: ReduceAt
    """``window``: micro-batches are summed locally and reduced once, at the accumulation window's end (stage 1);
    ``micro_batch``: every backward reduces into the shard (P_os+g)."""

    shard_parameters: bool
    """Parameters are gathered for forward and for backward, unit by unit (P_os+g+p)."""


STAGES = {
    0: Stage(shard_optimizer=False, reduce_at="window", shard_parameters=False),
    1: Stage(shard_optimizer=True, reduce_at="window", shard_parameters=False),
    2: Stage(shard_optimizer=True, reduce_at="micro_batch", shard_parameters=False),
    3: Stage(shard_optimizer=True, reduce_at="micro_batch", shard_parameters=True),
}


def stage_row(number: int, reduce_at: ReduceAt | None) -> Stage:
    """The row of a stage, with the user's own ``reduce_at`` if there is one."""
    row = STAGES[number]
    return row if reduce_at is None else replace(row, reduce_at=reduce_at)
