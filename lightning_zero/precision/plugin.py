"""Lightning's precision plugins, with clipping, loss scaling and dtypes that know the shards."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from lightning_zero.config.training import LossScaleConfig
from lightning_zero.engine import Engine
from lightning_zero.precision.dtypes import HALF, MIXED, already_half, compute_dtype, convert_buffers, rounded_layers
from lightning_zero.precision.scaler import is_fixed, is_lowest, scaler_of
from lightning_zero.precision.schedulers import hold, let_go

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

_SCALED = ("16-mixed", "16-true")


class ZeroPrecision(_Precision):
    """Mixed into the class of whatever precision plugin Lightning made: what touches gradients goes to the engine.

    The plugin stays the object it was, with its class name (checkpoints file its state under it) and its settings.
    """

    engine: Engine | None = None
    scaler: torch.amp.GradScaler | None = None
    loss_scale: LossScaleConfig | None = None
    """How the loss scale of ``16-mixed`` and ``16-true`` moves; None: as the scaler says that is there."""
    plain_class: type[_Precision]
    skipped_steps = 0
    """How many steps have been skipped because gradients were not finite."""
    _undo_buffers: Callable[[], None] | None = None

    def attach(self, engine: Engine, device: torch.device) -> None:
        """Serve a run on ``device``.

        Raises:
            ValueError: the user has given both ``loss_scale`` and a scaler.
        """
        self.engine = engine
        if hasattr(self, "device"):  # the Trainer guesses "cuda" where the accelerator is given as an object
            self.device = device.type
        self._make_scaler(device.type)

    def _make_scaler(self, device: str) -> None:
        if self.loss_scale is not None and self.precision in _SCALED:
            self.scaler = scaler_of(self.loss_scale, self.scaler, device)
        elif self.precision == "16-true" and self.scaler is None:
            self.scaler = torch.amp.GradScaler(device)

    def detach(self) -> None:
        """End of the run: buffers get the dtype back that the user gave them."""
        self.engine = None
        if self._undo_buffers is not None:
            self._undo_buffers()
            self._undo_buffers = None

    def compute_dtype(self, module: nn.Module) -> Callable[[nn.Parameter], torch.dtype] | None:
        """See :func:`lightning_zero.precision.dtypes.compute_dtype`; notices parameters that lose precision."""
        half = [] if self.precision in HALF else already_half(module)
        if half:
            rank_zero_warn(
                f"{len(half)} trainable parameters (the first: {half[0]!r}) are 16-bit already, under precision="
                f"{self.precision!r}. They are updated in fp32 masters made from the rounded values, and checkpoints "
                "round them again. Leave the module in fp32 and use 'bf16-true' or 'bf16-mixed' to lose nothing."
            )
        return compute_dtype(module, str(self.precision))

    def rounded_layers(self, module: nn.Module) -> list[nn.Module]:
        """See :func:`lightning_zero.precision.dtypes.rounded_layers`."""
        return rounded_layers(module, str(self.precision))

    def convert_module(self, module: nn.Module) -> nn.Module:
        """``16-true`` and ``bf16-true`` cast buffers only: parameters are rounded on their way into the flat buffers,
        and masters are made from what they were before.
        """
        if self.precision not in HALF:
            return super().convert_module(module)
        self._undo_buffers = convert_buffers(module, HALF[self.precision])
        return module

    def convert_meta_module(self, module: nn.Module, attach: Callable[[nn.Module], None]) -> None:
        """The same for a module on ``meta``, which ``attach`` fills: buffers are rounded once they have values."""
        if self.precision not in HALF:
            self.convert_module(module)
        attach(module)
        if self.precision in HALF:
            self.convert_module(module)

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        """Parameters are born in full precision."""
        return nullcontext() if self.precision in HALF else super().tensor_init_context()

    def module_init_context(self) -> AbstractContextManager[Any]:
        """Parameters are born in full precision."""
        return nullcontext() if self.precision in HALF else super().module_init_context()

    def stray_forward_context(self) -> AbstractContextManager[Any]:
        """Autocast for a forward outside a step, since linear layers hold 16-bit weights there, too."""
        return self.forward_context() if self.precision in MIXED else nullcontext()

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        """Scale the loss."""
        if self.scaler is not None and self.precision in HALF:  # under 16-mixed Lightning's plugin does it
            tensor = self.scaler.scale(tensor)
        scaled: Tensor = super().pre_backward(tensor, module)
        return scaled

    def run_step(
        self,
        optimizer: Optimizer,
        module: Any,
        closure: Callable[[], Any],
        options: dict[str, Any],
        schedulers: Sequence[Any],
    ) -> Any:
        """Run the closure (forward, backward), unscale, run the hooks and the clipping, and step if all is finite: the
        same decision on all ranks. Otherwise the optimizer's ``schedulers`` stay where they are, too.

        Returns:
            The closure's result.

        Raises:
            RuntimeError: gradients overflow although the loss scale cannot get any lower.
        """
        if self.engine is None:
            raise AssertionError("A precision plugin steps within a run only.")
        for scheduler in schedulers:
            let_go(scheduler)
        output = closure()
        # as Lightning: no output, no backward
        scaler = None if output is None and module.automatic_optimization else self.scaler
        overflow = self._overflow(scaler, optimizer)
        self._after_closure(module, optimizer)
        if overflow is None:
            self.engine.step(raw_optimizer(optimizer), **options)
        else:
            self.skipped_steps += 1
        for scheduler in schedulers if overflow is not None else ():
            if getattr(scheduler, "optimizer", None) is raw_optimizer(optimizer):
                hold(scheduler)
        if scaler is not None and scaler._scale is not None:
            scale, fails = scaler.get_scale(), overflow is not None and is_lowest(scaler)
            scaler.update()
            if fails:
                raise RuntimeError(
                    f"Step {self.engine.steps}: the gradient of {overflow} is not finite at a loss scale of {scale}, "
                    "and a lower one does not help: the loss itself is too large or NaN. "
                    "Look for the first layer whose output is not finite, or use precision='bf16-mixed'."
                )
            if overflow is not None and is_fixed(scaler) and self.skipped_steps == 1:
                rank_zero_warn(
                    f"Step {self.engine.steps}: the gradient of {overflow} is not finite at the fixed loss scale of "
                    f"{scale}. The step is skipped, and so will be others like it, without another warning."
                )
        return output

    def _overflow(self, scaler: torch.amp.GradScaler | None, optimizer: Optimizer) -> str | None:
        """Unscale on the shards; returns which gradients the step is to be skipped for, on whatever rank."""
        if self.engine is None:
            return None
        if scaler is None or scaler._scale is None:
            return self.engine.clipper.to_skip(raw_optimizer(optimizer))
        overflow = self.engine.clipper.unscale_(raw_optimizer(optimizer), scaler.get_scale())
        # what GradScaler.unscale_ would have noted, for its update()
        state = scaler._per_optimizer_states[id(optimizer)]
        found = torch.full((), float(overflow is not None), device=scaler._scale.device)
        state.update(found_inf_per_device={found.device: found}, stage=OptState.UNSCALED)
        return overflow

    def clip_gradients(
        self, optimizer: Optimizer, clip_val: int | float = 0.0, gradient_clip_algorithm: Any = "norm"
    ) -> None:
        """Clip by norm or by value; fused optimizers, too, since unscaling is not theirs here."""
        if clip_val > 0:
            by_value = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)) == "value"
            (self.clip_grad_by_value if by_value else self.clip_grad_by_norm)(optimizer, clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp every element of the reduced gradients to ``[-clip_val, clip_val]``."""
        if self.engine is None:
            super().clip_grad_by_value(optimizer, clip_val)
        else:
            self.engine.clipper.clip_value_(raw_optimizer(optimizer), clip_val)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Scale the reduced gradients so that their norm over all ranks is at most ``clip_val``."""
        if self.engine is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            self.engine.clipper.clip_norm_(raw_optimizer(optimizer), clip_val)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, where there is one."""
        return super().state_dict() if self.scaler is None else self.scaler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with a saved loss scale."""
        if state_dict and self.engine is None:
            self._make_scaler("cpu")
        if self.scaler is None:
            super().load_state_dict(state_dict)
        elif state_dict:
            self.scaler.load_state_dict(state_dict)

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
    own_step = type(plugin).optimizer_step.__module__.partition(".")[0] not in ("lightning", "pytorch_lightning")
    if refused or own_step:
        raise ValueError(
            f"The ZeRO strategies do not support the precision plugin {type(plugin).__name__}"
            f"{', which steps the optimizer in its own way' if own_step else ''}."
            " Use precision='32-true', '64-true', 'bf16-mixed', 'bf16-true', '16-mixed' or '16-true'."
        )
    plugin.__class__ = _zero_class(type(plugin))
    if not isinstance(plugin, ZeroPrecision):
        raise AssertionError(type(plugin))
    return plugin


def choose(plugin: _Precision, wanted: str | None, family: bool, source: str, namespace: str) -> _Precision:
    """The plugin of the precision that a configuration wants.

    Args:
        plugin: the Trainer's. Its default, ``32-true``, gives way.
        wanted: the configuration's; None: the Trainer's.
        family: whether ``wanted`` means any precision of these 16 bits, as DeepSpeed's ``bf16`` does.
        source: of the configuration, for the message.
        namespace: of the Lightning whose plugin it is to be.

    Raises:
        ValueError: the Trainer says another precision.
    """
    own = str(plugin.precision)
    if wanted in (None, own) or (family and wanted and own.partition("-")[0] == wanted.partition("-")[0]):
        return plugin
    plugins = import_module(f"{namespace}.plugins.precision")
    if own != "32-true" or getattr(plugin, "plain_class", type(plugin)) is not plugins.Precision:
        raise ValueError(
            f"Trainer(precision={own!r}) and precision={wanted!r} of {source} contradict one another. "
            "Say it in one place."
        )
    if wanted in MIXED:
        made: _Precision = plugins.MixedPrecision(wanted, "cpu")
    elif wanted in HALF:
        made = plugins.HalfPrecision(wanted)
    else:
        made = plugins.DoublePrecision()
    return made


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
