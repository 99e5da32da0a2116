"""Offload: the same bits wherever state, masters and parameters rest, and errors that name the file."""

import errno
import os
import resource
import signal
from functools import partial

import pytest
import torch
import zoo
from harness import distributed, run_ranks
from lightning.pytorch.callbacks import ModelCheckpoint
from oracles import build_engine, communicator, train_engine
from test_optimizers import SignMomentum
from test_parity import assert_same
from test_strategy import Net, fitted, loader, trainer, zero

from lightning_zero import PeerError, TierError, ZeroStrategy
from lightning_zero.engine import offload
from lightning_zero.engine.nvme import NvmeTier, aligned_empty
from lightning_zero.engine.tiers import HostTier

STAGES = [1, 2, 3]


@pytest.fixture
def disk(tmp_path):
    return {"device": "nvme", "nvme_path": str(tmp_path / "swap")}


@pytest.fixture
def small_windows(monkeypatch):
    """Several windows in the shards of small models."""
    monkeypatch.setattr(offload, "WINDOW", 1024)


def tier_of(kind, folder):
    return HostTier() if kind == "host" else NvmeTier(folder, block_size=8192, queue_depth=2, threads=3)


def everywhere(stage, disk):
    return {"offload_optimizer": disk, **({"offload_params": disk} if stage == 3 else {})}


# Tiers


@pytest.mark.parametrize("make", [torch.empty, lambda n, dtype: aligned_empty(n, dtype)], ids=["heap", "pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("kind", ["host", "nvme"])
def test_any_range_comes_back(kind, dtype, make, tmp_path):
    tier = tier_of(kind, tmp_path)
    generator = torch.Generator().manual_seed(0)
    for numel in (1, 511, 513, 4096, 20011):
        array = tier.empty(numel, dtype, "values")
        want = torch.randint(0, 100, (numel,), generator=generator).to(dtype)
        array.store(0, want.clone())
        for _ in range(5):
            start, stop = sorted(torch.randint(0, numel + 1, (2,), generator=generator).tolist())
            want[start:stop] = torch.randint(0, 100, (stop - start,), generator=generator).to(dtype)
            array.store(start, want[start:stop].clone())  # not waited for: stores that share a page keep their order
            got = make(stop - start, dtype=dtype)
            array.fetch(start, got).wait()
            assert torch.equal(got, want[start:stop])
        whole = make(numel, dtype=dtype)
        array.fetch(0, whole).wait()
        assert torch.equal(whole, want)
    assert tier.nbytes() >= 20011 * dtype.itemsize
    tier.close()


def test_hooks_see_what_is_fetched_and_stored(tmp_path):
    tier, seen = tier_of("nvme", tmp_path), []
    tier.before_fetch.append(lambda array, start, out: seen.append(("fetch", array.what, start, out.numel())))
    tier.after_store.append(lambda array, start, values: seen.append(("store", array.what, start, values.numel())))
    array = tier.empty(100, torch.float32, "moments")
    array.store(10, torch.ones(20))
    array.fetch(5, torch.empty(30)).wait()
    assert seen == [("store", "moments", 10, 20), ("fetch", "moments", 5, 30)]


def test_files_have_no_name_and_go_with_their_tier(tmp_path):
    folder = tmp_path / "new" / "folder"
    tier = tier_of("nvme", folder)
    tier.empty(10**6, torch.float32, "values")
    assert not list(folder.iterdir()) and folder.stat().st_mode & 0o077 == 0
    assert os.fstat(tier._fd).st_mode & 0o777 == 0o600 and os.fstat(tier._fd).st_size >= 4 * 10**6
    file = tier._file
    del tier
    assert file.closed


# Faults


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(TierError, match=f"No file can be made in nvme_path='{blocked}/swap'"):
        tier_of("nvme", blocked / "swap")


def test_too_small_a_disk_is_said_with_what_is_needed(tmp_path):
    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6))
        tier = tier_of("nvme", tmp_path)
        tier.empty(10**5, torch.float32, "exp_avg of blocks.0")
        with pytest.raises(
            TierError, match=r"no room for exp_avg of blocks.1: .* 401,408 bytes there and needs 802,816"
        ):
            tier.empty(2 * 10**5, torch.float32, "exp_avg of blocks.1")

    run_ranks(lambda rank, world_size: fill(), 1)


@pytest.mark.parametrize("kind", ["full", "short"])
def test_a_disk_that_fails_is_an_error_of_the_transfer(kind, tmp_path, monkeypatch):
    tier = tier_of("nvme", tmp_path)
    array = tier.empty(10**5, torch.float32, "exp_avg of blocks.0")
    if kind == "full":
        monkeypatch.setattr(os, "pwritev", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        transfer, said = (
            array.store(0, torch.ones(10**5)),
            "exp_avg of blocks.0 could not be written to .*No space left",
        )
    else:
        os.ftruncate(tier._fd, 4096)
        transfer, said = array.fetch(0, torch.empty(10**5)), "exp_avg of blocks.0 could not be read from .*is shorter"
    with pytest.raises(TierError, match=said):
        transfer.wait()


def test_any_failure_of_a_thread_reaches_who_waits(tmp_path, monkeypatch):
    tier = tier_of("nvme", tmp_path)
    array = tier.empty(100, torch.float32, "exp_avg of blocks.0")
    monkeypatch.setattr(tier, "_read", lambda *args: 1 / 0)
    with pytest.raises(TierError, match="exp_avg of blocks.0 could not be read from .*division by zero"):
        array.fetch(0, torch.empty(100)).wait()


class FailsLate(Net):
    """The disk of one rank fills up in the third step."""

    def on_before_optimizer_step(self, optimizer):
        if self.global_step == 2 and self.global_rank == 1:
            os.pwritev = lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left on device"))


@distributed(world_size=2)
def test_a_disk_that_fills_up_in_a_run_ends_it_on_all_ranks(rank, world_size, disk, tmp_path):
    with pytest.raises(TierError if rank == 1 else PeerError, match="could not be written to"):
        fitted(rank, world_size, tmp_path, zero(3, offload_optimizer=disk), FailsLate())


def killed(rank, world_size, folder):
    tier = tier_of("nvme", folder)
    tier.empty(10**6, torch.float32, "values").store(0, torch.ones(10**6)).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_leaves_nothing(tmp_path):
    with pytest.raises(Exception, match="rank 0"):
        run_ranks(killed, 1, tmp_path / "swap")
    assert not list((tmp_path / "swap").iterdir())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"offload_optimizer": "nvme"}, "needs nvme_path"),
        ({"offload_optimizer": "disk"}, "device='disk'"),
        ({"offload_optimizer": {"device": "cpu", "pin_memry": False}}, "Did you mean 'pin_memory'"),
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/x", "block_size": 1000}}, "block_size=1000"),
        ({"stage": 2, "offload_params": "cpu"}, "offload_params needs stage 3"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "offload_optimizer needs stage"),
    ],
)
def test_wrong_settings_are_refused(settings, says):
    with pytest.raises((TypeError, ValueError), match=says):
        ZeroStrategy(**settings)


# The same bits


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "name", ["Gpt", "Tied", "Scalars", "ZeroElements", "Unused", "Frozen", "ParameterContainers", "CheckpointedBlocks"]
)
@distributed(world_size=2)
def test_state_on_disk_changes_no_bit(rank, world_size, name, stage, disk, small_windows):
    make = partial(zoo.make, name)
    with communicator() as comm:
        options = {"stage": stage, "accumulate": 2, "steps": 4}
        want = train_engine(make, comm, **options)
        assert_same(train_engine(make, comm, **options, **everywhere(stage, disk)), want, "on disk")
        if stage == 3:
            assert_same(train_engine(make, comm, **options, offload_params=disk), want, "parameters on disk")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["Gpt", "Tied", "Frozen"])
@distributed(world_size=2)
def test_masters_on_disk_change_no_bit(rank, world_size, name, stage, disk, small_windows):
    make = partial(zoo.make, name)
    with communicator() as comm:
        options = {"stage": stage, "accumulate": 2, "steps": 4, "autocast": True}
        want = train_engine(make, comm, **options)
        assert_same(train_engine(make, comm, **options, offload_optimizer=disk), want, "on disk")
        if stage == 3:
            assert_same(train_engine(make, comm, **options, **everywhere(stage, disk)), want, "parameters, too")


@pytest.mark.parametrize("buffers", [3, 4, 7])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=3)
def test_groups_in_any_order(rank, world_size, stage, buffers, disk):
    """Parameters of one window are in several groups, and some of them lie on other ranks only."""
    offload.WINDOW = 64  # more windows than buffers

    def train(**settings):
        model = zoo.make("Gpt")
        engine = build_engine(model, comm, stage=stage, **settings)
        params = list(model.parameters())[::-1]
        groups = [{"params": params[start::3], "lr": 0.01 * (start + 1)} for start in range(3)]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        for step in range(4):
            with engine.forward():
                loss = model.loss(model.batch(rank, step))
            optimizer.zero_grad()
            with engine.backward():
                loss.backward()
            engine.step(optimizer)
        state = engine.optimizer_state(optimizer)
        engine.release(whole=True)
        return model.state_dict(), state

    with communicator() as comm:
        want, want_state = train()
        got, got_state = train(offload_optimizer={**disk, "buffer_count": buffers})
    assert all(torch.equal(got[name], want[name]) for name in want)
    for index, entries in (want_state or {"state": {}})["state"].items():
        assert all(torch.equal(got_state["state"][index][key], value) for key, value in entries.items())


class Two(Net):
    """Two optimizers, one of them not torch's, each with its turn."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return SignMomentum(self.blocks.parameters(), lr=0.01), torch.optim.AdamW(self.head.parameters(), lr=0.01)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_several_optimizers_of_any_kind(rank, world_size, stage, disk, small_windows, tmp_path):
    want = fitted(rank, world_size, tmp_path, zero(stage), Two()).state_dict()
    got = fitted(rank, world_size, tmp_path, zero(stage, **everywhere(stage, disk)), Two()).state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_a_run_is_saved_and_goes_on_anywhere(rank, world_size, stage, precision, disk, small_windows, tmp_path):
    options = {"precision": precision, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_epochs": 2}
    on_disk = everywhere(stage, disk)

    def run(settings, **more):
        saves_folder = tmp_path / f"{len(settings)} {len(more)}"
        saves = ModelCheckpoint(saves_folder, save_top_k=-1)
        model, strategy = Net(), zero(stage, **settings)
        fit = trainer(rank, world_size, tmp_path, strategy, callbacks=[saves], enable_checkpointing=True, **options)
        fit.fit(model, loader(), **more)
        first = next(saves_folder.glob("epoch=0*"), None)  # not where it goes on behind it
        return model.state_dict(), strategy.optimizer_state(fit.optimizers[0]), first

    want, want_state, resident = run({})
    got, got_state, moved = run(on_disk)
    assert all(torch.equal(got[name], want[name]) for name in want)
    for index, entries in want_state.get("state", {}).items():
        assert all(torch.equal(got_state["state"][index][key], value) for key, value in entries.items())
    for settings, path in (({}, moved), (on_disk, resident)):
        resumed, _, _ = run(settings, ckpt_path=path)
        assert all(torch.equal(resumed[name], want[name]) for name in want), "a resumed run is another one"


@distributed(world_size=2)
def test_the_cpu_is_accepted_where_it_saves_nothing(rank, world_size, tmp_path):
    want = fitted(rank, world_size, tmp_path, "zero3").state_dict()
    for name in ("zero3_offload", "zero2_offload", "zero1_offload"):
        got = fitted(rank, world_size, tmp_path, name).state_dict()
        assert name != "zero3_offload" or all(torch.equal(got[key], want[key]) for key in want)
