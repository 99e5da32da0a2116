"""Weights as safetensors: the library's files to the byte, written by all ranks, and read by parts."""

import errno
import json
import os
import threading

import pytest
import torch
from harness import distributed
from huggingface_hub import split_torch_state_dict_into_shards
from lightning.pytorch import Callback
from oracles import communicator, linear_in_bf16
from safetensors.torch import load_file, save_file
from test_checkpoint import Rich
from test_expected import STAGES, Zoo, build, filled
from test_meta import Configured, on_meta
from test_strategy import Net, loader, trainer, zero
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_zero
from lightning_zero import load_safetensors, save_safetensors
from lightning_zero.checkpoint import safetensors_file
from lightning_zero.checkpoint.safetensors_file import DTYPES, SafetensorsFile, header
from lightning_zero.engine.host_memory import allocated


def library(module, path, dtype=None):
    """The file that the library writes of a plain module: tied parameters once."""
    tensors, seen = {}, set()
    for name, value in module.state_dict().items():
        if isinstance(value, torch.Tensor) and (not value.numel() or value.data_ptr() not in seen):
            seen.add(value.data_ptr())
            cast = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            tensors[name] = cast.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    return path.read_bytes()


def assert_same(module, want):
    """Equal to the bit, buffers as well."""
    got, expected = module.state_dict(), want.state_dict()
    assert list(got) == list(expected)
    for name, value in expected.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), name


@pytest.fixture
def plain_folder(tmp_path):
    """A folder with a file of the library's."""
    library(filled(), tmp_path / "model.safetensors")
    return tmp_path


# Writing


@distributed(world_size=[1, 2, 3, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_a_file_of_the_library_to_the_byte(rank, world_size, stage, tmp_path):
    module = filled(seed=3 if rank == 0 else 4)
    with communicator() as comm:
        build(comm, module, stage)
        for dtype in (None, torch.bfloat16):
            save_safetensors(module, tmp_path / f"{dtype}.safetensors", dtype=dtype)
            want = library(filled(), tmp_path / f"want{rank}", dtype)
            assert (tmp_path / f"{dtype}.safetensors").read_bytes() == want
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_user_dtypes_and_masters(rank, world_size, stage, tmp_path):
    """A 16-bit module is saved in 16 bits, or, asked for fp32, with its masters; a rounded one in the user's fp32."""
    with communicator() as comm:
        half = filled(dtype=torch.bfloat16)
        engine = build(comm, half, stage)
        for unit in engine.units:
            for flat in unit.flats:
                flat.write_master(0, flat.read_master(0, flat.high - flat.low) * (1 + 2**-12))
        save_safetensors(half, tmp_path / "half.safetensors")
        save_safetensors(half, tmp_path / "masters.safetensors", dtype=torch.float32)
        rounded = filled()
        build(comm, rounded, stage, compute_dtype=linear_in_bf16(rounded))
        save_safetensors(rounded, tmp_path / "rounded.safetensors")
    want, exact = filled(dtype=torch.bfloat16), load_file(tmp_path / "masters.safetensors")
    assert (tmp_path / "half.safetensors").read_bytes() == library(want, tmp_path / f"want{rank}")
    for name, param in want.named_parameters():
        if param.requires_grad:
            assert torch.equal(exact[name], param.float() * (1 + 2**-12)), name
    assert (tmp_path / "rounded.safetensors").read_bytes() == library(filled(), tmp_path / f"want{rank}")


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_what_the_user_has_written(rank, world_size, stage, tmp_path):
    want, module = filled(), filled()
    with communicator() as comm, torch.no_grad():
        engine = build(comm, module, stage)
        with engine.gathered(module):
            module.blocks[0].weight.mul_(2)
            module.turned.mul_(2)
            module.norm.running_mean.mul_(rank + 1)
        if stage < 3:
            module.blocks[2].bias.add_(1)
            want.blocks[2].bias.add_(1)
        save_safetensors(module, tmp_path / "x.safetensors")
        want.blocks[0].weight.mul_(2)
        want.turned.mul_(2)
    assert (tmp_path / "x.safetensors").read_bytes() == library(want, tmp_path / f"want{rank}")


@distributed(world_size=[1, 2])
def test_numbered_files_and_an_index(rank, world_size, tmp_path):
    """As Hugging Face's; another layout takes the place of what was there."""
    folder, module = tmp_path / "new" / "folder", filled()
    tensors = load_file_of(module, tmp_path / f"want{rank}")
    want = split_torch_state_dict_into_shards(tensors, max_shard_size=3000)
    assert 1 < len(want.filename_to_tensors) < 8
    with communicator() as comm:
        build(comm, module, 3)
        for limit in (3000, None, 3000, 6000, None):
            save_safetensors(module, folder, max_file_bytes=limit)
            if rank == 0:
                parts = split_torch_state_dict_into_shards(tensors, max_shard_size=limit or 10**9)
                index = ["model.safetensors.index.json"] if parts.is_sharded else []
                assert sorted(os.listdir(folder)) == sorted([*parts.filename_to_tensors, *index])
                for name, keys in parts.filename_to_tensors.items():
                    assert list(load_file(folder / name)) == list(SafetensorsFile(folder / name).pieces)
                    assert set(load_file(folder / name)) == set(keys)
                if index:
                    content = json.loads((folder / index[0]).read_text())
                    assert content["weight_map"] == parts.tensor_to_filename
                    assert content["metadata"]["total_size"] == parts.metadata["total_size"]
            comm.agree(None)
            other = filled(seed=9)
            load_safetensors(other, folder)
            assert_same(other, filled())
            comm.agree(None)


def load_file_of(module, path):
    """The tensors of a plain module's file, in the order of its state."""
    library(module, path)
    tensors = load_file(path)
    return {name: tensors[name] for name in module.state_dict() if name in tensors}


@distributed(world_size=2)
def test_some_of_it_under_other_names(rank, world_size, tmp_path):
    def only_blocks(name):
        return name.replace("blocks", "layers") if name.startswith("blocks") else None

    class Adapter(Zoo):
        def state_dict(self, **options):
            return {name: value for name, value in super().state_dict(**options).items() if "turned" in name}

    want = filled()
    with communicator() as comm:
        module = filled()
        module.blocks[2] = torch.compile(module.blocks[2])
        build(comm, module, 3)
        save_safetensors(module, tmp_path / "blocks.safetensors", names=only_blocks, exclude_frozen=True)
        save_safetensors(module.blocks, tmp_path / "part.safetensors", names={"0.weight": "w", "0.bias": None})
        save_safetensors(module, tmp_path / "head.safetensors", names={"embedding.weight": None})
        with pytest.raises(ValueError, match="'scale' and 'blocks.0.weight' would both be called 'scale'"):
            save_safetensors(module, tmp_path / "no.safetensors", names={"blocks.0.weight": "scale"})
        adapter = filled(Adapter)
        build(comm, adapter, 3)
        save_safetensors(adapter, tmp_path / "adapter.safetensors")
    found = {name: load_file(tmp_path / f"{name}.safetensors") for name in ("blocks", "part", "head", "adapter")}
    assert set(found["blocks"]) == {f"layers.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    assert set(found["part"]) == {"w", "1.weight", "1.bias", "2.weight", "2.bias"}
    assert torch.equal(found["part"]["w"], want.blocks[0].weight)
    assert torch.equal(found["blocks"]["layers.2.weight"], want.blocks[2].weight)
    assert torch.equal(found["head"]["head.weight"], want.head.weight) and "embedding.weight" not in found["head"]
    assert set(found["adapter"]) == {"turned"} and torch.equal(found["adapter"]["turned"], want.turned)


class WithState(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def get_extra_state(self):
        return 3

    def set_extra_state(self, state):
        pass


@distributed(world_size=2)
def test_what_cannot_be_saved(rank, world_size, tmp_path):
    path, module = tmp_path / "a.safetensors", WithState()
    with communicator() as comm:
        build(comm, module, 3)
        with pytest.raises(ValueError, match=r"_extra_state.* is no dense tensor.*names="):
            save_safetensors(module, path)
        save_safetensors(module, path, names={"_extra_state": None})
        with pytest.raises(ValueError if rank == 0 else RuntimeError, match="max_file_bytes is for a folder"):
            save_safetensors(module, path, names={"_extra_state": None}, max_file_bytes=10)
        with pytest.raises(ValueError, match="float64 must be"):
            save_safetensors(module, path, dtype=torch.float64)
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(ValueError if rank == 0 else RuntimeError, match="no local path"):
            save_safetensors(module, "s3://bucket/a.safetensors", names={"_extra_state": None})
        with pytest.raises(RuntimeError, match=r"Missing key.*_extra_state"):
            load_safetensors(module, path)
        assert not load_safetensors(module, path, names={"_extra_state": None}).missing_keys
    with pytest.raises(ValueError, match=r"'weight' has no values \(it is on meta\)"):
        save_safetensors(on_meta(lambda: nn.Linear(2, 2)), tmp_path / f"never{rank}.safetensors")


def test_every_dtype_is_where_the_library_has_it(tmp_path):
    tensors = {
        f"{name} {kind}": torch.randint(0, 2, (3, 16), dtype=torch.uint8).view(dtype)
        for name, dtype in DTYPES.items()
        for kind in ("\u00e9\u2028\U0001f600", 'quoted "\\\n')
    }
    save_file(tensors, tmp_path / "x", metadata={"format": "pt"})
    begin, pieces = header({name: (value.dtype, value.shape) for name, value in tensors.items()})
    assert (tmp_path / "x").read_bytes().startswith(begin)
    read = SafetensorsFile(tmp_path / "x")
    assert read.pieces == pieces
    for name, value in tensors.items():
        assert torch.equal(read.stored(name).view(torch.uint8), value.view(torch.uint8))


def fail_at(monkeypatch, name, error):
    def fails(*args):
        raise error

    monkeypatch.setattr(safetensors_file.os, name, fails)


@distributed(world_size=3)
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("call", ["pwrite", "fsync"])
@pytest.mark.parametrize("where", [0, 1])
def test_an_error_on_one_rank_is_one_on_all_and_leaves_the_old_file(rank, world_size, stage, call, where, tmp_path):
    module, path = filled(), tmp_path / "x.safetensors"
    with communicator() as comm:
        build(comm, module, stage)
        save_safetensors(module, path)
        before = path.read_bytes()
        with torch.no_grad():
            module.norm.running_mean.add_(1)
        with pytest.MonkeyPatch.context() as patch:
            if rank == where:
                fail_at(patch, call, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            with pytest.raises(OSError if rank == where else RuntimeError, match="No space left"):
                save_safetensors(module, path)
        comm.agree(None)  # rank 0 has removed what was written
        assert os.listdir(tmp_path) == [path.name] and path.read_bytes() == before
        comm.agree(None)
        save_safetensors(module, path)
        assert path.read_bytes() != before


@distributed(world_size=2)
def test_memory_of_a_save(rank, world_size, tmp_path):
    """No rank holds more than a unit beside what it had."""
    width, count = 512, 16
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    with communicator() as comm:
        build(comm, module, 3)
        save_safetensors(module, tmp_path / "x.safetensors", dtype=torch.bfloat16)
        highest = before = allocated()
        write = safetensors_file.os.pwrite

        def measured(*args):
            nonlocal highest
            highest = max(highest, allocated())
            return write(*args)

        safetensors_file.os.pwrite = measured
        save_safetensors(module, tmp_path / "x.safetensors", dtype=torch.bfloat16)
        assert highest - before <= 4 * width * width


# Reading


class Counted:
    """Bytes that are read of tensors."""

    def __init__(self, patch):
        self.read = 0
        read = SafetensorsFile._read

        def counted(file, memory, offset):
            self.read += len(memory)
            read(file, memory, offset)

        patch.setattr(SafetensorsFile, "_read", counted)


def in_order(engine):
    """Bytes of this rank's parts of parameters that are row-major, and of buffers."""
    flats = [flat for unit in engine.units for flat in unit.flats]
    spans = [(flat.own_part(i), slot) for flat in flats for i, slot in enumerate(flat.layout.slots) if slot.in_order]
    return 4 * sum(stop - start for (start, stop), _ in spans)


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_reads_its_part(rank, world_size, stage, plain_folder):
    want, module = filled(), filled(seed=9)
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    with communicator() as comm, pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        engine = build(comm, module, stage)
        assert load_safetensors(module, plain_folder) == ([], [])
        assert counted.read == in_order(engine) + buffers
        if stage < 3:
            assert torch.equal(module.turned, want.turned)
        engine.release(whole=True)
    assert_same(module, want)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_module_on_meta_is_read_when_it_is_sharded(rank, world_size, stage, plain_folder):
    module = on_meta(Zoo)
    with communicator() as comm, pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        assert load_safetensors(module, plain_folder / "model.safetensors") == ([], [])
        buffers = sum(buffer.nbytes for buffer in module.buffers())
        assert counted.read == buffers and module.turned.is_meta
        engine = build(comm, module, stage)
        assert counted.read == in_order(engine) + buffers
        engine.release(whole=True)
    assert_same(module, filled())


@distributed(world_size=2)
@pytest.mark.parametrize("made", [torch.bfloat16, torch.float64])
def test_dtypes_become_the_modules(rank, world_size, made, plain_folder):
    want = Zoo().to(made)
    want.load_state_dict(filled().state_dict())
    with communicator() as comm:
        for make in (Zoo, lambda: on_meta(Zoo)):
            before, after, plain = (make().to(made) for _ in range(3))
            engine = build(comm, after if not after.turned.is_meta else filled().to(made), 3)
            load_safetensors(engine.module, plain_folder)
            engine.release(whole=True)
            assert_same(engine.module, want)
            load_safetensors(before, plain_folder)
            build(comm, before, 2).release(whole=True)
            assert_same(before, want)
            if not plain.turned.is_meta:
                load_safetensors(plain, plain_folder)
                assert_same(plain, want)


def test_a_plain_module_in_one_process(tmp_path):
    module, want, path = filled(seed=9), filled(), tmp_path / "x.safetensors"
    save_safetensors(want, path)
    assert path.read_bytes() == library(filled(), tmp_path / "want")
    load_safetensors(module, path)
    assert_same(module, want)
    stored = SafetensorsFile(path).stored("turned")
    save_safetensors(module, path, exclude_frozen=True)  # another file under the name: the open one is as it was
    assert torch.equal(stored, want.turned) and "blocks.1.weight" not in load_file(path)
    for start, stop in ((0, 231), (5, 6), (30, 100), (7, 7)):
        assert torch.equal(stored.elements((1, 0), start, stop), want.turned.t().reshape(-1)[start:stop])


def test_missing_and_unexpected_names(tmp_path):
    path, module = tmp_path / "x.safetensors", filled(seed=9)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    save_safetensors(filled(), path, names={"scale": "gain", "norm.bias": None})
    with pytest.raises(RuntimeError, match=r'Zoo from .*\n.*Missing.*"scale", "norm.bias".*\n.*Unexpected.*"gain"'):
        load_safetensors(module, path)
    with pytest.raises(RuntimeError, match="size mismatch for scale"):
        load_safetensors(module, path, names={"scale": "norm.weight"}, strict=False)
    with pytest.raises(RuntimeError, match=r'Unexpected.*"turned"'):
        load_safetensors(module, path, names={"scale": "gain", "norm.bias": None, "turned": None})
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    found = load_safetensors(module, path, strict=False)
    assert found.missing_keys == ["scale", "norm.bias"] and found.unexpected_keys == ["gain"]
    assert torch.equal(module.turned, filled().turned) and torch.equal(module.scale, before["scale"])
    load_safetensors(module, path, names={"scale": "gain", "norm.bias": None})
    assert torch.equal(module.scale, filled().scale) and torch.equal(module.norm.bias, before["norm.bias"])


def broken(good):
    """Files that are not whole, with a part of what is said of them."""
    length = int.from_bytes(good[:8], "little")
    text = json.loads(good[8 : 8 + length])

    def with_header(change):
        entries = json.loads(json.dumps(text))
        change(entries)
        encoded = json.dumps(entries).encode()
        return len(encoded).to_bytes(8, "little") + encoded + good[8 + length :]

    return {
        "has 0": b"",
        "has 5": b"short",
        "header would have": (2**40).to_bytes(8, "little") + good[8:],
        "JSONDecodeError": good[:8] + b"x" * length + good[8 + length :],
        "ends at byte": good[:-1],
        "and it has": good + b"\0",
        "UnicodeDecodeError": good[:8] + b"\xff" * length + good[8 + length :],
        "should have 4 bytes": with_header(lambda entries: entries["scale"].update(data_offsets=[0, 8])),
        "'F13'": with_header(lambda entries: entries["scale"].update(dtype="F13")),
        "that is none": with_header(lambda entries: entries["scale"].update(shape=[-1])),
        "KeyError": with_header(lambda entries: entries["scale"].pop("shape")),
        "TypeError": with_header(lambda entries: entries.update(scale=None)),
    }


def test_damaged_files_are_refused_before_anything_changes(plain_folder):
    path = plain_folder / "model.safetensors"
    module = filled(seed=9)
    for words, content in broken(path.read_bytes()).items():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"model.safetensors is not a whole safetensors file: .*{words}"):
            load_safetensors(module, plain_folder)
    assert_same(module, filled(seed=9))


def test_which_files_are_meant(plain_folder):
    module, index = filled(seed=9), plain_folder / "model.fp16.safetensors.index.json"
    (plain_folder / "model.safetensors").rename(plain_folder / "adapter_model.safetensors")
    load_safetensors(module, plain_folder)
    assert_same(module, filled())
    index.write_text("[]")
    with pytest.raises(ValueError, match="not an index"):
        load_safetensors(module, plain_folder)
    index.write_text(
        json.dumps({"weight_map": {"scale": "adapter_model.safetensors", "more": "adapter_model.safetensors"}})
    )
    with pytest.raises(ValueError, match="'more' is not in adapter_model.safetensors"):
        load_safetensors(module, plain_folder)
    index.write_text(json.dumps({"weight_map": {"scale": "gone.safetensors"}}))
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        load_safetensors(module, index)
    index.unlink()
    save_safetensors(module, plain_folder / "other.safetensors")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors, other\.safetensors"):
        load_safetensors(module, plain_folder)
    (plain_folder / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="no file whose name"):
        load_safetensors(module, plain_folder / "empty")


@distributed(world_size=2)
def test_a_damaged_file_on_one_rank_is_an_error_on_all(rank, world_size, tmp_path):
    module, path = filled(seed=9), tmp_path / f"x{rank}.safetensors"
    library(filled(), path)
    if rank == 1:
        os.truncate(path, 1000)
    with communicator() as comm:
        engine = build(comm, module, 3)
        with pytest.raises(ValueError if rank == 1 else RuntimeError, match=r"x1\.safetensors is not a whole"):
            load_safetensors(module, path)
        engine.release(whole=True)
    assert_same(module, filled(seed=9))


# In a run


EXTRA = {"extra._extra_state": None}


class AtTheEnd(Callback):
    """Saves while the module is sharded, trains on from elsewhere, and loads."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0:
            save_safetensors(pl_module, self.folder / "early", names=EXTRA)
        if batch_idx == 1:
            save_safetensors(pl_module, self.folder / "late.safetensors", names=EXTRA)
            load_safetensors(pl_module, self.folder / "early", names=EXTRA)
            save_safetensors(pl_module, self.folder / "again.safetensors", names=EXTRA)
            load_safetensors(pl_module, self.folder / "late.safetensors", names=EXTRA)

    def on_train_end(self, trainer, pl_module):
        save_safetensors(pl_module, self.folder / "end.safetensors", names=EXTRA)


@distributed(world_size=2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize(
    ("stage", "places"),
    [(1, {}), (2, {}), (3, {}), (2, {"offload_optimizer": "nvme"}), (3, {"offload_params": "nvme"})],
)
def test_in_a_run(rank, world_size, stage, places, precision, tmp_path):
    offload = {name: {"device": device, "nvme_path": str(tmp_path / "swap")} for name, device in places.items()}

    model, folder = Rich(), tmp_path / "saved"
    runner = trainer(
        rank,
        world_size,
        tmp_path,
        zero(stage, **offload),
        callbacks=[AtTheEnd(folder)],
        precision=precision,
        max_epochs=1,
    )
    runner.fit(model, loader())
    assert (folder / "again.safetensors").read_bytes() == (folder / "early" / "model.safetensors").read_bytes()
    assert (folder / "late.safetensors").read_bytes() != (folder / "again.safetensors").read_bytes()
    got, want = load_file(folder / "end.safetensors"), model.state_dict()
    del want["blocks.2.weight"], want["extra._extra_state"]  # tied; no tensor
    assert got.keys() == want.keys() and all(
        torch.equal(got[name], value) for name, value in model.named_parameters() if name in got
    )
    runner.strategy.barrier()
    save_safetensors(model, folder / "after.safetensors", names=EXTRA)  # a plain module, rank 0's
    assert (folder / "after.safetensors").read_bytes() == library(model, tmp_path / f"want{rank}")


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_configure_model(rank, world_size, stage, tmp_path):
    want = Net(seed=5)
    library(want, tmp_path / f"x{rank}.safetensors")

    class Pretrained(Configured):
        def configure_model(self):
            super().configure_model()
            load_safetensors(self, tmp_path / f"x{rank}.safetensors")

    got = Pretrained()
    for model in (want, got):
        trainer(rank, world_size, tmp_path, zero(stage), max_epochs=1).fit(model, loader())
    assert_same(got, want)


def test_a_plain_module_beside_a_process_group(tmp_path):
    @distributed(world_size=2)
    def body(rank, world_size):
        module = filled(seed=3 + rank)
        save_safetensors(module, tmp_path / "x.safetensors")
        assert (tmp_path / "x.safetensors").read_bytes() == library(filled(), tmp_path / f"want{rank}")
        assert not [
            thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()
        ]

    body(world_size=2)


@distributed(world_size=2)
def test_a_module_whose_run_was_lost(rank, world_size, tmp_path):
    module = filled()
    with communicator() as comm:
        build(comm, module, 3).release(whole=False)
        for call in (save_safetensors, load_safetensors):
            with pytest.raises(RuntimeError, match="its weights are lost"):
                call(module, tmp_path / "x.safetensors")


# Hugging Face


@pytest.mark.parametrize("tied", [True, False])
@distributed(world_size=1, timeout=200)  # apart: tokenizers and transformers leave threads behind
def test_transformers_reads_ours_and_we_theirs(rank, world_size, tied, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=50, tie_word_embeddings=tied, max_position_embeddings=32, **sizes)
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(config)
    x = torch.arange(10)[None]
    for limit in ({}, {"max_shard_size": 8000}):
        folder = tmp_path / f"theirs{len(limit)}"  # it leaves an old model.safetensors beside numbered files
        theirs.save_pretrained(folder, **limit)
        torch.manual_seed(1)
        ours = LlamaForCausalLM(config)
        load_safetensors(ours, folder)
        assert_same(ours, theirs)
        with communicator() as comm:
            build(comm, ours, 3)
            save_safetensors(ours, tmp_path / "ours", max_file_bytes=limit.get("max_shard_size"))
        config.save_pretrained(tmp_path / "ours")
        files = {path.name for path in folder.glob("*.safetensors*")}
        assert files == {path.name for path in (tmp_path / "ours").glob("*.safetensors*")}
        for name in files:
            if name.endswith(".safetensors"):
                assert (tmp_path / "ours" / name).read_bytes() == (folder / name).read_bytes()
        read = LlamaForCausalLM.from_pretrained(tmp_path / "ours")
        assert torch.equal(read(x).logits, theirs.eval()(x).logits)


def test_it_is_public():
    assert {"load_safetensors", "save_safetensors"} <= set(lightning_zero.__all__)
