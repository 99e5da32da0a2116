"""Ranks that part: other numbers of batches, collectives that only some of them call, signals. Never a silent hang."""

import os
import signal
import sys
import threading
import time
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import RankFailed, distributed, run_ranks
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from test_strategy import DIM, Net, trainer, zero
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_zero.engine import PeerError, outside
from lightning_zero.engine.peers import LINGER, Peers

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
    def validation_step(self, batch, batch_idx, dataloader_idx=0):
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


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("limit", [5, 6, 9])
@distributed(world_size=[2, 3])
def test_a_limit_does_not_hide_it(rank, world_size, limit, stage, tmp_path):
    """Lightning looks no batch ahead under a limit: data without a length end where it counts on more."""
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="Rank 0 has no training batches after batch 4, and other ranks have more"):
        run = uneven(rank, world_size, tmp_path, zero(stage), limit_train_batches=limit)
        run.fit(Net(), batches(Endless, rank))
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("kind", [Sized, Endless])
@pytest.mark.parametrize("limit", [{"max_steps": 4}, {"limit_train_batches": 4}, {"max_steps": 3}])
@distributed(world_size=2)
def test_a_run_that_ends_before_is_none(rank, world_size, limit, kind, tmp_path):
    uneven(rank, world_size, tmp_path, zero(3), **limit).fit(Net(), batches(kind, rank))


@distributed(world_size=2)
def test_data_shorter_than_a_limit_on_all_ranks(rank, world_size, tmp_path):
    run = uneven(rank, world_size, tmp_path, zero(3), limit_train_batches=9, max_epochs=2)
    run.fit(Net(), batches(Endless, 0))
    assert run.global_step == 8 and run.current_epoch == 2


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


@pytest.mark.parametrize("kind", [Sized, Endless])
@pytest.mark.parametrize("limit", [4, 5, 9, 1.0])
@distributed(world_size=[2, pytest.param(3, marks=pytest.mark.full)])
def test_evaluation_of_several_loaders_and_under_a_limit(rank, world_size, limit, kind, tmp_path):
    def losses(strategy):
        limits = {f"limit_{name}_batches": limit for name in ("val", "test", "predict")}
        run = uneven(rank, world_size, tmp_path, strategy, num_sanity_val_steps=int(limit), **limits)
        model = Both()
        found = [
            run.validate(model, [batches(kind, rank), batches(kind, -rank)], verbose=False),
            run.test(model, batches(kind, rank), verbose=False),
            torch.cat([batch[0] for batch in run.predict(model, batches(kind, rank))]).tolist(),
        ]
        run.fit(model, batches(Sized, 0), batches(kind, rank))
        return [*found, run.callback_metrics["loss"].item()]

    assert losses("zero3") == losses("ddp")


class Counted(Net):
    """With a buffer that training changes, which evaluation begins with rank 0's of."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self(batch[0])


@pytest.mark.parametrize("kind", [Sized, Endless])
@distributed(world_size=[2, 3])
def test_evaluation_in_which_a_rank_has_no_batch(rank, world_size, kind, tmp_path):
    data = batches(kind, rank, counts=(0, 3, 2))
    run = uneven(rank, world_size, tmp_path, zero(3), num_sanity_val_steps=0)
    model = Counted()
    model.allow_zero_length_dataloader_with_multiple_devices = True
    # Lightning leaves the validation of an empty loader out where it knows the length, on that rank alone
    run.fit(model, batches(Sized, 0), data if kind is Endless else None)
    assert len(run.predict(model, data) or []) == (0, 3, 2)[rank]
    if kind is Endless:
        run.validate(model, data, verbose=False)


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


class Signalled(Callback):
    """One rank sends itself a signal in the third batch."""

    def __init__(self, rank, signum=signal.SIGTERM):
        self.rank, self.signum = rank, signum

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)

    def on_predict_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)

    on_validation_batch_start = on_predict_batch_start


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.parametrize("signalled", [0, 1])
@distributed(world_size=[2, 3])
def test_sigterm_ends_training_everywhere_with_a_checkpoint(rank, world_size, signalled, stage, tmp_path):
    run = uneven(
        rank,
        world_size,
        tmp_path,
        zero(stage),
        callbacks=[Signalled(signalled), OnExceptionCheckpoint(tmp_path)],
        enable_checkpointing=True,
    )
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match=f"Rank {signalled} has got SIGTERM: rank {rank} ends after step 3") as end:
        run.fit(Net(), batches(Sized, 0, counts=[8]))
    assert end.value.code, "the process would end with success"
    assert (tmp_path / "on_exception.ckpt").exists()
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("what", ["validate", "predict"])
@distributed(world_size=2)
def test_sigterm_in_evaluation(rank, world_size, what, stage, tmp_path):
    """The rank that has got it ends after its batch, and the other one says so."""
    run = uneven(rank, world_size, tmp_path, zero(stage), callbacks=[Signalled(1)])
    error, says = (SystemExit, "Rank 1 has got SIGTERM") if rank else (RuntimeError, "rank 1 failed: S.*SIGTERM")
    with pytest.raises(error, match=says):
        getattr(run, what)(Silent(), batches(Sized, 0, counts=[8]))


class Silent(Net):
    def validation_step(self, batch, batch_idx):
        self(batch[0])


def killed(rank, world_size, folder):
    uneven(rank, world_size, folder, zero(1), callbacks=[Signalled(1, signal.SIGKILL)]).validate(
        Both(), batches(Sized, 0), verbose=False
    )


def test_a_rank_that_dies_while_others_wait_in_a_collective_of_lightnings(tmp_path):
    with pytest.raises(RankFailed) as failure:
        run_ranks(killed, 2, tmp_path)
    assert "Rank 0 lost a peer in torch.distributed.barrier in" in str(failure.value)


def test_a_store_that_has_gone_is_an_error_that_names_the_operation():
    class Gone:
        def set(self, *args):
            raise RuntimeError("Broken pipe")

    peers, arrived = Peers(dist.HashStore(), 1, 2), threading.Event()
    peers._store = Gone()
    with pytest.raises(PeerError, match="Rank 1 cannot go on with 'gather of x' in step 0: .* has died or left"):
        peers.wait(arrived, "gather of x", 1, dict, 0.02)
    threading.Timer(0.1, arrived.set).start()
    peers.wait(arrived, "gather of x", 1, dict, 0.05)  # rank 0 has only ended earlier


def test_the_first_exception_is_not_hidden_by_those_that_follow():
    peers = Peers(dist.HashStore(), 1, 2)
    try:
        raise KeyError("the first")
    except KeyError as first:
        assert outside._handled(sys._getframe()) is first
        try:
            raise peers.lost("gather of x", RuntimeError("Connection closed"))
        except PeerError:
            said = traceback.format_exc()
    assert said.index("the first") < said.index("Connection closed") < said.index("lost a peer during 'gather of x'")


def peers_of(store, world_size):
    """The peers of all ranks, in one process."""
    generation, made = Peers._generation, []
    for rank in range(world_size):
        Peers._generation = generation
        made.append(Peers(store, rank, world_size))
    return made


def test_last_words_stay_whatever_another_thread_says():
    first, second = peers_of(dist.HashStore(), 2)
    first.fail("ValueError: wrong")
    first.go_on()
    first.outside("torch.distributed.barrier")
    assert second.last_words() == "rank 0 failed: ValueError: wrong"


@pytest.mark.parametrize(("gone", "seconds"), [(set(), 0.5), ({1}, 0.5), ({1, 2}, 0.0)])
def test_the_holder_of_the_store_stays_until_the_others_know(gone, seconds, monkeypatch):
    """Rank 1 has failed or died; rank 2, if it lives, is busy and reads the words later."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    peers = peers_of(dist.TCPStore("127.0.0.1", 0, is_master=True), 3)
    if not gone:
        peers[1].fail("ValueError: wrong")
    for rank in gone:
        peers[0].lost("gather of x", RuntimeError("Connection closed"), rank)
    timer = threading.Timer(seconds, peers[2].fail, ["PeerError"])
    timer.start()
    began = time.monotonic()
    peers[0].linger()
    took = time.monotonic() - began
    timer.join()
    assert (seconds <= took < LINGER) if seconds else took < 0.5


def test_alone_nobody_is_waited_for(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    (alone,) = peers_of(dist.TCPStore("127.0.0.1", 0, is_master=True), 1)
    alone.fail("ValueError: wrong")
    began = time.monotonic()
    alone.linger()
    assert time.monotonic() - began < 0.5
