"""Writes spans as a Chrome trace: JSON that chrome://tracing and https://ui.perfetto.dev open."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_zero.report.timeline import NESTED, Span

_THREADS = ("compute", "gather", "reduce", "control", "read", "write")


def write(path: Path, ranks: Sequence[Sequence[Span]], about: str) -> None:
    """Write the spans of all ranks, in rank order: a process for each rank, a thread for each row.

    Raises:
        OSError: the file cannot be written.
    """
    events = [event for rank, spans in enumerate(ranks) for event in _of_rank(rank, spans, _origin(ranks))]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"about": about}}))


def _origin(ranks: Sequence[Sequence[Span]]) -> float:
    return min((span.begin for spans in ranks for span in spans), default=0.0)


def _of_rank(rank: int, spans: Sequence[Span], origin: float) -> list[dict[str, Any]]:
    events = [
        _label("process_name", rank, 0, name=f"rank {rank}"),
        _label("process_sort_index", rank, 0, sort_index=rank),
    ]
    used = {_thread(span) for span in spans}
    for thread in sorted(used):
        events.append(_label("thread_name", rank, thread, name=_THREADS[thread]))
        events.append(_label("thread_sort_index", rank, thread, sort_index=thread))
    return events + [_complete(rank, span, origin) for span in spans]


def _thread(span: Span) -> int:
    return 0 if span.row in NESTED else _THREADS.index(span.row)


def _label(kind: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": args}


def _complete(rank: int, span: Span, origin: float) -> dict[str, Any]:
    """A complete event: times in microseconds."""
    args: dict[str, Any] = {"unit": span.unit} if span.unit else {}
    if span.nbytes:
        args["bytes"] = span.nbytes
    begin, end = (span.begin - origin) * 1e6, (span.end - origin) * 1e6
    place = {"pid": rank, "tid": _thread(span)}
    return {"ph": "X", "name": span.name, "cat": span.row, "ts": begin, "dur": end - begin, **place, "args": args}
