"""ZeRO (stages 1, 2, 3) for PyTorch Lightning: ``Trainer(strategy="zero3")`` on an unmodified LightningModule.

Importing this package registers the strategies ``zero1``, ``zero2`` and ``zero3`` with Lightning, and those that
offload: ``zero1_offload``, ``zero2_offload``, ``zero3_offload`` and ``zero3_nvme``.
"""

__version__ = "0.1.0"

from lightning_zero.callbacks import ZeroMonitor
from lightning_zero.checkpoint.load import load_from_checkpoint
from lightning_zero.checkpoint.safetensors_read import load_safetensors
from lightning_zero.checkpoint.safetensors_write import save_safetensors
from lightning_zero.config import LossScaleConfig, OffloadConfig, TrainingConfig, ZeroConfig
from lightning_zero.engine import PeerError, Tier, TierArray, TierError, Transfer, gathered
from lightning_zero.registry import register_everywhere
from lightning_zero.strategy import ZeroStrategy

__all__ = [
    "LossScaleConfig",
    "OffloadConfig",
    "PeerError",
    "Tier",
    "TierArray",
    "TierError",
    "TrainingConfig",
    "Transfer",
    "ZeroConfig",
    "ZeroMonitor",
    "ZeroStrategy",
    "__version__",
    "gathered",
    "load_from_checkpoint",
    "load_safetensors",
    "save_safetensors",
]

register_everywhere()
