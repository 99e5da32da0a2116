"""Checkpoints against the disk: what saving and loading cost beside a plain write and a plain read of as many bytes.

    python benchmarks/checkpoints.py FOLDER [--parameters 40e6] [--ranks 2] [--rounds 5] [--stage 3]

FOLDER is on the disk that is measured. In every round, in any order, each rank: writes as many bytes as its part of the
state into a file of its own and fsyncs it (``raw``); saves a checkpoint folder (``sharded``; ``async`` is how long
``async_save`` stops training), one file (``full``, as any strategy of Lightning's) and the weights (``safetensors``;
``raw weights`` is their plain write); rank 0 writes as many bytes as the whole state has with ``torch.save``. Then
everything is read (with ``torch.load`` by every rank), with the page cache dropped before (``cold``) and once more
(``warm``). Printed are the medians, the rates, the ratios to raw, taken within rounds, and how far resident memory has
risen on the worst rank.
"""

import argparse
import os
import random
import shutil
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import Callback, LightningModule, Trainer
from meters import ResidentMemory
from model import GPT
from torch import Tensor

import lightning_zero
from lightning_zero import ZeroStrategy
from lightning_zero.checkpoint.background import Background

Way = tuple[str, str, str]
"""What is done, with what, and how: ("load", "sharded", "cold")."""

CHUNK = 2**26  # bytes of a plain write or read


class Lit(LightningModule):
    """A GPT that trains on noise: only its state counts."""

    def __init__(self, dim: int, layers: int) -> None:
        super().__init__()
        self.gpt = GPT(dim, layers, seq=8)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.gpt(batch).logsumexp(-1).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Rounds(Callback):
    """After one step: all the saving and loading."""

    def __init__(self, folder: Path, rounds: int) -> None:
        self.folder, self.rounds = folder, rounds
        self.seconds: dict[Way, list[float]] = defaultdict(list)
        self.memory: dict[Way, list[int]] = defaultdict(list)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        rank, ranks = trainer.global_rank, trainer.world_size
        size = 12 * sum(p.numel() for p in module.parameters()) // ranks
        values = torch.empty(size, dtype=torch.uint8).random_()
        raw, weights = self.folder / f"raw{rank}", self.folder / f"weights{rank}"
        saves = {
            "raw": partial(write, raw, values),
            "sharded": partial(save, trainer, self.folder / "sharded.ckpt", "sharded"),
            "async": partial(save, trainer, self.folder / "async.ckpt", "sharded", later=True),
            "full": partial(save, trainer, self.folder / "full.ckpt", "full"),
            "raw weights": partial(write, weights, values[: size // 3]),
            "safetensors": partial(lightning_zero.save_safetensors, module, self.folder / "model.safetensors"),
            "torch.save": partial(save_whole, rank, self.folder / "whole.pt", size * ranks),
        }
        loads = {
            "raw": partial(read, raw),
            "torch.load": partial(load_whole, self.folder / "whole.pt"),
            "sharded": partial(load, trainer, self.folder / "sharded.ckpt"),
            "full": partial(load, trainer, self.folder / "full.ckpt"),
        }
        for number in range(self.rounds + 1):  # the first one warms up
            for name in random.Random(number).sample(list(saves), len(saves)):
                self._measure(("save", name, ""), saves[name], number)
            for name in random.Random(number).sample(list(loads), len(loads)):
                drop_cache(self.folder)
                self._measure(("load", name, "cold"), loads[name], number)
                self._measure(("load", name, "warm"), loads[name], number)

    def _measure(self, way: Way, work: Callable[[], Background | None], number: int) -> None:
        dist.barrier()
        memory, begin = ResidentMemory(), time.perf_counter()
        background = work()
        dist.barrier()
        seconds = time.perf_counter() - begin
        if background is not None:
            background.wait()
        if number:
            self.seconds[way].append(seconds)
            self.memory[way].append(memory.peak())


def write(path: Path, values: Tensor) -> None:
    """A plain write of bytes, to the disk."""
    with path.open("wb", buffering=0) as file:
        for piece in values.split(CHUNK):
            file.write(piece.numpy().data)
        os.fsync(file.fileno())


def read(path: Path) -> None:
    """A plain read, into memory of its own, as whoever loads must do."""
    with path.open("rb", buffering=0) as file:
        for piece in torch.empty(path.stat().st_size, dtype=torch.uint8).split(CHUNK):
            file.readinto(piece.numpy().data)


def save_whole(rank: int, path: Path, size: int) -> None:
    """``torch.save`` of as much as the whole state, by rank 0, to the disk."""
    if rank == 0:
        with path.open("wb") as file:
            torch.save([torch.zeros(CHUNK, dtype=torch.uint8) for _ in range(size // CHUNK + 1)], file)
            os.fsync(file.fileno())


def load_whole(path: Path) -> None:
    """``torch.load`` of it by every rank."""
    torch.load(path)


def save(trainer: Trainer, path: Path, kind: str, later: bool = False) -> Background | None:
    """What ``trainer.save_checkpoint`` does; and what of it goes on in the background."""
    training = trainer.strategy.training
    training.state_dict_type, training.async_save = kind, later
    trainer.save_checkpoint(path)
    return trainer.strategy._background if later else None


def load(trainer: Trainer, path: Path) -> None:
    """What resuming does with module and optimizer."""
    checkpoint = trainer.strategy.load_checkpoint(path)
    trainer.strategy.load_model_state_dict(checkpoint)
    trainer.strategy.load_optimizer_state_dict(checkpoint)


def drop_cache(folder: Path) -> None:
    """Let no page of the files stay in memory."""
    dist.barrier()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def run(rank: int, args: argparse.Namespace, folder: Path, queue: Any) -> None:
    """One rank."""
    warnings.filterwarnings("ignore")
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(args.ranks), "NODE_RANK": "0"}
    torch.manual_seed(0)
    torch.set_num_threads(1)
    module = Lit(args.dim, max(1, int(args.parameters / (12 * args.dim**2))))
    rounds = Rounds(folder, args.rounds)
    data = torch.utils.data.DataLoader(torch.randint(256, (args.ranks, 8)))
    trainer = Trainer(
        strategy=ZeroStrategy(stage=args.stage, config={}), accelerator="cpu", devices=args.ranks, max_steps=1,
        callbacks=[rounds], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, data)
    queue.put((rank, sum(p.numel() for p in module.parameters()), dict(rounds.seconds), dict(rounds.memory)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--parameters", type=float, default=40e6, help="of the model, about (default: 40e6)")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stage", type=int, default=3)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29500 + os.getpid() % 1000)}
    queue = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(run, (args, folder, queue), nprocs=args.ranks)
    finally:
        shutil.rmtree(folder)
    report([queue.get() for _ in range(args.ranks)])


def report(found: list[tuple[int, int, dict[Way, list[float]], dict[Way, list[int]]]]) -> None:
    """Print a line for each way."""
    _, parameters, seconds, _ = min(found)
    print(f"{parameters / 1e6:.1f} M parameters, {12 * parameters / 1e6:.0f} MB of state on {len(found)} ranks")
    print(f"{'':24s} {'seconds':>8s} {'GB/s':>6s} {'of raw':>7s} {'MB more':>8s}")
    for way, values in seconds.items():
        verb, what, how = way
        weights = what in ("raw weights", "safetensors")
        raw = seconds[verb, "raw weights" if weights else "raw", how]
        ratio = median(other / own for other, own in zip(raw, values, strict=True))
        size, worst = (4 if weights else 12) * parameters, max(median(memory[way]) for *_, memory in found)
        name = " ".join(way)
        print(f"{name:24s} {median(values):8.3f} {size / median(values) / 1e9:6.2f} {ratio:7.2f} {worst / 1e6:8.1f}")


if __name__ == "__main__":
    main()
