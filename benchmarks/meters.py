"""What a rank measures: the time of each step, bytes sent in it, and the largest resident memory."""

import os
import socket
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback

WARM_UP = 2  # steps that fill pools and make the optimizer's state
TCP_INFO_BYTES, BYTES_ACKED = 128, 120  # size of the kernel's record, and where in it the count is


class Meter(Callback):
    """Seconds and sent bytes of each optimizer step after the first two, between one barrier and another.

    A step's bytes have those of its closing barrier among them.
    """

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self._seconds: list[float] = []
        self._sent: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.accumulate:
            return  # in the middle of a step
        dist.barrier()
        self._sent_before = sent_bytes()
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.accumulate:
            return
        dist.barrier()
        self._seconds.append(time.perf_counter() - self._began)
        self._sent.append(sent_bytes() - self._sent_before)

    @property
    def seconds(self) -> list[float]:
        """Of each measured step."""
        return self._seconds[WARM_UP:]

    @property
    def sent(self) -> float:
        """Bytes a step, the mean of the measured ones."""
        return sum(self._sent[WARM_UP:]) / len(self._sent[WARM_UP:])


class ResidentMemory:
    """How far this process' resident memory has risen, at its highest, above what it was when this was made."""

    def __init__(self) -> None:
        with suppress(OSError):  # where it is not allowed, a peak of the past counts
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = _status("VmRSS")

    def peak(self) -> int:
        """In bytes."""
        return _status("VmHWM") - self._before


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise KeyError(f"/proc/self/status has no {key}")


def sent_bytes() -> int:
    """Bytes that this process' TCP connections have delivered so far, by the kernel's count."""
    total = 0
    for entry in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):  # not TCP, or closed in the meantime
            if os.readlink(entry).startswith("socket:"):
                total += _acknowledged(int(entry.name))
    return total


def _acknowledged(descriptor: int) -> int:
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    return struct.unpack_from("Q", info, BYTES_ACKED)[0] if len(info) == TCP_INFO_BYTES else 0
