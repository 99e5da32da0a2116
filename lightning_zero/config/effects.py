"""Settings that change nothing where they are given."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from lightning_zero.config.schema import OffloadConfig, ZeroConfig
from lightning_zero.config.training import TrainingConfig

_STAGE_3 = ("persistence_threshold", "persistence_limit", "prefetch", "saved_tensors_hooks")
_DISK = ("nvme_path", "block_size", "queue_depth", "threads")
_OPTIMIZER = ("buffer_count", "ratio")


def without_effect(zero: ZeroConfig, training: TrainingConfig, given: Mapping[str, Any]) -> list[str]:
    """A sentence for each of the settings ``given`` that differs from its default and changes nothing."""
    default = ZeroConfig()
    said = []
    for name in _STAGE_3:
        if name in given and zero.stage < 3 and getattr(zero, name) != getattr(default, name):
            said.append(f"{name}={getattr(zero, name)!r} has no effect at stage {zero.stage}, only at stage 3.")
    if zero.persistence_limit is not None and not zero.persistence_threshold:
        said.append("persistence_limit has no effect without persistence_threshold.")
    if (
        training.loss_scale is not None
        and "loss_scale" in given
        and training.precision not in (None, "16-mixed", "16-true")
    ):
        said.append(f"loss_scale has no effect with precision={training.precision!r}, only with 16-mixed and 16-true.")
    if "save_16bit_weights" in given and training.save_16bit_weights and training.state_dict_type == "full":
        said.append("save_16bit_weights has no effect with state_dict_type='full': the file has whole weights.")
    for name in ("offload_optimizer", "offload_params"):
        said += _of_offload(name, getattr(zero, name)) if name in given else []
    return said


def _of_offload(name: str, config: OffloadConfig) -> Iterator[str]:
    default = OffloadConfig()
    changed = [each.name for each in fields(config) if getattr(config, each.name) != getattr(default, each.name)]
    for setting in changed:
        value = f"{name}: {setting}={getattr(config, setting)!r}"
        if setting in _DISK and config.device != "nvme":
            yield f"{value} has no effect with device={config.device!r}, only with 'nvme'."
        elif setting in _OPTIMIZER and name != "offload_optimizer":
            yield f"{value} has no effect, only in offload_optimizer."
        elif setting != "device" and config.device == "none":
            yield f"{value} has no effect without a device."
        elif setting == "pin_memory" and config.device != "cpu":
            yield f"{value} has no effect with device={config.device!r}, only with 'cpu'."
