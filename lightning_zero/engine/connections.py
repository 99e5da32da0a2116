"""The TCP connections of a process group of gloo's, which has no way to give up what it waits for."""

import os
import socket
from contextlib import suppress
from typing import Self


def _sockets() -> dict[str, int]:
    """The open sockets of this process: file descriptors by the kernel's names. Empty where there is no ``/proc``."""
    found = {}
    with suppress(OSError):
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # closed since
                name = os.readlink(f"/proc/self/fd/{fd}")
                if name.startswith("socket:"):
                    found[name] = int(fd)
    return found


class Connections:
    """A context in which a process group is made; afterwards, what it has connected.

    That is what the process has opened meanwhile: of another thread, too. Connections that gloo only makes when they
    are needed (``TORCH_GLOO_LAZY_INIT``) are not among them.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()

    def __enter__(self) -> Self:
        self._names = set(_sockets())
        return self

    def __exit__(self, *_: object) -> None:
        self._names = _sockets().keys() - self._names

    def cut(self) -> None:
        """Shut the connections down: whoever waits at either end gets an error."""
        for name, fd in _sockets().items():
            if name in self._names:
                with suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                    connection.getpeername()  # a listening socket has none; gloo ends the process if that is shut
                    connection.shutdown(socket.SHUT_RDWR)
