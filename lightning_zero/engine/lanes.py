"""Asynchronous operations and how they are waited for.

A lane is a process group with a thread that waits for its operations in order. The main thread never waits inside the
backend: a gloo wait can neither be interrupted nor timed out without closing the connection. It waits for the thread,
in slices, and between them asks whether the peers can still arrive.
"""

import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch.distributed as dist

from lightning_zero.engine.peers import Peers

SLICE = 1.0
"""Seconds between two looks at the peers."""


class Handle:
    """An operation under way. ``wait`` must be called once its result is needed, from the main thread."""

    def __init__(self, what: str, works: Sequence[Any], finish: Callable[[], Any] | None, lane: "Lane") -> None:
        self.what = what
        self.works = works
        self.error: BaseException | None = None
        self.key, self.number = f"{lane.name}:{what}", lane.launched(what)
        self._finish = finish
        self._lane = lane
        self._arrived = threading.Event()
        self._done = False

    def wait(self) -> None:
        """Return when the result is there.

        Raises:
            RuntimeError: a peer failed, left, or waits for something that can never come.
        """
        if self._done:
            return
        if self._lane.blocking and not self._arrived.is_set():
            self._lane.peers.wait(self._arrived, self.what, self.number, self._lane.unfinished, SLICE)
        elif not self._lane.blocking:
            for work in self.works:
                work.wait()
        if self.error is not None:
            raise self._lane.peers.lost(self.what, self.error)
        self._done = True
        self.works = ()
        if self._finish is not None:
            self._finish()
            self._finish = None

    def arrives(self, seconds: float) -> bool:
        """Whether the result is there within so many seconds. (On NCCL a wait only orders streams: always.)"""
        return not self._lane.blocking or self._arrived.wait(seconds)

    def arrive(self) -> None:
        """Called by the lane's thread: wait inside the backend."""
        # works hold tensors: none may be left here when the main thread goes on
        works, self.works = list(self.works), ()
        try:
            while works:
                works.pop(0).wait()
        except BaseException as error:  # handed to the main thread
            self.error = error
            works.clear()
        self._arrived.set()


class Lane:
    """A process group for one kind of operation."""

    def __init__(self, name: str, group: dist.ProcessGroup, peers: Peers) -> None:
        self.name = name
        self.group = group
        self.peers = peers
        # NCCL's wait only orders streams: no thread is needed, and its own watchdog ends what hangs
        self.blocking = dist.get_backend(group) == "gloo"
        self._launched: Counter[str] = Counter()
        self._queue: SimpleQueue[Handle | None] = SimpleQueue()
        self._pending: deque[Handle] = deque()
        self._thread: threading.Thread | None = None

    def tag(self, what: str) -> int:
        """A message tag for the next operation named ``what``: equal on all ranks, whatever else they do in between."""
        self._launched[what] += 1
        count = self._launched[what]
        self.peers.launched(f"{self.name}:{what}", count)
        return (zlib.crc32(what.encode()) ^ (count * 0x9E3779B1)) & 0x3FFFFFFF

    @contextmanager
    def starting(self, what: str) -> Iterator[None]:
        """Around calls that start operations: there, too, the backend raises when a peer has gone.

        Raises:
            PeerError: in the place of the backend's own error.
        """
        try:
            yield
        except RuntimeError as error:
            raise self.peers.lost(what, error) from error

    def submit(self, works: Sequence[Any], what: str, finish: Callable[[], Any] | None = None) -> Handle:
        """Take charge of operations that have been started; ``finish`` runs in the main thread in ``wait``."""
        handle = Handle(what, works, finish, self)
        if not works:
            handle._arrived.set()
        elif self.blocking:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"zero-{self.name}", daemon=True)
                self._thread.start()
            self._pending.append(handle)
            self._queue.put(handle)
        return handle

    def launched(self, what: str) -> int:
        """How many operations named ``what`` this rank has started."""
        return self._launched[what]

    def unfinished(self) -> dict[str, int]:
        """What the lane's thread has still to wait for, in order: operations and their numbers."""
        return {handle.key: handle.number for handle in list(self._pending)}

    def _run(self) -> None:
        while (handle := self._queue.get()) is not None:
            handle.arrive()
            self._pending.popleft()

    def close(self) -> None:
        """End the thread when what it waits for has come; the process group lives as long as the process."""
        self._queue.put(None)
