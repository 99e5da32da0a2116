"""Steps of the loops, and ranks that have different numbers of batches for them.

In evaluation the ranks that have no more batches serve the others (see ``engine.uneven``). In training they cannot: a
step needs gradients of all ranks. There it is an error on all of them (see ``batches``).
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from lightning_zero.batches import EvaluationBatches, TrainingBatches, may_differ
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
    """Whether this rank is in an evaluation in which ranks may have different numbers of batches."""

    def _begin_steps(self, trainer: "Trainer") -> None:
        """A run begins."""
        # Lightning neither fills up the loaders of predict nor enters the loop of a rank without batches
        self._uneven = trainer.state.fn == "predict"
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
        """Around an evaluation step."""
        engine = self._running
        with engine.uneven.step() if self._uneven else nullcontext(), engine.forward():
            yield
        if self._sigterm is not None:
            self._sigterm.end_predict()

    def on_validation_start(self) -> None:
        """The loop begins; ranks may have different numbers of batches."""
        super().on_validation_start()
        self._compare_batches()

    def on_test_start(self) -> None:
        """The loop begins; ranks may have different numbers of batches."""
        super().on_test_start()
        self._compare_batches()

    def on_predict_start(self) -> None:
        """The loop begins; ranks may have different numbers of batches."""
        super().on_predict_start()
        if self._uneven:
            loop: Any = self._module.trainer.predict_loop
            loop._data_fetcher = EvaluationBatches(loop._data_fetcher, self._stay_for_others, 1)

    def _stay_for_others(self) -> None:
        """Serve the ranks that predict still, once."""
        if self._uneven:
            self._uneven = False
            self._running.uneven.finish()

    def _compare_batches(self) -> None:
        engine = self._running
        loop: Any = self._module.trainer._evaluation_loop
        self._uneven = engine.uneven.needed and may_differ(engine.comm, loop.max_batches, loop._data_fetcher)
        if self._uneven:
            loop._data_fetcher = EvaluationBatches(loop._data_fetcher, engine.uneven.finish, len(loop.max_batches))
