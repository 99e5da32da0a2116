"""Which steps of a run are looked at, and what is written about them."""

import os
import tempfile
import time
from pathlib import Path

from lightning_zero.engine import Engine
from lightning_zero.report import chrome, pictures
from lightning_zero.report.memory import MemorySamples
from lightning_zero.report.timeline import Span, Timeline

TIMED, SAMPLED = 2, 3
"""How many steps are made before the one that is timed, in which pools and orders are what they stay, and before that
whose memory is sampled, which takes time."""


class StepReport:
    """Looks at the third and the fourth optimizer step of a run and writes into a folder:

    ``trace.json``    the third step of all ranks, for chrome://tracing and https://ui.perfetto.dev
    ``timeline.png``  the same, of rank 0
    ``memory.png``    memory of rank 0 in the fourth step

    Its calls, all ranks: :meth:`prepare`, then for each batch :meth:`begin_batch` and :meth:`end_batch`. A step is what
    lies between them, from the first batch of a window to the last.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.written = False
        self._done = 0
        self._in_step = False
        self._timeline: Timeline | None = None
        self._memory: MemorySamples | None = None
        self._began = 0.0
        self._spans: list[Span] = []

    def prepare(self) -> None:
        """See, on rank 0 before training, whether the report can be written.

        Raises:
            ImportError: matplotlib is not installed.
            OSError: the folder cannot be made or written to.
        """
        pictures.check()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise OSError(
                f"A report cannot be written to {str(self.folder)!r}: {error.strerror}. Give a folder that you may"
                " write to."
            ) from error

    def begin_batch(self, engine: Engine) -> None:
        """A batch begins, the first of a step or another."""
        if self._in_step:
            return
        self._in_step = True
        if self._done == TIMED - 1:  # one step early: gathers of that step end in the next one
            self._timeline = Timeline(engine)
            self._timeline.open()
        if self._done == TIMED:
            self._began = time.perf_counter()
        if self._done == SAMPLED:
            self._memory = MemorySamples(engine)
            self._memory.open()

    def end_batch(self, engine: Engine, stepped: bool, number: int) -> None:
        """A batch has ended; with the last one of interest, collect and write. Collective then.

        Args:
            engine: the run's.
            stepped: whether the optimizer has stepped in it.
            number: of optimizer steps so far, which is this one's.

        Raises:
            OSError: on rank 0, a file cannot be written.
        """
        if not stepped:
            return
        self._in_step = False
        self._done += 1
        if self._timeline is not None and self._done == TIMED + 1:
            self._timeline.close()
            self._spans, self._timeline = self._timeline.spans(self._began, time.perf_counter()), None
        if self._memory is not None:
            self._memory.close()
            memory, self._memory = self._memory, None
            ranks = engine.comm.collect(self._spans)
            self.written = True
            if engine.comm.rank == 0:
                self._write(ranks, memory, engine, number)

    def _write(self, ranks: list[list[Span]], memory: MemorySamples, engine: Engine, number: int) -> None:
        run = f"rank 0 of {len(ranks)}, stage {engine.config.stage}"
        chrome.write(self.folder / "trace.json", ranks, f"optimizer step {number - 1}, stage {engine.config.stage}")
        timeline = pictures.timeline_figure(ranks[0], f"Where the time goes: optimizer step {number - 1}, {run}")
        pictures.save(timeline, self.folder / "timeline.png")
        picture = pictures.memory_figure(memory.samples, f"What memory holds: optimizer step {number}, {run}")
        pictures.save(picture, self.folder / "memory.png")
