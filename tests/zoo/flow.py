"""Models by what runs: blocks that are reused, skipped, recomputed, or run with other hooks on saved tensors."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zoo.base import DIM, Batch, Block, Blocks
from zoo.layers import Scales


class Reused(Blocks):
    """Blocks that run several times in one forward."""

    def body(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 2, 1):
            x = self.blocks[index](x)
        return x


class Unused(Blocks):
    """A block that nobody calls and a parameter that nobody reads: they must not even decay."""

    unused = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].ghost = nn.Parameter(torch.ones(DIM))

    def body(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](x))


class Branchy(Blocks):
    """Ranks take different branches in the root unit."""

    unused = True

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.rare = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def loss(self, batch: Batch) -> Tensor:
        x = self(batch.x)
        x = self.odd(x) if batch.rank % 2 else self.even(x)
        return F.mse_loss(self.rare(x) if batch.rank == 0 and batch.step % 2 else x, batch.y)


class Alternating(Blocks):
    """All ranks skip the same block, another one in each step."""

    unused = True

    def loss(self, batch: Batch) -> Tensor:
        x = self.stem(batch.x)
        for index, block in enumerate(self.blocks):
            x = block(x) if index != batch.step % 3 else x
        return F.mse_loss(self.head(x), batch.y)


class NoGradBlock(Blocks):
    """A block that runs without gradients, as a feature extractor does."""

    unused = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.blocks[0](x)
        return self.head(self.blocks[2](self.stem(features)))


class Siamese(Blocks):
    """Several passes, one of them without gradients, before one backward."""

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = self(batch.y)
        return F.mse_loss(self(batch.x), target) + F.mse_loss(self(-batch.x), batch.y)


class Experts(nn.Module):
    """Each row goes to one of four experts: which of them run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index in choice.unique().tolist():
            rows = choice == index
            out[rows] = self.experts[index](x[rows])
        return x + out * weight[:, None]


class MixtureOfExperts(Blocks):
    config = {"leaf_classes": ("Experts",)}
    unused = True
    block = Experts


class Checkpointed(Blocks):
    """A part of each block is recomputed in backward."""

    class block(Block):
        reentrant = False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Blocks):
    """The same, with a backward inside the backward."""

    class block(Checkpointed.block):
        reentrant = True


class CheckpointedBlocks(Blocks):
    """Whole blocks are recomputed in backward."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedBlocksReentrant(CheckpointedBlocks):
    reentrant = True


class LayeredBlock(nn.Module):
    """Several layers, and a little weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class CheckpointedLayers(CheckpointedBlocks):
    """What is recomputed is several units where the block is much of the model."""

    block = LayeredBlock


class NestedCheckpoint(Blocks):
    """Recomputed blocks inside a recomputed body."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        inner = partial(CheckpointedBlocks.body, self)
        return checkpoint(inner, x, use_reentrant=self.reentrant)


class NestedCheckpointReentrant(NestedCheckpoint):
    reentrant = True


class ReusedReentrant(Blocks):
    """One block recomputed twice: its gradients come in two separate backwards."""

    not_for_ddp = "marks a parameter ready twice"
    late_gradients = True

    def body(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 2):
            x = checkpoint(self.blocks[index], x, use_reentrant=True)
        return x


class SelectiveCheckpoint(Blocks):
    """Matrix products are kept, all else is recomputed."""

    def body(self, x: Tensor) -> Tensor:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


class SaveOnCpu(Blocks):
    """Saved tensors, weights among them, are copied away."""

    def body(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().body(x)


class OffloadedActivations(Scales):
    """Hooks on saved tensors that hand parameters through, as those of torchtune and trl do."""

    def loss(self, batch: Batch) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, nn.Parameter) else tensor.clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            return super().loss(batch)


class Dropout(Blocks):
    """Random numbers, drawn again in the recomputation."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda t: F.dropout(Block.forward(self, t), 0.3), x, use_reentrant=False)
