"""Ranks that part ways: other numbers of batches, collectives that only some of them call. Never a silent hang."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import RankFailed, distributed, run_ranks
from lightning.pytorch import Callback
from test_strategy import DIM, Net, trainer, zero
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_zero.engine import outside

STAGES = [1, 2, 3]


class Sized(Dataset):
    """``count`` samples of this rank's own."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        return torch.randn(DIM, generator=generator), torch.randn(1, generator=generator)


class Endless(IterableDataset):
    """The same without a length."""

    def __init__(self, count):
        self.samples = Sized(count)

    def __iter__(self):
        return (self.samples[i] for i in range(len(self.samples)))


def batches(kind, rank, counts=(4, 6, 5)):
    return DataLoader(kind(2 * counts[rank]), batch_size=2)


class Both(Net):
    def validation_step(self, batch, batch_idx):
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)


def uneven(rank, world_size, folder, strategy, **kwargs):
    return trainer(rank, world_size, folder, strategy, use_distributed_sampler=False, **kwargs)


@pytest.mark.parametrize("kind", [Sized, Endless])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=[2, 3])
def test_one_training_batch_more_is_an_error_everywhere(rank, world_size, stage, kind, tmp_path):
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="Rank 0 has no training batches after batch 4, and other ranks have more"):
        uneven(rank, world_size, tmp_path, zero(stage)).fit(Net(), batches(kind, rank))
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("limit", [{"max_steps": 4}, {"limit_train_batches": 4}, {"max_steps": 3}])
@distributed(world_size=2)
def test_a_run_that_ends_before_is_none(rank, world_size, limit, tmp_path):
    uneven(rank, world_size, tmp_path, zero(3), **limit).fit(Net(), batches(Sized, rank))


@pytest.mark.parametrize("kind", [Sized, Endless])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_evaluation_with_other_numbers_of_batches(rank, world_size, stage, kind, tmp_path):
    def losses(strategy):
        run = uneven(rank, world_size, tmp_path, strategy)
        model = Both()
        found = [
            run.validate(model, batches(kind, rank), verbose=False),
            run.test(model, batches(kind, rank), verbose=False),
        ]
        run = uneven(rank, world_size, tmp_path, strategy, val_check_interval=2)
        run.fit(model, batches(Sized, 0), batches(kind, rank))
        return [*found, run.callback_metrics["loss"].item()]

    assert losses(f"zero{stage}") == losses("ddp")


class Alone(Callback):
    """One rank meets the others in a collective that they do not call."""

    def __init__(self, call):
        self.call = call

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2 and trainer.global_rank == 0:
            self.call()


def part(rank, world_size, folder, stage, call):
    outside.LOOK, outside.PATIENCE, outside.GRACE = 0.2, 1.0, 2.0
    os.dup2(os.open(folder / f"stderr{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    uneven(rank, world_size, folder, zero(stage), callbacks=[Alone(call)]).fit(Net(), batches(Sized, 0))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_collective_of_one_rank_only(stage, world_size, tmp_path):
    begin = time.monotonic()
    with pytest.raises(RankFailed) as failure:
        run_ranks(part, world_size, tmp_path, stage, dist.barrier)
    assert time.monotonic() - begin < 20
    said = str(failure.value) + "".join((tmp_path / f"stderr{rank}").read_text() for rank in range(world_size))
    assert "cannot meet" in said and "torch.distributed.barrier in test_parted.py" in said, said
    assert "was here" not in said, "a rank has not ended by itself"


def parted_outside(rank, world_size, folder):
    from oracles import communicator

    outside.LOOK, outside.PATIENCE, outside.GRACE = 0.2, 1.0, 1.0
    os.dup2(os.open(folder / f"stderr{rank}", os.O_CREAT | os.O_WRONLY), 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    with communicator():
        if rank:
            dist.broadcast(torch.zeros(1), src=0)
        else:
            dist.barrier()
            dist.barrier()


def test_ranks_that_wait_for_ever_outside_the_engine_end(tmp_path):
    begin = time.monotonic()
    with pytest.raises(RankFailed):
        run_ranks(parted_outside, 2, tmp_path)
    assert time.monotonic() - begin < 15
    said = "".join((tmp_path / f"stderr{rank}").read_text() for rank in range(2))
    assert "Rank 0 ends: it waits for ever here" in said or "Rank 1 ends: it waits for ever here" in said
    assert "torch.distributed.barrier in test_parted.py" in said


def slow(rank, world_size):
    from oracles import communicator

    outside.LOOK, outside.PATIENCE, outside.GRACE = 0.1, 0.3, 0.5
    with communicator() as comm:
        if rank:
            time.sleep(3)
        dist.barrier()
        comm.agree(None)
        if not rank:
            time.sleep(3)
        comm.agree(None)
        dist.barrier()


def test_slowness_alone_is_no_error():
    run_ranks(slow, 2)
