"""Runs a function on N gloo ranks that are forked from the test process: 0.1 s for two, nothing is imported again.

The ranks meet in a ``FileStore`` (no ports). A watchdog dumps the stacks of all ranks and ends them; the failure that
came first is reported first, for the others are usually its echo.
"""

import ctypes
import faulthandler
import functools
import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

TIMEOUT = 60.0
HUGE, COLLAPSE = 2**21, 25  # bytes of a huge page; MADV_COLLAPSE of Linux 6.1
START = Path(__file__).with_name("start")
GRACE = 5.0  # seconds that the other ranks get to end by themselves after one has failed


class RankFailed(AssertionError):
    """A rank raised, died or hung; the text holds its traceback or the stacks of all ranks."""


@dataclass
class Outcome:
    """What one rank left behind; ``error`` is a traceback, ``at`` the host's clock when the rank ended."""

    value: Any
    error: str | None
    at: float


def make_forks_cheap() -> None:
    """Once all is imported: that is no garbage to look for, and lies in huge pages, of which a fork copies few entries.

    This halves the time in the kernel of a test that does little else. Where there are no huge pages nothing happens.
    """
    gc.freeze()
    maps = Path("/proc/self/maps")
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, mode, _, _, _, *name = line.split()
        if mode.startswith("rw") and name in ([], ["[heap]"]):
            first, last = (int(address, 16) for address in span.split("-"))
            for page in range(-(-first // HUGE) * HUGE, last - HUGE + 1, HUGE):
                madvise(page, HUGE, COLLAPSE)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = TIMEOUT, grace: float = GRACE, **kwargs: Any
) -> list[Any]:
    """Call ``fn(rank, world_size, *args, **kwargs)`` on ``world_size`` ranks with a gloo process group; values by rank.

    Raises:
        RankFailed: with the tracebacks of ranks, the first failure first, and the stacks of those that still ran after
            ``timeout`` seconds, or ``grace`` seconds after the first failure.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        context = multiprocessing.get_context("fork")
        ranks: list[BaseProcess] = [
            context.Process(target=_rank_main, args=(fn, rank, world_size, folder, args, kwargs), daemon=False)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            stacks = _watch(ranks, folder, timeout, grace)
            exit_codes = [process.exitcode for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return _collect(exit_codes, folder, stacks)


def _watch(ranks: Sequence[BaseProcess], folder: Path, timeout: float, grace: float) -> str | None:
    """Wait for all ranks; returns the stacks of those that were still running at the deadline."""
    deadline = time.monotonic() + timeout
    running = {process.sentinel: process for process in ranks}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(running), left):
            process = running.pop(sentinel)  # type: ignore[call-overload]
            process.join()  # a killed one has closed its sentinel a moment before it has an exit code
            if process.exitcode != 0:
                deadline = min(deadline, time.monotonic() + grace)
    for process in running.values():
        os.kill(process.pid, signal.SIGUSR1)  # type: ignore[arg-type]
    time.sleep(0.5 if running else 0)  # the handler writes while its process may be stuck in C++
    hung = [(rank, process) for rank, process in enumerate(ranks) if process.sentinel in running]
    return "\n".join(f"--- rank {rank} was here:\n{(folder / f'stack{rank}').read_text()}" for rank, _ in hung) or None


def _collect(exit_codes: Sequence[int | None], folder: Path, stacks: str | None) -> list[Any]:
    files = {rank: folder / f"outcome{rank}" for rank in range(len(exit_codes))}
    outcomes: dict[int, Outcome] = {rank: pickle.loads(f.read_bytes()) for rank, f in files.items() if f.exists()}
    died = [(rank, code) for rank, code in enumerate(exit_codes) if code is not None and rank not in outcomes]
    failed = sorted((outcome.at, rank) for rank, outcome in outcomes.items() if outcome.error is not None)
    parts = [f"--- rank {rank} died with exit code {code}" for rank, code in died]
    parts += [f"--- rank {rank} failed:\n{outcomes[rank].error}" for _, rank in failed]
    if stacks is not None:
        parts.append(stacks)
    if parts:
        raise RankFailed("\n" + "\n".join(parts))
    return [outcomes[rank].value for rank in files]


def _rank_main(fn: Callable[..., Any], rank: int, world_size: int, folder: Path, args: Any, kwargs: Any) -> None:
    stack_file = (folder / f"stack{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, stack_file, all_threads=True)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
        dist.barrier()  # a rank that fails at once must not look like a failed rendezvous to the others
        outcome = Outcome(fn(rank, world_size, *args, **kwargs), None, time.monotonic())
        if dist.is_initialized():  # a test may have ended it
            dist.destroy_process_group()
    except BaseException:
        outcome = Outcome(None, traceback.format_exc(), time.monotonic())
    part = folder / f"part{rank}"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(folder / f"outcome{rank}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if outcome.error is None else 1)  # no joining of threads: one of them may wait for a rank that is gone


def environment(*folders: str | Path, **more: str) -> dict[str, str]:
    """For a Python that a test starts: one thread, and imports from ``folders``; ``start`` makes them quicker."""
    path = os.pathsep.join(map(str, (START, *folders)))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def distributed(world_size: int | Sequence[int], timeout: float = TIMEOUT) -> Callable[[Callable[..., None]], Any]:
    """Run a test's body ``def test_x(rank, world_size, ...)`` on ranks, once for each world size.

    Everything but ``rank`` comes from pytest: parametrisations and fixtures work, and are made once, before the fork.
    """
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)

    def decorate(body: Callable[..., None]) -> Any:
        @functools.wraps(body)
        def test(**kwargs: Any) -> None:
            __tracebackhide__ = True
            size = kwargs.pop("world_size")
            try:
                run_ranks(_without_value(body), size, timeout=timeout, **kwargs)
            except RankFailed as failure:
                pytest.fail(str(failure), pytrace=False)

        signature = inspect.signature(body)
        test.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[p for name, p in signature.parameters.items() if name != "rank"]
        )
        return pytest.mark.parametrize("world_size", sizes, ids=lambda size: f"{size}ranks")(test)

    return decorate


def _without_value(body: Callable[..., None]) -> Callable[..., None]:
    def call(rank: int, world_size: int, **kwargs: Any) -> None:
        body(rank=rank, world_size=world_size, **kwargs)

    return call
