"""What several keys of DeepSpeed's JSON decide together."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
_DEFAULTS = ZeroConfig()


@dataclass
class Outcome:
    """What the keys of a file come to.

    Args:
        stage: what the file says, or else the keyword of ZeroStrategy, or else DeepSpeed's default.
        settings: keywords of ZeroStrategy.
        wrong: keys that contradict others, and why.
        idle: keys that do nothing beside the others, and why.
        implied: keys that are not in the file and whose default in DeepSpeed counts, and what that is.
    """

    stage: int
    settings: dict[str, Any] = field(default_factory=dict)
    wrong: list[tuple[str, str]] = field(default_factory=list)
    idle: list[tuple[str, str]] = field(default_factory=list)
    implied: list[tuple[str, str]] = field(default_factory=list)


def combine(found: Mapping[str, Any], rows: Mapping[str, Row], stage: int | None) -> Outcome:
    """The settings that the keys ask for.

    Args:
        found: values by key, in the order of the file.
        rows: what each key is by itself.
        stage: what ZeroStrategy says beside the file.
    """
    given = {key: value for key, value in found.items() if value != "auto"}
    out = Outcome(given.get(f"{Z}stage", stage or 0))
    if f"{Z}stage" not in given and stage is None:
        out.implied.append((f"{Z}stage", "0, DeepSpeed's default: nothing is sharded"))
    nested: dict[str, dict[str, Any]] = {}
    first: dict[str, str] = {}
    for key, value in given.items():
        block, dot, name = rows[key].sets.rpartition(".")
        place = nested.setdefault(block, {}) if dot else out.settings
        other = first.setdefault(rows[key].sets, key) if name else key
        if name and other != key and place[name] != value:
            out.wrong.append((key, f"{other} says otherwise: it is another name of the same"))
        elif name:
            place[name] = value
    _precision(found, out)
    _sixteen_bits(found, nested, out)
    _gradient_dtypes(found, out)
    _offload(found, nested, out)
    _blocks(found, out)
    _sizes(nested.get("elements", {}), out.stage, out.settings)
    watched = [key for key in ("comms_logger.enabled", "wall_clock_breakdown", "memory_breakdown") if key in given]
    if any(given[key] for key in watched):
        out.settings["monitor"] = True
    out.idle += [(key, "off") for key in watched if not given[key]]
    if given.get(f"{Z}compute_grad_norm") is False and given.get("gradient_clipping"):
        out.wrong.append((f"{Z}compute_grad_norm", "gradient_clipping needs the norm"))
    if out.stage < 3:
        out.idle += [(key, f"at stage {out.stage}") for key in found if key.startswith(f"{Z}stage3_")]
    return out


def _precision(found: Found, out: Outcome) -> None:
    names = {"fp16.enabled": "16-true", "bf16.enabled": "bf16-true"}
    chosen = [key for key in (*names, "torch_autocast.enabled") if found.get(key) is True]
    if len(chosen) > 1:
        out.wrong.append((chosen[1], f"{chosen[0]} is true as well: choose one of them"))
    elif chosen == ["torch_autocast.enabled"]:
        kind = found.get("torch_autocast.dtype", "bf16")
        if kind == "fp32":
            out.wrong.append(("torch_autocast.dtype", "must be 'bfloat16' or 'float16'"))
        out.settings["precision"] = {"fp16": "16-mixed"}.get(kind, "bf16-mixed")
    elif chosen:
        out.settings["precision"] = names[chosen[0]]


def _sixteen_bits(found: Found, nested: Mapping[str, Any], out: Outcome) -> None:
    """What fp16 and bf16 say beside ``enabled`` counts where they are on, with DeepSpeed's defaults."""
    scaled = found.get("fp16.enabled") in (True, "auto") or out.settings.get("precision") == "16-mixed"
    for kind in ("fp16", "bf16"):
        keys = [key for key in found if key.startswith(f"{kind}.") and not key.endswith(".enabled")]
        on = found.get(f"{kind}.enabled") in (True, "auto")
        spared = set(nested.get("loss_scale", {})) if kind == "fp16" and scaled else set()
        out.idle += [(key, f"{kind} is off") for key in keys if not on and key.partition(".")[2] not in spared]
    if scaled:
        scale = {"loss_scale_window": 1000, "hysteresis": 2, **nested.get("loss_scale", {})}
        out.settings["loss_scale"] = scale
        if scale.get("min_loss_scale") == 0:
            out.wrong.append(("fp16.min_loss_scale", "must be above 0"))
        if scale.get("initial_scale_power", 0) > 127:
            out.wrong.append(("fp16.initial_scale_power", "must be 127 at most: fp32 ends there"))
    overflow = "bf16.check_grad_overflow"
    if found.get("bf16.enabled") is True and overflow not in found:
        out.implied.append((overflow, "DeepSpeed's default: a step with infinite or NaN gradients is left out"))
    if found.get("bf16.enabled") is True or (found.get("bf16.enabled") == "auto" and overflow in found):
        out.settings["nonfinite_gradients"] = "skip" if found.get(overflow, True) else "warn"


def _gradient_dtypes(found: Found, out: Outcome) -> None:
    settings = out.settings
    for kind in ("bf16", "fp16"):
        if found.get(f"{kind}.enabled") and found.get(f"{kind}.{kind}_master_weights_and_grads"):
            settings |= {"master_dtype": kind, "gradient_dtype": kind}
    states, masters = "bf16.bf16_optimizer_states", "bf16.bf16_master_weights_and_grads"
    if found.get(states) and not found.get(masters):
        out.wrong.append((states, f"needs {masters}, as in DeepSpeed"))
    if found.get(masters) and not found.get(states):
        out.wrong.append((masters, f"states have the dtype of the masters: set {states}, too"))
    summed = found.get("data_types.grad_accum_dtype")
    if summed in ("bf16", "fp16"):
        settings["gradient_dtype"] = summed
    forward = {"bf16-true": "bf16", "16-true": "fp16"}.get(settings.get("precision", ""))
    wire = found.get("communication_data_type")
    if wire in ("bf16", "fp16") and wire not in (forward, settings.get("gradient_dtype")):
        words = (
            "gradients travel in the dtype of the forward and are summed in fp32; data_types.grad_accum_dtype rounds"
        )
        out.wrong.append(("communication_data_type", f"{words} what is sent, summed and kept"))
    if settings.get("gradient_dtype") == "fp16":
        for key, plain in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            if found.get(key, plain) != plain:
                out.wrong.append((key, "gradients that are summed in fp16 are not scaled before: sum them in fp32"))


def _offload(found: Found, nested: Mapping[str, dict[str, Any]], out: Outcome) -> None:
    optimizer, params = (dict(nested.get(name, {})) for name in ("offload_optimizer", "offload_params"))
    pin = found.get(f"{Z}cpu_offload_use_pin_memory")
    for old, block in (("cpu_offload", optimizer), ("cpu_offload_param", params)):
        if found.get(Z + old):
            if block.setdefault("device", "cpu") != "cpu":
                out.wrong.append((Z + old, f"the device of the block that has replaced it is {block['device']!r}"))
            if pin is not None:
                block.setdefault("pin_memory", pin)
    for name, block in (("offload_optimizer", optimizer), ("offload_params", params)):
        key = f"{Z}{name.removesuffix('s')}"
        block["device"] = block.get("device") or "none"
        if block["device"] == "nvme":
            block |= nested.get("aio", {})
            if "nvme_path" not in block:
                out.wrong.append((f"{key}.nvme_path", "must name a directory on a disk of this host: device is nvme"))
            elif block.get("block_size", 4096) % 4096:
                out.wrong.append(("aio.block_size", "must be a multiple of 4096, the pages of direct I/O"))
        if "buffer_count" in block:
            block["buffer_count"] = max(3, block["buffer_count"])
        if not 0 <= block.get("ratio", 1) <= 1:
            out.wrong.append((f"{key}.ratio", "must be a number from 0 to 1"))
        if block["device"] != "none":
            out.settings[name] = block
        else:
            out.idle += [
                (each, "device is none") for each in found if each.startswith(f"{key}.") and "device" not in each
            ]
    if "nvme" not in (optimizer["device"], params["device"]):
        out.idle += [(each, "nothing is offloaded to nvme") for each in found if each.startswith("aio.")]
    if params["device"] != "none" and out.stage < 3:
        words = f"needs stage 3: at stage {out.stage} parameters are whole on every rank"
        out.wrong.append((f"{Z}offload_param.device", words))
    if optimizer["device"] != "none" and out.stage == 0:
        out.wrong.append((f"{Z}offload_optimizer.device", "needs stage 1, 2 or 3: at stage 0 nothing is sharded"))


def _blocks(found: Found, out: Outcome) -> None:
    for name in ("optimizer", "scheduler"):
        kind, params = found.get(f"{name}.type"), found.get(f"{name}.params")
        if kind is not None:
            out.settings[name] = {"type": kind, "params": {} if params in (None, "auto") else params}
        elif params is not None:
            out.wrong.append((f"{name}.params", f"{name}.type is missing"))


def _sizes(elements: Mapping[str, int], stage: int, settings: dict[str, Any]) -> None:
    """Numbers of elements become bytes of units in fp32, and slices of the step."""
    limits = [elements[name] for name in ("reduce_bucket_size", "allgather_bucket_size") if name in elements]
    if "stage3_max_live_parameters" in elements and stage == 3:
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
    out: dict[str, Any] = {}
    if "stage3_param_persistence_threshold" in values:
        out["persistence_threshold"] = values["stage3_param_persistence_threshold"]
    _sizes({name: values[name] for name in values if name == "reduce_bucket_size"}, 0, out)
    if "max_unit_bytes" in out and "max_unit_bytes" in settings:
        out["max_unit_bytes"] = min(out["max_unit_bytes"], settings["max_unit_bytes"])
    return out
