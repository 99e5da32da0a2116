"""SIGTERM, to one rank or to all of them: training ends on every rank, after the same step.

Lightning's handler broadcasts from rank 0 inside the handler, which waits for ever where rank 0 has not got the signal,
or where a rank has died (and torchrun then sends it to the others). Here the handler only takes a note, and the ranks
tell each other in the next step (see ``steps``).
"""

from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class Sigterm:
    """Stands in for Lightning's handler in one run, until :meth:`give_back`."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self.received = False
        """Whether this rank has got the signal in this run."""
        self._ranks: Sequence[int] = [trainer.global_rank]
        # what Lightning would register, and the broadcast before each batch, in which it asks for rank 0's
        self._connector, self._loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
        self._connector._sigterm_notifier_fn = self._note  # type: ignore[method-assign, assignment]
        self._loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def give_back(self) -> None:
        """Leave the Trainer as it was."""
        self._connector.__dict__.pop("_sigterm_notifier_fn", None)
        self._loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        launcher = self._trainer.strategy.launcher
        if launcher is not None and not self.received:
            launcher.kill(signum)
        self.received = True
        if not self._trainer.training:  # evaluation: ranks may have no step in common, and it changes nothing
            self._connector.received_sigterm = True

    def end_training(self, ranks: Sequence[int]) -> None:
        """Some ranks have got the signal, and all ranks know it: Lightning's loop ends after this batch."""
        self._ranks = ranks
        self._connector.received_sigterm = True

    def end_predict(self) -> None:
        """End after a batch of prediction: Lightning's loop does not.

        Raises:
            SystemExit: this rank has got the signal.
        """
        if self.received and self._trainer.predicting:
            raise SystemExit(self._words())

    def explain(self, exception: BaseException) -> None:
        """Give Lightning's silent ``SystemExit`` a reason, so that the process does not end with success."""
        if type(exception).__name__ == "SIGTERMException" and isinstance(exception, SystemExit):
            exception.code = self._words()
            exception.args = (exception.code,)

    def _words(self) -> str:
        who, trainer = ", ".join(map(str, self._ranks)), self._trainer
        return f"Rank {who} has got SIGTERM: rank {trainer.global_rank} ends after step {trainer.global_step}."
