"""Tiers: any range comes back, files are private and leave nothing, and errors that say what to do."""

import errno
import os
import resource
import shutil
import signal
import subprocess

import pytest
import torch
from harness import distributed, run_ranks
from test_strategy import Net, fitted, zero

from lightning_zero import PeerError, TierError, ZeroStrategy
from lightning_zero.engine import host_memory, tiers
from lightning_zero.engine.nvme import NvmeTier, aligned_empty
from lightning_zero.engine.tiers import HostTier


@pytest.fixture
def disk(tmp_path):
    return {"device": "nvme", "nvme_path": str(tmp_path / "swap")}


def tier_of(kind, folder):
    return HostTier() if kind == "host" else NvmeTier(folder, block_size=8192, requests=3)


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


def test_the_place_of_an_array_that_has_gone_is_used_again(tmp_path):
    tier = tier_of("nvme", tmp_path)
    kept = tier.empty(1000, torch.float32, "kept")
    kept.store(0, torch.arange(1000.0)).wait()
    for _ in range(5):
        array = tier.empty(10**5, torch.float32, "one after the other")
        array.store(0, torch.ones(10**5))
        del array
    assert tier.nbytes() == 4096 and os.fstat(tier._fd).st_size < 2 * 4 * 10**5
    kept.fetch(0, out := torch.empty(1000)).wait()
    assert torch.equal(out, torch.arange(1000.0))


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


def mounted(folder, *options):
    """A file system of its own at a folder."""
    folder.mkdir()
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip(
            "a small or read-only disk is a tmpfs, which only root may mount, with the mount command (util-linux)"
        )
    made = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small or read-only disk is a tmpfs, which root may not mount here: {made.stderr.strip()}")
    return folder


@pytest.fixture
def small_disk(tmp_path):
    yield mounted(tmp_path / "small", "-o", "size=1m")
    subprocess.run(["umount", tmp_path / "small"], check=True)


@pytest.fixture
def read_only_disk(tmp_path):
    yield mounted(tmp_path / "read_only", "-o", "ro")
    subprocess.run(["umount", tmp_path / "read_only"], check=True)


class Large(Net):
    """A megabyte of parameters."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(512, 512)

    def on_train_start(self):
        raise AssertionError("training must not begin")


class InPieces(Large):
    """Gradients fit on the disk, and so does the state, but not both."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(300, 300)


class TwoOptimizers(InPieces):
    """The state of each fits, but not that of both."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.wide = torch.nn.ModuleList(torch.nn.Linear(180, 180) for _ in range(3))

    def configure_optimizers(self):
        return [torch.optim.AdamW(part) for part in (self.wide.parameters(), self.head.parameters())]


@pytest.mark.parametrize("params", [False, True], ids=["state", "parameters"])
@pytest.mark.parametrize("model", [Large, InPieces, TwoOptimizers])
@distributed(world_size=2)
def test_a_disk_that_is_too_small_is_an_error_before_training(rank, world_size, model, params, small_disk, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(small_disk)}
    strategy = zero(3, offload_optimizer=disk, offload_params=disk if params else "none")
    with pytest.raises(RuntimeError, match=r"has no room for .* more, [\d,]+ are free"):
        fitted(rank, world_size, tmp_path, strategy, model())


@distributed(world_size=2)
def test_a_read_only_disk_is_an_error_before_training(rank, world_size, read_only_disk, tmp_path):
    strategy = zero(1, offload_optimizer={"device": "nvme", "nvme_path": str(read_only_disk)})
    with pytest.raises(TierError, match="No file can be made in nvme_path=.*Read-only file system"):
        fitted(rank, world_size, tmp_path, strategy, Large())


@distributed(world_size=2)
def test_too_little_memory_is_an_error_before_training(rank, world_size, disk, tmp_path):
    tiers.free_memory = lambda: 2 * 10**6
    strategy = zero(3, offload_params=disk)  # the optimizer's state is then in host memory
    with pytest.raises(TierError, match=r"Host memory has no room for the state of AdamW: 2 ranks .* need 1,05"):
        fitted(rank, world_size, tmp_path, strategy, Large())


@pytest.mark.parametrize(
    ("own", "group", "limit", "usage", "cache"),
    [
        ("0::/\n", "", "memory.max", "memory.current", "inactive_file"),  # a container
        (
            "0::/user/job/step\n",
            "user/job",
            "memory.max",
            "memory.current",
            "inactive_file",
        ),  # the limit is further out
        (
            "4:cpu:/\n3:memory:/job\n",
            "memory/job",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
)
def test_the_limit_of_a_control_group_counts(own, group, limit, usage, cache, tmp_path, monkeypatch):
    (tmp_path / "own").write_text(own)
    (tmp_path / group).mkdir(parents=True, exist_ok=True)
    (tmp_path / group / limit).write_text("3000000\n")
    (tmp_path / group / usage).write_text("1000000\n")
    (tmp_path / group / "memory.stat").write_text(f"anon 700000\n{cache} 300000\n")
    monkeypatch.setattr(host_memory, "_MOUNT", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN", tmp_path / "own")
    assert host_memory.free_memory() == 2300000


@distributed(world_size=2)
def test_two_runs_in_one_directory_do_not_meet(rank, world_size, disk, tmp_path):
    """Both ranks of this run, and of one that is still there, have files in it."""
    other = tier_of("nvme", disk["nvme_path"]).empty(10**5, torch.float32, "another run's")
    other.store(0, torch.full((10**5,), 7.0)).wait()
    fitted(rank, world_size, tmp_path, zero(3, offload_optimizer=disk, offload_params=disk))
    other.fetch(0, out := torch.empty(10**5)).wait()
    assert (out == 7).all()


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
        ({"offload_optimizer": {"device": "cpu", "ratio": 1.5}}, "ratio=1.5 must be a number from 0 to 1"),
        ({"stage": 2, "offload_params": "cpu"}, "offload_params needs stage 3"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "offload_optimizer needs stage"),
    ],
)
def test_wrong_settings_are_refused(settings, says):
    with pytest.raises((TypeError, ValueError), match=says):
        ZeroStrategy(**settings)


def test_a_path_may_begin_with_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    tier = NvmeTier("~/swap files", 4096, 1)
    assert (tmp_path / "swap files").is_dir() and tier.path == str(tmp_path / "swap files")
    tier.close()
