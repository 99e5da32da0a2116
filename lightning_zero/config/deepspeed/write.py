"""Writes settings as DeepSpeed's JSON."""

import json
from dataclasses import asdict, fields
from typing import Any

from lightning_zero.config.deepspeed.rules import OWN
from lightning_zero.config.deepspeed.translate import translate
from lightning_zero.config.schema import OffloadConfig, ZeroConfig
from lightning_zero.config.training import TrainingConfig


def to_deepspeed(zero: ZeroConfig, training: TrainingConfig) -> dict[str, Any]:
    """A DeepSpeed configuration that reads as these settings again.

    What DeepSpeed has no key for goes into a block ``lightning_zero``, which DeepSpeed leaves aside.

    Raises:
        ValueError: a setting is a function or a class, which JSON has no words for; the message names it.
    """
    out = _keys(zero, training)
    wanted = {**_changed(zero), **_changed(training)}
    back = translate(out).settings
    read = {
        **_changed(ZeroConfig(**_part(back, ZeroConfig))),
        **_changed(TrainingConfig(**_part(back, TrainingConfig))),
    }
    defaults = {**asdict(ZeroConfig()), **asdict(TrainingConfig())}
    own = {
        name: wanted.get(name, defaults[name])
        for name in {**wanted, **read}
        if wanted.get(name, defaults[name]) != read.get(name, defaults[name])
    }
    if own:
        out[OWN] = own
    for name, value in wanted.items():
        try:
            json.dumps(value)
        except TypeError:
            raise ValueError(f"{name}={value!r} cannot be written into a JSON file.") from None
    return out


def _part(settings: dict[str, Any], kind: type) -> dict[str, Any]:
    known = {item.name for item in fields(kind)}
    return {name: value for name, value in settings.items() if name in known}


def _changed(config: ZeroConfig | TrainingConfig) -> dict[str, Any]:
    """What differs from the defaults, in JSON's terms."""
    values, defaults = asdict(config), asdict(type(config)())
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if value != defaults[name]
    }


def _keys(zero: ZeroConfig, training: TrainingConfig) -> dict[str, Any]:
    """What DeepSpeed has keys for."""
    block: dict[str, Any] = {"stage": zero.stage}
    for name, config in (("offload_optimizer", zero.offload_optimizer), ("offload_param", zero.offload_params)):
        if config.device in ("cpu", "nvme"):
            block[name] = _offload(name, config)
    if zero.stage == 3:
        block["stage3_param_persistence_threshold"] = zero.persistence_threshold
        if zero.persistence_limit is not None:
            block["stage3_model_persistence_threshold"] = zero.persistence_limit
    if training.save_16bit_weights:
        block["stage3_gather_16bit_weights_on_model_save"] = True
    if zero.leaf_classes:
        block["leaf_module"] = {"classes": list(zero.leaf_classes)}
    out: dict[str, Any] = {"zero_optimization": block, **_precision(training)}
    disk = next((part for part in (zero.offload_optimizer, zero.offload_params) if part.device == "nvme"), None)
    if disk is not None:
        out["aio"] = {
            "block_size": disk.block_size,
            "queue_depth": disk.queue_depth,
            "intra_op_parallelism": disk.threads,
        }
    said = {
        "train_batch_size": training.train_batch_size,
        "train_micro_batch_size_per_gpu": training.micro_batch_size,
        "gradient_accumulation_steps": training.gradient_accumulation_steps,
        "gradient_clipping": training.gradient_clipping,
        "optimizer": training.optimizer,
        "scheduler": training.scheduler,
    }
    out |= {key: value for key, value in said.items() if value is not None and not callable(value)}
    if training.monitor:
        out["wall_clock_breakdown"] = True
    return out


def _offload(name: str, config: OffloadConfig) -> dict[str, Any]:
    block: dict[str, Any] = {"device": config.device, "pin_memory": config.pin_memory}
    if config.nvme_path:
        block["nvme_path"] = config.nvme_path
    if name == "offload_optimizer":
        block |= {"buffer_count": config.buffer_count, "ratio": config.ratio}
    return block


def _precision(training: TrainingConfig) -> dict[str, Any]:
    scale = {} if training.loss_scale is None else asdict(training.loss_scale)
    if training.precision == "16-true":
        return {"fp16": {"enabled": True, **scale}}
    if training.precision == "bf16-true":
        return {"bf16": {"enabled": True}}
    if training.precision in ("16-mixed", "bf16-mixed"):
        kind = {"16-mixed": "float16", "bf16-mixed": "bfloat16"}[training.precision]
        return {"torch_autocast": {"enabled": True, "dtype": kind}, **({"fp16": scale} if scale else {})}
    return {}
