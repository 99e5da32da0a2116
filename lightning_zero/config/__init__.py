"""Configuration: one schema behind every door."""

from lightning_zero.config.schema import ZeroConfig

__all__ = ["ZeroConfig"]
