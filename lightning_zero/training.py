"""What a configuration says about the run, brought to Lightning: batch sizes, accumulation, clipping, optimizers.

Where the Trainer says something else, that is an error that names both places.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities.data import _get_dataloader_init_args_and_kwargs, _reinstantiate_wrapped_cls
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter
from torch.utils.data import BatchSampler, DataLoader

from lightning_zero.config import Given, Settings, Translation, settings_from
from lightning_zero.optim import check_optimizer, check_scheduler, make_optimizer, make_scheduler

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def settings_of(keywords: Mapping[str, Any], config: Given | Translation | None) -> Settings:
    """What keywords and a DeepSpeed configuration say, checked as far as that goes without a Trainer.

    Raises:
        TypeError, ValueError, FileNotFoundError: see :func:`lightning_zero.config.settings_from`; or optimizer or
            scheduler are unknown, or have no such parameters.
    """
    settings = settings_from(keywords, config)
    for chosen, check in (
        (settings.training.optimizer, check_optimizer),
        (settings.training.scheduler, check_scheduler),
    ):
        if chosen is not None:
            try:
                check(chosen)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{settings.source}: {error}") from None
    return settings


def apply_to_trainer(trainer: "Trainer", settings: Settings) -> None:
    """Let the Trainer accumulate and clip as the settings say; the number of ranks is known by now.

    Raises:
        ValueError: the Trainer says something else, or batch sizes contradict one another.
    """
    _accumulate(trainer, settings)
    clip, source = settings.training.gradient_clipping, settings.place("gradient_clipping")
    if clip is None:
        return
    theirs, by = trainer.gradient_clip_val, str(getattr(trainer.gradient_clip_algorithm, "value", "norm"))
    if theirs is not None and (float(theirs) != clip or by != "norm"):
        raise ValueError(_differ("gradient_clip_val", f"{theirs} by {by}", "gradient_clipping", clip, source))
    if clip > 0:
        _refuse_manual(trainer, f"gradient_clipping={clip}", source)
        trainer.gradient_clip_val = clip


def _accumulate(trainer: "Trainer", settings: Settings) -> None:
    training, own = settings.training, trainer.accumulate_grad_batches
    sizes = training.batch(trainer.world_size, own if own != 1 else None)
    accumulate = training.gradient_accumulation_steps if sizes is None else sizes[2]
    if accumulate is None or not training.says_accumulation:
        return
    name = "gradient_accumulation_steps"
    source = settings.place(name if training.gradient_accumulation_steps else "train_batch_size")
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if any(type(callback).__name__ == "GradientAccumulationScheduler" for callback in callbacks):
        raise ValueError(f"{name}={accumulate} of {source} and GradientAccumulationScheduler contradict one another.")
    if accumulate != own:
        if own != 1:
            raise ValueError(_differ("accumulate_grad_batches", own, name, accumulate, source))
        _refuse_manual(trainer, f"{name}={accumulate}", source)
        trainer.accumulate_grad_batches = accumulate


def _differ(theirs: str, value: Any, ours: str, other: Any, source: str) -> str:
    return f"Trainer({theirs}={value}) and {ours}={other} of {source} contradict one another. Say it in one place."


def _refuse_manual(trainer: "Trainer", what: str, source: str) -> None:
    if not trainer.lightning_module.automatic_optimization:
        raise ValueError(
            f"{what} of {source} needs automatic optimization: {type(trainer.lightning_module).__name__} decides for "
            "itself when to step, and clips by strategy.clip_gradients_norm(module, optimizer, max_norm)."
        )


def fit_loader(loader: Any, trainer: "Trainer", settings: Settings) -> Any:
    """A training DataLoader with as many samples in a batch as the settings say.

    Raises:
        ValueError: it has others, and cannot be made anew.
    """
    training = settings.training
    sizes = training.batch(trainer.world_size, trainer.accumulate_grad_batches)
    if sizes is None:
        return loader
    total, micro, steps = sizes
    now = _batch_size(loader)
    place = settings.place("micro_batch_size" if settings.training.micro_batch_size else "train_batch_size")
    said = f"{place}: {total} samples a step, {steps} batches, {trainer.world_size} ranks"
    if not training.says_accumulation:  # a step may have another number of batches in every epoch
        said = f"{place}: micro_batch_size={micro}"
    if now is None:
        rank_zero_warn(f"{said}: a batch must have {micro} samples, and nobody can say how many yours have.")
    elif now != micro and _is_plain(loader):
        rank_zero_warn(f"{said}: your DataLoader of {now} samples is made anew with batch_size={micro}.")
        args, kwargs = _get_dataloader_init_args_and_kwargs(loader, loader.sampler)
        names = getattr(loader, "__pl_saved_arg_names", ())
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs, "batch_size": micro}
        return _reinstantiate_wrapped_cls(loader, **kwargs)
    elif now != micro:
        raise ValueError(
            f"{said}: a batch must have {micro} samples, and your batch_sampler makes {now}. Let it make {micro}."
        )
    return loader


def _batch_size(loader: Any) -> int | None:
    """Samples of a batch, if the loader says it."""
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _is_plain(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and type(loader.batch_sampler) in (BatchSampler, type(None))


def configure_optimizers(module: "LightningModule", settings: Settings) -> Callable[[], Any] | None:
    """What takes the place of the module's ``configure_optimizers`` during a fit; None if nothing does.

    As under Lightning's DeepSpeedStrategy, an optimizer of the configuration goes before the module's. It is pickled
    and copied with the module.
    """
    training, own = settings.training, module.configure_optimizers
    if training.optimizer is None and training.scheduler is None:
        return None
    if training.optimizer is not None and _is_written(own):
        rank_zero_warn(
            f"The optimizer is that of {settings.place('optimizer')}; configure_optimizers of {type(module).__name__} "
            "is not called, nor a scheduler that it would make."
        )
    if isinstance(own, MethodType):  # is pickled as a name of the module's, which then stands for what is made here
        own = partial(own.__func__, own.__self__)
    return partial(_configure, module, settings, own)


def _configure(module: "LightningModule", settings: Settings, own: Callable[[], Any]) -> Any:
    """The optimizer, and the scheduler if there is one; ``own`` makes those of the module."""
    training = settings.training
    if training.optimizer is not None:
        optimizer = make_optimizer(training.optimizer, module)
    else:
        optimizer = _only_optimizer(own(), settings.place("scheduler"))
    if training.scheduler is None:
        return optimizer
    if not module.automatic_optimization:
        raise ValueError(
            f"The scheduler of {settings.place('scheduler')} needs automatic optimization: {type(module).__name__} "
            "decides for itself when to step."
        )
    steps = lambda: int(module.trainer.estimated_stepping_batches)
    scheduler = make_scheduler(training.scheduler, optimizer, steps, module)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _is_written(method: Callable[[], Any]) -> bool:
    """Whether a ``configure_optimizers`` is the user's, and not the empty one of LightningModule."""
    return not method.__module__.startswith(("lightning.pytorch.core", "pytorch_lightning.core"))


def _only_optimizer(configured: Any, source: str) -> Optimizer:
    """The optimizer that a module has configured, whose scheduler the configuration brings."""
    found = configured
    if not isinstance(found, Optimizer) and not (isinstance(found, dict) and found.keys() == {"optimizer"}):
        rank_zero_warn(f"The scheduler is that of {source}; one of configure_optimizers is not used.")
    if isinstance(found, dict):
        found = found["optimizer"]
    elif isinstance(found, list | tuple):
        flat = [item for part in found for item in (part if isinstance(part, list | tuple) else [part])]
        optimizers = [item["optimizer"] if isinstance(item, dict) else item for item in flat]
        optimizers = [item for item in optimizers if isinstance(item, Optimizer)]
        found = optimizers[0] if len(optimizers) == 1 else optimizers
    if not isinstance(found, Optimizer):
        raise ValueError(f"The scheduler of {source} needs one optimizer, and configure_optimizers has made {found!r}.")
    return found


def hidden_size(module: nn.Module) -> int:
    """The hidden size that Hugging Face's "auto" is reckoned with: that of the first ``config`` in the module, or of
    its ``text_config``; else the most frequent number of inputs of the linear layers.

    Raises:
        ValueError: there is neither.
    """
    for part in module.modules():
        config = getattr(part, "config", None)
        for holder in (config, getattr(config, "text_config", None)):
            size, sizes = getattr(holder, "hidden_size", None), getattr(holder, "hidden_sizes", None)
            if isinstance(size, int):
                return size
            if sizes:
                return int(max(sizes))
    inputs = Counter(part.in_features for part in module.modules() if isinstance(part, nn.Linear))
    if not inputs:
        raise ValueError(
            'The DeepSpeed configuration says "auto" where the hidden size of the model is needed, and '
            f"{type(module).__name__} has neither a config.hidden_size nor a linear layer. Write a number."
        )
    return inputs.most_common(1)[0][0]


def micro_batch_size(trainer: "Trainer") -> int | None:
    """Samples of a batch of the training DataLoader, if there is one and it says so."""
    loaders = trainer.train_dataloader
    flat = list(tree_iter(loaders)) if loaders is not None else []
    return _batch_size(flat[0]) if len(flat) == 1 else None


def add_monitor(trainer: "Trainer", settings: Settings) -> None:
    """Let a ZeroMonitor log what the settings want to know, unless there is one."""
    from lightning_zero.callbacks import ZeroMonitor  # which watches strategies, and so imports them

    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    if settings.training.monitor and not any(isinstance(callback, ZeroMonitor) for callback in callbacks):
        callbacks.insert(0, ZeroMonitor())  # before those that save what is logged
