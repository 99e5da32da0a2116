"""Trains a GPT on one batch of text, in this process, and measures what that takes."""

import logging
import resource
import sys
import time
import warnings
from dataclasses import dataclass

import torch
from gpt import GPT
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import TQDMProgressBar
from text import language_reference
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy

LEARNING_RATE = 3e-5
UNIT_BYTES = 32 * 2**20


@dataclass
class Run:
    """A training: sizes, most resident memory and bytes on disk, and of each step the loss and the seconds."""

    layers: int
    parameters: int
    layer_parameters: int
    peak: int
    disk: int
    losses: list[float]
    seconds: list[float]


class Measured(LightningModule):
    """A GPT that is built when the Trainer asks for it, and measures its training."""

    def __init__(self, layers: int, width: int, length: int, device: str) -> None:
        super().__init__()
        self.sizes = {"dim": width, "depth": layers, "num_heads": width // 64, "sequence_length": length}
        self.built_on = device
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def configure_model(self) -> None:
        """On ``meta`` it takes no memory; the strategy fills it unit by unit."""
        with torch.device(self.built_on):
            self.gpt = GPT(**self.sizes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.gpt.loss(batch)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.began = time.perf_counter()

    def on_train_batch_end(self, outputs: dict[str, Tensor], batch: Tensor, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].item())
        self.seconds.append(time.perf_counter() - self.began)

    def on_train_end(self) -> None:
        """Measure here: at the end of a run the strategy makes parameters whole again if there is memory for them."""
        engine = getattr(self.trainer.strategy, "engine", None)
        memory = {} if engine is None else engine.memory()
        self.run = Run(
            layers=self.sizes["depth"],
            parameters=sum(p.numel() for p in self.parameters()),
            layer_parameters=sum(p.numel() for p in self.gpt.blocks[0].parameters()),
            peak=peak_memory(),
            disk=sum(nbytes for kind, nbytes in memory.items() if kind.startswith("offload_")),
            losses=self.losses,
            seconds=self.seconds,
        )


def train_on_one_batch(layers: int, width: int, length: int, steps: int, folder: str | None) -> Run:
    """Take ``steps`` optimizer steps on ``length`` bytes; with a folder as ``zero3_nvme`` does, else plainly."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*(does not have many workers|treespec|stays sharded)")
    seed_everything(0, verbose=False)
    model = Measured(layers, width, length, "cpu" if folder is None else "meta")
    text = torch.tensor([[*language_reference()[: length + 1]]], dtype=torch.uint8)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        strategy="auto" if folder is None else on_disk(folder),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        callbacks=[TQDMProgressBar()],
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader([text] * steps, batch_size=None))
    return model.run


def on_disk(folder: str) -> ZeroStrategy:
    """``zero3_nvme`` with a folder of one's own, and with small units, of which a few are in memory."""
    disk = {"device": "nvme", "nvme_path": folder}
    return ZeroStrategy(offload_optimizer=disk, offload_params=disk, max_unit_bytes=UNIT_BYTES)


def peak_memory() -> int:
    """The most bytes that were resident since this process began."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
