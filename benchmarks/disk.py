"""What the optimizer's step reads from and writes to a disk, against the disk itself.

    python benchmarks/disk.py NVME_PATH [--parameters 64e6] [--rounds 5]

In every round, one after the other: a loop that only reads and writes as many bytes, in the same proportion and with as
many requests under way, past the page cache (``raw``); AdamW's step with its state in a tier in host memory and in one
on the disk; and the same of an AdamW that computes eight times, which takes longer than the disk does. Printed are
medians, the rate of AdamW's step against the raw one, and how much of the transfers the slower optimizer's compute
hides.
"""

import argparse
import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import chain, repeat
from statistics import median

import torch
from torch import nn

from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.engine import Communicator, Engine
from lightning_zero.engine.tiers import HostTier

READ, WRITTEN = 16, 12
"""Bytes for each parameter in a step of AdamW in fp32: weight, moments and gradient are read, all but that written."""
WIDTH = 1024


class Eightfold(torch.optim.AdamW):
    """Computes eight steps for one."""

    def step(self, closure=None):
        """Step; the last one counts."""
        for _ in range(8):
            super().step(closure)


class Stepper:
    """A model with gradients, and an optimizer whose state is in memory or on the disk."""

    def __init__(self, parameters: int, kind: type[torch.optim.Optimizer], offload: OffloadConfig, comm: Communicator):
        self.module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters // WIDTH**2)))
        self.engine = Engine(self.module, ZeroConfig(stage=3, offload_optimizer=offload, offload_params=offload), comm)
        self.optimizer = kind(self.module.parameters(), lr=1e-5, foreach=True)

    def seconds(self) -> float:
        """Of a step; its gradients are new."""
        with self.engine.forward():
            loss = self.module(torch.ones(1, WIDTH)).square().mean()
        with self.engine.backward():
            loss.backward()
        begin = time.perf_counter()
        self.engine.step(self.optimizer)
        return time.perf_counter() - begin


class Raw:
    """A file that is read and written at once, by as many threads as the tier has."""

    def __init__(self, config: OffloadConfig, parameters: int) -> None:
        self.block, self.requests = config.block_size, config.queue_depth * config.threads
        self.blocks = parameters * READ // self.block
        self.file = tempfile.TemporaryFile(dir=config.nvme_path, buffering=0)  # noqa: SIM115 - as long as this
        self.fd = self.file.fileno()
        os.posix_fallocate(self.fd, 0, self.blocks * self.block)
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_DIRECT)
        self.seconds()  # nothing is read from blocks that were never written

    def _plan(self) -> Iterator[tuple[bool, int]]:
        """Whether to write, and where: three of four blocks that are read are written."""
        return iter([(write, b) for b in range(self.blocks) for write in ((False, True) if b % 4 else (False,))])

    def seconds(self) -> float:
        """Of the reads and writes of a step."""
        plan, lock = self._plan(), threading.Lock()

        def work() -> None:
            memory = mmap.mmap(-1, self.block)
            while True:
                with lock:
                    write, block = next(plan, (False, -1))
                if block < 0:
                    return
                move = os.pwritev if write else os.preadv
                if move(self.fd, [memory], block * self.block) != self.block:
                    raise OSError("a block has gone through in part only")

        threads = [threading.Thread(target=work) for _ in range(self.requests)]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nvme_path")
    parser.add_argument("--parameters", type=float, default=64e6)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    disk, memory = OffloadConfig(device="nvme", nvme_path=args.nvme_path), OffloadConfig(device=HostTier)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    comm = Communicator(device=torch.device("cpu"), timeout=timedelta(minutes=10))
    count = int(args.parameters)
    meters = {"raw": Raw(disk, count)} | {
        f"{kind.__name__}, state {place}": Stepper(count, kind, config, comm)
        for kind in (torch.optim.AdamW, Eightfold)
        for place, config in (("in memory", memory), ("on disk", disk))
    }
    for meter in meters.values():
        meter.seconds()
    seconds = {name: [] for name in meters}
    for name, meter in chain.from_iterable(repeat(list(meters.items()), args.rounds)):
        seconds[name].append(meter.seconds())
    report({name: median(values) for name, values in seconds.items()}, count // WIDTH**2 * WIDTH**2)


def report(seconds: dict[str, float], parameters: int) -> None:
    """Print a line for each, and the two figures."""
    moved = parameters * (READ + WRITTEN)
    for name, value in seconds.items():
        rate = "" if "memory" in name else f"{moved / value / 1e9:6.2f} GB/s"
        print(f"{name:32s} {value:7.3f} s  {rate}")
    raw, _, adam, compute, both = seconds.values()
    print(f"rate of AdamW's step against the raw one: {raw / adam:.2f}")
    print(f"hidden of the transfers of the optimizer that computes longer: {1 - (both - compute) / raw:.0%}")


if __name__ == "__main__":
    main()
