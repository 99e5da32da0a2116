"""What this rank knows of the others: where they are, and whether they can still meet.

While ranks agree this costs nothing. A rank that has waited for a second writes what it waits for, and which operations
it has launched, into the store, and reads what the others wrote.
"""

import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

Position = dict[str, Any]


LINGER = 3.0
"""Seconds that a process which has failed stays at most, if the store lives in it, for the others to read why."""


class PeerError(RuntimeError):
    """A peer failed, left, or has taken another way."""


class Peers:
    """Positions of all ranks, in the rendezvous store."""

    _generation = 0

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        Peers._generation += 1
        self._store = PrefixStore(f"lightning_zero/{Peers._generation}", store)
        self.rank, self.world_size = rank, world_size
        self._holds_store = world_size > 1 and rank == 0 and _lives_here(store)
        self._gone: set[int] = set()
        self._failed = False
        self._lock = threading.Lock()  # the thread that watches the main thread publishes, too
        self.step = 0
        self.trouble = ""
        """Why this rank does what the others do not expect, if it knows."""
        self._counts: Counter[str] = Counter()
        self._published = False

    def launched(self, what: str, count: int) -> None:
        """Note that this rank has started operation number ``count`` of the name ``what``."""
        self._counts[what] = count

    def wait(
        self, arrived: threading.Event, what: str, number: int, unfinished: Callable[[], dict[str, int]], seconds: float
    ) -> None:
        """Wait for operation ``number`` of the name ``what``, and look at the peers every so many seconds.

        ``unfinished`` gives the operations that must be complete first, as :meth:`launched` was told of them.

        Raises:
            PeerError: the ranks cannot meet; the message says where each of them is.
        """
        before: list[Position | None] = []
        pause = seconds
        while not arrived.wait(pause):
            pause = min(2 * pause, 8 * seconds)  # thousands of ranks may be waiting for one that saves
            here = {"waits": what, "number": number, "step": self.step, "unfinished": unfinished()}
            try:
                self._publish({**here, "launched": dict(self._counts)})
                now = self._positions()
            except RuntimeError as error:  # the store has gone with its host: so will the connection, if it is needed
                if arrived.wait(5 * seconds):
                    break
                words = "the process that holds the store (rank 0, or torchrun) has died or left"
                raise PeerError(f"Rank {self.rank} cannot go on with {what!r} in step {self.step}: {words}.") from error
            self._raise_failed(what, now)
            if now == before and self.rank in stuck(now):
                words = self.describe(now)
                self.fail(words)  # a peer may only see the connection close, and then finds these
                raise PeerError(words)
            before = now
        if self._published:
            self.go_on()

    def outside(self, where: str) -> list[Position | None]:
        """Say that this rank waits at a place outside the engine; returns all positions."""
        here = {f"outside:{where}": 1}
        launched = {**self._counts, **here}
        self._publish({"waits": where, "number": 1, "step": self.step, "unfinished": here, "launched": launched})
        return self._positions()

    def go_on(self) -> None:
        """Say that this rank waits no more."""
        with suppress(RuntimeError):
            self._publish({"waits": None, "step": self.step})
        self._published = False

    def last_words(self) -> str:
        """What other ranks have said when they failed; empty if none has."""
        try:
            positions = self._positions()
        except RuntimeError:
            return ""
        return _join_failures(positions, self.rank)

    def fail(self, message: str) -> None:
        """Leave word that this rank has failed; what it says first stays."""
        if self.world_size > 1:
            with suppress(RuntimeError):  # the store's host is gone, and the peers know it
                self._publish({"waits": None, "step": self.step, "failed": message})

    def linger(self) -> None:
        """The process is about to end, and if it holds the store, that with it, where all words are: wait until the
        others have failed, too, for a while.
        """
        deadline = time.monotonic() + LINGER
        with suppress(RuntimeError):  # the store has gone already
            while self._holds_store and time.monotonic() < deadline:
                ended = {rank for rank, position in enumerate(self._positions()) if position and "failed" in position}
                if len(ended | self._gone | {self.rank}) == self.world_size:
                    return
                time.sleep(0.05)

    def lost(self, what: str, error: BaseException, peer: int | None = None) -> PeerError:
        """The error for a connection that broke (to rank ``peer``, if it is known): the peer's own words, where it left
        any.
        """
        if peer is not None:
            self._gone.add(peer)
        error.__context__ = error.__context__ or sys.exc_info()[1]  # what this rank handles is shown, too
        try:
            now = self._positions()
        except RuntimeError:
            now = [None] * self.world_size
        self._wait_for_word(now)
        try:
            self._raise_failed(what, self._positions())
        except PeerError as failed:
            failed.__cause__ = error
            return failed
        except RuntimeError:
            pass
        found = PeerError(
            f"Rank {self.rank} lost {'a peer' if peer is None else f'rank {peer}'} during {what!r} in step {self.step}:"
            f" {error}. A rank has died or left; look for the first error in the output of the other ranks."
        )
        found.__cause__ = error
        return found

    def _wait_for_word(self, now: list[Position | None]) -> None:
        """A rank that fails closes its connections and then says why: give it a moment."""
        if not any(position and "failed" in position for position in now):
            threading.Event().wait(0.5)

    def _publish(self, position: Position) -> None:
        position["trouble"] = f" after {self.trouble}" if self.trouble else ""
        with self._lock:
            if not self._failed:
                self._failed = "failed" in position
                self._store.set(str(self.rank), json.dumps(position))
                self._published = True

    def _positions(self) -> list[Position | None]:
        keys = [str(rank) for rank in range(self.world_size)]
        return [json.loads(self._store.get(key)) if self._store.check([key]) else None for key in keys]

    def _raise_failed(self, what: str, positions: list[Position | None]) -> None:
        words = _join_failures(positions, self.rank)
        if words:
            raise PeerError(f"Rank {self.rank} cannot go on with {what!r} in step {self.step}: {words}")

    def describe(self, positions: list[Position | None]) -> str:
        """In words, where all ranks are that wait."""
        lines = [
            f"  rank {r}: waits for {p['waits']!r} (number {p['number']}) in step {p['step']}{p['trouble']}"
            for r, p in enumerate(positions)
            if p and p.get("waits")
        ]
        advice = (
            "All ranks must run the same units in the same order (stage 3) and the same number of steps: "
            "look for a branch, a batch, a save or an exception that only some of them have. A module that chooses "
            "among its layers can be named in leaf_classes."
        )
        return "\n".join(["The ranks have parted and cannot meet:", *lines, advice])


def _lives_here(store: Store) -> bool:
    """Whether it is rank 0 that holds the store, and not a file or torchrun."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def _join_failures(positions: list[Position | None], own: int) -> str:
    failed = {rank: p["failed"] for rank, p in enumerate(positions) if p and "failed" in p and rank != own}
    return "; ".join(f"rank {rank} failed: {text}" for rank, text in failed.items())


def stuck(positions: list[Position | None]) -> set[int]:
    """Ranks that wait for an operation which a rank that is itself stuck has not launched."""
    waiting = {rank: p for rank, p in enumerate(positions) if p and p.get("waits")}

    def missing(rank: int) -> set[int]:
        return {
            peer
            for peer in range(len(positions))
            if peer != rank and _lacks(waiting.get(peer), waiting[rank]["unfinished"])
        }

    lost = {rank for rank in waiting if missing(rank)}
    while True:
        still = {rank for rank in lost if missing(rank) & lost}
        if still == lost:
            return lost
        lost = still


def _lacks(peer: Position | None, needed: dict[str, int]) -> bool:
    """Whether a peer is not known to have launched all that is needed."""
    return peer is None or any(peer["launched"].get(what, 0) < number for what, number in needed.items())
