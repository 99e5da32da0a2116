"""How a model is cut into units. Sizes are those of large models; on meta they take no memory."""

import pytest
import torch
from torch import nn

from lightning_zero.config import ZeroConfig
from lightning_zero.engine.grouping import make_units

DIM = 1024  # a block is 48 MiB


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)


class Scaled(Block):
    """A little weight of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))


class Fused(Block):
    """A large weight of its own."""

    def __init__(self):
        super().__init__()
        self.fused = nn.Parameter(torch.empty(DIM, DIM))


class Experts(Block):
    """Which elements of a list are used is the data's business."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))


class Compiled(Block):
    def __init__(self):
        super().__init__()
        self.compile()


class Inside(Block):
    """Something below is compiled."""

    def __init__(self):
        super().__init__()
        self.up = torch.compile(self.up)


class Scripted(Block):
    """Hooks cannot be put on what is below."""

    def __init__(self):
        super().__init__()
        self.up = torch.jit.script(self.up)


class Many(nn.Module):
    """Only small layers: together they would be a root that is never sharded in a step."""

    def __init__(self):
        super().__init__()
        for index in range(192):
            setattr(self, f"layer{index}", nn.Linear(256, 256))


class FastPath(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(DIM, 8)


def names(kind, depth, **settings):
    with torch.device("meta"):
        module = nn.ModuleDict({"blocks": nn.ModuleList(kind() for _ in range(depth)), "head": nn.Linear(DIM, 8)})
    units = make_units(module, ZeroConfig(**settings))
    found = [name for unit in units for name in unit.params]
    assert sorted(found) == sorted(name for name, _ in module.named_parameters())
    assert units[0].is_root
    return {unit.name: sorted(unit.params) for unit in units}


@pytest.mark.parametrize("kind", [Block, Scaled])
def test_a_block_that_is_much_of_the_model_is_cut_at_its_layers(kind):
    units = names(kind, 4)
    assert list(units) == ["", *(f"blocks.{i}.{layer}" for i in range(4) for layer in ("qkv", "up", "down"))]
    assert units["blocks.1.qkv"] == [f"blocks.1.{layer}.{p}" for layer in ("proj", "qkv") for p in ("bias", "weight")]
    assert "blocks.1.norm.weight" in units[""], "what is small is no reason for a message"


def test_a_block_that_is_little_of_the_model_stays_whole():
    assert list(names(Block, 16)) == ["", *(f"blocks.{i}" for i in range(16))]


@pytest.mark.parametrize("kind", [Fused, Experts, Compiled, Inside, Scripted, Many, FastPath])
def test_a_block_stays_whole_where_cutting_it_may_be_wrong(kind):
    assert list(names(kind, 4)) == ["", *(f"blocks.{i}" for i in range(4))]


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.MultiheadAttention])
def test_fused_layers_stay_whole_outside_of_lists_too(kind):
    with torch.device("meta"):
        module = nn.ModuleDict({"layer": kind(DIM, 8), "head": nn.Linear(DIM, 8)})
    units = {unit.name: unit for unit in make_units(module, ZeroConfig(min_unit_bytes=0))}
    assert list(units) == ["layer", "head"]
    assert units["layer"].nbytes == sum(p.nbytes for p in module["layer"].parameters())


@pytest.mark.parametrize("kind", [nn.ModuleDict, nn.ModuleList])
def test_what_is_in_a_container_of_a_cut_block_is_in_units(kind):
    with torch.device("meta"):
        experts = {f"expert{i}": nn.Linear(DIM, DIM) for i in range(3)}
        make = (lambda: kind(experts)) if kind is nn.ModuleDict else (lambda: kind(experts.values()))
        module = nn.ModuleDict({"blocks": nn.ModuleList(nn.ModuleDict({"experts": make()}) for _ in range(2))})
    module["wide"] = nn.Linear(DIM, 8 * DIM, device="meta")
    units = make_units(module, ZeroConfig(min_unit_bytes=0, max_unit_bytes=2**22))
    assert not [unit for unit in units if unit.is_root]


@pytest.mark.parametrize("how", ["compile", "in place", "forward"])
def test_blocks_of_what_is_compiled_stay_whole(how):
    with torch.device("meta"):
        module = nn.Sequential(*(Block() for _ in range(4)))
    if how == "compile":
        units = make_units(nn.ModuleDict({"core": torch.compile(module)}), ZeroConfig())
    else:
        if how == "in place":
            module.compile()
        else:
            module.forward = torch.compile(module.forward)
        units = make_units(module, ZeroConfig())
    assert [len(unit.params) for unit in units] == [10] * 4


def test_what_two_units_share_is_in_the_root():
    with torch.device("meta"):
        module = nn.ModuleDict({"blocks": nn.ModuleList(Block() for _ in range(4))})
    module["blocks"][1].up = module["blocks"][3].up
    units = {unit.name: unit.params for unit in make_units(module, ZeroConfig(unit_classes=("Block",)))}
    assert list(units[""]) == ["blocks.1.up.weight", "blocks.1.up.bias"]


def test_small_layers_of_a_block_that_must_be_cut_are_units():
    units = names(Many, 2, max_unit_bytes=2**25)
    assert max(map(len, units.values())) <= 192, "none has more than half of a block's weights and biases"


@pytest.mark.parametrize("option", ["unit_classes", "leaf_classes"])
def test_a_block_that_the_user_names_stays_whole(option):
    assert list(names(Block, 4, **{option: ("Block",)})) == ["", *(f"blocks.{i}" for i in range(4))]


def test_the_largest_unit_that_the_user_allows():
    assert list(names(Block, 16, max_unit_bytes=2**25))[1:4] == ["blocks.0.qkv", "blocks.0.up", "blocks.0.down"]
    assert list(names(Block, 16, max_unit_bytes=2**25, leaf_classes=("Block",)))[1:3] == ["blocks.0", "blocks.1"]


@pytest.mark.parametrize("kind", [Block, Fused])
def test_modules_with_several_names(kind):
    """A layer of two blocks, a block that is there twice, and all of them in one more list."""
    with torch.device("meta"):
        module = nn.Module()
        module.blocks = nn.ModuleList(kind() for _ in range(4))
        module.blocks[2].up = module.blocks[0].up
        module.blocks[3] = module.blocks[1]
        module.all = nn.Sequential(*module.blocks, nn.Linear(DIM, 8))
    units = make_units(module, ZeroConfig())
    assert sorted(name for unit in units for name in unit.params) == sorted(n for n, _ in module.named_parameters())
    assert len({id(m) for unit in units for m in unit.modules}) == sum(len(unit.modules) for unit in units)
