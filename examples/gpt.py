"""A byte-level GPT as a plain LightningModule: nothing in it knows about ZeRO."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, both with a pre-norm and a residual."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp_norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(LightningModule):
    """Predicts the next byte from up to ``sequence_length`` bytes before it."""

    def __init__(
        self,
        dim: int = 192,
        depth: int = 3,
        num_heads: int = 3,
        sequence_length: int = 128,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        warmup: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="optimizer")
        self.make_optimizer = optimizer
        self.bytes, self.positions = nn.Embedding(256, dim), nn.Embedding(sequence_length, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, ``(batch, length, 256)``, for byte values ``(batch, length)`` of dtype int64."""
        x = self.bytes(tokens) + self.positions.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_loss_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def loss(self, batch: Tensor) -> Tensor:
        """Nats per byte, of the bytes of ``batch``, ``(batch, length + 1)``, after the first."""
        inputs, targets = batch[:, :-1].long(), batch[:, 1:].long()
        return F.cross_entropy(self(inputs).flatten(0, 1).float(), targets.flatten())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Weight decay for matrices only; a linear warm-up for a part ``warmup`` of all steps, then half a cosine."""
        matrices = [p for p in self.parameters() if p.ndim >= 2]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        optimizer = self.make_optimizer([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
        total = self.trainer.estimated_stepping_batches

        def factor(step: int) -> float:
            cosine = 0.51 + 0.5 * math.cos(math.pi * min(step / total, 1))
            return min((step + 1) / (self.hparams.warmup * total), cosine)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: bytes, num_bytes: int, temperature: float = 0.7) -> str:
        """Continue ``prompt`` by ``num_bytes`` sampled bytes; parameters must be whole, as before and after a fit."""
        tokens = torch.tensor([list(prompt)], device=self.device)
        random = torch.Generator(self.device).manual_seed(0)
        for _ in range(num_bytes):
            logits = self(tokens[:, -self.hparams.sequence_length :])[0, -1].float()
            nxt = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=random)
            tokens = torch.cat([tokens, nxt[None]], dim=1)
        return bytes(tokens[0].tolist()).decode("utf-8", errors="replace")
