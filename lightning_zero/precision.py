"""Precision: Lightning's plugins, with gradient clipping that knows the shards, and the dtypes of ``bf16-mixed``."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.engine import Engine

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision as _Precision
else:
    _Precision = object

# Plugins that replace layers or step optimizers in their own way.
_REFUSED = {
    "TransformerEnginePrecision",
    "BitsandbytesPrecision",
    "DeepSpeedPrecision",
    "FSDPPrecision",
    "XLAPrecision",
}

# The layers whose weights autocast rounds to bf16 before each use: exactly these classes, since a subclass may do
# something else with its weight.
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


class ZeroPrecision(_Precision):
    """Mixed into the class of whatever precision plugin Lightning made: clipping goes to the engine.

    The plugin stays the object it was, with its class name (checkpoints file its state under it) and its settings.
    """

    engine: Engine | None = None
    plain_class: type[_Precision]

    def attach(self, engine: Engine, device: torch.device) -> None:
        """Serve a run on ``device``."""
        self.engine = engine
        if hasattr(self, "device"):  # the Trainer guesses "cuda" where the accelerator is given as an object
            self.device = device.type

    def detach(self) -> None:
        """End of the run."""
        self.engine = None

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp every element of the reduced gradients to ``[-clip_val, clip_val]``."""
        if self.engine is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self.engine.clip_grad_value_(raw_optimizer(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the reduced gradients so that their norm over all ranks is at most ``clip_val``."""
        if self.engine is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.engine.clip_grad_norm_(raw_optimizer(optimizer), clip_val)

    def __reduce__(self) -> tuple[Any, ...]:
        # The class is made at run time under its base's name, so pickle cannot find it (spawning launchers pickle).
        return _unpickle, (self.plain_class,), self.__dict__


def adapt(plugin: _Precision) -> ZeroPrecision:
    """Turn a precision plugin into a :class:`ZeroPrecision`, in place.

    Raises:
        ValueError: the plugin is one that the engine cannot serve.
    """
    if isinstance(plugin, ZeroPrecision):
        return plugin
    refused = _REFUSED & {cls.__name__ for cls in type(plugin).__mro__}
    if refused:
        raise ValueError(
            f"The ZeRO strategies do not support the precision plugin {refused.pop()}."
            " Use precision='32-true', 'bf16-mixed', 'bf16-true' or '64-true'."
        )
    if getattr(plugin, "scaler", None) is not None:
        raise ValueError(
            f"The ZeRO strategies do not support precision={plugin.precision!r} with a GradScaler yet."
            " Use precision='bf16-mixed', which needs no loss scale."
        )
    plugin.__class__ = _zero_class(type(plugin))
    assert isinstance(plugin, ZeroPrecision)
    return plugin


_classes: dict[type[_Precision], type[ZeroPrecision]] = {}


def _zero_class(plain: type[_Precision]) -> type[ZeroPrecision]:
    if plain not in _classes:
        names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "plain_class": plain}
        _classes[plain] = type(plain.__name__, (ZeroPrecision, plain), names)
    return _classes[plain]


def _unpickle(plain: type[_Precision]) -> ZeroPrecision:
    return object.__new__(_zero_class(plain))


def raw_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer inside Lightning's wrapper."""
    wrapped: Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return wrapped


def compute_dtype(module: nn.Module, precision: str) -> Callable[[nn.Parameter], torch.dtype] | None:
    """The dtype in which each parameter takes part in forward and backward; None if each keeps its own.

    With ``bf16-mixed`` the fp32 parameters that only linear and convolution layers own are held in bf16, as autocast
    would round them before each use; everything else (embeddings, norms, what is tied to them) stays as it is.

    Args:
        module: the plain module, before it is sharded.
        precision: Lightning's name of the precision.
    """
    if precision != "bf16-mixed":
        return None
    keep = {child for parent in module.modules() if isinstance(parent, _READS_CHILDREN) for child in parent.modules()}
    rounded: set[int] = set()
    others: set[int] = set()
    for owner in module.modules():
        ids = rounded if type(owner) in _AUTOCAST_LAYERS and owner not in keep else others
        ids.update(id(param) for param in owner.parameters(recurse=False))
    rounded -= others

    def dtype(param: nn.Parameter) -> torch.dtype:
        return torch.bfloat16 if param.dtype == torch.float32 and id(param) in rounded else param.dtype

    return dtype
