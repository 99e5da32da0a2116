"""The loss scale that a configuration describes, and the lowest one that a scaler may reach."""

from typing import Any

from torch import Tensor
from torch.amp import GradScaler

from lightning_zero.config.training import LossScaleConfig

LOWEST_SCALE = 1.0
"""Loss scale below which a scaler of torch's own is not to fall: another skip would not save fp16 (DeepSpeed's
default of ``min_loss_scale``).
"""


class LossScaler(GradScaler):
    """A ``GradScaler`` with a fixed scale, or with hysteresis and a lowest scale, as DeepSpeed's ``DynamicLossScaler``.

    With the configuration's defaults its scales are those of ``GradScaler()``, down to ``min_loss_scale``. Steps are
    counted as torch counts them: the scale is doubled in the ``loss_scale_window``-th step without an overflow, where
    DeepSpeed's first doubling after an overflow comes one step later.

    Args:
        config: how the scale moves.
        device: the type of the device of the run.
    """

    def __init__(self, config: LossScaleConfig, device: str) -> None:
        scale = float(config.loss_scale or 2.0**config.initial_scale_power)
        super().__init__(device, init_scale=scale, growth_interval=config.loss_scale_window)
        self.config = config
        self._overflows_left = config.hysteresis

    @property
    def is_lowest(self) -> bool:
        """Whether the scale would have to fall in another overflow and cannot. A fixed one never has to."""
        falls = not self.config.loss_scale and self._overflows_left == 1
        return falls and self.get_scale() <= self.config.min_loss_scale

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale after a step, or set it."""
        if new_scale is not None or not self.is_enabled():
            super().update(new_scale)
            return
        config, before = self.config, self.get_scale()
        overflow = any(
            bool(found.item())
            for state in self._per_optimizer_states.values()
            for found in state["found_inf_per_device"].values()
        )
        super().update()
        if config.loss_scale:
            super().update(before)
        elif overflow and self._overflows_left > 1:
            self._overflows_left -= 1
            super().update(before)
        elif overflow:
            super().update(max(self.get_scale(), float(config.min_loss_scale)))
        elif config.consecutive_hysteresis or not self._get_growth_tracker():  # 0 after a doubling
            self._overflows_left = config.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """That of ``GradScaler``, which can load it, and how many overflows are left until the scale falls."""
        state = super().state_dict()
        return {**state, "overflows_left": self._overflows_left} if state else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with a saved scale, of any ``GradScaler``. How it moves is for the configuration to say, and what a
        fixed one is, too.
        """
        if not self.is_enabled():
            return
        config = self.config
        steps = min(state_dict["_growth_tracker"], config.loss_scale_window - 1)
        now = {**GradScaler.state_dict(self), "_growth_tracker": steps}
        if not config.loss_scale:
            now["scale"] = state_dict["scale"]
        super().load_state_dict(now)
        self._overflows_left = min(state_dict.get("overflows_left", config.hysteresis), config.hysteresis)


def is_lowest(scaler: GradScaler) -> bool:
    """Whether the scale cannot fall any more, should there be another overflow."""
    if isinstance(scaler, LossScaler):
        return scaler.is_lowest
    return scaler.get_scale() * scaler.get_backoff_factor() < LOWEST_SCALE


def is_fixed(scaler: GradScaler) -> bool:
    """Whether the scale never moves."""
    return isinstance(scaler, LossScaler) and bool(scaler.config.loss_scale)


def is_default(scaler: GradScaler) -> bool:
    """Whether it is as Lightning makes it where the user has given none, or does nothing."""
    if not scaler.is_enabled():
        return True
    plain, names = GradScaler("cpu"), ("_init_scale", "_growth_factor", "_backoff_factor", "_growth_interval")
    return type(scaler) is GradScaler and all(getattr(scaler, name) == getattr(plain, name) for name in names)


def scaler_of(config: LossScaleConfig, scaler: GradScaler | None, device: str) -> LossScaler:
    """The scaler of a configuration: the one in use if it follows that already.

    Args:
        config: how the scale moves.
        scaler: the one in use.
        device: the type of the device of the run.

    Raises:
        ValueError: the one in use is the user's own.
    """
    if isinstance(scaler, LossScaler):
        return scaler if scaler.config == config else LossScaler(config, device)
    if scaler is not None and not is_default(scaler):
        raise ValueError(
            f"loss_scale={config} and a {type(scaler).__name__} of your own in the precision plugin: which of them is "
            "to scale the losses? Give one."
        )
    return LossScaler(config, device)
