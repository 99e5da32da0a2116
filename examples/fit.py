"""What a rank does: Lightning's Trainer on a plain module. Nothing here depends on the strategy."""

import logging
import warnings
from functools import partial
from pathlib import Path

from costs import Costs, steps_needed
from hydra.utils import instantiate
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar
from omegaconf import DictConfig

from lightning_zero import ZeroMonitor


def train(cfg: DictConfig) -> None:
    """Fit; on rank 0, write checkpoints and measurements and print a sample of text."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (".*does not have many workers", ".*treespec", "The dirpath has changed"):
        warnings.filterwarnings("ignore", message=message)
    seed_everything(cfg.seed, verbose=False)
    folder = Path(cfg.output)
    costs = Costs(cfg.measured_steps)
    callbacks = [costs, Losses()]
    if cfg.trainer.get("enable_progress_bar", True):
        callbacks.append(TQDMProgressBar(refresh_rate=10))
    if cfg.report is not None:
        callbacks.append(ZeroMonitor(report=folder / cfg.report))
    if cfg.trainer.get("enable_checkpointing", True):
        save = partial(ModelCheckpoint, folder / "checkpoints", "epoch{epoch}", auto_insert_metric_name=False)
        callbacks.append(save(monitor="step", mode="max", save_top_k=2))  # the last two
    model, loaders, strategy = (instantiate(cfg[key], _convert_="all") for key in ("model", "data", "zero"))
    trainer: Trainer = instantiate(cfg.trainer, strategy=strategy, callbacks=callbacks, _convert_="all")
    trainer.fit(model, *loaders, ckpt_path=cfg.resume)
    costs.save(
        folder / "costs.json",
        stage=cfg.zero.get("stage"),
        params=sum(p.numel() for p in model.parameters()),
        ranks=trainer.world_size,
        steps_needed=steps_needed(cfg.measured_steps),
        accumulate=trainer.accumulate_grad_batches,
        precision=trainer.precision,
        losses={key: value.item() for key, value in trainer.callback_metrics.items()},
    )
    if trainer.is_global_zero and cfg.sample_bytes and trainer.global_step >= cfg.sample_after:
        # After a fit the module is plain and whole again, on every rank.
        print(f"\nA sample:\n{model.generate(cfg.prompt.encode(), cfg.sample_bytes)}\n", flush=True)


class Losses(Callback):
    """Prints training and validation loss after every epoch."""

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        if trainer.is_global_zero:
            losses = {key: trainer.callback_metrics.get(key) for key in ("train_loss_epoch", "val_loss")}
            words = [f"{key} {value:.4f}" for key, value in losses.items() if value is not None]
            print(f"\nepoch {trainer.current_epoch}, step {trainer.global_step}: {', '.join(words)}", flush=True)
