"""The smallest complete use: an unmodified LightningModule, trained with ZeRO stage 3 on two CPU ranks.

Run it with

    python examples/minimal.py
"""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero  # noqa: F401  registers zero1, zero2 and zero3


class Regression(LightningModule):
    """Learns the sum of eight numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    torch.manual_seed(0)
    x = torch.randn(1024, 8)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=32)
    model = Regression()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy="zero3", max_epochs=10, logger=False, enable_checkpointing=False
    )
    trainer.fit(model, data)
    if trainer.is_global_zero:
        print(f"error after training: {F.mse_loss(model.layers(x), x.sum(1, keepdim=True)):.4f}")
