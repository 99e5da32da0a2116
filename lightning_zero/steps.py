"""Steps of the loops, and ranks that have different numbers of batches for them.

In evaluation the ranks that have no more batches serve the others (see ``engine.uneven``). In training they cannot: a
step needs gradients of all ranks. There it is an error on all of them, in the last step that they share. In the same
message ranks learn that one of them has got SIGTERM, or SLURM's signal to save.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from lightning_zero.engine import Communicator
from lightning_zero.requeue import Requeue
from lightning_zero.saving import CheckpointMethods
from lightning_zero.sigterm import Sigterm

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class StepMethods(CheckpointMethods):
    """The strategy's part in training, validation, test and predict steps."""

    _batches: "TrainingBatches | None" = None
    """Of the fit in progress."""
    _sigterm: Sigterm | None = None
    """Of the run in progress."""
    _requeue: Requeue | None = None
    """Of the fit in progress."""
    _uneven = False
    """Whether this rank is in an evaluation with other numbers of batches on other ranks, which some have not ended."""

    def _begin_steps(self, trainer: "Trainer") -> None:
        """A run begins."""
        self._uneven = trainer.state.fn == "predict"  # Lightning does not fill its loaders up
        self._sigterm = Sigterm(trainer)
        self._batches = self._requeue = None
        if trainer.state.fn == "fit":
            self._requeue = Requeue(trainer)
            self._batches = TrainingBatches(trainer, self._communicator, self._sigterm, self._requeue)

    def _end_steps(self) -> None:
        """The run is over, or has failed."""
        for handler in (self._sigterm, self._requeue):
            if handler is not None:
                handler.give_back()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """A batch is there on this rank."""
        super().on_train_batch_start(batch, batch_idx)
        if self._requeue is not None:
            self._requeue.save_if_due()
        if self._batches is not None:
            self._batches.begin_epoch()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``training_step``."""
        with self._batches.step() if self._batches else nullcontext(), self._running.forward():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``validation_step``."""
        with self._evaluating():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``test_step``."""
        with self._evaluating():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's ``predict_step``."""
        with self._evaluating():
            return super().predict_step(*args, **kwargs)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Around an evaluation step; after the last one of this rank it serves those that have more."""
        engine = self._running
        with engine.uneven.step() if self._uneven else nullcontext(), engine.forward():
            yield
        if self._sigterm is not None:
            self._sigterm.end_predict()
        if getattr(self._evaluation_loop.batch_progress, "is_last_batch", False):
            self._stay_for_others()

    @property
    def _evaluation_loop(self) -> Any:
        trainer = self._module.trainer
        return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop

    def on_validation_start(self) -> None:
        """The loop begins; ranks may have different numbers of batches."""
        super().on_validation_start()
        self._compare_batches()

    def on_test_start(self) -> None:
        """The loop begins; ranks may have different numbers of batches."""
        super().on_test_start()
        self._compare_batches()

    def _compare_batches(self) -> None:
        engine = self._running
        self._uneven = engine.uneven.needed and may_differ(engine.comm, self._evaluation_loop.max_batches)

    def on_validation_end(self) -> None:
        """The loop is over."""
        super().on_validation_end()
        self._stay_for_others()

    def on_test_end(self) -> None:
        """The loop is over."""
        super().on_test_end()
        self._stay_for_others()

    def on_predict_end(self) -> None:
        """The loop is over."""
        super().on_predict_end()
        self._stay_for_others()

    def _stay_for_others(self) -> None:
        """Serve the ranks that have more batches, once, before any hook in which ranks may wait for one another."""
        if self._uneven:
            self._uneven = False
            self._running.uneven.finish()


class TrainingBatches:
    """Notices that a rank has run out of training batches before the others, or has got a signal."""

    def __init__(self, trainer: "Trainer", comm: Communicator, sigterm: Sigterm, requeue: Requeue) -> None:
        self._trainer, self._comm, self._sigterm, self._requeue = trainer, comm, sigterm, requeue
        self._epoch = -1
        self._watched = False

    def begin_epoch(self) -> None:
        """Compare the numbers of batches, once an epoch. Collective."""
        if self._epoch != self._trainer.current_epoch:
            self._epoch = self._trainer.current_epoch
            self._watched = may_differ(self._comm, [self._trainer.fit_loop.max_batches])

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward of one batch: the ranks tell each other, meanwhile, for whom it is the last one.

        Raises:
            RuntimeError: it is for some of them only.
        """
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        own = [self._watched and progress.is_last_batch, self._sigterm.received, self._requeue.received]
        news = torch.zeros(self._comm.world_size, len(own), dtype=torch.uint8, device="cpu")
        news[self._comm.rank] = torch.tensor(own)
        handle = self._comm.all_reduce(news.view(-1), "max", "training batch")
        yield
        handle.wait()
        ends, terminated, saving = ([rank for rank, bit in enumerate(bits) if bit] for bits in news.t().tolist())
        if terminated:
            self._sigterm.end_training(terminated)
        self._requeue.due |= bool(saving)
        if ends and len(ends) < self._comm.world_size and not self._stops_anyway():
            raise RuntimeError(
                f"Rank {', '.join(map(str, ends))} has no training batches after batch {progress.current.ready}, and "
                "other ranks have more. Give all ranks the same number: DistributedSampler, "
                f"Trainer(limit_train_batches={progress.current.ready}), or a data set cut to the shortest."
            )

    def _stops_anyway(self) -> bool:
        """Whether the step that this batch belongs to is the last one of the run."""
        limit = self._trainer.max_steps
        return limit != -1 and self._trainer.global_step + 1 >= limit


def may_differ(comm: Communicator, counts: Sequence[float]) -> bool:
    """Whether numbers of batches differ between ranks, or are not known before the end. Collective."""
    everywhere = comm.collect(list(counts))
    return any(other != everywhere[0] or float("inf") in other for other in everywhere)
