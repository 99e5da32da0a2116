"""The training of ``test_hosts.py`` and ``test_launchers.py``; as a script, prints its losses and sums of weights.

torchrun --nproc-per-node 2 tests/hosts_fit.py STAGE NODES [STRATEGY]

With STRATEGY, the name of a registered strategy, STAGE is not used.
"""

import json
import os
import sys

import torch
from lightning.pytorch import Callback, Trainer
from test_strategy import Net, loader

from lightning_zero import ZeroStrategy


class Losses(Callback):
    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())


def fit(strategy, nodes=1):
    """Train on two ranks; on rank 0, the losses and the sums of the weights."""
    losses = Losses()
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    trainer = Trainer(
        accelerator="cpu",
        devices=2 // nodes,
        num_nodes=nodes,
        strategy=strategy,
        max_epochs=2,
        callbacks=[losses],
        **quiet,
    )
    model = Net()
    trainer.fit(model, loader())
    return [losses.losses, [p.double().sum().item() for p in model.parameters()]] if trainer.is_global_zero else None


def fit_on_rank(rank, world_size, strategy):
    """The same on a rank that the harness has made: what those of a launcher must come to."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    return fit(strategy)


def main():
    stage, nodes = map(int, sys.argv[1:3])
    torch.set_num_threads(1)
    result = fit(sys.argv[3] if sys.argv[3:] else ZeroStrategy(stage=stage, min_unit_bytes=0), nodes)
    if result is not None:
        print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
