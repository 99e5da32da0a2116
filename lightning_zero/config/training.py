"""What a configuration says about the run beside ZeRO: what Trainer, DataLoader and configure_optimizers say otherwise.

Each setting may be given there or here. Where both give it and differ, that is an error (``lightning_zero.training``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_zero.config import checks

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true")


@dataclass(kw_only=True)
class LossScaleConfig:
    """How fp16 losses are scaled. The names are those of DeepSpeed's ``fp16``, the defaults those of torch's
    ``GradScaler``, so that nothing differs from ``ddp``.
    """

    loss_scale: float = 0.0
    """A fixed scale. 0: the scale is halved when gradients overflow and doubled after ``loss_scale_window`` steps."""

    initial_scale_power: int = 16
    """The scale begins at 2 to the power of this."""

    loss_scale_window: int = 2000
    """Steps without an overflow after which the scale is doubled."""

    hysteresis: int = 1
    """How many overflows it takes to halve the scale. Each of them skips its step."""

    consecutive_hysteresis: bool = False
    """Whether a step without an overflow lets the counting of ``hysteresis`` begin anew; else the doubling does."""

    min_loss_scale: float = 1.0
    """The scale does not fall below this: an overflow there is an error."""

    def __post_init__(self) -> None:
        for name, least in (("initial_scale_power", 0), ("loss_scale_window", 1), ("hysteresis", 1)):
            checks.whole(f"loss_scale: {name}", getattr(self, name), least)
        if self.initial_scale_power > 127:
            raise ValueError(f"loss_scale: initial_scale_power={self.initial_scale_power}: 2**128 is infinite in fp32.")
        checks.number("loss_scale: loss_scale", self.loss_scale, 0)
        if not checks.is_number(self.min_loss_scale) or self.min_loss_scale <= 0:
            raise ValueError(f"loss_scale: min_loss_scale={self.min_loss_scale!r} must be a finite number above 0.")
        checks.flag("loss_scale: consecutive_hysteresis", self.consecutive_hysteresis)


@dataclass(kw_only=True)
class TrainingConfig:
    """Settings of the run that are not ZeRO's own. Every field is also a keyword of
    :class:`lightning_zero.ZeroStrategy`; None: what Trainer, DataLoader and module say.
    """

    train_batch_size: int | None = None
    """Samples of one optimizer step, on all ranks together: ``micro_batch_size * gradient_accumulation_steps`` times
    the number of ranks. Any two of the three give the third; of one alone, the Trainer accumulates what it says.
    """

    micro_batch_size: int | None = None
    """Samples of one batch of one rank. Training DataLoaders of another ``batch_size`` are made anew with this one."""

    gradient_accumulation_steps: int | None = None
    """Batches of one optimizer step: ``Trainer(accumulate_grad_batches=)``."""

    gradient_clipping: float | None = None
    """The largest global norm of gradients: ``Trainer(gradient_clip_val=)``. 0: none."""

    precision: str | None = None
    """``Trainer(precision=)``: ``32-true``, ``64-true``, ``bf16-mixed``, ``bf16-true``, ``16-mixed`` or ``16-true``."""

    loss_scale: LossScaleConfig | None = None
    """Of ``16-mixed`` and ``16-true``; a mapping will do."""

    optimizer: Any = None
    """Instead of that of ``configure_optimizers``: ``{"type": "AdamW", "params": {"lr": 1e-3}}`` with a name of
    DeepSpeed or of ``torch.optim``; or a function that makes one of parameters (``functools.partial(AdamW, lr=1e-3)``).
    """

    scheduler: Any = None
    """A learning rate scheduler that moves with every optimizer step: ``{"type": "WarmupLR", "params": {...}}`` with a
    name of DeepSpeed or of ``torch.optim.lr_scheduler``; or a function that makes one of the optimizer.
    """

    monitor: bool = False
    """Whether a :class:`lightning_zero.ZeroMonitor` is added to the Trainer's callbacks."""

    state_dict_type: str = "full"
    """What a checkpoint is. ``full``: one file that any strategy loads; rank 0 collects the whole in its memory, as
    under ``ddp``. ``sharded``: a folder to which each rank writes its own part, and from which any number of ranks, and
    Lightning's FSDP strategies, load theirs.
    """

    async_save: bool = False
    """``sharded``: training goes on once each rank has a copy of its part in host memory; the rest is done meanwhile.
    """

    exclude_frozen: bool = False
    """Leave parameters that are not trained out of checkpoints: to load one takes ``strict_loading = False``."""

    save_16bit_weights: bool = False
    """``sharded``: each checkpoint folder has the weights as ``model.safetensors`` in 16 bits, too, for those who only
    use the model (DeepSpeed's ``stage3_gather_16bit_weights_on_model_save``).
    """

    def __post_init__(self) -> None:
        for name in ("train_batch_size", "micro_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) is not None:
                checks.whole(name, getattr(self, name), 1)
        if self.gradient_clipping is not None:
            checks.number("gradient_clipping", self.gradient_clipping, 0)
        if self.precision not in (None, *PRECISIONS):
            raise ValueError(f"precision={self.precision!r} is none of {', '.join(map(repr, PRECISIONS))}.")
        if isinstance(self.loss_scale, Mapping):
            checks.names("loss_scale", self.loss_scale, [field.name for field in fields(LossScaleConfig)])
            self.loss_scale = LossScaleConfig(**self.loss_scale)
        for name in ("optimizer", "scheduler"):
            setattr(self, name, _made_by(name, getattr(self, name)))
        for name in ("monitor", "async_save", "exclude_frozen", "save_16bit_weights"):
            checks.flag(name, getattr(self, name))
        if self.state_dict_type not in ("full", "sharded"):
            raise ValueError(f"state_dict_type={self.state_dict_type!r} is none of 'full', 'sharded'.")
        if self.async_save and self.state_dict_type == "full":
            raise ValueError("async_save needs state_dict_type='sharded': a file is written by rank 0 alone.")
        self.batch(world_size=None)

    @property
    def says_accumulation(self) -> bool:
        """Whether how many batches make a step is said here; else the Trainer says it, or a callback of it."""
        return self.train_batch_size is not None or self.gradient_accumulation_steps is not None

    def batch(self, world_size: int | None, accumulate: int | None = None) -> tuple[int, int, int] | None:
        """``train_batch_size``, ``micro_batch_size`` and ``gradient_accumulation_steps`` on so many ranks; None if
        nothing is said of the first two.

        Args:
            world_size: the ranks; None: unknown, and nothing but what is wrong at any number is an error.
            accumulate: what the Trainer accumulates, if there is something that it says.

        Raises:
            ValueError: the three contradict one another.
        """
        total, micro, steps = self.train_batch_size, self.micro_batch_size, self.gradient_accumulation_steps
        if total is None and micro is None:
            return None
        if world_size is None:
            if total is not None and total % ((micro or 1) * (steps or 1)):
                raise ValueError(_contradiction(self, world_size, accumulate))
            return None
        if steps is None:
            steps = total // (micro * world_size) if total and micro else accumulate or 1
        if micro is None:
            micro = (total or 0) // (steps * world_size)
        product = micro * steps * world_size
        if product == 0 or total not in (None, product):
            raise ValueError(_contradiction(self, world_size, accumulate))
        return product, micro, steps


def _contradiction(config: TrainingConfig, world_size: int | None, accumulate: int | None) -> str:
    names = ("train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    given = [f"{name}={getattr(config, name)}" for name in names if getattr(config, name)]
    if accumulate and not config.gradient_accumulation_steps:
        given.append(f"Trainer(accumulate_grad_batches={accumulate})")
    ranks = "the number of ranks" if world_size is None else f"{world_size} ranks"
    return (
        f"{', '.join(given)} and {ranks} contradict one another: train_batch_size must be micro_batch_size * "
        "gradient_accumulation_steps * ranks, whole numbers all of them."
        f"{' Leave one of the three out, and it follows.' if len(given) == 3 else ''}"
    )


def _made_by(name: str, value: Any) -> Any:
    """A block of the form of DeepSpeed's, checked; or what makes it."""
    if value is None or callable(value):
        return value
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        raise ValueError(
            f"{name}={value!r} must be a mapping with 'type' and 'params', as in DeepSpeed's JSON, or a function."
        )
    for key in value:
        if key not in ("type", "params"):
            raise TypeError(
                f"{name} has no setting {key!r} beside 'type' and 'params': what it takes goes into params."
            )
    params = value.get("params") or {}
    if not isinstance(params, Mapping):
        raise ValueError(f"{name}: params={params!r} must be a mapping.")
    return {"type": value["type"], "params": dict(params)}
