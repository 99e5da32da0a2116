"""Configuration: one schema behind every door."""

from lightning_zero.config.schema import OffloadConfig, ZeroConfig

__all__ = ["OffloadConfig", "ZeroConfig"]
