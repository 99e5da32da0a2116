"""``ZeroMonitor``: what it logs is what happens."""

import csv
from pathlib import Path

import pytest
import torch
from harness import distributed
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from test_strategy import DIM, Net, loader, trainer, zero
from torch import nn

from lightning_zero import ZeroMonitor


class Records(CSVLogger):
    """Keeps what the monitor logs."""

    def __init__(self, folder):
        super().__init__(folder)
        self.records = {}

    def log_metrics(self, metrics, step=None):
        if any(key.startswith("zero/") for key in metrics):
            self.records[step] = metrics


def watched(rank, world_size, folder, stage, every=2, **kwargs):
    logger = Records(folder)
    run = trainer(rank, world_size, folder, zero(stage), callbacks=[ZeroMonitor(every)], **{"logger": logger, **kwargs})
    return run, logger.records


class Wide(Net):
    """Large enough for padding not to count."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(128, 128) for _ in range(6))

    def training_step(self, batch, batch_idx):
        x = batch[0].repeat(1, 128 // DIM)
        for layer in self.wide:
            x = torch.tanh(layer(x))
        return super().training_step(batch, batch_idx) + 50 * x.square().mean()


@pytest.mark.parametrize("stage", [1, 2, 3])
@distributed(world_size=2)
def test_metrics_are_what_happens(rank, world_size, stage, tmp_path):
    run, records = watched(rank, world_size, tmp_path, stage, gradient_clip_val=0.01)
    model = Wide()
    half = sum(p.numel() for p in model.parameters()) / 2
    run.fit(model, loader())
    assert list(records) == [1, 3]
    last = records[3]
    assert last["zero/grad_norm"] > last["zero/grad_norm_clipped"]
    assert last["zero/grad_norm_clipped"] == pytest.approx(0.01, rel=1e-4)
    assert last["zero/optimizer_bytes"] == pytest.approx(8 * half, rel=0.02)
    assert last["zero/gradients_bytes"] == pytest.approx(4 * half, rel=0.02)
    assert last["zero/master_bytes"] == (pytest.approx(4 * half, rel=0.02) if stage == 3 else 0)
    gathers = {1: 1, 2: 1, 3: 2}[stage]  # the last block and the root are gathered once
    assert 0.8 * gathers * 4 * half <= last["zero/sent_gather_bytes"] <= 1.02 * gathers * 4 * half
    assert last["zero/sent_reduce_bytes"] == pytest.approx(4 * half, rel=0.02)
    assert last["zero/step_seconds"] > 0 and last["zero/gather_seconds"] >= 0 and last["zero/reduce_seconds"] >= 0
    assert last["zero/peak_bytes"] > last["zero/parameters_bytes"]
    assert "zero/loss_scale" not in last


@distributed(world_size=2)
def test_the_norm_without_clipping(rank, world_size, tmp_path):
    run, records = watched(rank, world_size, tmp_path, 3, every=1, max_steps=1, use_distributed_sampler=False)
    run.fit(Net(), loader())
    reference = Net()
    reference.training_step(next(iter(loader())), 0).backward()
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
    assert records[0]["zero/grad_norm"] == records[0]["zero/grad_norm_clipped"] == pytest.approx(want.item(), rel=1e-5)


class ClipsNow(Net):
    """Clips in the second step only."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.global_step == 1:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)


class ClipsByHand(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx == 1:
            self.clip_gradients(optimizer, 0.01, "norm")
        optimizer.step()


@pytest.mark.parametrize("kind", [ClipsNow, ClipsByHand])
@distributed(world_size=2)
def test_the_norms_are_those_of_the_step(rank, world_size, kind, tmp_path):
    clips = {"gradient_clip_val": 0.01} if kind is ClipsNow else {}
    run, records = watched(rank, world_size, tmp_path, 3, every=1, max_steps=3, **clips)
    run.fit(kind(), loader())
    before = [record["zero/grad_norm"] for record in records.values()]
    after = [record["zero/grad_norm_clipped"] for record in records.values()]
    assert before[0] == after[0] > 0 and before[2] == after[2] > 0
    assert before[1] > after[1] == pytest.approx(0.01, rel=1e-4)


class Logs(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("accumulate", [1, 2])
@distributed(world_size=2)
def test_records_stand_beside_those_of_the_module(rank, world_size, accumulate, tmp_path):
    logger = CSVLogger(tmp_path)
    settings = {
        "max_steps": 4,
        "max_epochs": 2,
        "log_every_n_steps": 2,
        "accumulate_grad_batches": accumulate,
        "logger": logger,
    }
    run = trainer(rank, world_size, tmp_path, "zero2", callbacks=[ZeroMonitor()], **settings)
    run.fit(Logs(), loader())
    if rank == 0:
        rows = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
        assert [row["step"] for row in rows if row["loss"]] == ["1", "3"]
        assert [row["step"] for row in rows if row["zero/grad_norm"]] == ["1", "3"]


class Overflows(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 1 else loss


@distributed(world_size=2)
def test_loss_scale_and_skipped_steps(rank, world_size, tmp_path):
    run, records = watched(rank, world_size, tmp_path, 2, every=1, precision="16-true")
    run.fit(Overflows(), loader())
    last = records[max(records)]
    assert last["zero/skipped_steps"] >= 1
    assert last["zero/loss_scale"] == 2**16 / 2 ** last["zero/skipped_steps"]


def test_under_other_strategies_it_only_says_so(tmp_path):
    logger = Records(tmp_path)
    quiet = {"enable_progress_bar": False, "enable_checkpointing": False, "max_epochs": 1}
    run = Trainer(accelerator="cpu", devices=1, callbacks=[ZeroMonitor(1)], logger=logger, **quiet)
    with pytest.warns(UserWarning, match="ZeroMonitor logs nothing under SingleDeviceStrategy"):
        run.fit(Net(), loader())
    assert not logger.records


@distributed(world_size=1)
def test_nothing_to_log_to_is_said(rank, world_size, tmp_path):
    with pytest.warns(UserWarning, match="ZeroMonitor has nothing to log to"):
        trainer(rank, world_size, tmp_path, "zero3", callbacks=[ZeroMonitor()]).fit(Net(), loader())


def test_bad_interval_is_refused():
    with pytest.raises(ValueError, match="every_n_steps=0"):
        ZeroMonitor(0)
