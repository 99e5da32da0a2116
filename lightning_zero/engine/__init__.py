"""The ZeRO engine. Knows torch and torch.distributed, and nothing of Lightning.

The life of a unit
==================

A module is cut into **units** (``grouping``, ``build``). A unit's parameters are views of flat buffers (``flat``,
``layout``, ``dtypes``) whose memory comes and goes (``buffer``); each rank keeps 1/N of it, its **shard**, with the
master weights. The **stage** (``stages``) says what is sharded.

1. *pre-forward* (``hooks``): the unit is unsharded (``residency``), and the next one in the recorded order (``trace``)
   is gathered ahead.
2. *post-forward*: it is resharded; what the user has written to it is kept (``written``). What autograd saved of it is
   a place, not bytes (``net``); a Python read of a parameter that is not there meets the guard (``guard``).
3. *pre-backward*: autograd asks for a saved weight, and the unit is unsharded, the one before it gathered ahead.
4. *gradients ready* (``collector``, ``reuse``): gradients are copied into the unit's flat gradient; when the last one
   is in, the reduction starts (``reducer``), in an order that is the same on all ranks (``order``).
5. *backward end*: what is left is reduced, ranks agree on which parameters have a gradient, and ``p.grad`` stands for
   it (``gradient``).
6. *step* (``clipping``, ``nonfinite``, ``norm``; ``optim``, ``elementwise``): gradients are checked, unscaled and
   clipped, and the user's optimizer runs on the shards; whole parameters are gathered again.

Optimizer state, master weights and shards can rest in a **tier** (``tiers``, ``nvme``, ``offload``): a unit is then
gathered from there, and the step runs window by window (``swapped``).

A module on ``meta`` is filled unit by unit as it is cut (``materialize``). What a file holds of a parameter
(``elsewhere``) is read then, by each rank its own part (``expected``).

All of it is told to whoever listens (``events``).

``comm`` (with ``lanes``, ``connections``, ``peers`` and ``outside``) is the only file that talks to other ranks;
``state`` turns shards into whole values and back.
"""

from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.elementwise import check_elementwise
from lightning_zero.engine.engine import Engine
from lightning_zero.engine.gathered import gathered
from lightning_zero.engine.peers import PeerError
from lightning_zero.engine.tiers import Tier, TierArray, TierError, Transfer

__all__ = [
    "Communicator",
    "Engine",
    "PeerError",
    "Tier",
    "TierArray",
    "TierError",
    "Transfer",
    "check_elementwise",
    "gathered",
]
