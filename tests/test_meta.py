"""Modules built on ``meta``: filled unit by unit with the numbers that their constructors would have given them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from harness import distributed
from oracles import communicator
from test_strategy import DIM, Net, fitted, loader, trainer, zero
from torch import nn

from lightning_zero.config import ZeroConfig
from lightning_zero.engine import Engine, grouping
from lightning_zero.engine.host_memory import allocated
from lightning_zero.engine.materialize import assign_state, is_meta

STAGES = [1, 2, 3]


class Attention(nn.Module):
    """A module whose own initialisation touches its children's parameters."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)
        self.norm = nn.BatchNorm1d(16)
        self.down = nn.Linear(16, 16)


class Stock(nn.Module):
    """Layers of torch, whose constructors call ``reset_parameters``."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.rnn = nn.LSTM(16, 8)
        self.head = nn.Linear(16, 10)


class Convention(nn.Module):
    """nanoGPT's convention: ``apply(self._init_weights)`` in the constructor, with a rule for a block as a whole."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(3))
        self.scale = nn.Parameter(torch.empty(()))
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Sequential):
            nn.init.constant_(module[1].bias, 3.0)
        if module is self:
            nn.init.ones_(self.scale)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.c_proj = nn.Linear(16, 64), nn.Linear(64, 16)


class ByName(nn.Module):
    """``transformers``' GPT-2: a module without tensors of its own has a rule for what its child is called."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Mlp() for _ in range(2))
        self.apply(self._init_weights)

    def _init_weights(self, module):
        for name, param in module.named_parameters():
            if name == "c_proj.weight":
                nn.init.constant_(param, 3.0)


class Watched(nn.Linear):
    """Notes how much memory is in use whenever one of it is initialised."""

    highest = 0

    def reset_parameters(self):
        super().reset_parameters()
        if not self.weight.is_meta:
            Watched.highest = max(Watched.highest, allocated())


class Unfilled(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.head(x)


class OnlyBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.mean, 2)


def on_meta(make):
    with torch.device("meta"):
        return make()


def build(comm, module, stage):
    return Engine(module, ZeroConfig(stage=stage, min_unit_bytes=0), comm)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_same_numbers_as_the_constructors(rank, world_size, stage):
    torch.manual_seed(5)
    want = Stock().state_dict()
    with communicator() as comm:
        module = on_meta(Stock)
        params = dict(module.named_parameters())
        torch.manual_seed(5 + rank)  # rank 0's numbers win
        build(comm, module, stage).release(whole=True)
    assert all(param is params[name] for name, param in module.named_parameters())
    got = module.state_dict()
    assert list(got) == list(want) and all(torch.equal(got[key], want[key]) for key in want)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_init_weights_of_a_module_above(rank, world_size, stage):
    with communicator() as comm:
        module = on_meta(Convention)
        build(comm, module, stage).release(whole=True)
    assert module.head.weight is module.embedding.weight and module.scale == 1
    assert all((block[1].bias == 3).all() for block in module.blocks)
    assert 0.01 < module.embedding.weight.std() < 0.03


@distributed(world_size=2)
def test_rules_reach_over_units(rank, world_size):
    grouping.SMALL = 0  # the blocks are much of the model, and not small
    torch.manual_seed(5)
    want = ByName().state_dict()
    with communicator() as comm:
        module = on_meta(ByName)
        torch.manual_seed(5)
        engine = build(comm, module, 3)
        assert {"blocks.0.up", "blocks.0.c_proj"} <= {unit.name for unit in engine.units}
        engine.release(whole=True)
    got = module.state_dict()
    assert all(torch.equal(got[key], want[key]) for key in want) and (got["blocks.0.c_proj.weight"] == 3).all()


@distributed(world_size=2)
def test_the_whole_is_never_there(rank, world_size):
    width, count = 512, 16
    block = 4 * width * width
    with communicator() as comm:
        module = on_meta(lambda: nn.Sequential(*(Watched(width, width, bias=False) for _ in range(count))))
        before = allocated()
        engine = build(comm, module, 3)
        # at the end half of the model is there (the shards), and on the way a block in two copies
        assert Watched.highest - before < (count / 2 + 3) * block
        assert not is_meta(module)
        engine.release(whole=False)


@distributed(world_size=2)
def test_what_nothing_fills_is_named(rank, world_size):
    with communicator() as comm, pytest.raises(ValueError, match=r"'weight' was built on meta, and neither Unfilled"):
        build(comm, on_meta(Unfilled), 3)


@distributed(world_size=2)
def test_a_module_without_parameters(rank, world_size):
    with communicator() as comm:
        module = on_meta(OnlyBuffers)
        build(comm, module, 3).release(whole=True)
    assert module.mean.tolist() == [2, 2, 2]


def test_loading_keeps_identity_and_ties():
    torch.manual_seed(0)
    want = Convention()
    module = on_meta(Convention)
    params = list(module.parameters())
    assign_state(module, want.state_dict(), strict=True)
    assert all(a is b for a, b in zip(params, module.parameters(), strict=True))
    assert module.head.weight is module.embedding.weight
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), want.parameters(), strict=True))
    with pytest.raises(RuntimeError, match="Missing key"):
        assign_state(on_meta(Convention), {}, strict=True)


class Configured(Net):
    """Made in ``configure_model``, on meta."""

    def __init__(self, enter=lambda: torch.device("meta")):
        super(Net, self).__init__()
        self.enter, self.blocks = enter, None

    def configure_model(self):
        if self.blocks is None:
            with self.enter():
                made = Net()
            for name, child in made.named_children():
                setattr(self, name, child)
        torch.manual_seed(0)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_configure_model_on_meta_trains_as_from_the_start(rank, world_size, stage, tmp_path):
    want = fitted(rank, world_size, tmp_path, "ddp")
    got = fitted(rank, world_size, tmp_path, zero(stage), Configured())
    assert all(torch.equal(a, b) for a, b in zip(got.state_dict().values(), want.state_dict().values(), strict=True))


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_init_module_empty_and_a_checkpoint(rank, world_size, stage, tmp_path):
    first = trainer(rank, world_size, tmp_path, zero(stage), max_epochs=1)
    want = Net()
    first.fit(want, loader())
    path = tmp_path / "first.ckpt"
    first.save_checkpoint(path)
    second = trainer(rank, world_size, tmp_path, zero(stage), max_epochs=2)
    with second.init_module(empty_init=True):
        got = Net()
    assert is_meta(got) == (stage == 3)
    second.fit(got, loader(), ckpt_path=path)
    unbroken = fitted(rank, world_size, tmp_path, zero(stage), max_epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(got.parameters(), unbroken.parameters(), strict=True))


@distributed(world_size=2)
def test_a_forward_before_training(rank, world_size, tmp_path):
    torch.manual_seed(0)
    want = Net()
    got = Configured()
    run = trainer(rank, world_size, tmp_path, zero(3))
    run.test(got, loader(), verbose=False)
    expected = copy.deepcopy(want)
    x, y = next(iter(loader(16, 16)))
    assert torch.allclose(run.callback_metrics["loss"], F.mse_loss(expected(x), y), rtol=1e-4)
    assert got.blocks[0].weight.shape == (DIM, DIM)
