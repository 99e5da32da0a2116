"""What ZeRO does, seen: memory, traffic, waits, norms and loss scale, through the Trainer's loggers."""

import os
import resource
import sys
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.optim import Optimizer

from lightning_zero.engine import Engine
from lightning_zero.engine.norm import GradientNorm
from lightning_zero.host import together
from lightning_zero.precision import raw_optimizer
from lightning_zero.report import StepReport
from lightning_zero.strategy import ZeroMethods


class ZeroMonitor(Callback):
    """Logs what the engine holds and does, of rank 0, every so many optimizer steps.

    ===============================================  ==================================================================
    ``zero/{parameters,master,gradients,             bytes of each kind of state on this rank at present (``buffers``:
    optimizer,buffers}_bytes``                       free memory that the engine keeps for reuse; ``parameters``: whole
                                                     ones, which at stage 3 come and go; ``master``: the shards)
    ``zero/peak_bytes``                              most bytes at one time: allocated on a GPU, resident on a CPU
    ``zero/sent_{gather,reduce,control,other}_bytes``  bytes that this rank has sent per optimizer step
    ``zero/{gather,reduce,step}_seconds``            seconds per optimizer step spent waiting for gathers and for
                                                     reductions, and in the optimizer
    ``zero/grad_norm``, ``zero/grad_norm_clipped``   global 2-norm of the gradients before and after clipping
    ``zero/loss_scale``                              under fp16
    ``zero/skipped_steps``                           under fp16 and with ``nonfinite_gradients="skip"``: how many steps
                                                     have been left out since their gradients were not finite
    ===============================================  ==================================================================

    Per-step values are means since the last time. The norm is computed for the steps that are logged.

    Args:
        every_n_steps: optimizer steps between two records; None: the Trainer's ``log_every_n_steps``.
        report: a folder for what the third and fourth optimizer steps of a fit look like: ``trace.json`` (a timeline of
            all ranks for chrome://tracing and https://ui.perfetto.dev), ``timeline.png`` and ``memory.png`` (of rank
            0). Takes matplotlib; a fit without it, or that cannot write to the folder, ends before training with an
            error on all ranks.
    """

    def __init__(self, every_n_steps: int | None = None, report: str | os.PathLike[str] | None = None) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be at least 1.")
        self.every_n_steps = every_n_steps
        self.report = report
        self._report: StepReport | None = None
        self._watches = False
        self._logged = self._begun_at = 0
        self._norm: torch.Tensor | None = None
        self._last_clipped: GradientNorm | None = None
        self._before: dict[str, float] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Say so where there is nothing to log, or to log to."""
        self._watches = isinstance(trainer.strategy, ZeroMethods)
        if not self._watches:
            rank_zero_warn(
                f"ZeroMonitor logs nothing under {type(trainer.strategy).__name__}: it watches zero1, zero2 and zero3."
            )
        elif not trainer.loggers and self.report is None:
            rank_zero_warn("ZeroMonitor has nothing to log to: give the Trainer a logger.")
        self._report = None
        if self._watches and self.report is not None and stage == "fit":
            self._report = StepReport(self.report)
            with together(trainer.strategy._communicator):
                if trainer.is_global_zero:
                    self._report.prepare()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to count."""
        if not self._watches:
            return
        self._logged = trainer.global_step
        self._before = _totals(trainer.strategy.engine)
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(trainer.strategy.root_device)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note which clipping was the last one."""
        self._norm = None
        self._last_clipped = trainer.strategy.gradient_norm if self._watches else None
        self._begun_at = trainer.global_step
        if self._report is not None:
            self._report.begin_batch(trainer.strategy.engine)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:
        """Take the norm, in case that nobody clips by it in this batch."""
        if self._is_due(trainer, trainer.global_step + 1) and self._clipped(trainer) is None:
            engine = trainer.strategy.engine
            self._norm = engine.sharded(raw_optimizer(optimizer)).gradients().norm(engine.comm)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log, if it is time, and report, if it is the step to report on."""
        if self._report is not None:
            stepped = trainer.global_step > self._begun_at
            self._report.end_batch(trainer.strategy.engine, stepped, trainer.global_step)
        if self._is_due(trainer, trainer.global_step):
            metrics = self._metrics(trainer)
            # the number under which Lightning logs what the module has logged in this batch
            step = trainer.fit_loop.epoch_loop._batches_that_stepped
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=step)
            self._logged = trainer.global_step

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Say where the report is, or that there is none."""
        if self._report is not None and self._report.written:
            rank_zero_info(f"ZeroMonitor: {self.report} has trace.json, timeline.png and memory.png.")
        elif self._report is not None:
            rank_zero_warn("ZeroMonitor has written no report: it takes four optimizer steps.")

    def _is_due(self, trainer: Any, step: int) -> bool:
        every = self.every_n_steps or trainer.log_every_n_steps
        return self._watches and bool(every) and step // every > self._logged // every

    def _clipped(self, trainer: Any) -> GradientNorm | None:
        """The norm before and after the clipping in this batch, if there was one."""
        norm = trainer.strategy.gradient_norm
        return None if norm is self._last_clipped else norm

    def _metrics(self, trainer: Any) -> dict[str, float]:
        strategy, engine = trainer.strategy, trainer.strategy.engine
        steps = max(trainer.global_step - self._logged, 1)
        now = _totals(engine)
        metrics: dict[str, float] = {f"{kind}_bytes": float(nbytes) for kind, nbytes in engine.memory().items()}
        metrics["peak_bytes"] = float(_peak(strategy.root_device))
        metrics |= {key: (value - self._before.get(key, 0.0)) / steps for key, value in now.items()}
        self._before = now
        clipped = self._clipped(trainer)
        if clipped is not None:
            metrics |= {"grad_norm": clipped.before.item(), "grad_norm_clipped": clipped.after.item()}
        elif self._norm is not None:
            metrics |= dict.fromkeys(("grad_norm", "grad_norm_clipped"), self._norm.item())
        if strategy.precision_plugin.scaler is not None:
            metrics["loss_scale"] = strategy.precision_plugin.scaler.get_scale()
        if strategy.precision_plugin.scaler is not None or strategy.config.nonfinite_gradients == "skip":
            metrics["skipped_steps"] = float(strategy.precision_plugin.skipped_steps)
        return {f"zero/{key}": value for key, value in metrics.items()}


def _totals(engine: Engine) -> dict[str, float]:
    """What has been sent and waited for since the communicator was made, and the time in optimizers."""
    sent = {f"sent_{kind}_bytes": float(nbytes) for kind, nbytes in engine.comm.sent_bytes.items()}
    waits = engine.comm.waited()
    seconds = {"gather_seconds": waits["gather"], "reduce_seconds": waits["reduce"]}
    return {**sent, **seconds, "step_seconds": engine.step_seconds}


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024
