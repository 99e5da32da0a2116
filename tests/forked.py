"""Programs in forks of the test process, where all is imported: what takes a new Python five seconds to begin.

A program is what follows ``python``: a script, or ``-m`` and a module, and arguments. It runs as ``__main__``, with the
environment, folder and output that it would have. So do the ranks that torch's elastic agent starts for it, whether
``torchrun`` was asked or ``lightning_zero.launch``: they are forks, too.
"""

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hydra.core.singleton import Singleton
from torch.distributed.launcher import api

FORK = multiprocessing.get_context("fork")
TORCHRUN = ("-m", "torch.distributed.run")
CLONE_NEWNET = 0x40000000


class Program:
    """A program that runs; it and all that it starts are one session.

    ``network`` names a namespace of ``ip netns`` to run in.
    """

    def __init__(self, *words: str, cwd: Path, network: str | None = None, **env: str) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115  goes with this object
        self._process: BaseProcess = FORK.Process(target=self._start, args=(words, cwd, network, env))
        sys.stdout.flush()
        sys.stderr.flush()
        self._process.start()

    def _start(self, words: Sequence[str], cwd: Path, network: str | None, env: dict[str, str]) -> None:
        os.setsid()
        if network is not None:
            with open(f"/var/run/netns/{network}") as namespace:
                assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0
        for number in (1, 2):
            os.dup2(self._said.fileno(), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        _say_all_here()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        os.chdir(cwd)
        os.environ.update(env)
        torch.set_num_threads(1)
        api.launch_agent = partial(_launch_agent, Singleton.get_state(), api.launch_agent)
        os._exit(_run(words))  # nothing of pytest's is to be ended here

    def end(self, timeout: float = 60) -> tuple[str, int]:
        """Wait for it; what was printed, and the exit code. Nothing that it has started is there any more."""
        self._process.join(timeout)
        ended = self._process.exitcode is not None
        if not ended:
            os.killpg(self._process.pid, signal.SIGUSR1)  # for the stacks of all of them
        left = self._left()
        if left:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.join()
        self._said.seek(0)
        output = self._said.read()
        assert ended, f"a program has not ended:\n{output}"
        assert not left, f"a program has left processes behind:\n{output}"
        return output, self._process.exitcode

    def _left(self) -> bool:
        """Whether there are processes of it, after some seconds in which they may end."""
        for _ in range(250):
            try:
                os.killpg(self._process.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.02)
        return True


def run(*words: str, cwd: Path, **env: str) -> tuple[str, int]:
    """Run a program to its end; what was printed, and the exit code."""
    return Program(*words, cwd=cwd, **env).end()


def _run(words: Sequence[str]) -> int:
    """The program in this process; returns its exit code."""
    try:
        if words[0] == "-m":
            _, name, *arguments = words
            sys.argv = [name, *arguments]
            sys.modules.pop(name, None)  # it may have been imported, and is another one as __main__
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(words)
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
        code: Any = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)


def _say_all_here() -> None:
    """Libraries log to the stream of when they were imported, and pytest collects warnings."""
    loggers = [logging.getLogger(name) for name in logging.Logger.manager.loggerDict]
    for handler in (handler for logger in loggers for handler in logger.handlers):
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    warnings.resetwarnings()
    for quiet in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):  # as in a new Python
        warnings.simplefilter("ignore", quiet)
    warnings.showwarning = lambda *args: sys.stderr.write(warnings.formatwarning(*args[:4]))


def _rank(hydra: Any, words: Sequence[str]) -> None:
    """A rank's program, without what a new Python would not have of the one that starts the ranks."""
    Singleton.set_state(hydra)
    logging.disable(logging.NOTSET)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own, end = os.getpid(), os._exit
    with mock.patch.object(os, "_exit", lambda code: (sys.exit if os.getpid() == own else end)(code)):
        code = _run(words)  # however it ends, the agent waits for a result
    if code:
        os._exit(code)


def _launch_agent(hydra: Any, launch: Any, config: Any, entrypoint: str, args: Sequence[str], **more: Any) -> Any:
    """Torch's ``launch``, with ranks that are forks; ``args`` begin with ``-u``, for a Python.

    ``hydra`` is what Hydra knew before the program.
    """
    assert entrypoint == sys.executable and args[0] == "-u"
    config.start_method = "fork"
    return launch(config, _rank, [hydra, args[1:]], **more)
