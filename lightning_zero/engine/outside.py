"""A main thread that waits in a collective which is not the engine's: Lightning's or the user's own.

Such a wait cannot be interrupted, and the ranks that wait in the engine cannot see it. A thread looks at the main
thread's stack now and then, and says where it waits. If no rank can go on any more, the process ends with that message:
gloo would wait for the time-out, half an hour by default.
"""

import os
import sys
import threading
import traceback
from types import FrameType

from lightning_zero.engine.peers import Peers, stuck

LOOK = 2.0
"""Seconds between two looks."""

PATIENCE = 8.0
"""Seconds in one and the same collective before it is worth a word: until then it may only be slow."""

GRACE = 8.0
"""Seconds that the others have to end by themselves, which ends the wait, too."""

_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")


class Outside:
    """Watches the main thread of one rank until :meth:`close`."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self._closed = threading.Event()
        self._main = threading.main_thread().ident
        threading.Thread(target=self._watch, name="zero-outside", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _watch(self) -> None:
        frame, seconds = None, 0.0
        while not self._closed.wait(LOOK):
            before, frame = frame, self._collective()
            seconds = seconds + LOOK if frame is not None and frame is before else 0.0
            if frame is not None and seconds >= PATIENCE:
                self._wait_along(frame)
                frame, seconds = None, 0.0

    def _collective(self) -> FrameType | None:
        """The innermost Python frame of the main thread, if that is a collective of ``torch.distributed``."""
        frame = sys._current_frames().get(self._main or 0)
        return frame if frame is not None and _is_collective(frame) else None

    def _wait_along(self, frame: FrameType) -> None:
        """Publish where the main thread is for as long as it is there, and end the process if that is for ever."""
        where = _place(frame)
        hopeless, before = 0.0, None
        while not self._closed.wait(LOOK) and self._collective() is frame:
            try:
                now = self.peers.outside(where)
            except RuntimeError:  # the store has gone with its host: so will the connection
                return
            hopeless = hopeless + LOOK if now == before and self.peers.rank in stuck(now) else 0.0
            before = now
            if hopeless >= GRACE:
                self._end(frame, self.peers.describe(now))
        self.peers.go_on()

    def _end(self, frame: FrameType, words: str) -> None:
        self.peers.fail(words)
        first, stack = _handled(frame), "".join(traceback.format_stack(frame))
        sys.stderr.write("".join(traceback.format_exception(first)) if first is not None else "")
        sys.stderr.write(f"Rank {self.peers.rank} ends: it waits for ever here.\n{stack}{words}\n")
        sys.stderr.flush()
        os._exit(1)


def failed_in(error: BaseException) -> str:
    """In words, the collective of ``torch.distributed`` that has raised an error; empty if it was something else."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return _place(trace.tb_frame) if trace is not None and _is_collective(trace.tb_frame) else ""


def _is_collective(frame: FrameType) -> bool:
    return frame.f_code.co_filename.endswith(_COLLECTIVES)


def _handled(frame: FrameType | None) -> BaseException | None:
    """The exception that a caller of the frame has by name: it came first, and would not be printed any more."""
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, BaseException):
                return value
        frame = frame.f_back
    return None


def _place(frame: FrameType) -> str:
    """In words, the collective and the line outside of torch that has called it."""
    name, caller = frame.f_code.co_name, frame.f_back
    while caller is not None and os.path.join("torch", "distributed") in caller.f_code.co_filename:
        name, caller = caller.f_code.co_name if caller.f_code.co_name != "wrapper" else name, caller.f_back
    if caller is None:
        return f"torch.distributed.{name}"
    return f"torch.distributed.{name} in {os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
