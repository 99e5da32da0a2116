"""Asynchronous operations: how they are started and waited for.

A lane is a process group with two threads, one that starts its operations and one that waits for them, both in order.
The main thread does neither inside the backend: starting a message on a busy gloo connection takes a lock that the
transport holds for long, and a gloo wait can neither be interrupted nor timed out without closing the connection. It
waits for the threads, in slices, and between them asks whether the peers can still arrive.
"""

import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zero.engine.connections import Connections
from lightning_zero.engine.peers import Peers
from lightning_zero.engine.tiers import TierError


class Start(NamedTuple):
    """Starts one operation of the backend and returns its ``Work``; ``peer`` is the other end of a message."""

    run: Callable[[], Any]
    peer: int | None = None


Round = Sequence[Start]
"""Operations that are under way together."""

SLICE = 1.0
"""Seconds between two looks at the peers."""


class Handle:
    """An operation under way. ``wait`` must be called once its result is needed, from the main thread."""

    def __init__(self, what: str, rounds: Sequence[Round], finish: Callable[[], Any] | None, lane: "Lane") -> None:
        self.what = what
        self.rounds = list(rounds)
        self.works: list[tuple[Any, int | None]] = []
        self.error: BaseException | None = None
        self.lost_peer: int | None = None
        self.ended: float | None = None
        """When the result was there, by ``time.perf_counter()``; on NCCL: when ``wait`` returned, which only orders
        streams."""
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
            begin = time.perf_counter()
            self._lane.peers.wait(self._arrived, self.what, self.number, self._lane.unfinished, SLICE)
            self._lane.waited += time.perf_counter() - begin
        elif not self._lane.blocking:
            for work, _ in self.works:
                work.wait()
            self.ended = time.perf_counter()
        if isinstance(self.error, TierError):
            raise self.error
        if self.error is not None:
            raise self._lane.peers.lost(self.what, self.error, self.lost_peer)
        self._done = True
        self.works = []
        if self._finish is not None:
            self._finish()
            self._finish = None

    def arrives(self, seconds: float) -> bool:
        """Whether the result is there within so many seconds. (On NCCL a wait only orders streams: always.)"""
        return not self._lane.blocking or self._arrived.wait(seconds)

    def start(self) -> None:
        """Start the first round; errors are kept for :meth:`wait`."""
        # what starts and works hold are tensors: none may be left here when the main thread goes on
        starts = self.rounds.pop(0)
        for run, peer in starts:
            try:
                self.works.append((run(), peer))
            except Exception as error:  # the backend's, when a peer or the process group has gone
                self.error, self.lost_peer = error, peer
                break

    def arrive(self) -> None:
        """Wait inside the backend, for one round after the other."""
        self._await_round()
        while self.rounds and self.error is None:
            self.start()
            self._await_round()
        self.rounds.clear()
        self.ended = time.perf_counter()
        self._arrived.set()

    def _await_round(self) -> None:
        # a method of its own, for the same reason: its last work goes before the main thread goes on
        works, self.works = self.works, []
        while works and self.error is None:
            work, peer = works.pop(0)
            try:
                work.wait()
            except BaseException as error:  # handed to the main thread
                self.error, self.lost_peer = error, peer
        works.clear()


class Lane:
    """A process group for one kind of operation."""

    def __init__(self, name: str, backend: str, timeout: timedelta, peers: Peers) -> None:
        self.name = name
        with Connections() as self._connections:
            self.group = dist.new_group(backend=backend, timeout=timeout)
        self.peers = peers
        # NCCL's wait only orders streams: no thread is needed, and its own watchdog ends what hangs
        self.blocking = backend == "gloo"
        self.waited = 0.0
        """Seconds that the main thread has waited for operations of this lane."""
        self.watch: Callable[[str, Handle], None] | None = None
        """Told of each operation: the lane's name, and the handle."""
        self._launched: Counter[str] = Counter()
        self._submitted: SimpleQueue[Handle | None] = SimpleQueue()
        self._started: SimpleQueue[Handle | None] = SimpleQueue()
        self._pending: deque[Handle] = deque()
        self._threads: list[threading.Thread] = []

    def tag(self, what: str) -> int:
        """A message tag for the next operation named ``what``: equal on all ranks, whatever else they do in between."""
        self._launched[what] += 1
        count = self._launched[what]
        self.peers.launched(f"{self.name}:{what}", count)
        return (zlib.crc32(what.encode()) ^ (count * 0x9E3779B1)) & 0x3FFFFFFF

    def send(self, tensor: Tensor, peer: int, tag: int) -> Start:
        """Starts to send a 1-D CPU tensor. (The group's own method: what ``dist.isend`` checks costs more than it.)"""
        return Start(partial(self.group.send, [_real(tensor)], peer, tag), peer)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Start:
        """Starts to receive into a 1-D CPU tensor."""
        return Start(partial(self.group.recv, [_real(tensor)], peer, tag), peer)

    def submit(self, starts: Round, what: str, finish: Callable[[], Any] | None = None) -> Handle:
        """Have operations started, and take charge of them; ``finish`` runs in the main thread in ``wait``."""
        return self.submit_rounds([starts] if starts else [], what, finish)

    def submit_rounds(self, rounds: Sequence[Round], what: str, finish: Callable[[], Any] | None = None) -> Handle:
        """The same for rounds of operations, each started when those of the round before are complete."""
        handle = Handle(what, rounds, finish, self)
        if rounds and self.watch is not None:
            self.watch(self.name, handle)
        if not rounds:
            handle._arrived.set()
        elif self.blocking:
            self._run()
            self._pending.append(handle)
            self._submitted.put(handle)
        else:
            handle.start()
        return handle

    def launched(self, what: str) -> int:
        """How many operations named ``what`` this rank has started."""
        return self._launched[what]

    def unfinished(self) -> dict[str, int]:
        """What the lane's thread has still to wait for, in order: operations and their numbers."""
        return {handle.key: handle.number for handle in list(self._pending)}

    def _run(self) -> None:
        """Begin the threads, once."""
        if not self._threads:
            for target in (self._start_all, self._await_all):
                self._threads.append(threading.Thread(target=target, name=f"zero-{self.name}", daemon=True))
                self._threads[-1].start()

    def _start_all(self) -> None:
        while (handle := self._submitted.get()) is not None:
            handle.start()
            self._started.put(handle)
        self._started.put(None)

    def _await_all(self) -> None:
        while (handle := self._started.get()) is not None:
            handle.arrive()
            self._pending.popleft()

    def close(self) -> None:
        """Have the threads end when what they wait for has come; the process group lives as long as the process."""
        self._submitted.put(None)

    def ends(self, deadline: float) -> bool:
        """Whether the threads of a closed lane have ended by then (of ``time.monotonic``)."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def cut(self) -> None:
        """Shut the connections down: whoever waits at either end gets an error."""
        self._connections.cut()


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
