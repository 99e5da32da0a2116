"""One rank of one run: the model of a case, trained by the Trainer under a strategy.

    torchrun --nproc-per-node 2 benchmarks/run_one.py STRATEGY SETTINGS FILE FOLDER

SETTINGS is the JSON of ``cases.Settings``. Rank 0 writes what was measured to FILE, as JSON: seconds of each step are
its own, sent bytes and memory the largest of all ranks. The first rank that fails writes its traceback to FILE.error.
What is offloaded to a disk goes into FOLDER.
"""

import json
import logging
import os
import sys
import traceback
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Settings
from lightning.pytorch import Trainer, seed_everything
from meters import WARM_UP, Meter, ResidentMemory
from model import Bytes, Net
from strategies import make_strategy, trainer_precision
from torch.utils.data import DataLoader


def run(name: str, settings: Settings, disk: str) -> dict[str, Any]:
    """Train, and return what was measured. Collective."""
    seed_everything(0, verbose=False)
    strategy, meter = make_strategy(name, settings, disk), Meter(settings.accumulate)
    memory = ResidentMemory()
    net = Net(settings, fully_sharded=name == "fsdp2")
    parameters = sum(p.numel() for p in net.parameters())
    samples = (WARM_UP + settings.steps) * settings.accumulate * settings.devices * settings.batch
    trainer = Trainer(
        accelerator="cpu",
        devices=settings.devices,
        strategy=strategy,
        precision=trainer_precision(name, settings.precision),
        accumulate_grad_batches=settings.accumulate,
        max_epochs=1,
        callbacks=[meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, DataLoader(Bytes(samples, settings.seq), batch_size=settings.batch))
    sent, peak = _largest(meter.sent, memory.peak())
    return {
        "parameters": parameters,
        "seconds": meter.seconds,
        "sent": round(sent),
        "peak": round(peak),
        "loss": net.loss.item(),
    }


def _largest(*values: float) -> list[float]:
    """Of each value the largest of all ranks. Collective."""
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, values)
    return [max(column) for column in zip(*ranks, strict=True)]


def main() -> None:
    name, settings, path, disk = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    try:
        measured = run(name, Settings.from_json(settings), disk)
        if dist.get_rank() == 0:
            Path(path).write_text(json.dumps(measured))
        dist.barrier()
    except Exception:
        with suppress(FileExistsError), open(f"{path}.error", "x") as file:
            file.write(traceback.format_exc())
        raise
    os._exit(0)  # some strategies leave threads behind that an orderly end of the interpreter would meet


if __name__ == "__main__":
    main()
