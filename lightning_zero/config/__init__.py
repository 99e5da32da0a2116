"""Configuration: one schema behind every door."""

from lightning_zero.config.deepspeed import Given, Translation
from lightning_zero.config.schema import OffloadConfig, ZeroConfig
from lightning_zero.config.settings import Settings, settings_from
from lightning_zero.config.signature import with_settings
from lightning_zero.config.training import LossScaleConfig, TrainingConfig

__all__ = [
    "Given",
    "LossScaleConfig",
    "OffloadConfig",
    "Settings",
    "TrainingConfig",
    "Translation",
    "ZeroConfig",
    "settings_from",
    "with_settings",
]
