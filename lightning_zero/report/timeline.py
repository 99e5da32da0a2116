"""When what happened in a step: spans of time, from the engine's events and transfers.

All times are the host's. On CUDA the host runs ahead of the GPU: a span then says when work was launched, and
``torch.profiler``, in which the same spans are labels, when it ran.
"""

import time
from collections.abc import Iterator
from typing import NamedTuple

from lightning_zero.engine import Engine, Transfer
from lightning_zero.engine.lanes import Handle

NESTED = ("phase", "unit", "wait", "engine")
"""Rows of the main thread, whose spans lie within one another."""

_ENGINE = {
    "gather": "launch gather",
    "reduce": "launch reduce",
    "wait": "wait for gather",
    "reduce_wait": "wait for reduce",
    "reshard": "free",
}


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        row: ``phase`` (forward, backward, step), ``unit`` (forward or backward of one), ``wait`` (for a collective),
            ``engine`` (launching one, freeing a unit); ``gather``, ``reduce``, ``control`` (collectives on their way),
            ``read``, ``write`` (tiers).
        name: what, with the unit.
        unit: its name; empty where it is none's.
        begin, end: seconds since the epoch.
        nbytes: of a read or write.
    """

    row: str
    name: str
    unit: str
    begin: float
    end: float
    nbytes: int = 0


class _Transfer(NamedTuple):
    row: str
    what: str
    begin: float
    under_way: Handle | Transfer
    nbytes: int


class Timeline:
    """Listens to an engine between :meth:`open` and :meth:`close`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._events: list[tuple[float, str, str]] = []
        self._transfers: list[_Transfer] = []
        self._epoch = time.time() - time.perf_counter()
        self._units = {flat.name: unit.name for unit in engine.units for flat in unit.flats}

    def open(self) -> None:
        """Begin to listen."""
        self._engine.events = self
        self._engine.comm.watch(self._collective)
        for tier in self._engine.offload.tiers:
            tier.watch = self._tier

    def close(self) -> None:
        """Stop."""
        self._engine.events = None
        self._engine.comm.watch(None)
        for tier in self._engine.offload.tiers:
            tier.watch = None

    def append(self, event: tuple[str, str], /) -> None:
        """The engine says what happens."""
        self._events.append((time.perf_counter(), *event))

    def _collective(self, row: str, handle: Handle) -> None:
        self._transfers.append(_Transfer(row, handle.what, time.perf_counter(), handle, 0))

    def _tier(self, verb: str, what: str, nbytes: int, begin: float, transfer: Transfer) -> None:
        self._transfers.append(_Transfer(verb, what, begin, transfer, nbytes))

    def spans(self, begin: float, end: float) -> list[Span]:
        """What happened between two times of ``time.perf_counter()``, cut there, in the order of their beginnings; of
        those that begin together the longer one first.
        """
        found = [*self._passes(end), *self._under_way(begin, end)]
        cut = [span._replace(begin=max(span.begin, begin), end=min(span.end, end)) for span in found]
        # also what has no length: transfers that wait behind others at the end
        within = [span for span in cut if span.begin <= end and span.end > begin]
        moved = [span._replace(begin=span.begin + self._epoch, end=span.end + self._epoch) for span in within]
        return sorted(moved, key=lambda span: (span.begin, -span.end))

    def _passes(self, end: float) -> Iterator[Span]:
        """What the main thread did.

        The backward of a unit begins when the gradient of its output is there, and not before that of another has
        ended; for what has no such moment (the root unit), when that has ended.
        """
        open_since: dict[tuple[str, str], list[float]] = {}
        begun: dict[str, float] = {}
        free = 0.0
        for now, event, unit in self._events:
            kind = event.removesuffix("_done")
            if kind == "backward" and unit:
                if event == kind:
                    begun.setdefault(unit, now)
                else:
                    yield Span("unit", f"backward {unit}", unit, max(begun.pop(unit, free), free), now)
                    free = now
                continue
            if event == kind:
                open_since.setdefault((kind, unit), []).append(now)
            elif open_since.get((kind, unit)):
                yield _span(kind, unit, open_since[kind, unit].pop(), now)
            if kind == "backward":
                free, begun = now, {}
        for (kind, unit), times in open_since.items():
            yield from (_span(kind, unit, since, end) for since in times)

    def _under_way(self, begin: float, end: float) -> Iterator[Span]:
        """Transfers. Of one row they follow one another: where several were under way together, the span of one begins
        when the one before has ended, so that their lengths add up to the time in which any was.
        """
        free: dict[str, float] = {}
        ends = [(transfer.under_way.ended or end, transfer) for transfer in self._transfers]
        for ended, (row, what, since, _, nbytes) in sorted(ends, key=lambda pair: pair[0]):
            since = min(max(since, free.get(row, begin)), ended)
            free[row] = ended
            words, _, flat = what.rpartition(" of ")
            unit = self._units.get(flat, "")
            name = f"{row} {unit}" if words in ("gather", "reduction") else what
            yield Span(row, name, unit, since, ended, nbytes)


def _span(kind: str, unit: str, begin: float, end: float) -> Span:
    if kind in _ENGINE:
        row = "wait" if kind.endswith("wait") else "engine"
        return Span(row, f"{_ENGINE[kind]} {unit}", unit, begin, end)
    if kind == "step":
        return Span("phase", "optimizer step", "", begin, end)
    return Span("unit" if unit else "phase", f"{kind} {unit}".rstrip(), unit, begin, end)
