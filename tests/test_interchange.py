"""Checkpoints of Lightning's other strategies and of torch's tools under ours, and ours under theirs."""

import gc
import io
import os
import pickle
import runpy
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallel
from lightning.fabric.utilities.load import _load_distributed_checkpoint
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from omegaconf import OmegaConf
from oracles import assert_same_state
from test_checkpoint import Counted
from test_strategy import Net, loader, trainer, zero
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._pytree import tree_map

from lightning_zero import load_from_checkpoint
from lightning_zero.checkpoint import folder, metadata, reader

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # wanted
    pytest.mark.filterwarnings("ignore:Found keys that are not in the model state dict"),
    pytest.mark.filterwarnings("ignore:.*found in sys.modules after import"),
]


class Parallel(Net):
    """As ModelParallelStrategy wants it; under others ``configure_model`` does nothing. Two groups, and a schedule."""

    def configure_model(self):
        if self._trainer is not None and isinstance(self.trainer.strategy, ModelParallelStrategy):
            for part in self.parts():
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def parts(self):
        return [*self.blocks, self]

    def configure_optimizers(self):
        groups = [{"params": [], "weight_decay": 0.1, "betas": (0.8, 0.9)}, {"params": [], "weight_decay": 0.0}]
        for name, param in self.named_parameters():  # FSDPStrategy has other shapes here
            groups[name.endswith("bias")]["params"].append(param)
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Rich(Parallel):
    """Tied and frozen parameters, a buffer, extra state."""

    def __init__(self):
        super().__init__()
        self.blocks[2].weight = self.blocks[0].weight
        self.blocks[1].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(2))
        self.extra = Counted()

    def training_step(self, batch, batch_idx):
        self.seen += 1
        self.extra.count += 1
        return super().training_step(batch, batch_idx)

    def parts(self):
        return [self]  # tied parameters must be in one


class OnCPU(FSDPStrategy):
    """Lightning wraps for GPUs only; torch's FSDP runs on CPUs if it is told so."""

    def _setup_model(self, model):
        policy = ModuleWrapPolicy([nn.Linear])
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), auto_wrap_policy=policy, use_orig_params=True
        )


def strategy_of(name, world_size):
    if name == "fsdp1":
        return OnCPU(state_dict_type="sharded")
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
    return DDPStrategy() if name == "ddp" else zero(int(name[0]), state_dict_type=name[1:] or "sharded")


class Save(Callback):
    """Save at the end of training, when the module is still sharded."""

    def __init__(self, path):
        self.path = path

    def on_train_end(self, trainer, pl_module):
        trainer.save_checkpoint(self.path)


def life(rank, world_size, folder, name, epochs=1, cls=Parallel, load=None, save=None, later=None, **kwargs):
    """Train under a strategy from a checkpoint or from the beginning; on rank 0 all that there is in the end.

    ``name``: "ddp", "fsdp1", "fsdp2", or a stage, as "3" or "3full". ``save``: where to, at the end of training;
    ``later``: afterwards, when ours have given the module back.
    """
    callbacks = [Save(save)] if save else []
    strategy = strategy_of(name, world_size)
    runner = trainer(rank, world_size, folder, strategy, max_epochs=epochs, callbacks=callbacks, **kwargs)
    model = cls()
    runner.fit(model, loader(), ckpt_path=load)
    if later is not None:
        runner.save_checkpoint(later)
    return whole(runner, model, name)


def whole(runner, model, name):
    """Weights, and the optimizer's state by names."""
    (optimizer,) = runner.optimizers
    if name == "fsdp1":
        # to gather whole tensors is not for CPUs
        runner.save_checkpoint(end := runner.default_root_dir + "/end")
        runner.strategy.barrier()
        found = _load_distributed_checkpoint(Path(end))
        weights, state = found["model"], found["optimizer_0"]
    elif name == "fsdp2":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        state = get_optimizer_state_dict(model, optimizer, options=options)
    elif name == "ddp":
        weights, state = model.state_dict(), by_name(model, optimizer, optimizer.state_dict())
    else:
        weights = model.state_dict()
        state = by_name(model, optimizer, runner.strategy._fit_engine.optimizer_state(optimizer))
    return (dict(sorted(weights.items())), sorted_state(state)) if runner.global_rank == 0 else None


def by_name(model, optimizer, state):
    if state is None:
        return None
    names = {id(param): name for name, param in model.named_parameters()}
    order = [names[id(param)] for group in optimizer.param_groups for param in group["params"]]
    groups = [{**group, "params": [order[n] for n in group["params"]]} for group in state["param_groups"]]
    return {"state": {order[n]: entries for n, entries in state["state"].items()}, "param_groups": groups}


def sorted_state(state):
    return state and {
        "state": {name: dict(sorted(state["state"][name].items())) for name in sorted(state["state"])},
        "param_groups": [dict(sorted(group.items())) for group in state["param_groups"]],
    }


def on_ranks(world_size, *args, **kwargs):
    """A :func:`life` on ranks of its own."""
    return run_ranks(life, world_size, *args, **kwargs)[0]


# FSDP


FULL = pytest.mark.full
PAIRS = [(1, "fsdp2"), (3, "fsdp1"), *(pytest.param(s, "fsdp2", marks=FULL) for s in (2, 3))]
SIZES = [((2, 3), "fsdp2"), *(pytest.param(*it, marks=FULL) for it in [((3, 2), "fsdp1"), ((2, 1), "fsdp2")])]


@pytest.mark.parametrize(("stage", "theirs"), PAIRS)
def test_fsdp_and_ours_go_on_from_each_other_to_the_bit(stage, theirs, tmp_path):
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    unbroken = on_ranks(2, tmp_path, theirs, epochs=3)
    on_ranks(2, tmp_path, theirs, epochs=1, save=first)
    on_ranks(2, tmp_path, str(stage), epochs=2, load=first, save=second)
    assert_same_state(on_ranks(2, tmp_path, theirs, epochs=3, load=second), unbroken)


def test_fsdp2_and_ours_with_all_kinds_of_state(tmp_path):
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    unbroken = on_ranks(2, tmp_path, "fsdp2", epochs=3, cls=Rich)
    on_ranks(2, tmp_path, "fsdp2", epochs=1, cls=Rich, save=first)
    on_ranks(2, tmp_path, "3", epochs=2, cls=Rich, load=first, save=second)
    assert_same_state(on_ranks(2, tmp_path, "fsdp2", epochs=3, cls=Rich, load=second), unbroken)
    assert unbroken[0]["extra._extra_state"] == 12 and unbroken[0]["seen"].tolist() == [12.0, 12.0]


@pytest.mark.parametrize(("sizes", "theirs"), SIZES, ids=str)
def test_fsdp_and_ours_at_other_sizes(sizes, theirs, tmp_path):
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    want = on_ranks(sizes[0], tmp_path, theirs, save=first)
    assert_same_state(on_ranks(sizes[1], tmp_path, "3", load=first), want)
    want = on_ranks(sizes[1], tmp_path, "3", epochs=2, load=first, save=second)
    assert_same_state(on_ranks(sizes[0], tmp_path, theirs, epochs=2, load=second), want)


class Idle(Parallel):
    """A parameter that is in no forward has no optimizer state."""

    def __init__(self):
        super().__init__()
        self.idle = nn.Parameter(torch.zeros(4))


def test_parameters_without_state_come_from_fsdp2(tmp_path):
    """The other way torch finds keys missing, as it does in FSDP2's own folders."""
    want = on_ranks(2, tmp_path, "fsdp2", cls=Idle, save=tmp_path / "it.ckpt")
    assert "idle" not in want[1]["state"]
    assert_same_state(on_ranks(2, tmp_path, "3", cls=Idle, load=tmp_path / "it.ckpt"), want)


def test_bf16_true_is_rounded_for_fsdp2_and_widened_for_ours(tmp_path):
    """Ours keep fp32 masters and state, FSDP2 has bf16 only."""
    weights, state = on_ranks(2, tmp_path, "3", precision="bf16-true", save=tmp_path / "ours.ckpt")
    want = cast(weights, torch.bfloat16), cast(state, torch.bfloat16)
    got = on_ranks(2, tmp_path, "fsdp2", precision="bf16-true", load=tmp_path / "ours.ckpt")
    assert_same_state(got, want)
    weights, state = on_ranks(2, tmp_path, "fsdp2", precision="bf16-true", save=tmp_path / "theirs.ckpt")
    got = on_ranks(3, tmp_path, "3", precision="bf16-true", load=tmp_path / "theirs.ckpt")
    assert_same_state(got, (cast(weights, torch.float32), cast(state, torch.float32)))


def cast(tree, dtype):
    """All tensors but the number of steps in another dtype."""
    change = lambda value: value.to(dtype) if isinstance(value, torch.Tensor) and value.dim() else value
    return tree_map(change, tree)


class Two(Parallel):
    """Two optimizers of two kinds."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        blocks = [param for name, param in self.named_parameters() if name.startswith("blocks")]
        others = [param for name, param in self.named_parameters() if not name.startswith("blocks")]
        return torch.optim.SGD(blocks, lr=0.1, momentum=0.9), torch.optim.Adam(others, lr=0.01, amsgrad=True)


def two(rank, world_size, folder, name, epochs, load=None, save=None):
    callbacks = [Save(save)] if save else []
    runner = trainer(rank, world_size, folder, strategy_of(name, world_size), max_epochs=epochs, callbacks=callbacks)
    model = Two()
    runner.fit(model, loader(), ckpt_path=load)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return dict(sorted(get_model_state_dict(model, options=options).items()))


def test_two_optimizers_go_to_fsdp2_and_back_to_the_bit(tmp_path):
    first, second = tmp_path / "first.ckpt", tmp_path / "second.ckpt"
    unbroken = run_ranks(two, 2, tmp_path, "fsdp2", 3)[0]
    run_ranks(two, 2, tmp_path, "fsdp2", 1, save=first)
    run_ranks(two, 2, tmp_path, "3", 2, load=first, save=second)
    assert_same_state(run_ranks(two, 2, tmp_path, "fsdp2", 3, load=second)[0], unbroken)


# Fabric


def life_with_fabric(rank, world_size, load=None, names=("model", "optimizer"), save=None):
    """A few steps, or what is in a folder; the state in the end."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))

    def parallelize(module, mesh):
        for part in [*module.blocks, module]:
            fully_shard(part, mesh=mesh["data_parallel"])
        return module

    strategy = FabricModelParallel(parallelize, data_parallel_size=world_size, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
    fabric.launch()
    module = fabric.setup_module(Net())
    module.mark_forward_method("training_step")
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=0.01))
    if load is not None:
        fabric.load(load, dict(zip(names, (module, optimizer), strict=True)))
    else:
        for number, batch in enumerate(fabric.setup_dataloaders(loader())):
            fabric.backward(module.training_step(batch, number))
            optimizer.step()
            optimizer.zero_grad()
    if save is not None:
        fabric.save(save, {"model": module, "optimizer": optimizer, "step": 8})
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(module.module, options=options)
    state = get_optimizer_state_dict(module.module, optimizer.optimizer, options=options)
    return dict(sorted(weights.items())), sorted_state(state)


@pytest.mark.parametrize("section", ["state_dict", pytest.param("model", marks=FULL)])
def test_fabric_goes_on_from_our_folders(section, tmp_path):
    path = tmp_path / "it.ckpt"
    want = on_ranks(3, tmp_path, "2", cls=Net, save=path)
    assert_same_state(run_ranks(life_with_fabric, 2, path, (section, "optimizer_0"))[0], want)


def evaluate(rank, world_size, path):
    runner, model = trainer(rank, world_size, path.parent, zero(3)), Net()
    runner.test(model, loader(), ckpt_path=path, verbose=False)
    with pytest.raises(KeyError, match="contains only the model"):
        trainer(rank, world_size, path.parent, zero(3)).fit(Net(), loader(), ckpt_path=path)
    return model.state_dict()


def test_weights_come_from_fabrics_folders(tmp_path):
    path = tmp_path / "it.ckpt"
    weights, _ = run_ranks(life_with_fabric, 2, save=path)[0]
    assert_same_state(dict(sorted(load_from_checkpoint(Net, path).state_dict().items())), weights)
    assert_same_state(dict(sorted(run_ranks(evaluate, 2, path)[0].items())), weights)


# One file from a folder


def consolidated(folder, package, monkeypatch):
    """``python -m lightning.<package>.utilities.consolidate_checkpoint``."""
    file = folder.with_suffix(f".{package}")
    monkeypatch.setattr(sys, "argv", ["consolidate_checkpoint", str(folder), "--output_file", str(file)])
    runpy.run_module(f"lightning.{package}.utilities.consolidate_checkpoint", run_name="__main__")
    return file


@pytest.mark.parametrize("cls", [Parallel, Rich])
def test_lightning_consolidates_our_folders(cls, tmp_path, monkeypatch):
    """Optimizer states are by names there; torch takes them in the order of the groups, as it does numbers."""
    folder = tmp_path / "it.ckpt"
    weights, state = on_ranks(2, tmp_path, "2", cls=cls, save=folder)
    file = consolidated(folder, "pytorch", monkeypatch)
    found = torch.load(file, weights_only=True)
    assert_same_state(dict(sorted(found["state_dict"].items())), weights)
    assert_same_state(sorted_state(found["optimizer_states"][0]), state)
    loaded = cls.load_from_checkpoint(file).state_dict()
    assert_same_state(dict(sorted(loaded.items())), weights)
    want = on_ranks(2, tmp_path, "ddp", cls=cls, epochs=2)
    for name in ["ddp", "3", "1full", *(["fsdp2"] if cls is Parallel else [])]:  # FSDP2 reads no extra state from files
        assert_same_state(on_ranks(2, tmp_path, name, cls=cls, epochs=2, load=file), want)


def test_fabric_and_torch_consolidate_our_folders(tmp_path, monkeypatch):
    folder, file = tmp_path / "it.ckpt", tmp_path / "file"
    weights, state = on_ranks(2, tmp_path, "3", cls=Rich, save=folder)
    dcp_to_torch_save(folder, file)
    for path in [file, consolidated(folder, "fabric", monkeypatch)]:
        found = torch.load(path, weights_only=True)
        assert_same_state(dict(sorted(found["state_dict"].items())), weights)
        assert_same_state(dict(sorted(found["model"].items())), weights)
        assert_same_state(sorted_state(found["optimizer_0"]), state)


def test_torch_loads_our_folders_into_plain_tensors(tmp_path):
    folder = tmp_path / "it.ckpt"
    weights, state = on_ranks(2, tmp_path, "3", save=folder)
    for section in ["state_dict", "model"]:
        wanted = {
            section: {name: torch.full_like(value, torch.nan) for name, value in weights.items()},
            "optimizer_0": {"state": {"head.bias": {"exp_avg": torch.zeros(1), "step": torch.zeros(())}}},
        }
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
        assert_same_state(wanted[section], weights)
        entries = {key: value for key, value in state["state"]["head.bias"].items() if key != "exp_avg_sq"}
        assert_same_state(wanted["optimizer_0"]["state"]["head.bias"], entries)


# Ordinary files


@pytest.mark.parametrize("stage", [pytest.param(1, marks=FULL), pytest.param(2, marks=FULL), 3])
def test_ddp_and_ours_go_on_from_each_other_to_the_bit(stage, tmp_path):
    files = [tmp_path / f"{n}.ckpt" for n in range(3)]
    unbroken = on_ranks(2, tmp_path, "ddp", cls=Rich, epochs=4)
    on_ranks(2, tmp_path, "ddp", cls=Rich, epochs=1, save=files[0])
    on_ranks(2, tmp_path, f"{stage}full", cls=Rich, epochs=2, load=files[0], save=files[1])
    on_ranks(2, tmp_path, "ddp", cls=Rich, epochs=3, load=files[1], save=files[2])
    assert_same_state(on_ranks(2, tmp_path, str(stage), cls=Rich, epochs=4, load=files[2]), unbroken)


# Modules and data modules in one process


class Wide(Net):
    """Hyperparameters, one of which is an object."""

    def __init__(self, width=3, where=None):
        super().__init__()
        self.save_hyperparameters()
        self.inner = nn.Linear(width, width)


class Configured(Net):
    """All hyperparameters in an OmegaConf object."""

    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)
        self.inner = nn.Linear(config.width, config.width)


class Data(LightningDataModule):
    def __init__(self, size=8):
        super().__init__()
        self.save_hyperparameters()
        self.drawn = torch.zeros(2)

    def train_dataloader(self):
        self.drawn += 1
        return loader(self.hparams.size)

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


def fitted_with_data(rank, world_size, path, make, name):
    runner = trainer(rank, world_size, path.parent, strategy_of(name, world_size))
    model = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runner.fit(model, datamodule=Data(6))
        runner.save_checkpoint(path)
    return model.state_dict()


@pytest.mark.parametrize("name", ["3", "3full"])
def test_a_module_and_its_data_from_a_checkpoint(name, tmp_path):
    path = tmp_path / "it.ckpt"
    weights = run_ranks(fitted_with_data, 2, path, lambda: Wide(5), name)[0]
    if name == "3":
        with pytest.raises(IsADirectoryError):
            Wide.load_from_checkpoint(path)
    places = [
        None,
        "cpu",
        torch.device("cpu"),
        lambda storage, place: storage,
        lambda storage, place: None,
        {"cuda:0": "cpu"},
    ]
    for place in places:
        loaded = load_from_checkpoint(Wide, path, where="here", map_location=place)
        assert loaded.hparams == {"width": 5, "where": "here"}
        assert_same_state(loaded.state_dict(), weights)
    data = load_from_checkpoint(Data, path)
    assert data.hparams.size == 6 and data.drawn.tolist() == [1.0, 1.0]
    assert load_from_checkpoint(Data, str(path), size=7).hparams.size == 7
    with pytest.raises(RuntimeError, match=r"size mismatch for inner\.weight"):
        load_from_checkpoint(Wide, path, width=4)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*inner\.weight"):
        load_from_checkpoint(Net, path)
    assert_same_state(dict(load_from_checkpoint(Net, path, strict=False).head.named_parameters()), head_of(weights))
    hparams = tmp_path / "hparams.yaml"
    hparams.write_text("width: 5\nwhere: there\n")
    assert load_from_checkpoint(Wide, path, hparams_file=hparams).hparams.where == "there"
    with pytest.raises(ValueError, match="csv"):
        load_from_checkpoint(Wide, path, hparams_file="hparams.txt")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_from_checkpoint(Wide, tmp_path / "nowhere")
    if name == "3":
        assert load_from_checkpoint(Wide, path, map_location="meta").inner.weight.is_meta
    else:
        assert_same_state(load_from_checkpoint(Wide, io.BytesIO(path.read_bytes())).state_dict(), weights)


def head_of(weights):
    return {name.removeprefix("head."): value for name, value in weights.items() if name.startswith("head.")}


def test_the_other_namespace_and_a_base_class_of_that_name(tmp_path):
    pl = pytest.importorskip("pytorch_lightning")
    path = tmp_path / "it.ckpt"
    weights = run_ranks(fitted_with_data, 1, path, Wide, "3")[0]

    class Head(pl.LightningModule):
        def __init__(self, where):
            super().__init__()
            self.where, self.head = where, nn.Linear(8, 1)

    loaded = load_from_checkpoint(Head, path, where=1, strict=False)
    assert loaded.where == 1
    assert_same_state(dict(loaded.head.state_dict()), head_of(weights))

    class LightningModule(Net):
        pass

    assert load_from_checkpoint(LightningModule, path, strict=False).head.bias == weights["head.bias"]


@pytest.mark.parametrize("make", [lambda: Wide(5, Path("x")), lambda: Configured(OmegaConf.create({"width": 5}))])
def test_objects_in_hyperparameters_need_trust(make, tmp_path):
    path, cls = tmp_path / "it.ckpt", type(make())
    weights = run_ranks(fitted_with_data, 1, path, make, "3")[0]
    for doubt in [None, True]:
        with pytest.raises(ValueError, match="may run code"):
            load_from_checkpoint(cls, path, weights_only=doubt)
    loaded = load_from_checkpoint(cls, path, weights_only=False)
    assert loaded.hparams == make().hparams and type(loaded.hparams) is type(make().hparams)
    assert_same_state(loaded.state_dict(), weights)


def test_nothing_stays_open(tmp_path):
    path = tmp_path / "it.ckpt"
    on_ranks(2, tmp_path, "3", save=path)
    load_from_checkpoint(Parallel, path)
    gc.collect()
    files = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not any(path in file.resolve().parents for file in files)


# Trust


class Objects(Net):
    """What ``torch.load`` does not take without being told so, in five places."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"root": Path("x"), "config": OmegaConf.create({"a": 1}), "plain": [1, {"b": None}]})
        self.told = Told()

    def configure_optimizers(self):
        betas = OmegaConf.create([0.8, 0.9])
        return torch.optim.AdamW([{"params": list(self.parameters()), "betas": betas}], lr=np.float64(0.01))


class Told(nn.Module):
    def get_extra_state(self):
        return {"where": Path("y")}

    def set_extra_state(self, state):
        assert state == {"where": Path("y")}


class Best(Callback):
    def state_dict(self):
        return {"best": np.float32(1), "all": np.ones(2), "weights": torch.ones(2)}


PLACES = [
    "checkpoint['hyper_parameters']['root'] (pathlib.PosixPath)",
    "checkpoint['hyper_parameters']['config'] (omegaconf.dictconfig.DictConfig)",
    "checkpoint['callbacks']['Best']['best'] (numpy.float32)",
    "checkpoint['callbacks']['Best']['all'] (numpy.ndarray)",
    "checkpoint['state_dict']['told._extra_state']['where'] (pathlib.PosixPath)",
    "checkpoint['optimizer_states'][0]['param_groups'][0]['betas'] (omegaconf.listconfig.ListConfig)",
    "checkpoint['optimizer_states'][0]['param_groups'][0]['lr'] (numpy.float64)",
]


def save_objects(rank, world_size, path, name, resume):
    """The warnings of a save; then a run from there."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runner = trainer(rank, world_size, path.parent, strategy_of(name, 2), callbacks=[Best()])
        model = Objects()
        runner.fit(model, loader())
        for _ in range(2):
            runner.save_checkpoint(path)
    again = trainer(rank, world_size, path.parent, strategy_of(resume, 2), max_epochs=1, callbacks=[Best()])
    with pytest.raises(Exception, match="eights.only"):
        again.fit(Objects(), loader(), ckpt_path=path)
    again = trainer(rank, world_size, path.parent, strategy_of(resume, 2), max_epochs=1, callbacks=[Best()])
    other = Objects()
    again.fit(other, loader(), ckpt_path=path, weights_only=False)
    assert_same_state(dict(other.named_parameters()), dict(model.named_parameters()))
    assert again.optimizers[0].param_groups[0]["betas"] == OmegaConf.create([0.8, 0.9])
    return [str(warning.message) for warning in caught if "torch.load refuses" in str(warning.message)]


@pytest.mark.parametrize(("name", "resume"), [("3", "2"), ("3full", "ddp")])
def test_objects_are_named_when_they_are_saved(name, resume, tmp_path):
    said, nothing = run_ranks(save_objects, 2, tmp_path / "it.ckpt", name, resume)
    assert nothing == [] and len(said) == 1
    assert all(place in said[0] for place in PLACES) and said[0].count("checkpoint[") == len(PLACES)


@pytest.mark.parametrize("name", ["2", "3full"])
def test_what_we_write_needs_no_trust(name, tmp_path):
    path = tmp_path / "it.ckpt"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*torch.load refuses")
        on_ranks(2, tmp_path, name, cls=Rich, save=path)
    if name == "3full":
        assert torch.load(path, weights_only=True)["epoch"] == 1
        return
    assert torch.load(path / folder.META, weights_only=True)["epoch"] == 1
    found = metadata.read(path / folder.METADATA)
    for info in found.storage_data.values():
        data = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        torch.load(io.BytesIO(data), weights_only=True)


class Malice:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("place", ["all", "dict", "dtype"])
def test_metadata_that_would_run_code_are_refused(place, tmp_path):
    path, touched = tmp_path / "it.ckpt", tmp_path / "touched"
    on_ranks(1, tmp_path, "3", save=path)
    found = metadata.read(path / folder.METADATA)
    (path / "manifest.json").unlink()
    if place == "dict":
        found.planner_data["state_dict.head.bias"] = Malice(touched)
    elif place == "dtype":
        found.storage_meta = Malice(touched)
    (path / folder.METADATA).write_bytes(pickle.dumps(Malice(touched) if place == "all" else found))
    with pytest.raises(ValueError, match=r"\.metadata.*does not belong there"):
        load_from_checkpoint(Parallel, path)
    assert not touched.exists()
    pickle.loads((path / folder.METADATA).read_bytes())
    assert touched.exists(), "the test would have seen it"


@pytest.mark.parametrize("name", ["/etc/passwd", "../../other", "sub/../../x"])
def test_metadata_that_name_files_elsewhere_are_refused(name, tmp_path):
    path = tmp_path / "it.ckpt"
    on_ranks(1, tmp_path, "3", save=path)
    found = metadata.read(path / folder.METADATA)
    (path / "manifest.json").unlink()
    for info in found.storage_data.values():
        info.relative_path = name
    (path / folder.METADATA).write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match="outside of its folder"):
        load_from_checkpoint(Parallel, path)


@pytest.mark.parametrize("stored", [None, {"x": 1}])
def test_metadata_that_say_nothing_are_refused(stored, tmp_path):
    path = tmp_path / "it.ckpt"
    path.mkdir()
    (path / folder.META).write_bytes(b"")
    (path / folder.METADATA).write_bytes(pickle.dumps(dcp.Metadata({}, storage_data=stored)))
    with pytest.raises(ValueError, match="does not describe a checkpoint"):
        load_from_checkpoint(Parallel, path)


# Tensors of all kinds


def kinds():
    """Dtypes, shapes and orders in memory."""
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(3, 4, 5, 6, generator=generator)
    matrix = torch.randn(6, 7, generator=generator)
    return {
        "last": image.contiguous(memory_format=torch.channels_last),
        "turned": matrix.t(),
        "permuted": image.permute(2, 0, 3, 1),
        "part": matrix[1:5, 2:6],
        "stepped": matrix[::2, ::3],
        "wide": torch.randn(1, 7, generator=generator).expand(4, 7),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
        "bf16": image.bfloat16().contiguous(memory_format=torch.channels_last),
        "complex": torch.complex(matrix, -matrix).t(),
        "bytes": torch.randint(0, 255, (5, 3), generator=generator, dtype=torch.uint8).t(),
        "flags": matrix.t() > 0,
        "count": torch.tensor(7),
        "fp64": matrix.double(),
        "eighth": matrix.to(torch.float8_e4m3fn),
    }


def test_foreign_folders_with_tensors_of_all_kinds(tmp_path):
    path = tmp_path / "it.ckpt"
    dcp.save({"model": kinds()}, checkpoint_id=path, no_dist=True)
    torch.save({}, path / folder.META)
    found = reader.checkpoint(reader.Folder(path), True)["state_dict"]
    assert list(found) == list(kinds())
    for name, want in kinds().items():
        got = found[name].whole()
        assert got.dtype == want.dtype and got.shape == want.shape
        assert as_bytes(got) == as_bytes(want), name
        for dims in [range(want.dim()), range(want.dim())[::-1]]:
            flat = want.permute(tuple(dims)).reshape(-1)
            for start, stop in [(0, len(flat)), (len(flat) // 3, 2 * len(flat) // 3), (len(flat), len(flat))]:
                assert as_bytes(found[name].elements(dims, start, stop)) == as_bytes(flat[start:stop]), (name, start)


def as_bytes(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


class Kinds(Parallel):
    """Parameters and buffers of all kinds."""

    def __init__(self):
        super().__init__()
        trained = {"last", "turned", "permuted", "scalar", "none", "bf16", "complex", "fp64"}
        for name, value in kinds().items():
            if name in trained:
                self.register_parameter(name, nn.Parameter(value.clone(memory_format=torch.preserve_format)))
            elif name not in ("wide", "eighth"):  # DDP and gloo cannot send them
                self.register_buffer(name, value)

    def training_step(self, batch, batch_idx):
        used = [self.last, self.turned, self.permuted, self.scalar, self.none, self.bf16, self.fp64]
        more = sum(value.float().pow(2).sum() for value in used) + self.complex.abs().sum()
        return super().training_step(batch, batch_idx) + 0.1 * more


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("when", ["save", "later"])
def test_our_folders_with_tensors_of_all_kinds(when, stage, tmp_path):
    path = tmp_path / "it.ckpt"
    weights, state = on_ranks(2, tmp_path, str(stage), cls=Kinds, **{when: path})
    plain = {"state_dict": {name: torch.zeros_like(value) for name, value in weights.items()}}
    dcp.load(plain, checkpoint_id=path, no_dist=True)
    for found in [plain["state_dict"], load_from_checkpoint(Kinds, path).state_dict()]:
        assert_same_bits(found, weights)
    again = on_ranks(3, tmp_path, "2", cls=Kinds, load=path)
    assert_same_bits(again[0], weights)
    assert_same_state(again[1], state)


def assert_same_bits(got, want):
    assert sorted(got) == sorted(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape
        assert as_bytes(got[name]) == as_bytes(value), name


class Odd(Net):
    """Buffers that are more than numbers in a row."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        values = torch.complex(torch.randn(3), torch.randn(3))
        self.register_buffer("conjugated", values.conj())
        self.register_buffer("negated", values.conj().imag)
        self.register_buffer("sparse", torch.eye(3).to_sparse())
        self.register_buffer("eighth", torch.randn(4).to(torch.float8_e4m3fn))


def test_odd_buffers(tmp_path):
    path = tmp_path / "it.ckpt"
    run_ranks(save_odd, 1, path)
    got, want = load_from_checkpoint(Odd, path), Odd()
    assert torch.equal(got.sparse.to_dense(), torch.eye(3)) and as_bytes(got.eighth) == as_bytes(want.eighth)
    assert torch.equal(got.conjugated, want.conjugated) and torch.equal(got.negated, want.negated)


def save_odd(rank, world_size, path):
    trainer(rank, world_size, path.parent, strategy_of("3", 1), callbacks=[Save(path)]).fit(Odd(), loader())
