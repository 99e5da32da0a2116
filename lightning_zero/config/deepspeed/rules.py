"""What several keys of DeepSpeed's JSON decide together."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning_zero.config.deepspeed.row import Row
from lightning_zero.config.schema import ZeroConfig

OWN = "lightning_zero"
"""The block of keywords of ours that DeepSpeed, which lets unknown keys of the root pass, has none for."""

Z = "zero_optimization."

AUTO: dict[str, tuple[Callable[[int], int], str]] = {
    f"{Z}reduce_bucket_size": (lambda hidden: hidden**2, "hidden size squared"),
    f"{Z}stage3_prefetch_bucket_size": (lambda hidden: int(0.9 * hidden**2), "0.9 of the hidden size squared"),
    f"{Z}stage3_param_persistence_threshold": (lambda hidden: 10 * hidden, "ten times the hidden size"),
}
"""What Hugging Face's "auto" is, of the module's hidden size (``transformers.integrations.deepspeed``)."""

Found = Mapping[str, Any]
Wrong = Iterator[tuple[str, str]]
"""Keys that cannot be used, and why."""

_DEFAULTS = ZeroConfig()


def combine(found: dict[str, Any], rows: Mapping[str, Row], settings: dict[str, Any]) -> list[tuple[str, str]]:
    """Fill in the settings that the keys ask for.

    Args:
        found: values by key.
        rows: what each key is by itself.
        settings: is filled.

    Returns:
        Keys that contradict others, and why.
    """
    given = {key: value for key, value in found.items() if value != "auto"}
    nested: dict[str, dict[str, Any]] = {}
    for key, value in given.items():
        block, dot, name = rows[key].sets.rpartition(".") if key in rows else ("", "", "stage")
        if dot:
            nested.setdefault(block, {})[name] = value
        elif name:
            settings[name] = value
    settings.setdefault("stage", 0)  # as DeepSpeed, where nothing is said
    wrong = [
        *_precision(found, settings),
        *_loss_scale(found, nested, settings),
        *_gradient_dtypes(found, settings),
        *_offload(found, nested, settings),
        *_blocks(found, settings),
    ]
    _sizes(nested.get("elements", {}), settings)
    if any(given.get(key) for key in ("comms_logger.enabled", "wall_clock_breakdown", "memory_breakdown")):
        settings["monitor"] = True
    if given.get(f"{Z}compute_grad_norm") is False and given.get("gradient_clipping"):
        wrong.append((f"{Z}compute_grad_norm", "gradient_clipping needs the norm"))
    return wrong


def _precision(found: Found, settings: dict[str, Any]) -> Wrong:
    names = {"fp16.enabled": "16-true", "bf16.enabled": "bf16-true"}
    chosen = [key for key in (*names, "torch_autocast.enabled") if found.get(key) is True]
    if len(chosen) > 1:
        yield chosen[1], f"{chosen[0]} is true as well: choose one of them"
    elif chosen == ["torch_autocast.enabled"]:
        kind = found.get("torch_autocast.dtype", "bf16")
        if kind == "fp32":
            yield "torch_autocast.dtype", "must be 'bfloat16' or 'float16'"
        settings["precision"] = {"fp16": "16-mixed"}.get(kind, "bf16-mixed")
    elif chosen:
        settings["precision"] = names[chosen[0]]


def _loss_scale(found: Found, nested: Mapping[str, Any], settings: dict[str, Any]) -> Wrong:
    if found.get("fp16.enabled") in (True, "auto") or settings.get("precision") == "16-mixed":
        # what DeepSpeed takes where nothing is said
        settings["loss_scale"] = {"loss_scale_window": 1000, "hysteresis": 2, **nested.get("loss_scale", {})}
        if settings["loss_scale"].get("min_loss_scale") == 0:
            yield "fp16.min_loss_scale", "must be above 0"
    if found.get("bf16.enabled") in (True, "auto") and "bf16.check_grad_overflow" in found:
        settings["nonfinite_gradients"] = "skip" if found["bf16.check_grad_overflow"] else "warn"


def _gradient_dtypes(found: Found, settings: dict[str, Any]) -> Wrong:
    for kind in ("bf16", "fp16"):
        if found.get(f"{kind}.{kind}_master_weights_and_grads"):
            settings |= {"master_dtype": kind, "gradient_dtype": kind}
    states, masters = "bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"
    if found.get(states) and not found.get(masters):
        yield states, f"needs {masters}, as in DeepSpeed"
    if found.get(masters) and not found.get(states):
        yield masters, f"states have the dtype of the masters: set {states}, too"
    summed = found.get("data_types.grad_accum_dtype")
    if summed in ("bf16", "fp16"):
        settings["gradient_dtype"] = summed
    forward = {"bf16-true": "bf16", "16-true": "fp16"}.get(settings.get("precision", ""))
    wire = found.get("communication_data_type")
    if wire in ("bf16", "fp16") and wire not in (forward, settings.get("gradient_dtype")):
        yield (
            "communication_data_type",
            "gradients travel in the dtype of the forward and are summed in fp32; data_types.grad_accum_dtype rounds"
            " what is sent, summed and kept",
        )


def _offload(found: Found, nested: dict[str, dict[str, Any]], settings: dict[str, Any]) -> Wrong:
    optimizer, params = (dict(nested.get(name, {})) for name in ("offload_optimizer", "offload_params"))
    pin = found.get(f"{Z}cpu_offload_use_pin_memory")
    for old, block in (("cpu_offload", optimizer), ("cpu_offload_param", params)):
        if found.get(Z + old):
            block.setdefault("device", "cpu")
            if pin is not None:
                block.setdefault("pin_memory", pin)
    for name, block in (("offload_optimizer", optimizer), ("offload_params", params)):
        key = f"{Z}{name.removesuffix('s')}"
        block["device"] = block.get("device") or "none"
        if block["device"] == "nvme":
            block |= nested.get("aio", {})
            if "nvme_path" not in block:
                yield f"{key}.nvme_path", "must name a directory on a disk of this host: device is nvme"
            elif block.get("block_size", 4096) % 4096:
                yield "aio.block_size", "must be a multiple of 4096, the pages of direct I/O"
        if "buffer_count" in block:
            block["buffer_count"] = max(3, block["buffer_count"])
        if not 0 <= block.get("ratio", 1) <= 1:
            yield f"{key}.ratio", "must be a number from 0 to 1"
        if block["device"] != "none":
            settings[name] = block
    stage = settings["stage"]
    if params["device"] != "none" and stage < 3:
        yield f"{Z}offload_param.device", f"needs stage 3: at stage {stage} parameters are whole on every rank"
    if optimizer["device"] != "none" and stage == 0:
        yield f"{Z}offload_optimizer.device", "needs stage 1, 2 or 3: at stage 0 nothing is sharded"


def _blocks(found: Found, settings: dict[str, Any]) -> Wrong:
    for name in ("optimizer", "scheduler"):
        kind, params = found.get(f"{name}.type"), found.get(f"{name}.params")
        if kind is not None:
            settings[name] = {"type": kind, "params": {} if params in (None, "auto") else params}
        elif params is not None:
            yield f"{name}.params", f"{name}.type is missing"


def _sizes(elements: Mapping[str, int], settings: dict[str, Any]) -> None:
    """Numbers of elements become bytes of units in fp32, and slices of the step."""
    limits = [elements[name] for name in ("reduce_bucket_size", "allgather_bucket_size") if name in elements]
    if "stage3_max_live_parameters" in elements and settings["stage"] == 3:
        limits.append(elements["stage3_max_live_parameters"] // 3)  # the running unit, the one before, the next one
    if limits:
        largest = max(4 * min(limits), _DEFAULTS.min_unit_bytes)
        settings["max_unit_bytes"] = min(largest, _DEFAULTS.max_unit_bytes)
    if settings.pop("prefetch_elements", None) == 0:
        settings["prefetch"] = 0
    group = settings.pop("sub_group_size", None)
    if group is not None:
        settings["tile_size"] = min(_DEFAULTS.tile_size, max(64, group // 64 * 64))


def resolve_autos(keys: list[str], hidden: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings that "auto" of ``keys`` stands for, with a module of this hidden size."""
    values = {key.removeprefix(Z): AUTO[key][0](hidden) for key in keys}
    out = {"stage": settings.get("stage", 0)}
    if "stage3_param_persistence_threshold" in values:
        out["persistence_threshold"] = values["stage3_param_persistence_threshold"]
    buckets = {name: values[name] for name in ("reduce_bucket_size",) if name in values}
    _sizes(buckets, out)
    if "max_unit_bytes" in out and "max_unit_bytes" in settings:
        out["max_unit_bytes"] = min(out["max_unit_bytes"], settings["max_unit_bytes"])
    del out["stage"]
    return out
