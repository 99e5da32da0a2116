"""SLURM's signal before the end of a job (``sbatch --signal``): Lightning saves, and puts the job into the queue again.

Lightning does so inside the handler, wherever a rank is just then. Saving is a collective, for which all ranks must be
at the same place, and SLURM may signal some of them only. Here the handler takes a note, the ranks tell each other in
the next step (see ``steps``), and save before another one begins.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Requeue:
    """Stands in for Lightning's handler in one fit, until :meth:`give_back`."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer, self._connector = trainer, trainer._signal_connector
        self.received = False
        """Whether this rank has got the signal."""
        self.due = False
        """Whether some rank has, and all ranks know it."""
        self.saving = False
        """Whether the job goes back into the queue as soon as it is saved, which ends it."""
        self._connector._slurm_sigusr_handler_fn = self._note  # type: ignore[method-assign, assignment]

    def give_back(self) -> None:
        """Leave the Trainer as it was."""
        vars(self._connector).pop("_slurm_sigusr_handler_fn", None)

    def _note(self, signum: Any, frame: Any) -> None:
        self.received = True

    def save_if_due(self) -> None:
        """Do what Lightning's handler does, between two windows. Collective."""
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.completed
        if self.due and done % self._trainer.accumulate_grad_batches == 0:
            self.received = self.due = False
            signum = self._trainer._accelerator_connector.cluster_environment.requeue_signal  # type: ignore[attr-defined]
            self.saving = True
            try:
                type(self._connector)._slurm_sigusr_handler_fn(self._connector, signum, None)  # type: ignore[arg-type]
            finally:
                self.saving = False
