"""The dtypes of forward and backward for each of Lightning's precisions (table in the README)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
HALF = {"bf16-true": torch.bfloat16, "16-true": torch.float16}

# The layers whose weights autocast rounds before each use: exactly these classes, since a subclass may do something
# else with its weight.
_AUTOCAST_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)

# Modules that, in evaluation, hand their children's weights to one fused kernel, which autocast does not reach.
_READS_CHILDREN = (nn.TransformerEncoderLayer, nn.MultiheadAttention)


def compute_dtype(module: nn.Module, precision: str) -> Callable[[nn.Parameter], torch.dtype] | None:
    """The dtype in which each parameter takes part in forward and backward; None if each keeps its own.

    - ``bf16-true``, ``16-true``: every floating-point parameter in bf16 or fp16.
    - ``bf16-mixed``, ``16-mixed``: the fp32 parameters that only linear and convolution layers own, as autocast would
      round them before each use; everything else (embeddings, norms, what is tied to them) stays as it is.

    Args:
        module: the plain module, before it is sharded.
        precision: Lightning's name of the precision.
    """
    if precision in HALF:
        return lambda param: HALF[precision] if param.is_floating_point() else param.dtype
    if precision not in MIXED:
        return None
    keep = {child for parent in module.modules() if isinstance(parent, _READS_CHILDREN) for child in parent.modules()}
    rounded: set[int] = set()
    others: set[int] = set()
    for owner in module.modules():
        ids = rounded if type(owner) in _AUTOCAST_LAYERS and owner not in keep else others
        ids.update(id(param) for param in owner.parameters(recurse=False))
    rounded -= others

    def dtype(param: nn.Parameter) -> torch.dtype:
        return MIXED[precision] if param.dtype == torch.float32 and id(param) in rounded else param.dtype

    return dtype


def rounded_layers(module: nn.Module, precision: str) -> list[nn.Module]:
    """The layers whose weights autocast would round at every use."""
    return [layer for layer in module.modules() if type(layer) in _AUTOCAST_LAYERS] if precision in MIXED else []


def convert_buffers(module: nn.Module, dtype: torch.dtype) -> Callable[[], None]:
    """Cast all floating-point buffers, and tell the module (``module.dtype``); returns what undoes that.

    ``module.to(dtype)`` without the parameters: those stay as precise as they are for the masters. A buffer that has
    not changed meanwhile gets all of its bits back.
    """
    before = [
        (owner, name, buffer)
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and buffer.is_floating_point() and buffer.dtype != dtype
    ]
    # Lightning's modules (of either namespace) answer `module.dtype` from this attribute
    told: list[tuple[Any, Any]] = [(part, part._dtype) for part in module.modules() if "_dtype" in vars(part)]
    for owner, name, buffer in before:
        owner._buffers[name] = buffer.to(dtype)
    for part, _ in told:
        part._dtype = dtype

    def undo() -> None:
        for owner, name, old in before:
            now = owner._buffers.get(name)
            if now is not None:
                precise = old.to(now.device)
                unchanged = now.shape == old.shape and torch.equal(now, precise.to(now.dtype))
                owner._buffers[name] = precise if unchanged else now.to(old.dtype)
        for part, told_before in told:
            part._dtype = told_before

    return undo


def already_half(module: nn.Module) -> list[str]:
    """Names of the trainable parameters that the user has cast to a 16-bit dtype."""
    return [
        name
        for name, param in module.named_parameters()
        if param.requires_grad and param.dtype in (torch.float16, torch.bfloat16)
    ]
