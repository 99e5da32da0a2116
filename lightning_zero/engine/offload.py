"""From the configuration to tiers."""

import torch

from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.engine.nvme import NvmeTier
from lightning_zero.engine.swapped import Swap
from lightning_zero.engine.tiers import HostTier, Tier

WINDOW = 2**20
"""Elements of optimizer state that are brought in at a time."""


def make_tier(config: OffloadConfig, device: torch.device) -> Tier | None:
    """The tier that a configuration names; None for the device itself, also where that is the host.

    Raises:
        TierError: the tier cannot be used.
    """
    if not _is_elsewhere(config, device):
        return None
    if config.device == "cpu":
        return HostTier(config.pin_memory and device.type == "cuda")
    return NvmeTier(str(config.nvme_path), config.block_size, config.queue_depth, config.threads)


def make_swap(config: ZeroConfig, device: torch.device) -> Swap | None:
    """Where an optimizer's state rests; None: on the device.

    Where the weights that it steps on rest elsewhere, it is in host memory at least: there the step runs.
    """
    tier = make_tier(config.offload_optimizer, device)
    if tier is None and _is_elsewhere(config.offload_params, device):
        tier = HostTier(pin=False)
    return None if tier is None else Swap(tier, WINDOW, config.offload_optimizer.buffer_count)


def _is_elsewhere(config: OffloadConfig, device: torch.device) -> bool:
    return config.device == "nvme" or (config.device == "cpu" and device.type != "cpu")
