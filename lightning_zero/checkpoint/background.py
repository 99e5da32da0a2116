"""Saves that go on while training does."""

import threading
from collections.abc import Callable
from pathlib import Path


class Background:
    """Work in a thread, one piece at a time. The process waits for it before it ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._target: Path | None = None  # while the thread has something to do
        self._error: Exception | None = None
        self._afterwards: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def start(self, work: Callable[[], None], target: Path) -> None:
        """Begin to write ``target``, once what is under way is done.

        Raises:
            RuntimeError: that has failed.
        """
        self.wait()
        self._target = target
        self._thread = threading.Thread(target=self._run, args=(work,), name="lightning_zero save")
        self._thread.start()

    def is_writing(self, path: Path) -> bool:
        """Whether that is under way."""
        return self._target == path

    def afterwards(self, work: Callable[[], None]) -> None:
        """Do something when what is under way is complete; never if it fails. At once, if nothing is under way."""
        with self._lock:
            failed = self._error is not None  # just now: the next step says it
            waits = self._target is not None
            if waits:
                self._afterwards.append(work)
        if not waits and not failed:
            work()

    def check(self) -> None:
        """Raise what went wrong, if something has.

        Raises:
            RuntimeError: a save has failed since the last call.
        """
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for what is under way.

        Raises:
            RuntimeError: it has failed.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def outcome(self) -> Exception | None:
        """Wait for what is under way, where another error may be on its way already; the error in which it ends."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
            while (following := self._next()) is not None:
                following()
        except BaseException as error:
            self._error = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            with self._lock:
                self._afterwards.clear()
                self._target = None

    def _next(self) -> Callable[[], None] | None:
        with self._lock:
            if not self._afterwards:
                self._target = None
                return None
            return self._afterwards.pop(0)
