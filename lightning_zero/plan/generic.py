"""Dry runs of a model that is known by its size: a transformer of identical blocks."""

from dataclasses import dataclass, replace
from functools import partial

import torch

from lightning_zero.config import ZeroConfig
from lightning_zero.plan.account import Account
from lightning_zero.plan.dry_run import Case, Workload, dry_run
from lightning_zero.plan.model import Block, Transformer, inner_size

FEW = 6
"""Blocks of the smaller of two runs that stand for a run of more. The first and the last ones are special, and a
backward needs some until as much is under way to a tier as ever; between them one is like the other, so that the
difference of two runs is what a block adds."""


@dataclass(frozen=True)
class Size:
    """A transformer and its micro-batch of ``batch`` sequences of ``seq`` tokens."""

    parameters: float
    layers: int
    dim: int
    vocabulary: int = 0
    batch: int = 1
    seq: int = 2048
    checkpointed: bool = True

    @property
    def inner(self) -> int:
        """Of the feed-forward networks, to have that many parameters."""
        return inner_size(self.parameters, self.layers, self.dim, self.vocabulary)

    @property
    def block_bytes(self) -> int:
        """Of a block's matrices, in fp32."""
        return 4 * (4 * self.dim * self.dim + 2 * self.dim * self.inner)


def account_of(size: Size, case: Case, only_states: bool = False) -> Account:
    """What a rank takes.

    Of a model of many blocks the engine runs :data:`FEW` and one more, and the difference stands for the others.
    """
    case = replace(case, settings=(("unit_classes", (Block.__name__,)), *case.settings))
    least = dict(case.settings).get("min_unit_bytes", ZeroConfig().min_unit_bytes)
    merges = size.block_bytes < least  # how many blocks are one unit depends on how many there are
    if size.layers <= FEW + 1 or (merges and not only_states):
        return dry_run(partial(_workload, size, size.layers, case), case, only_states)
    few = 1 if only_states else FEW
    less, more = (dry_run(partial(_workload, size, layers, case), case, only_states) for layers in (few, few + 1))
    return less.extended(more, size.layers - few)


def _workload(size: Size, layers: int, case: Case) -> Workload:
    module = Transformer(layers, size.dim, size.inner, size.vocabulary, size.checkpointed)
    tokens = torch.zeros(size.batch, size.seq, dtype=torch.int64, device=case.device)
    optimizer = partial(torch.optim.AdamW, list(module.parameters()), fused=True)
    return Workload(module, optimizer, partial(module, tokens))
