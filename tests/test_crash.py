"""Saves that do not end well: killed, on a full disk, at a wrong place, damaged afterwards. What was there stays."""

import errno
import gc
import json
import multiprocessing
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import RankFailed, distributed, run_ranks
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors import signal_connector
from safetensors.torch import load_file
from test_launchers import slurm
from test_strategy import Net, loader, trainer, zero
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_zero.checkpoint import folder, folders, full, manifest, reader, temporary
from lightning_zero.checkpoint.background import Background
from lightning_zero.engine.elsewhere import OwnPart


def sharded(stage=3, **settings):
    return zero(stage, state_dict_type="sharded", **settings)


def in_full(*values):
    """Parameters that are left out by default."""
    return pytest.param(*values, marks=pytest.mark.full)


def left_behind(path):
    """Temporary things in a directory."""
    return sorted(p.name for p in Path(path).iterdir() if p.name.startswith("."))


def weights(path):
    """The weights in a checkpoint, a folder or a file."""
    path = Path(path)
    state = reader.checkpoint(reader.Folder(path), True) if path.is_dir() else torch.load(path, weights_only=True)
    return {name: torch.as_tensor(value + 0) for name, value in state["state_dict"].items()}


def steps(path):
    path = Path(path)
    state = reader.checkpoint(reader.Folder(path), True) if path.is_dir() else torch.load(path, weights_only=True)
    return state["global_step"]


class AtBatch(Callback):
    """Does something in the midst of training; training must go on afterwards."""

    def __init__(self, work, batch=1):
        self.work, self.batch = work, batch

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == self.batch:
            self.work(trainer)


def in_training(rank, world_size, path, strategy, work, **kwargs):
    run = trainer(rank, world_size, path, strategy, callbacks=[AtBatch(work)], **kwargs)
    run.fit(Net(), loader())
    assert run.global_step == (8 if world_size == 1 else 4)
    return run


def refusal(work):
    """The one error with which something ends, in a line."""
    with pytest.raises(Exception) as caught:
        work()
    return f"{type(caught.value).__name__}: {caught.value}"


# Places


@distributed(world_size=2, timeout=30)
@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_a_place_where_no_checkpoint_can_be_is_an_error_on_all_ranks(rank, world_size, later, tmp_path):
    work = tmp_path / "work"
    if rank == 0:
        (work / "mine").mkdir(parents=True)
        (work / "mine" / "data.csv").write_text("1,2")
        (work / "project").mkdir()
        (work / "project" / "manifest.json").write_text('{"name": "a project of mine"}')
        (work / "file").write_text("no directory")
        (work / "kept.ckpt").mkdir()
        for name in (folder.META, folder.METADATA, "notes.txt"):
            (work / "kept.ckpt" / name).write_text("")

    def attempt(run):
        for name, words in {
            "mine": ["IsADirectoryError", "data.csv", "another name"],
            "project": ["IsADirectoryError", "manifest.json", "another name"],
            "kept.ckpt": ["IsADirectoryError", "notes.txt", "another name"],
            "file/deeper/x.ckpt": ["NotADirectoryError", "Save elsewhere"],
        }.items():
            said = refusal(lambda name=name: run.save_checkpoint(work / name))
            assert all(word in said for word in [*words, str(work / name)]), said
        said = refusal(lambda: run.save_checkpoint("memory://x.ckpt"))
        assert "memory://x.ckpt" in said and "state_dict_type" in said, said
        run.strategy.barrier()

    in_training(rank, world_size, tmp_path, sharded(async_save=later), attempt)
    assert sorted(p.name for p in work.rglob("*")) == [
        ".metadata", "data.csv", "file", "kept.ckpt", "manifest.json", "meta.pt", "mine", "notes.txt", "project",
    ]  # fmt: skip


@distributed(world_size=2, timeout=30)
@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["readable", "closed"])
def test_a_directory_that_must_not_be_written_to(rank, world_size, mode, tmp_path):
    place = tmp_path / "work"
    if rank == 0:
        place.mkdir(mode=mode)

    def attempt(run):
        real, run_as = os.geteuid(), 65534
        if real == 0:
            os.seteuid(run_as)  # permissions are nothing to root
        try:
            said = refusal(lambda: run.save_checkpoint(place / "x.ckpt"))
        finally:
            os.seteuid(real)
        assert "PermissionError" in said and str(place / "x.ckpt") in said and "Save elsewhere" in said, said

    for path in [tmp_path, *tmp_path.parents]:
        if rank == 0 and path.stat().st_uid == os.geteuid() and path.name.startswith(("pytest-", "popen-", "test_")):
            path.chmod(0o755)
    in_training(rank, world_size, tmp_path, sharded(), attempt)
    place.chmod(0o755)
    assert not list(place.iterdir())


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_a_place_that_not_all_ranks_see(rank, world_size, later, tmp_path, monkeypatch):
    """A path on a disk of one host only."""
    if rank == 1:
        real = Path.is_dir
        monkeypatch.setattr(Path, "is_dir", lambda self: "work" not in self.parts and real(self))

    def attempt(run):
        said = refusal(lambda: run.save_checkpoint(tmp_path / "work" / "x.ckpt"))
        assert "rank 1" in said or rank == 1, said
        assert str(tmp_path / "work") in said and "all ranks" in said, said

    in_training(rank, world_size, tmp_path, sharded(async_save=later), attempt)
    assert not list((tmp_path / "work").iterdir())


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("who", [1, in_full(0)])
def test_a_save_on_one_rank_only_is_an_error(rank, world_size, who, tmp_path):
    path = tmp_path / "work" / "x.ckpt"

    def attempt(run):
        if rank == who:
            run.save_checkpoint(path)

    with pytest.raises(RuntimeError, match="parted"):
        in_training(rank, world_size, tmp_path, sharded(), attempt)
    assert not path.parent.exists() or not list(path.parent.iterdir())


@distributed(world_size=2, timeout=20)
def test_a_path_that_is_no_checkpoint_says_what_is_there(rank, world_size, tmp_path):
    place = tmp_path / "checkpoints"
    in_training(rank, world_size, tmp_path, sharded(), lambda run: run.save_checkpoint(place / "a.ckpt"))
    run = trainer(rank, world_size, tmp_path, sharded())
    for path, words in {
        place: ["not a checkpoint", "a.ckpt"],
        tmp_path / "nowhere.ckpt": ["no checkpoint at", "nowhere.ckpt"],
        place / "a.ckpt" / folder.META: [],
    }.items():
        said = refusal(lambda path=path: run.fit(Net(), loader(), ckpt_path=path))
        assert all(word in said for word in words), said


# Faults


class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__(first)
        self.lock = threading.Lock()


FAULTS = {
    "full": (lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
    "unpicklable": (lambda: Unpicklable("a strange error", 2), "a strange error"),
    "memory": (lambda: MemoryError("no memory"), "no memory"),
}


@contextmanager
def faulty_disk(error, after=0):
    """``os.fsync`` of files fails, as the disk does that takes what has been written."""
    real, count = os.fsync, [0]

    def fsync(descriptor):
        count[0] += 1
        if count[0] > after:
            raise error()
        real(descriptor)

    os.fsync = fsync
    try:
        yield
    finally:
        os.fsync = real


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("fault", ["full", "unpicklable", in_full("memory")])
def test_a_fault_on_one_rank_is_an_error_on_all_and_leaves_the_old_one(rank, world_size, fault, tmp_path):
    make, words = FAULTS[fault]
    path = tmp_path / "work" / "x.ckpt"

    def attempt(run):
        run.save_checkpoint(path)
        before = weights(path)
        for who, after in [(1, 0), (0, 0), (0, 2), (0, 3)]:
            run.strategy.barrier()
            with faulty_disk(make, after) if rank == who else contextmanager(lambda: (yield))():
                said = refusal(lambda: run.save_checkpoint(path))
            assert f"{path} was not saved" in said and f"rank {who}: " in said and words in said, said
            run.strategy.barrier()
            assert os.listdir(path.parent) == ["x.ckpt"], (who, after)
        now = weights(path)
        assert all(torch.equal(now[name], value) for name, value in before.items())

    in_training(rank, world_size, tmp_path, sharded(), attempt)


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("who", [0, 1])
def test_an_error_before_anything_is_written_leaves_nothing(rank, world_size, who, tmp_path, monkeypatch):
    """While the snapshot is taken, or what goes into meta.pt is put together."""
    from lightning_zero.checkpoint import sharded as module

    path = tmp_path / "work" / "x.ckpt"

    def fails(*_):
        raise MemoryError("no room for a copy")

    def attempt(run):
        if rank == who:
            monkeypatch.setattr(module, "snapshot", fails)
        said = refusal(lambda: run.save_checkpoint(path))
        assert "no room for a copy" in said
        run.strategy.barrier()
        assert not list(path.parent.iterdir())

    in_training(rank, world_size, tmp_path, sharded(async_save=True), attempt)


@distributed(world_size=2, timeout=40)
def test_values_that_cannot_be_saved_are_an_error_on_all_ranks(rank, world_size, tmp_path):
    path = tmp_path / "work" / "x.ckpt"

    class Odd(Callback):
        def on_save_checkpoint(self, trainer, pl_module, checkpoint):
            checkpoint["odd"] = lambda: None

    run = trainer(rank, world_size, tmp_path, sharded(), callbacks=[Odd()])
    run.fit(Net(), loader())
    assert "pickle" in refusal(lambda: run.save_checkpoint(path))
    assert not path.parent.exists()


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("who", [0, 1])
def test_ctrl_c_during_a_save_ends_all_ranks(rank, world_size, who, tmp_path):
    path = tmp_path / "work" / "x.ckpt"

    def attempt(run):
        run.save_checkpoint(path)
        if rank == who:
            with faulty_disk(KeyboardInterrupt):
                run.save_checkpoint(path)
        else:
            run.save_checkpoint(path)

    begin = time.monotonic()
    with pytest.raises(SystemExit if rank == who else RuntimeError):
        in_training(rank, world_size, tmp_path, sharded(), attempt)
    assert time.monotonic() - begin < 20
    assert steps(path) == 2 and (rank != 0 or os.listdir(path.parent) == ["x.ckpt"])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    place = tmp_path / "small"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a disk that is really full is a small file system, mounted by root: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@distributed(world_size=2, timeout=40)
def test_a_disk_that_is_really_full(rank, world_size, small_disk, tmp_path):
    path, filler = small_disk / "x.ckpt", small_disk / "filler"

    def attempt(run):
        run.save_checkpoint(path)
        before = weights(path)
        if rank == 0:
            free = os.statvfs(small_disk)
            filler.write_bytes(bytes(max(free.f_bavail * free.f_frsize - 8192, 1)))
        run.strategy.barrier()
        said = refusal(lambda: run.save_checkpoint(path))
        assert "was not saved" in said and "No space left" in said, said
        run.strategy.barrier()
        assert sorted(os.listdir(small_disk)) == ["filler", "x.ckpt"]
        now = weights(path)
        assert all(torch.equal(now[name], value) for name, value in before.items())
        run.strategy.barrier()
        if rank == 0:
            filler.unlink()
        run.save_checkpoint(path)

    in_training(rank, world_size, tmp_path, sharded(), attempt)


# Damage


def damages(path):
    """Copies of a checkpoint, each with one thing wrong, by what the error must name."""
    data = sorted(p.name for p in path.glob("*.distcp"))
    for name in [folder.META, folder.METADATA, *data]:
        yield "missing", name, lambda copy, name=name: (copy / name).unlink()
        yield "short", name, lambda copy, name=name: os.truncate(copy / name, os.path.getsize(copy / name) - 1)
        yield "flipped", name, lambda copy, name=name: flip(copy / name, os.path.getsize(copy / name) // 2)
    yield "flipped", manifest.NAME, lambda copy: flip(copy / manifest.NAME, 3)
    yield "short", manifest.NAME, lambda copy: os.truncate(copy / manifest.NAME, 20)


def flip(path, place, bit=3):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@distributed(world_size=2, timeout=60)
def test_damage_is_one_error_on_all_ranks_that_names_the_file(rank, world_size, tmp_path):
    path = tmp_path / "x.ckpt"
    in_training(rank, world_size, tmp_path, sharded(), lambda run: run.save_checkpoint(path))
    for number, (kind, name, damage) in enumerate(damages(path)):
        copy = tmp_path / f"{number}.ckpt"
        run = trainer(rank, world_size, tmp_path, sharded())
        if rank == 0:
            subprocess.run(["cp", "-r", str(path), str(copy)], check=True)
            damage(copy)
        torch.distributed.barrier()
        begin = time.monotonic()
        said = refusal(lambda run=run, copy=copy: run.fit(Net(), loader(), ckpt_path=copy))
        assert name in said and str(copy) in said and "another checkpoint" in said, (kind, name, said)
        assert time.monotonic() - begin < 10, (kind, name)
        torch.distributed.barrier()


def test_a_flipped_bit_of_a_manifest_is_found_or_harmless(tmp_path):
    """Whatever a flip makes of it: an error that says so, or still the same values."""
    path = tmp_path / "x.ckpt"
    path.mkdir()
    files = {"a": manifest.write_file(path / "a", bytes(3_000_000)), "b": manifest.write_file(path / "b", b"123")}
    manifest.write(path, files)
    content = (path / manifest.NAME).read_bytes()
    for place in random.Random(1).sample(range(8 * len(content)), 800):
        changed = bytearray(content)
        changed[place // 8] ^= 1 << place % 8
        (path / manifest.NAME).write_bytes(changed)
        try:
            found = manifest.read(path)
        except ValueError as error:
            assert "use another checkpoint" in str(error)
            continue
        for name, entry in found.items():
            assert isinstance(name, str) and len(entry.sums) == -(-entry.size // manifest.BLOCK), changed


@distributed(world_size=1, timeout=20)
def test_a_copy_that_was_cut_short_is_refused(rank, world_size, tmp_path):
    """Whatever of the files have come across."""
    path = tmp_path / "x.ckpt"
    in_training(rank, world_size, tmp_path, sharded(), lambda run: run.save_checkpoint(path))
    names = sorted(os.listdir(path))
    for chosen in range(1, 2 ** len(names) - 1):
        some = [name for number, name in enumerate(names) if chosen >> number & 1]
        copy = tmp_path / f"{chosen}.ckpt"
        copy.mkdir()
        for name in some:
            os.link(path / name, copy / name)
        whole = {*names} - {manifest.NAME} <= {*some}  # like a folder of somebody else
        if whole:
            reader.Folder(copy)
        else:
            with pytest.raises((ValueError, FileNotFoundError), match="checkpoint"):
                reader.Folder(folders.find(copy))
        assert folder.is_whole(copy) is False


# Putting into place


def make(path, text="new"):
    """A folder as a save leaves it before the last rename."""
    part = folder.new_part(path)
    files = {name: manifest.write_file(part / name, text.encode()) for name in (folder.META, folder.METADATA)}
    manifest.write(part, files)
    return part


def saved(path, text="new"):
    folder.commit(make(path, text), path)


def text_of(path):
    return (path / folder.META).read_text() if path.is_dir() else path.read_text()


@pytest.fixture(params=[True, False], ids=["exchange", "two_renames"])
def exchange(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(folder, "_exchange", lambda *_: False)
    return request.param


def test_a_folder_comes_into_the_place_of_anything(exchange, tmp_path):
    target, other = tmp_path / "x.ckpt", tmp_path / "other.ckpt"

    def nothing():
        pass

    def file():
        target.write_text("old")

    def whole():
        saved(target, "old")

    def empty():
        target.mkdir()

    def link():
        saved(other, "other")
        target.symlink_to(other.name)

    def link_to_a_file():
        other.write_text("other")
        target.symlink_to(other.name)

    def dangling():
        target.symlink_to("nowhere")

    def half():
        target.mkdir()
        (target / folder.META).write_text("half")

    for before in (nothing, file, whole, empty, link, link_to_a_file, dangling, half):
        before()
        folder.commit(make(target), target)
        assert text_of(target) == "new" and not target.is_symlink() and folder.is_whole(target), before.__name__
        assert left_behind(tmp_path) == [], before.__name__
        assert not before.__name__.startswith("link") or text_of(other) == "other"
        for path in (target, other):
            folder.remove(path)
        assert not list(tmp_path.iterdir())


def test_a_file_comes_into_the_place_of_anything(exchange, tmp_path):
    target, other = tmp_path / "x.ckpt", tmp_path / "other.ckpt"
    for before in ("nothing", "file", "folder", "link", "empty"):
        if before == "file":
            target.write_text("old")
        elif before == "folder":
            saved(target, "old")
        elif before == "link":
            saved(other, "other")
            target.symlink_to(other.name)
        elif before == "empty":
            target.mkdir()
        full.write({"new": 1}, target)
        assert torch.load(target) == {"new": 1} and not target.is_symlink(), before
        assert left_behind(tmp_path) == [], before
        assert before != "link" or text_of(other) == "other"
        for path in (target, other):
            folder.remove(path)


def test_a_file_that_fails_leaves_the_folder(tmp_path):
    target = tmp_path / "x.ckpt"
    saved(target, "old")
    with pytest.raises(Exception, match="pickle"):
        full.write({"cannot": lambda: None}, target)
    assert folder.is_whole(target) and text_of(target) == "old" and left_behind(tmp_path) == []
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "data.csv").write_text("1,2")
    with pytest.raises(IsADirectoryError, match=r"data\.csv.*another name"):
        full.write({"new": 1}, mine)
    assert os.listdir(mine) == ["data.csv"] and left_behind(tmp_path) == []


@distributed(world_size=2, timeout=40)
def test_files_and_folders_take_each_others_place(rank, world_size, tmp_path):
    """A run whose settings have changed since its last checkpoint, with the same names."""
    path = tmp_path / "work" / "x.ckpt"
    kinds = [zero(3), sharded(), zero(2), sharded(1, async_save=True)]
    resume = {}
    for number, strategy in enumerate(kinds, 1):
        run = trainer(rank, world_size, tmp_path, strategy, max_epochs=number)
        run.fit(Net(seed=number), loader(), **resume)
        run.save_checkpoint(path)
        resume = {"ckpt_path": path}
        assert steps(path) == 4 * number and path.is_dir() == (number in (2, 4))
        assert os.listdir(path.parent) == ["x.ckpt"]
        torch.distributed.barrier()


def test_what_is_left_of_killed_processes_goes_at_the_next_save(tmp_path):
    dead = subprocess.Popen(["true"])  # and nobody waits for it yet
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)
    host = temporary._host()
    ours, theirs = f"{host}-{dead.pid}", f"elsewhere-{dead.pid}"
    for name in (
        f".x.ckpt.{ours}-0a.part", f".y.ckpt.{ours}-0b.part", f".x.ckpt.{host}-{os.getpid()}-0c.part",
        f".x.ckpt.{theirs}-0d.part", f".y.ckpt.{theirs}-0e.part", f".y.ckpt.{host}-{os.getppid()}-0f.part",
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("half")
    (tmp_path / f".last.ckpt.{ours}-10.link").symlink_to("nowhere")
    (tmp_path / f".x.ckpt.{ours}-11.part").write_text("half of a file")
    (tmp_path / ".mine.part").write_text("somebody else's")
    (tmp_path / ".hidden").mkdir()
    mine = folder.new_part(tmp_path / "z.ckpt")
    (tmp_path / "same").symlink_to(tmp_path)
    saved(tmp_path / "same" / "x.ckpt")
    # of others only the same name goes, which nobody else writes at the same time; what is being written stays
    stay = [".hidden", ".mine.part", f".y.ckpt.{theirs}-0e.part", f".y.ckpt.{host}-{os.getppid()}-0f.part", mine.name]
    assert left_behind(tmp_path) == sorted(stay)
    saved(tmp_path / "z.ckpt")  # a save that has failed in this process
    temporary.drop(mine)
    full.write({}, tmp_path / "y.ckpt")
    assert left_behind(tmp_path) == sorted([".hidden", ".mine.part", f".y.ckpt.{host}-{os.getppid()}-0f.part"])
    dead.wait()


@pytest.mark.parametrize("host", ["node", "node.of.a.cluster"])
def test_names_that_begin_alike_are_not_taken_for_one_another(host, tmp_path, monkeypatch):
    """What is left of ``1.5``, or is being written by another host, is nothing to ``1``."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    longer, shorter = tmp_path / "1.5", tmp_path / "1"
    saved(longer, "old")
    aside, theirs = temporary.name(longer, "old"), tmp_path / f".{longer.name}.elsewhere-1-0a.part"
    longer.rename(aside)
    theirs.mkdir()
    temporary._in_use.clear()
    with pytest.raises(FileNotFoundError):
        folder.find(shorter)
    saved(shorter)
    assert text_of(shorter) == "new" and left_behind(tmp_path) == sorted([aside.name, theirs.name])
    with pytest.raises(FileNotFoundError, match=r"1\.5 is called "):
        folders.refuse_moved(tmp_path, "1")
    assert text_of(folder.find(longer)) == "old"
    saved(longer)
    assert text_of(longer) == "new" and left_behind(tmp_path) == []


def test_killed_between_two_renames(tmp_path, monkeypatch):
    """On a file system that cannot exchange, the old one is found under its other name, and comes back."""
    target = tmp_path / "last[1].ckpt"
    saved(target, "old")
    part, aside = make(target), temporary.name(target, "old")
    target.rename(aside)
    temporary._in_use.clear()  # the process is another one now
    assert text_of(folder.find(target)) == "old"
    with pytest.raises(FileNotFoundError, match=r"last\[1\]\.ckpt is called .*\.old now.*killed"):
        folders.refuse_moved(tmp_path, "last")
    other = folder.new_part(tmp_path / "other.ckpt")
    assert sorted(left_behind(tmp_path)) == sorted([aside.name, other.name]) and not part.exists()
    temporary.drop(other)
    part = folder.new_part(target)
    assert text_of(target) == "old" and left_behind(tmp_path) == [part.name]


def test_a_new_one_that_cannot_take_the_place_leaves_the_old(tmp_path, monkeypatch):
    target = tmp_path / "x.ckpt"
    saved(target, "old")
    monkeypatch.setattr(folder, "_exchange", lambda *_: False)
    part, rename = make(target), Path.rename

    def refuse(self, other):
        if self == part:
            raise OSError(errno.EIO, "broken")
        return rename(self, other)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="broken"):
        folder.commit(part, target)
    assert text_of(target) == "old"


def test_an_old_one_that_does_not_go_is_no_failed_save(tmp_path, monkeypatch):
    target = tmp_path / "x.ckpt"
    saved(target, "old")

    def refuse(*_, **__):
        raise OSError(errno.EBUSY, "busy")

    with monkeypatch.context() as patch:
        patch.setattr(temporary.shutil, "rmtree", refuse)
        with pytest.warns(UserWarning, match="busy"):
            saved(target)
    assert text_of(target) == "new" and len(left_behind(tmp_path)) == 1
    saved(target, "newer")
    assert text_of(target) == "newer" and left_behind(tmp_path) == []


def test_links_are_removed_as_links_and_follow_what_is_whole(tmp_path):
    first, second, link = tmp_path / "1.ckpt", tmp_path / "2.ckpt", tmp_path / "last.ckpt"
    saved(first, "one")
    link.symlink_to(first.name)
    folder.remove(link)
    assert text_of(first) == "one" and not link.is_symlink()
    link.symlink_to(first.name)
    saved(second, "two")
    other = tmp_path / "other.ckpt"
    other.symlink_to(first.name)
    folder.remove(other)
    assert text_of(link) == "one"  # what it leads to is still there
    folder.remove(first)
    assert text_of(link) == "two" and os.readlink(link) == "2.ckpt" and not first.exists()
    folder.remove(second)
    with pytest.raises(FileNotFoundError, match=r"2\.ckpt"):
        folder.find(link)
    with pytest.raises(FileNotFoundError, match="leads nowhere"):
        folders.refuse_dangling([str(link)])
    saved(first, "again")
    assert folder.find(link) == first
    with pytest.raises(FileNotFoundError, match=r"1\.ckpt"):
        folders.refuse_dangling([str(link)])


FILE_SYSTEM = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "ctypes.dlsym"}  # renameat2


def survives(work, calls):
    """Whether a process comes to the end of ``work`` if it is killed before the call to the file system of a number."""
    pid = os.fork()
    if pid == 0:
        left = [calls]

        def count(event, _):
            if event in FILE_SYSTEM:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


WAYS = {
    "folder over folder": (lambda a, b, last: saved(a, "old"), lambda a, b, last: saved(a)),
    "folder over file": (lambda a, b, last: a.write_text("old"), lambda a, b, last: saved(a)),
    "folder over link": (lambda a, b, last: (saved(b, "old"), a.symlink_to(b.name)), lambda a, b, last: saved(a)),
    "file over folder": (lambda a, b, last: saved(a, "old"), lambda a, b, last: full.write({"new": 1}, a)),
    "file over file": (lambda a, b, last: full.write({"old": 1}, a), lambda a, b, last: full.write({"new": 1}, a)),
    "link over folder": (lambda a, b, last: (saved(a, "old"), saved(b)), lambda a, b, last: folder.link(a, b)),
    "link over link": (
        lambda a, b, last: (saved(last, "old"), saved(b), a.symlink_to(last.name)),
        lambda a, b, last: folder.link(a, b),
    ),
    "remove what a link leads to": (
        lambda a, b, last: (saved(b, "old"), saved(last), a.symlink_to(b.name)),
        lambda a, b, last: folder.remove(b),
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_killed_before_each_call_to_the_file_system(way, exchange, tmp_path):
    before, work = WAYS[way]
    calls, died = 0, True
    while died:
        place = tmp_path / str(calls)
        place.mkdir()
        paths = place / "a.ckpt", place / "b.ckpt", place / "c.ckpt"
        before(*paths)
        died = not survives(lambda paths=paths: work(*paths), calls)
        found = folder.find(paths[0])
        assert not found.is_dir() or not manifest.missing(found, manifest.read(found)), calls
        if found.is_dir() or b"PK" not in found.read_bytes()[:2]:
            assert text_of(found) in (("old", "new") if died else ("new",)), calls
        else:
            assert list(torch.load(found)) in ([["old"], ["new"]] if died else [["new"]]), calls
        if exchange:
            assert os.path.exists(paths[0])
        saved(paths[0], "newest")
        assert text_of(paths[0]) == "newest" and left_behind(place) == [], calls
        calls += 1
    assert calls > (3 if "link" in way else 6)


def test_everything_is_on_the_disk_before_it_has_its_name(exchange, tmp_path, monkeypatch):
    """A cut of power takes what has not been brought to the disk, and may keep a rename that came after it."""
    target, order = tmp_path / "x.ckpt", []
    fsync, exchanges = os.fsync, folder._exchange

    def note(descriptor):
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(folder, "_exchange", lambda *paths: order.append("exchange") or exchanges(*paths))
    for path_rename in ("rename", "replace"):
        real = getattr(Path, path_rename)
        monkeypatch.setattr(
            Path, path_rename, lambda self, to, real=real: order.append(f"{self.suffix}>{to.suffix}") or real(self, to)
        )
    second = ["exchange"] if exchange else ["exchange", ".ckpt>.old", ".part>.ckpt"]
    for moves in ([".part>.ckpt"], second):
        saved(target)
        files, own, rest = order[:3], order[3], order[4:]
        assert files == [folder.META, folder.METADATA, manifest.NAME] and own.endswith(".part")
        assert rest == [*moves, tmp_path.name]
        order.clear()
    folder.remove(target)
    order.clear()
    full.write({}, target)
    own, first, last = order
    assert own.endswith(".part") and first == ".part>.ckpt" and last == tmp_path.name


# In the background


class Gate:
    """The disk: ``os.fsync`` waits while it is closed."""

    def __init__(self, monkeypatch):
        self.open, real = threading.Event(), os.fsync

        def fsync(descriptor):
            assert self.open.wait(20)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)

    def opens_in(self, seconds):
        threading.Timer(seconds, self.open.set).start()


class Batches(Callback):
    """Calls ``at[n](trainer)`` after the ``n``-th batch."""

    def __init__(self, **at):
        self.at = {int(name.removeprefix("batch")): work for name, work in at.items()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.at.get(batch_idx, lambda _: None)(trainer)


def tensors(path):
    """All tensors in a folder, by name, as copies."""
    state = reader.checkpoint(reader.Folder(Path(path)), True)
    optimizer = state["optimizer_states"][0]["state"]
    found = {f"{name}.{key}": value for name, entry in optimizer.items() for key, value in entry.items()}
    return {name: torch.as_tensor(value + 0) for name, value in {**state["state_dict"], **found}.items()}


class Counting(Net):
    """Has values that are no tensors, and changes them in place."""

    def __init__(self, seed=0):
        super().__init__(seed)
        self.count = [0, np.zeros(2)]

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        pass

    def on_train_batch_start(self, batch, batch_idx):
        self.count[0] += 1
        self.count[1] += 1


@distributed(world_size=2, timeout=40)
def test_values_that_are_no_tensors_are_of_the_time_of_the_save(rank, world_size, tmp_path, monkeypatch):
    gate, a = Gate(monkeypatch), tmp_path / "a.ckpt"
    work = Batches(batch0=lambda run: run.save_checkpoint(a), batch2=lambda run: gate.open.set())
    trainer(rank, world_size, tmp_path, sharded(async_save=True), callbacks=[work]).fit(Counting(), loader(24))
    count, array = reader.checkpoint(reader.Folder(a), False)["state_dict"]["_extra_state"]
    assert count == 1 and array.tolist() == [1, 1]


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("stage", [3, in_full(1)])
def test_training_goes_on_and_what_is_saved_is_of_the_time_of_the_save(rank, world_size, stage, tmp_path, monkeypatch):
    seen = []
    a, b = tmp_path / "work" / "a.ckpt", tmp_path / "work" / "b.ckpt"

    def still_without(run):
        seen.append(a.exists() or b.exists())

    def second(run):
        assert not a.exists()
        gate.opens_in(0.5)
        run.save_checkpoint(b)  # one at a time
        assert a.exists()

    def reference(run):
        for name in ("a", "b"):
            batches.at[{"a": 0, "b": 3}[name]] = lambda run, name=name: run.save_checkpoint(tmp_path / f"{name}.ckpt")

    batches = Batches()
    reference(None)
    trainer(rank, world_size, tmp_path, sharded(stage), callbacks=[batches]).fit(Net(), loader(24))
    gate = Gate(monkeypatch)
    work = Batches(batch0=lambda run: run.save_checkpoint(a), batch1=still_without, batch2=still_without, batch3=second)
    run = trainer(rank, world_size, tmp_path, sharded(stage, async_save=True), callbacks=[work])
    run.fit(Net(), loader(24))
    assert seen == [False, False] and run.global_step == 6
    for path in (a, b):  # the end of the fit has waited
        got, want = tensors(path), tensors(tmp_path / path.name)
        assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert not any(torch.equal(value, tensors(b)[name]) for name, value in tensors(a).items() if "weight" in name)
    run.test(Net(), loader(), ckpt_path=str(b), verbose=False)
    run.save_checkpoint(a)  # nothing else goes on: it is there at once
    assert steps(a) == 6


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("when", ["early", "at the end"])
def test_an_error_in_the_background_is_one_on_all_ranks(rank, world_size, who, when, tmp_path, monkeypatch):
    path, real = tmp_path / "work" / "x.ckpt", os.fsync

    def broken(run):
        run.strategy._background.wait()
        if rank == who:
            monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        run.save_checkpoint(path)

    def patient(run):
        time.sleep(0.3)

    work = Batches(batch0=lambda run: run.save_checkpoint(path), batch1=broken, batch2=patient)
    if when == "at the end":
        work = Batches(batch0=lambda run: run.save_checkpoint(path), batch11=broken)
    run = trainer(rank, world_size, tmp_path, sharded(async_save=True), callbacks=[work])
    model = Net()
    said = refusal(lambda: run.fit(model, loader(48)))
    assert "No space left" in said and f"rank {who}: OSError" in said and f"{path} was not saved" in said, said
    assert run.global_step == 12 if when == "at the end" else run.global_step <= 4
    assert steps(path) == 1 and os.listdir(path.parent) == ["x.ckpt"]
    if when == "at the end":
        assert all(torch.isfinite(param).all() and param.numel() for param in model.parameters())
    os.fsync = real


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("who", [{0, 1}, {1}], ids=["all", "one"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, in_full(SystemExit)])
def test_a_run_that_ends_with_an_exception_waits_for_the_save(rank, world_size, who, error, tmp_path, monkeypatch):
    path = tmp_path / "work" / "x.ckpt"

    def fails(run):
        gate.opens_in(0.5)
        if rank in who:
            raise error("enough")

    gate = Gate(monkeypatch)
    work = Batches(batch0=lambda run: run.save_checkpoint(path), batch1=fails)
    with pytest.raises(SystemExit if error is not ValueError and rank in who else Exception):
        trainer(rank, world_size, tmp_path, sharded(async_save=True), callbacks=[work]).fit(Net(), loader())
    assert steps(path) == 1 and folder.is_whole(path)


@distributed(world_size=2, timeout=40)
def test_a_failed_save_beside_another_error_is_a_note(rank, world_size, tmp_path, monkeypatch):
    def fails(run):
        time.sleep(0.2)
        raise ValueError("mine")

    def broken(_):
        raise OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(os, "fsync", broken)
    work = Batches(batch0=lambda run: run.save_checkpoint(tmp_path / "x.ckpt"), batch1=fails)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        trainer(rank, world_size, tmp_path, sharded(async_save=True), callbacks=[work], max_epochs=1).fit(
            Net(), loader(8)
        )
    assert "No space left" in str(caught.value) + str(getattr(caught.value, "__notes__", ""))


def peer_dies(rank, world_size, path):
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)

        def dies(run):
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            gate.opens_in(0.2)

        work = Batches(batch0=lambda run: run.save_checkpoint(path / "x.ckpt"), batch1=dies)
        begin = time.monotonic()
        said = refusal(
            lambda: trainer(rank, world_size, path, sharded(async_save=True), callbacks=[work]).fit(Net(), loader())
        )
        (path / "said").write_text(f"{time.monotonic() - begin} {said}")


def test_a_peer_that_is_killed_during_a_save_leaves_no_rank_hanging(tmp_path):
    with pytest.raises(RankFailed, match=r"rank 1 died with exit code -9"):
        run_ranks(peer_dies, 2, tmp_path, timeout=30, grace=20)
    seconds, said = (tmp_path / "said").read_text().split(" ", 1)
    assert float(seconds) < 15 and "rank" in said.lower()
    assert not (tmp_path / "x.ckpt").exists() and not list(tmp_path.glob(".x*"))


@distributed(world_size=2, timeout=30)
@pytest.mark.parametrize("who", [0, in_full(1)])
def test_a_rank_without_its_part_of_a_save_leaves_no_other_waiting(rank, world_size, who, tmp_path, monkeypatch):
    """Its thread has not begun when it fails, and the process lives on, as a notebook's does."""
    path = tmp_path / "work" / "x.ckpt"

    def fails(run):
        if rank == who:
            raise ValueError("enough")

    if rank == who:
        monkeypatch.setattr(Background, "start", lambda *_: None)
    work = Batches(batch0=lambda run: run.save_checkpoint(path), batch1=fails)
    begin = time.monotonic()
    with pytest.raises((ValueError, RuntimeError), match="enough"):
        trainer(rank, world_size, tmp_path, sharded(async_save=True), callbacks=[work]).fit(Net(), loader())
    while rank == who and not (tmp_path / "ended").exists():
        time.sleep(0.1)
    (tmp_path / "ended").touch()
    assert time.monotonic() - begin < 20 and not path.exists()


# Lightning's ModelCheckpoint


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("last", [True, "link"])
def test_old_ones_go_when_the_newer_is_there(rank, world_size, last, tmp_path, monkeypatch):
    """Training waits neither for the save nor for what is removed; a link leads somewhere at all times."""
    place, seen, gate = tmp_path / "checkpoints", [], None
    keep = ModelCheckpoint(place, save_top_k=1, every_n_train_steps=3, save_last=last, filename="{step}")

    class Look(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            nonlocal gate
            if rank == 0:
                names = sorted(p.name for p in place.glob("*.ckpt"))
                assert all((place / name).exists() for name in names), names
                if gate is not None and not gate.open.is_set():
                    seen.append(names)
            if batch_idx == 5:  # the disk stops, and the second save begins
                trainer.strategy._background.wait()
                gate = Gate(monkeypatch)
                gate.opens_in(0.5)

    run = trainer(
        rank, world_size, tmp_path, sharded(async_save=True), callbacks=[keep, Look()], enable_checkpointing=True
    )
    run.fit(Net(), loader(48))
    if rank == 0:
        if last == "link":  # the other is a save of its own, which waits for the first
            assert len(seen) > 2 and all(names == ["last.ckpt", "step=3.ckpt"] for names in seen), seen
        assert sorted(os.listdir(place)) == ["last.ckpt", "step=12.ckpt"]
        assert (place / "last.ckpt").is_symlink() == (last == "link")
        assert steps(place / "last.ckpt") == steps(place / "step=12.ckpt") == 12
    torch.distributed.barrier()
    assert "_link_checkpoint" not in vars(keep) and "file_exists" not in vars(keep)
    run.test(ckpt_path="best", dataloaders=loader(), verbose=False)
    again = trainer(
        rank, world_size, tmp_path, sharded(), max_epochs=2, enable_checkpointing=True,
        callbacks=[ModelCheckpoint(place, save_top_k=1, every_n_train_steps=3, save_last=last, filename="{step}")],
    )  # fmt: skip
    again.fit(Net(), loader(48), ckpt_path="last")
    assert again.global_step == 24
    if rank == 0:
        assert sorted(os.listdir(place)) in (
            ["last.ckpt", "step=24.ckpt"],
            ["last.ckpt", "step=12.ckpt", "step=24.ckpt"],
        )


@distributed(world_size=2, timeout=40)
def test_a_failed_save_removes_no_old_one_and_moves_no_link(rank, world_size, tmp_path, monkeypatch):
    place = tmp_path / "checkpoints"
    keep = ModelCheckpoint(place, save_top_k=1, every_n_train_steps=2, save_last="link", filename="{step}")

    def breaks(run):
        run.strategy._background.wait()

        def broken(_):
            raise OSError(errno.ENOSPC, "No space left")

        monkeypatch.setattr(os, "fsync", broken)

    run = trainer(
        rank, world_size, tmp_path, sharded(async_save=True), callbacks=[keep, Batches(batch2=breaks)],
        enable_checkpointing=True,
    )  # fmt: skip
    assert "No space left" in refusal(lambda: run.fit(Net(), loader(32)))
    if rank == 0:
        assert sorted(os.listdir(place)) == ["last.ckpt", "step=2.ckpt"]
    assert steps(place / "last.ckpt") == 2


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_names_that_are_taken_get_a_version_while_they_are_written(rank, world_size, later, tmp_path, monkeypatch):
    class Worse(Net):
        def training_step(self, batch, batch_idx):
            self.log("loss", float(batch_idx), sync_dist=True)
            return super().training_step(batch, batch_idx)

    if later:
        Gate(monkeypatch).opens_in(0.5)
    keep = ModelCheckpoint(tmp_path / "work", "best", monitor="loss", save_top_k=2, every_n_train_steps=1)
    run = trainer(
        rank, world_size, tmp_path, sharded(async_save=later), callbacks=[keep], enable_checkpointing=True,
        logger=False,
    )  # fmt: skip
    run.fit(Worse(), loader(16))
    torch.distributed.barrier()
    assert sorted(os.listdir(tmp_path / "work")) == ["best-v1.ckpt", "best.ckpt"]
    assert steps(tmp_path / "work" / "best.ckpt") == 1 and steps(tmp_path / "work" / "best-v1.ckpt") == 2


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("kind", ["full", "sync", "async"])
def test_slurms_job_goes_back_into_the_queue_when_it_is_saved(rank, world_size, kind, tmp_path, monkeypatch):
    """And what was being written when a job before was killed is not taken for its checkpoint."""
    whole, path = [], tmp_path / "hpc_ckpt_1.ckpt"
    monkeypatch.setattr(signal_connector, "call", lambda _: whole.append(path.is_file() or folder.is_whole(path)) or 0)
    os.environ.update(slurm(rank, "1"))
    if rank == 0:
        folder.new_part(path, file=kind == "full")
        temporary._in_use.clear()
    torch.distributed.barrier()
    strategy = zero(3) if kind == "full" else sharded(async_save=kind == "async")
    send = Batches(batch1=lambda run: os.kill(os.getpid(), signal.SIGUSR1))
    trainer(rank, world_size, tmp_path, strategy, callbacks=[send]).fit(Net(), loader())
    assert whole == ([True] if rank == 0 else [])
    torch.distributed.barrier()
    assert [p.name for p in tmp_path.iterdir() if "hpc" in p.name] == ["hpc_ckpt_1.ckpt"]
    torch.distributed.barrier()
    if rank == 0:
        folder.new_part(path, file=kind == "full")
    torch.distributed.barrier()
    again = trainer(rank, world_size, tmp_path, zero(2) if kind == "full" else sharded(1), max_epochs=2)
    again.fit(Net(), loader())
    assert again.ckpt_path == str(path) and again.global_step in (6, 8)


# SIGKILL


class Counts(LightningModule):
    """After ``n`` steps all weights are ``n (n + 1) / 2`` and all momenta ``-n``, exactly."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(311, 257) for _ in range(4))
        for param in self.parameters():
            nn.init.zeros_(param)

    def training_step(self, batch, batch_idx):
        return -sum(layer(torch.ones(1, 311)).sum() for layer in self.layers)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0, momentum=1.0)


def verified(path):
    """The step of a checkpoint, of which every byte and every value is what it must be."""
    if path.is_dir():
        source = reader.Folder(path)
        assert source.files is not None
        for name, entry in source.files.items():
            source._file(name).read(0, memoryview(bytearray(entry.size)))
        state = reader.checkpoint(source, True)
    else:
        state = torch.load(path, weights_only=True)
    step = state["global_step"]
    (optimizer,) = state["optimizer_states"]
    assert len(state["state_dict"]) == len(optimizer["state"]) == 8
    for value in state["state_dict"].values():
        assert bool((value + 0 == step * (step + 1) / 2).all()), (path, step)
    for entry in optimizer["state"].values():
        assert bool((entry["momentum_buffer"] + 0 == -step).all()), (path, step)
    return step


class Log(Callback):
    """Leaves word of where the run is."""

    def __init__(self, path):
        self.path = path

    def on_train_start(self, trainer, pl_module):
        if trainer.is_global_zero:
            (self.path / "resumed").write_text(json.dumps([trainer.ckpt_path, trainer.global_step]))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.is_global_zero:  # the saves after the batch before have returned
            (self.path / "reached.new").write_text(str(trainer.global_step))
            (self.path / "reached.new").replace(self.path / "reached")


def saves_all_the_time(rank, world_size, path, kind, last, more=10**6):
    strategy = zero(3) if kind == "full" else sharded(async_save=kind == "async")
    keep = ModelCheckpoint(
        path / "work", "{step}", monitor="step", mode="max", save_top_k=2, every_n_train_steps=1, save_last=last
    )
    data = DataLoader(TensorDataset(torch.zeros(20_000, 1)), batch_size=1)
    run = trainer(
        rank, world_size, path, strategy, callbacks=[keep, Log(path)], enable_checkpointing=True, max_steps=more
    )
    run.fit(Counts(), data, ckpt_path="last")


def leader(path, kind, last):
    os.setsid()
    tempfile.tempdir = str(path)
    run_ranks(saves_all_the_time, 2, path, kind, last, timeout=60)


def killed(path, kind, last, seconds):
    """Start a run, and kill all of it so many seconds after it has begun to save."""
    (path / "reached").unlink(missing_ok=True)
    process = multiprocessing.get_context("fork").Process(target=leader, args=(path, kind, last))
    process.start()
    deadline = time.monotonic() + 30
    while not (path / "reached").exists():
        assert process.is_alive() and time.monotonic() < deadline, "the run does not begin"
        time.sleep(0.01)
    time.sleep(seconds)
    assert process.is_alive()
    os.killpg(process.pid, signal.SIGKILL)
    process.join()
    return int((path / "reached").read_text())


CASES = [("sync", True), ("sync", "link"), ("async", True), ("async", "link"), ("full", True), ("full", "link")]


@pytest.mark.parametrize(
    ("kind", "last", "kills"),
    [
        ("sync", True, 3),
        ("async", "link", 3),
        *(in_full(*case, 30) for case in CASES),
    ],
)
def test_a_kill_at_any_moment_costs_at_most_what_was_being_saved(kind, last, kills, tmp_path):
    """Again and again, each run resuming from what the one before has left."""
    place, newest, midst = tmp_path / "work", 0, 0
    chance = random.Random(kills)
    place.mkdir()  # a run may be killed before it does
    for _ in range(kills):
        reached = killed(tmp_path, kind, last, chance.uniform(0, 0.6))
        ckpt_path, start = json.loads((tmp_path / "resumed").read_text())
        assert start == newest and (ckpt_path is not None) == bool(newest), (ckpt_path, start, newest)
        midst += any(temporary.is_temporary(p) for p in place.iterdir())
        kept = [verified(p) for p in place.glob("step=*.ckpt")]
        lasts = sorted(place.glob("last*.ckpt"), key=lambda p: p.lstat().st_mtime)  # Lightning takes the newest
        if not lasts and reached <= start + 1:
            assert newest == 0, "the last checkpoint has gone"  # killed before there was one
            continue
        newest = verified(lasts[-1])
        # of the last batch, epoch's and last one are saved in turn; in the background one is still under way
        assert newest >= max(reached - (kind == "async"), start) and max(kept) >= newest, (newest, reached, kept)
    run_ranks(saves_all_the_time, 2, tmp_path, kind, last, newest + 2, timeout=60)
    assert json.loads((tmp_path / "resumed").read_text())[1] == newest
    assert newest + 2 in [verified(p) for p in place.glob("last*.ckpt")]
    assert not [p.name for p in place.iterdir() if p.name.startswith(".")]
    print(f"{kind} {last}: {kills} kills, {midst} in the midst of a save, {newest + 2} steps")


@distributed(world_size=2)
@pytest.mark.parametrize("later", [False, True], ids=["sync", "async"])
def test_nothing_outlives_a_save(rank, world_size, later, tmp_path):
    """Neither the copies that an asynchronous save makes of a rank's part, nor what refers to them; without gc."""

    def attempt(run):
        gc.collect()
        gc.disable()
        try:
            run.save_checkpoint(tmp_path / "x.ckpt")
            run.strategy._background.wait()
            assert not [each for each in gc.get_objects() if isinstance(each, OwnPart)]
        finally:
            gc.enable()

    in_training(rank, world_size, tmp_path, sharded(async_save=later), attempt)


@distributed(world_size=2)
def test_16_bit_weights_are_without_what_is_no_tensor(rank, world_size, tmp_path):
    class Extra(Net):
        def get_extra_state(self):
            return {"words": ["one"]}

        def set_extra_state(self, state):
            pass

    run = trainer(rank, world_size, tmp_path, sharded(save_16bit_weights=True))
    run.fit(Extra(), loader())
    path = tmp_path / "x.ckpt"
    if rank == 0:
        with pytest.warns(UserWarning, match="without what is no dense tensor: _extra_state"):
            run.save_checkpoint(path)
    else:
        run.save_checkpoint(path)
    assert load_file(path / "model.safetensors").keys() == Net().state_dict().keys()


@distributed(world_size=2)
def test_a_link_that_leads_nowhere_ends_a_fit_and_no_test(rank, world_size, tmp_path):
    if rank == 0:
        (tmp_path / "last.ckpt").symlink_to("gone.ckpt")
    torch.distributed.barrier()

    def run():
        keep = ModelCheckpoint(tmp_path, save_last="link")
        return trainer(rank, world_size, tmp_path, sharded(), callbacks=[keep], enable_checkpointing=True)

    run().test(Net(), loader(), verbose=False)
    assert "leads nowhere" in refusal(lambda: run().fit(Net(), loader()))
