"""Whole parameters on demand."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn


def gathered(module: nn.Module, modifier_rank: int | None = 0) -> AbstractContextManager[None]:
    """Context manager in which the parameters of ``module`` are whole, on all ranks.

    Collective: every rank enters it. Values may be read and changed; at exit those of ``modifier_rank`` win and go back
    into the shards (None: values are only read, nothing is sent back). A module that is not sharded is left as it is.
    """
    for param in module.parameters():
        place = getattr(param, "_zero_place", None)
        if place is not None:
            scope: AbstractContextManager[None] = place.owner.gathered(module, modifier_rank)
            return scope
    return nullcontext()
