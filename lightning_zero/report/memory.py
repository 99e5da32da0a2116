"""What memory holds during a step: sampled at every event of the engine."""

import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

from lightning_zero.engine import Engine

_STATM = Path("/proc/self/statm")


class Sample(NamedTuple):
    """Memory of this rank at one moment.

    Attributes:
        seconds: since the step began, without the time that sampling itself has taken.
        event: the engine's, with the unit.
        nbytes: live bytes by kind, those of ``Engine.memory`` and ``Engine.passing_memory``.
        total: bytes of all there is: allocated on a GPU, resident on a CPU; None where nobody can say.
    """

    seconds: float
    event: str
    nbytes: dict[str, int]
    total: int | None


class MemorySamples:
    """Listens to an engine between :meth:`open` and :meth:`close`."""

    def __init__(self, engine: Engine) -> None:
        self.samples: list[Sample] = []
        self._engine = engine
        self._taken = 0.0

    def open(self) -> None:
        """The step begins."""
        self._begin = time.perf_counter()
        self.append(("begin", ""))
        self._engine.events = self

    def close(self) -> None:
        """It has ended."""
        self._engine.events = None
        self.append(("end", ""))

    def append(self, event: tuple[str, str], /) -> None:
        """The engine says what happens."""
        now = time.perf_counter()
        nbytes = {**self._engine.memory(), **self._engine.passing_memory()}
        total = total_bytes(self._engine.comm.device)
        self.samples.append(Sample(now - self._begin - self._taken, " ".join(event).rstrip(), nbytes, total))
        self._taken += time.perf_counter() - now


def total_bytes(device: torch.device) -> int | None:
    """What is allocated on a GPU, or resident in this process; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
