"""Saves that do not end well: killed, on a full disk, at a wrong place, damaged afterwards. What was there stays."""

import errno
import os
import socket
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from harness import distributed
from lightning.pytorch import Callback
from test_strategy import Net, loader, trainer, zero

from lightning_zero.checkpoint import folder, folders, full, manifest, reader, temporary


def sharded(stage=3, **settings):
    return zero(stage, state_dict_type="sharded", **settings)


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
def test_a_directory_that_must_not_be_written_to(rank, world_size, tmp_path):
    place = tmp_path / "work"
    if rank == 0:
        place.mkdir(mode=0o555)

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
        if rank == 0 and path.stat().st_uid == os.geteuid() and path.name.startswith(("pytest-", "test_")):
            path.chmod(0o755)
    in_training(rank, world_size, tmp_path, sharded(), attempt)
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
@pytest.mark.parametrize("who", [0, 1])
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
@pytest.mark.parametrize("fault", FAULTS)
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
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
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


def test_every_flipped_bit_of_a_small_manifest_is_found_or_harmless(tmp_path):
    """Whatever a flip makes of it: an error that says so, or still the same values."""
    path = tmp_path / "x.ckpt"
    path.mkdir()
    files = {"a": manifest.write_file(path / "a", bytes(3_000_000)), "b": manifest.write_file(path / "b", b"123")}
    manifest.write(path, files)
    content = (path / manifest.NAME).read_bytes()
    for place in range(8 * len(content)):
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
    dead = subprocess.Popen(["true"])
    dead.wait()
    host = socket.gethostname()
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
    saved(tmp_path / "x.ckpt")
    # of others only the same name goes, which nobody else writes at the same time; what is being written stays
    stay = [".hidden", ".mine.part", f".y.ckpt.{theirs}-0e.part", f".y.ckpt.{host}-{os.getppid()}-0f.part", mine.name]
    assert left_behind(tmp_path) == sorted(stay)
    saved(tmp_path / "z.ckpt")  # a save that has failed in this process
    temporary.drop(mine)
    full.write({}, tmp_path / "y.ckpt")
    assert left_behind(tmp_path) == sorted([".hidden", ".mine.part", f".y.ckpt.{host}-{os.getppid()}-0f.part"])


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
