"""The strategy's settings: what they are, and how they reach Lightning."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_zero import host, training
from lightning_zero.config import Settings, TrainingConfig, ZeroConfig
from lightning_zero.config.deepspeed import table, to_deepspeed
from lightning_zero.engine import Communicator
from lightning_zero.precision import ZeroPrecision, adapt, choose, raw_optimizer

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy

    _Base = DDPStrategy
else:
    _Base = object


class ConfiguredMethods(_Base):
    """The strategy's part in what configuration, Trainer and module say of a run."""

    _settings: Settings
    _precision_plugin: "Precision | None"
    _fallback_precision: ZeroPrecision | None = None
    _before: dict[str, Any] | None = None
    """What the module had under the names that a run has covered; None between runs."""
    _said = False

    @property
    def config(self) -> ZeroConfig:
        """The engine's settings."""
        return self._settings.zero

    @property
    def training(self) -> TrainingConfig:
        """What the settings say about the run."""
        return self._settings.training

    def to_deepspeed(self) -> dict[str, Any]:
        """The settings as a DeepSpeed configuration; ``ZeroStrategy(config=...)`` reads them back.

        Raises:
            ValueError: a setting is a function or a class, which JSON has no words for.
        """
        return to_deepspeed(self.config, self.training)

    def resolved(self) -> dict[str, Any]:
        """All settings as the run has used them, whoever has said them: a plain dictionary of the fields of
        :class:`ZeroConfig` and :class:`TrainingConfig`. Before a run has begun, what is known so far.
        """
        values = {**asdict(self.config), **asdict(self.training)}
        trainer = getattr(self.lightning_module, "_trainer", None)
        if trainer is None:
            return values
        values |= {
            "precision": str(self.precision_plugin.precision),
            "gradient_accumulation_steps": trainer.accumulate_grad_batches,
            "gradient_clipping": trainer.gradient_clip_val,
        }
        micro = training.micro_batch_size(trainer)
        if micro is not None:
            total = micro * trainer.accumulate_grad_batches * trainer.world_size
            values |= {"micro_batch_size": micro, "train_batch_size": total}
        if self.optimizers:
            optimizer = raw_optimizer(self.optimizers[0])
            values["optimizer"] = {"type": type(optimizer).__name__, "params": dict(optimizer.defaults)}
        if self.lr_scheduler_configs:
            values["scheduler"] = type(self.lr_scheduler_configs[0].scheduler).__name__
        return values

    @property
    def precision_plugin(self) -> "Precision":
        """Lightning's plugin for the ``precision`` of settings and Trainer, with the engine's gradient clipping."""
        if self._precision_plugin is not None:
            return self._precision_plugin
        if self._fallback_precision is None:
            self._fallback_precision = self._adapted(super().precision_plugin)
        return self._fallback_precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: "Precision | None") -> None:
        self._precision_plugin = None if plugin is None else self._adapted(plugin)

    @property
    def _namespace(self) -> str:
        """Of the Lightning that this strategy belongs to."""
        return next(base.__module__ for base in type(self).__mro__ if base.__name__ == "DDPStrategy").partition(
            ".strategies"
        )[0]

    def _adapted(self, plugin: "Precision") -> ZeroPrecision:
        settings = self._settings
        wanted, place = settings.training.precision, settings.place("precision")
        adapted = adapt(choose(plugin, wanted, settings.any_16_bits, place, self._namespace))
        if settings.training.loss_scale is not None:
            adapted.loss_scale = settings.training.loss_scale
        return adapted

    def connect(self, model: "LightningModule") -> None:
        """A run begins with ``model``: in a fit, the optimizer of the settings takes the place of the module's."""
        super().connect(model)
        self._say_settings()
        trainer = model.trainer
        if trainer.state.fn == "fit":
            configure = training.configure_optimizers(model, self._settings)
            if configure is not None and self._before is None:
                self._before = {"configure_optimizers": vars(model).get("configure_optimizers")}
                model.configure_optimizers = configure  # type: ignore[method-assign]
            training.add_monitor(trainer, self._settings)

    def _forget_settings(self) -> None:
        """The run is over: the module has its own methods again."""
        for name, value in (self._before or {}).items():
            if value is None:
                delattr(self.lightning_module, name)
            else:
                setattr(self.lightning_module, name, value)
        self._before = None

    def _apply_settings(self, comm: Communicator) -> None:
        """The ranks are there: compare their settings, and let the Trainer know them. Collective.

        Raises:
            ValueError: ranks or the Trainer say other things; on all ranks.
        """
        everywhere = comm.collect(self._settings.shared())
        for name, value in everywhere[0].items():
            for rank, other in enumerate(each[name] for each in everywhere):
                if other != value:
                    raise ValueError(
                        f"Ranks have other settings: {name} is {value} on rank 0 and {other} on rank {rank}. Give all "
                        "of them the same configuration."
                    )
        model = self.lightning_module
        if model is not None and model.trainer.state.fn == "fit":
            with host.together(comm):
                training.apply_to_trainer(model.trainer, self._settings)

    def process_dataloader(self, dataloader: object) -> object:
        """The batch size of the settings, for the loaders of a training."""
        loader = super().process_dataloader(dataloader)
        trainer = None if self.lightning_module is None else self.lightning_module.trainer
        return training.fit_loader(loader, trainer, self._settings) if trainer and trainer.training else loader

    def _say_settings(self) -> None:
        """Once: what becomes of the keys of a DeepSpeed configuration, and what has no effect."""
        if self._said:
            return
        self._said = True
        translation = self._settings.translation
        if translation is not None:
            rank_zero_info(f"{table(translation)}\n{self._settings.describe()}")
            if self._settings.overruled:
                names = ", ".join(self._settings.overruled)
                rank_zero_info(f"What {translation.source} says goes before ZeroStrategy's defaults of {names}.")
            unknown = [verdict.key for verdict in translation.unknown]
            if unknown:
                rank_zero_warn(f"{translation.source} has keys that DeepSpeed does not know: {', '.join(unknown)}.")
        for words in self._settings.without_effect():
            rank_zero_warn(words)
