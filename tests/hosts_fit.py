"""The script of ``test_hosts.py`` and ``test_launchers.py``: trains a small module; prints losses and sums of weights.

torchrun --nproc-per-node 2 tests/hosts_fit.py STAGE NODES [STRATEGY]

With STRATEGY, the name of a registered strategy, STAGE is not used.
"""

import json
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


def main():
    stage, nodes = map(int, sys.argv[1:3])
    torch.set_num_threads(1)
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
        strategy=sys.argv[3] if sys.argv[3:] else ZeroStrategy(stage=stage, min_unit_bytes=0),
        max_epochs=2,
        callbacks=[losses],
        **quiet,
    )
    model = Net()
    trainer.fit(model, loader())
    if trainer.is_global_zero:
        print("RESULT", json.dumps([losses.losses, [p.double().sum().item() for p in model.parameters()]]), flush=True)


if __name__ == "__main__":
    main()
