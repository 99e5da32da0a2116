"""What memory holds during a step: sampled at every event of the engine."""

import time
from typing import NamedTuple

import torch

from lightning_zero.engine import Engine
from lightning_zero.engine.host_memory import allocated


class Sample(NamedTuple):
    """Memory of this rank at one moment.

    Attributes:
        seconds: since the step began, without the time that sampling itself has taken.
        event: the engine's, with the unit.
        nbytes: live bytes by kind, those of ``Engine.memory`` and ``Engine.passing_memory``.
        total: bytes of all that is allocated; None where nobody can say.
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
    """What is allocated, on a GPU or in this process' heap; None where nobody counts.

    Not resident memory: of what is freed the C library keeps much, so that activations would not be seen to go.
    """
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else allocated()
