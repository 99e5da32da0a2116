"""Full checkpoints: Lightning's ordinary single file, whoever writes it and whoever reads it."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import distributed
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from test_strategy import STAGES, Net, loader, trainer, zero
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_zero.checkpoint import full


class Rich(Net):
    """All kinds of state: tied and frozen parameters, buffers, extra state, an unused parameter, hooks of its own."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.blocks[2].weight = self.blocks[0].weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.extra = Counted()
        self.unused = nn.Parameter(torch.randn(()))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        self.extra.count += 1
        return super().training_step(batch, batch_idx)


class Counted(nn.Module):
    count = 0

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


class AtTheEnd(Callback):
    """State as the strategy gives it, while the module is sharded."""

    def on_train_end(self, trainer, pl_module):
        self.state = trainer.strategy.lightning_module_state_dict()
        self.optimizer = trainer.strategy.optimizer_state(trainer.optimizers[0])


def assert_same(got, want):
    """Equal to the bit, with the same keys and types."""
    assert type(got) is type(want) or isinstance(got, type(want)), (type(got), type(want))
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and torch.equal(got, want)
    elif isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            assert_same(got[key], want[key])
    elif isinstance(want, list):
        assert len(got) == len(want)
        for mine, yours in zip(got, want, strict=True):
            assert_same(mine, yours)
    else:
        assert got == want


# What is in it


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_state_is_that_of_the_whole_module(rank, world_size, stage, tmp_path):
    end = AtTheEnd()
    model = Rich()
    runner = trainer(rank, world_size, tmp_path, zero(stage), callbacks=[end])
    runner.fit(model, loader())
    after, later = runner.strategy.lightning_module_state_dict(), runner.strategy.optimizer_state(runner.optimizers[0])
    if rank != 0:
        assert end.state == after == end.optimizer == later == {}
        return
    plain = model.state_dict()
    assert list(end.state) == list(plain) and end.state._metadata == plain._metadata
    for name, value in plain.items():
        assert_same(end.state[name], value)
    assert end.state["blocks.0.weight"].data_ptr() == end.state["blocks.2.weight"].data_ptr()
    assert not any(value.requires_grad for value in end.state.values() if isinstance(value, torch.Tensor))
    assert_same(after, plain)
    assert_same(later, end.optimizer)
    owned = list(model.parameters())
    assert later["param_groups"][0]["params"] == list(range(len(owned)))
    for index, param in enumerate(owned):
        state = later["state"].get(index, {})
        assert bool(state) == (param.requires_grad and param is not model.unused)
        assert all(value.shape == param.shape for key, value in state.items() if key != "step")


@distributed(world_size=2)
def test_files_are_those_of_ddp(rank, world_size, tmp_path):
    """The same keys, and the same bits, whatever wrote them."""
    for name, strategy in [("ddp", DDPStrategy()), *((str(stage), zero(stage)) for stage in STAGES)]:
        runner = trainer(rank, world_size, tmp_path, strategy, limit_val_batches=0)
        runner.fit(Net(), loader())
        runner.save_checkpoint(tmp_path / f"{name}.ckpt")
    want = torch.load(tmp_path / "ddp.ckpt")
    for stage in STAGES:
        got = torch.load(tmp_path / f"{stage}.ckpt", weights_only=True)
        assert_same(got["state_dict"], want["state_dict"])
        assert_same(got["optimizer_states"], want["optimizer_states"])
        assert set(got) == set(want)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_only_and_model_checkpoint(rank, world_size, stage, tmp_path):
    keep = ModelCheckpoint(tmp_path, monitor="loss", save_top_k=1, save_weights_only=True, save_last=True)

    class Model(Net):
        def validation_step(self, batch, batch_idx):
            self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    runner = trainer(rank, world_size, tmp_path, zero(stage), callbacks=[keep], enable_checkpointing=True, max_epochs=3)
    model = Model()
    runner.fit(model, loader(), loader())
    assert "optimizer_states" not in torch.load(keep.best_model_path)
    best = Model.load_from_checkpoint(keep.best_model_path)
    assert runner.validate(best, loader(), verbose=False)[0]["loss"] == pytest.approx(float(keep.best_model_score))


# Resuming


@distributed(world_size=2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(rank, world_size, stage, precision, tmp_path):
    def run(epochs, model, strategy=None, **kwargs):
        runner = trainer(rank, world_size, tmp_path, strategy or zero(stage), max_epochs=epochs, precision=precision)
        runner.fit(model, loader(), **kwargs)
        return runner

    want, again, elsewhere = Rich(), Rich(seed=1), Rich(seed=2)
    run(3, want)
    run(1, Rich()).save_checkpoint(tmp_path / "early.ckpt")
    run(3, again, ckpt_path=tmp_path / "early.ckpt")
    assert_same(again.state_dict(), want.state_dict())
    run(3, elsewhere, zero(1 + stage % 3), ckpt_path=tmp_path / "early.ckpt")
    assert_same(elsewhere.state_dict(), want.state_dict())


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_loading_into_a_running_fit(rank, world_size, stage, tmp_path):
    """As the learning rate finder does: weights and optimizer go back to what they were."""
    path = tmp_path / "here.ckpt"

    class BackAndForth(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 2:
                trainer.save_checkpoint(path)
                self.before = trainer.strategy.lightning_module_state_dict()
            if batch_idx == 5:
                checkpoint = trainer.strategy.load_checkpoint(path)
                trainer.strategy.load_model_state_dict(checkpoint)
                trainer.strategy.load_optimizer_state_dict(checkpoint)
                trainer.strategy.barrier()
                assert_same(trainer.strategy.lightning_module_state_dict(), self.before)
                saved = checkpoint["optimizer_states"][0] if rank == 0 else {}
                assert_same(trainer.strategy.optimizer_state(trainer.optimizers[0]), saved)
                self.strictly(trainer.strategy, checkpoint["state_dict"])
                assert_same(trainer.strategy.lightning_module_state_dict(), self.before)

        def strictly(self, strategy, state):
            few = {name: value + 1 if name.endswith("weight") else value for name, value in state.items()}
            del few["head.bias"]
            with pytest.raises(RuntimeError, match=r"Missing key.*head\.bias"):
                strategy.load_model_state_dict({"state_dict": few})
            with pytest.raises(RuntimeError, match=r"Unexpected key.*more"):
                strategy.load_model_state_dict({"state_dict": {**state, "more": torch.zeros(1)}})
            with pytest.raises(RuntimeError, match=r"size mismatch for head\.bias"):
                strategy.load_model_state_dict({"state_dict": {**state, "head.bias": torch.zeros(3)}})
            strategy.load_model_state_dict({"state_dict": {"head.bias": state["head.bias"]}}, strict=False)

    runner = trainer(rank, world_size, tmp_path, zero(stage), callbacks=[BackAndForth()], max_epochs=1)
    runner.fit(Rich(), loader(24))


@distributed(world_size=2)
def test_another_number_of_optimizers_is_refused(rank, world_size, tmp_path):
    runner = trainer(rank, world_size, tmp_path, zero(3))
    runner.fit(Net(), loader())
    runner.save_checkpoint(tmp_path / "one.ckpt")

    class Two(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def configure_optimizers(self):
            return torch.optim.SGD(self.blocks.parameters()), torch.optim.SGD(self.head.parameters())

    with pytest.raises(ValueError, match=r"1 optimizer\(s\).* 2"):
        trainer(rank, world_size, tmp_path, zero(3)).fit(Two(), loader(), ckpt_path=tmp_path / "one.ckpt")


# The file


class Full(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@distributed(world_size=2)
def test_a_full_disk_is_an_error_on_all_ranks(rank, world_size, tmp_path):
    runner = trainer(rank, world_size, tmp_path, zero(3), plugins=[Full()])
    model = Net()
    runner.fit(model, loader())
    with pytest.raises(OSError if rank == 0 else RuntimeError, match="No space left"):
        runner.save_checkpoint(tmp_path / "never.ckpt")
    with pytest.raises(FileNotFoundError):
        runner.test(model, loader(), ckpt_path=tmp_path / "nowhere.ckpt")


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "folder" / "a.ckpt"
    full.write({"step": 1}, path)
    with pytest.raises(Exception, match="pickle"):
        full.write({"step": 2, "cannot": lambda: None}, path)
    assert [file.name for file in path.parent.iterdir()] == ["a.ckpt"] and torch.load(path) == {"step": 1}


@pytest.mark.parametrize("zipped", [True, False])
def test_reading_leaves_nothing_that_depends_on_the_file(zipped, tmp_path):
    path = tmp_path / "a.ckpt"
    checkpoint = {
        "state_dict": {"w": torch.ones(1000)},
        "optimizer_states": [{"state": {0: {"m": torch.ones(1000)}}, "param_groups": [{"lr": torch.tensor(0.5)}]}],
        "callbacks": {"best": torch.tensor(2.0)},
        "epoch": 3,
    }
    torch.save(checkpoint, path, _use_new_zipfile_serialization=zipped)
    read = full.read(path, "cpu", True)
    assert_same(read, checkpoint)
    kept = read["callbacks"]["best"], read["optimizer_states"][0]["param_groups"][0]["lr"]
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert [float(value) for value in kept] == [2.0, 0.5]


@distributed(world_size=2)
def test_wrapped_plugins_work(rank, world_size, tmp_path):
    runner = trainer(rank, world_size, tmp_path, zero(3), plugins=[AsyncCheckpointIO()])
    model = Net()
    runner.fit(model, loader())
    runner.save_checkpoint(tmp_path / "async.ckpt")
    runner.strategy.checkpoint_io.teardown()
    runner.strategy.barrier()
    assert_same(torch.load(tmp_path / "async.ckpt")["state_dict"], model.state_dict())


class Recorder(TorchCheckpointIO):
    """A user's plugin, which may keep files elsewhere."""

    def __init__(self):
        self.calls = []

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        self.calls.append(("save", Path(path).name))
        super().save_checkpoint(checkpoint, path, storage_options)

    def load_checkpoint(self, path, *args, **kwargs):
        self.calls.append(("load", Path(path).name))
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path):
        self.calls.append(("remove", Path(path).name))
        super().remove_checkpoint(path)


@distributed(world_size=2)
def test_files_go_through_the_users_plugin(rank, world_size, tmp_path):
    """All that happens to them: also what ModelCheckpoint removes."""
    plugin = Recorder()
    keep = ModelCheckpoint(tmp_path / "kept", save_top_k=1, filename="{epoch}")
    settings = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": 2}
    runner = trainer(rank, world_size, tmp_path, zero(3), plugins=[plugin], **settings)
    runner.fit(Net(), loader())
    runner.test(Net(), loader(), ckpt_path=keep.best_model_path, verbose=False)
    written = [("save", "epoch=0.ckpt"), ("save", "epoch=1.ckpt"), ("remove", "epoch=0.ckpt")]
    assert plugin.calls == [*(written if rank == 0 else []), ("load", "epoch=1.ckpt")]
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["epoch=1.ckpt"]


# Memory


class Tall(Net):
    """Many equal blocks: a unit is a small part of the whole."""

    def __init__(self):
        super().__init__()
        self.tower = nn.ModuleList(nn.Linear(128, 128) for _ in range(24))

    def training_step(self, batch, batch_idx):
        x = batch[0].repeat(1, 16)
        for layer in self.tower:
            x = torch.tanh(layer(x))
        return super().training_step(batch, batch_idx) + x.mean()


class MeasuredSave(Callback):
    """The most bytes that a save has allocated at one time."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 1:
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof, record_function("save"):
                trainer.save_checkpoint(self.path)
            total = self.peak = 0
            for event in sorted(prof.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
                total += event.nbytes() if event.name() == "[memory]" else 0
                self.peak = max(self.peak, total)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_memory_of_a_save(rank, world_size, stage, tmp_path):
    """Rank 0 holds what the file holds, the other at most a unit."""
    measured = MeasuredSave(tmp_path / "it.ckpt")
    trainer(rank, world_size, tmp_path, zero(stage), callbacks=[measured]).fit(Tall(), loader())
    unit = 4 * (128 * 128 + 128)
    limit = os.path.getsize(tmp_path / "it.ckpt") + unit if rank == 0 else unit
    assert measured.peak <= limit, f"{measured.peak} bytes, allowed {limit}"


class Plain(Net):
    """A ``state_dict`` of its own, without torch's arguments."""

    def state_dict(self):
        return {name: value for name, value in nn.Module.state_dict(self).items() if "weight" in name}


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_state_dict_without_arguments(rank, world_size, stage, tmp_path):
    end = AtTheEnd()
    model = Plain()
    trainer(rank, world_size, tmp_path, zero(stage), callbacks=[end]).fit(model, loader())
    assert rank or (
        end.state and all(torch.equal(value, model.state_dict()[name]) for name, value in end.state.items())
    )
