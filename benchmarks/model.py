"""The models and the data, the same for every strategy; only FSDP2 needs a method of its own, ``configure_model``.

Nothing is shared with the examples: figures must not change because a demo does.
"""

import torch
import torch.nn.functional as F
from cases import Settings
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import Dataset

BYTES = 256
NORMS = 50  # layers of a block of Norms, with two parameters each


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, both with a pre-norm and a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = max(1, dim // 64)
        self.norm1, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm2, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Logits of the next byte, ``(batch, seq, 256)``, for bytes ``(batch, seq)`` of dtype int64."""

    def __init__(self, dim: int, layers: int, seq: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(BYTES, dim), nn.Embedding(seq, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, BYTES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Norms(nn.Module):
    """Nothing but small parameters: in each of ``layers`` blocks 50 layer norms, so 100 parameters of ``dim`` elements.

    The logits are those of ``dim`` classes, which are the bytes modulo ``dim``.
    """

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.dim = dim
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.LayerNorm(dim) for _ in range(NORMS))) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.one_hot(tokens % self.dim, self.dim).to(self.blocks[0][0].weight.dtype)
        for block in self.blocks:
            x = block(x)
        return x


class Net(LightningModule):
    """Trains the model of a case with AdamW; keeps the loss of the last micro-batch.

    With ``fully_sharded``, every block is sharded by ``fully_shard``, as ``ModelParallelStrategy`` wants it.
    """

    def __init__(self, settings: Settings, fully_sharded: bool) -> None:
        super().__init__()
        s = settings
        self.model = Norms(s.dim, s.layers) if s.case == "tiny" else GPT(s.dim, s.layers, s.seq)
        self.fully_sharded, self.precision = fully_sharded, s.precision
        self.loss = torch.tensor(0.0)

    def configure_model(self) -> None:
        if not self.fully_sharded:
            return
        self.fully_sharded = False  # Lightning may call this again
        policy = MixedPrecisionPolicy()
        if self.precision == "bf16-mixed":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*self.model.blocks, self.model):
            fully_shard(part, mesh=self.device_mesh["data_parallel"], mp_policy=policy)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self.model(batch[:, :-1]).flatten(0, 1).float()
        loss = F.cross_entropy(logits, batch[:, 1:].flatten() % logits.size(-1))
        self.loss = loss.detach()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


class Bytes(Dataset[Tensor]):
    """Random bytes, ``(seq + 1,)`` of dtype int64, each sample from a seed of its own."""

    def __init__(self, samples: int, seq: int) -> None:
        self.samples, self.seq = samples, seq

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(BYTES, (self.seq + 1,), generator=torch.Generator().manual_seed(index))
