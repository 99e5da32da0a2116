"""What the optimizer's step reads from and writes to a disk, against the disk itself.

    python benchmarks/disk.py NVME_PATH [--parameters 64e6] [--rounds 5]

In every round, in any order: a loop that only reads and writes as many bytes, in the same proportion and with as
many requests under way, past the page cache (``raw``); AdamW's step with its state in a tier in host memory and in one
on the disk; and the same of an Adam that computes eight times, which takes longer than the disk does. Printed are
medians, the rate of AdamW's step against the raw one, and how much of the transfers the slower optimizer's compute
hides.
"""

import argparse
import fcntl
import mmap
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from statistics import median

import torch
from torch import nn
from tqdm import tqdm

from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.engine import Communicator, Engine
from lightning_zero.engine.tiers import HostTier

READ, WRITTEN = 16, 12
"""Bytes for each parameter in a step of AdamW in fp32: weight, moments and gradient are read, all but that written."""
WIDTH = 1024


class Eightfold(torch.optim.Optimizer):
    """Adam that makes eight steps of one."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Step."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                mean, square = (state.setdefault(key, torch.zeros_like(p)) for key in ("mean", "square"))
                for _ in range(8):
                    mean.lerp_(p.grad, 0.1)
                    square.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    p.addcdiv_(mean, square.sqrt().add_(1e-8), value=-group["lr"])


class Stepper:
    """A model with gradients, and an optimizer whose state is in memory or on the disk."""

    def __init__(self, parameters: int, kind: type[torch.optim.Optimizer], offload: OffloadConfig, comm: Communicator):
        self.module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters // WIDTH**2)))
        self.engine = Engine(self.module, ZeroConfig(stage=3, offload_optimizer=offload, offload_params=offload), comm)
        self.optimizer = kind(self.module.parameters(), lr=1e-5)

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
        # nothing is read from blocks that were never written
        self._move([(os.pwritev, block) for block in range(self.blocks)])

    def seconds(self) -> float:
        """Of the reads and writes of a step: of sixteen blocks that are read twelve are written, two windows later."""
        windows = [range(first, min(first + 16, self.blocks)) for first in range(0, self.blocks, 16)]
        plan = []
        for coming, going in zip([*windows, (), ()], [(), (), *windows], strict=True):
            plan += [(os.preadv, block) for block in coming] + [(os.pwritev, block) for block in going[:12]]
        return self._move(plan)

    def _move(self, plan: Iterable[tuple[Callable[..., int], int]]) -> float:
        moves, lock = iter(plan), threading.Lock()

        def work() -> None:
            memory = mmap.mmap(-1, self.block)
            while True:
                with lock:
                    move, block = next(moves, (None, 0))
                if move is None:
                    return
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
    parser.add_argument("--parameters", type=float, default=64e6, help="in layers of 1,048,576 (default: 64e6)")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    disk, memory = OffloadConfig(device="nvme", nvme_path=args.nvme_path), OffloadConfig(device=HostTier)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    comm = Communicator(device=torch.device("cpu"), timeout=timedelta(minutes=10))
    count = max(1, int(args.parameters) // WIDTH**2) * WIDTH**2
    meters = {"raw": Raw(disk, count)} | {
        f"{kind.__name__}, state {place}": Stepper(count, kind, config, comm)
        for kind in (torch.optim.AdamW, Eightfold)
        for place, config in (("in memory", memory), ("on disk", disk))
    }
    bar = tqdm(total=(args.rounds + 1) * len(meters), unit="measurement", leave=False)
    for name, meter in meters.items():
        bar.set_description(f"warm-up: {name}")
        meter.seconds()
        bar.update()
    seconds = {name: [] for name in meters}
    for number in range(args.rounds):
        # a disk is slower after much has been written: nobody always comes after the same one
        for name in random.Random(number).sample(list(meters), len(meters)):
            bar.set_description(f"round {number + 1} of {args.rounds}: {name}")
            seconds[name].append(meters[name].seconds())
            bar.update()
    bar.close()
    report({name: median(values) for name, values in seconds.items()}, count)


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
