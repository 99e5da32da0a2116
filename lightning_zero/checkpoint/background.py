"""Saves that go on while training does."""

import threading
from collections.abc import Callable
from contextlib import suppress


class Background:
    """Work in a thread, one piece at a time. The process waits for it before it ends."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._afterwards: list[Callable[[], None]] = []

    def start(self, work: Callable[[], None]) -> None:
        """Begin, once what is under way is done.

        Raises:
            RuntimeError: that has failed.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name="lightning_zero save")
        self._thread.start()

    def afterwards(self, work: Callable[[], None]) -> None:
        """Do something when what is under way is complete; never if it fails. At once, if nothing is under way."""
        if self._thread is None:
            work()
        else:
            self._afterwards.append(work)

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
        todo, self._afterwards = self._afterwards, []
        if error is not None:
            raise error
        for work in todo:
            work()

    def wait_quietly(self) -> None:
        """Wait for what is under way, where another error is on its way already."""
        with suppress(Exception):
            self.wait()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
