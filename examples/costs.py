"""What a strategy costs, measured in the same way for every strategy."""

import json
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_zero.engine.host_memory import allocated

WATCHED_STEP = 2  # the steps before it fill pools and make the optimizer's state
FIRST_STEP = WATCHED_STEP + 1  # traffic is counted from here on


class Costs(Callback):
    """Measures peak and state bytes of an optimizer step on this rank, and traffic and time of ``num_steps`` more."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.measured: dict[str, Any] = {}
        self.step_seconds: list[float] = []
        self._step = -1

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._step:
            return  # in the middle of an accumulation window
        self._step = trainer.global_step
        if self._done == WATCHED_STEP:
            self._at_rest = sum(_bytes_by_kind(trainer, module).values()) - allocated_bytes()
            self._watch = Watch()
            self._watch.start()
        if self._done == FIRST_STEP:
            self._sent = _sent_bytes(), _sent_elements(trainer)
        self._began = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        if self._done == FIRST_STEP:  # the window's last gradient is in
            self.measured["memory"] = _bytes_by_kind(trainer, module)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == self._step:
            return
        seconds = time.perf_counter() - self._began
        if self._done == WATCHED_STEP:
            self.measured["peak"] = self._at_rest + self._watch.stop()
        self.step_seconds.append(seconds)
        if self._done == steps_needed(self.num_steps):
            sent = _sent_bytes(), _sent_elements(trainer)
            self.measured["bytes"], self.measured["elements"] = (
                (now - before) / self.num_steps for now, before in zip(sent, self._sent, strict=True)
            )

    @property
    def _done(self) -> int:
        """Steps of this run, which may have begun at a checkpoint."""
        return len(self.step_seconds)

    def save(self, path: Path, **more: Any) -> None:
        """Write what was measured, of every number the largest of all ranks, and ``more``, as JSON. Collective.

        Sizes are in bytes; traffic and seconds are those of one optimizer step.
        """
        times = sorted(self.step_seconds[FIRST_STEP:])
        seconds = times[len(times) // 2] if times else None
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, {**self.measured, "step_seconds": seconds, "steps": self._done})
        if dist.get_rank() == 0:
            path.write_text(json.dumps({**_largest(ranks), **more}, indent=2))


def steps_needed(num_steps: int) -> int:
    """Optimizer steps that a run must make for ``num_steps`` of them to be measured."""
    return FIRST_STEP + num_steps


def _largest(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return {key: _largest([value[key] for value in values]) for key in values[0]}
    return max(values) if isinstance(values[0], int | float) else values[0]


def _bytes_by_kind(trainer: Trainer, module: LightningModule) -> dict[str, int]:
    """Live bytes of parameters, gradients and optimizer state: the engine's count, or that of whole tensors."""
    engine = getattr(trainer.strategy, "engine", None)
    if engine is not None:
        return engine.memory()
    parameters = list(module.parameters())
    state = [v for o in trainer.optimizers for s in o.state.values() for v in s.values() if torch.is_tensor(v)]
    return {
        "parameters": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(v.nbytes for v in state),
    }


def _sent_elements(trainer: Trainer) -> int:
    """Elements that the engine has sent so far; 0 for a strategy without an engine."""
    engine = getattr(trainer.strategy, "engine", None)
    return 0 if engine is None else sum(engine.comm.traffic.values())


def _sent_bytes() -> int:
    """Bytes that this process's TCP connections have delivered so far, by the kernel's count; 0 where it keeps none."""
    total = 0
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            if not os.readlink(entry).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
        except OSError:
            continue  # not TCP, or closed in the meantime
        total += struct.unpack_from("Q", info, 120)[0] if len(info) >= 128 else 0  # tcpi_bytes_acked
    return total


class Watch(threading.Thread):
    """Looks every millisecond at how much this process has allocated."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._end, self._highest = threading.Event(), 0

    def run(self) -> None:
        while not self._end.wait(0.001):
            self._highest = max(self._highest, allocated_bytes())

    def stop(self) -> int:
        """End, and return the largest number of bytes seen."""
        self._end.set()
        self.join()
        return self._highest


def allocated_bytes() -> int:
    """Bytes that this process has allocated: on its GPU if it has one, else from malloc (0 if that is not glibc's)."""
    if torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    return allocated() or 0
