"""Numbers of batches: whether ranks may have different ones, and training steps that not all of them have.

In the same message in which the ranks tell each other that there are no more batches they learn that one of them has
got SIGTERM, or SLURM's signal to save.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.data import sized_len

from lightning_zero.engine import Communicator
from lightning_zero.requeue import Requeue
from lightning_zero.sigterm import Sigterm

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


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
            fetcher: Any = self._trainer.fit_loop._data_fetcher
            self._watched = may_differ(self._comm, [self._trainer.fit_loop.max_batches], fetcher)
            if self._watched and fetcher.length is not None:
                # data without a length under a limit; without one Lightning looks a batch ahead
                fetcher.iterator = _then(fetcher.iterator, self._out_of_batches)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward of one batch: the ranks tell each other, meanwhile, for whom it is the last one.

        Raises:
            RuntimeError: it is for some of them only.
        """
        last = self._watched and self._progress.is_last_batch
        with self._told(last=last, over=False):
            yield

    def _out_of_batches(self) -> None:
        """Instead of a step that other ranks may be in."""
        with self._told(last=True, over=True):
            pass

    @contextmanager
    def _told(self, last: bool, over: bool) -> Iterator[None]:
        own = [self._progress.current.ready if last else 0, over, self._sigterm.received, self._requeue.received]
        news = torch.zeros(self._comm.world_size, len(own), dtype=torch.int64, device="cpu")
        news[self._comm.rank] = torch.tensor(own)
        handle = self._comm.all_reduce(news.view(-1), "max", "training batch")
        yield
        handle.wait()
        counts, *bits = news.t().tolist()
        early, terminated, saving = ([rank for rank, bit in enumerate(row) if bit] for row in bits)
        if terminated:
            self._sigterm.end_training(terminated)
        self._requeue.due |= bool(saving)
        if len(set(counts)) > 1 and (early or not self._stops_anyway()):
            raise self._uneven(counts)

    @property
    def _progress(self) -> Any:
        return self._trainer.fit_loop.epoch_loop.batch_progress

    @staticmethod
    def _uneven(counts: list[int]) -> RuntimeError:
        least = min(count for count in counts if count)
        ranks = ", ".join(str(rank) for rank, count in enumerate(counts) if count == least)
        return RuntimeError(
            f"Rank {ranks} has no training batches after batch {least}, and other ranks have more. Give all ranks the "
            f"same number: DistributedSampler, Trainer(limit_train_batches={least}), or a data set cut to the shortest."
        )

    def _stops_anyway(self) -> bool:
        """Whether the step that this batch belongs to is the last one of the run."""
        limit = self._trainer.max_steps
        return limit != -1 and self._trainer.global_step + 1 >= limit


class EvaluationBatches:
    """Lightning's fetcher, and a call where this rank has no more batches of a loader.

    There, before anything in which ranks wait for each other: Lightning reduces what was logged per loader.

    Args:
        fetcher: Lightning's.
        call: is made once for each loader.
        loaders: their number; with 1 the call is made after the last one only.
    """

    def __init__(self, fetcher: Any, call: Callable[[], None], loaders: int) -> None:
        self._fetcher, self._call = fetcher, call
        self._loader, self._loaders = 0, loaders

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # Lightning asks with isinstance()
        return type(self._fetcher)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)

    def __next__(self) -> Any:
        try:
            item = next(self._fetcher)
        except StopIteration:
            self._pass(self._loaders)
            raise
        if isinstance(item, tuple):  # else the steps fetch by themselves, from a `dataloader_iter`
            self._pass(min(item[2], self._loaders - 1))
        return item

    def _pass(self, loader: int) -> None:
        while self._loader < loader:
            self._loader += 1
            self._call()


def may_differ(comm: Communicator, counts: Sequence[float], fetcher: Any) -> bool:
    """Whether numbers of batches differ between ranks, or are not known before the end. Collective.

    Args:
        comm: of the ranks.
        counts: what Lightning takes them to be, for each loader. For data without a length it is the limit.
        fetcher: Lightning's, of the loop.
    """
    unknown = any(sized_len(loader) is None for loader in fetcher.combined_loader.flattened)
    everywhere = comm.collect([inf] if unknown else list(counts))
    return any(other != everywhere[0] or inf in other for other in everywhere)


def _then(iterator: Iterator[Any], call: Callable[[], None]) -> Iterator[Any]:
    while True:  # `yield from` would begin a CombinedLoader anew
        try:
            batch = next(iterator)
        except StopIteration:
            call()
            return
        yield batch
