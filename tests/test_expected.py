"""Values that come later: a module is told where its values lie, and each rank reads its own part when it is cut."""

import copy
import pickle
import warnings

import pytest
import torch
from harness import distributed
from oracles import communicator, linear_in_bf16
from test_meta import on_meta
from torch import nn

from lightning_zero.config import ZeroConfig
from lightning_zero.engine import Engine
from lightning_zero.engine.elsewhere import StoredTensor
from lightning_zero.engine.expected import expect, expected
from lightning_zero.engine.host_memory import allocated
from lightning_zero.engine.materialize import assign_state, is_meta

STAGES = [0, 1, 2, 3]


class Zoo(nn.Module):
    """Parameters of all kinds: tied, frozen, in other memory orders, empty, without dimensions; buffers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.empty(7, 33).t())
        self.scale, self.none = nn.Parameter(torch.empty(())), nn.Parameter(torch.empty(0, 4))
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 10, bias=False)
        self.head.weight = self.embedding.weight

    def reset_parameters(self):
        raise AssertionError("all of it has values")


def filled(make=Zoo, dtype=torch.float32, seed=3):
    """Random values, also in buffers."""
    generator = torch.Generator().manual_seed(seed)
    module = make().to(dtype)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 9)
    return module


class Reader:
    """Makes stored tensors of a state, and notes what is read of them."""

    def __init__(self):
        self.elements, self.highest = 0, 0

    def __call__(self, state):
        return {name: self.store(value) for name, value in state.items()}

    def store(self, value):
        def elements(dims, start, stop, out=None):
            self.elements += stop - start
            self.highest = max(self.highest, allocated())
            found = value.detach().permute(tuple(dims)).reshape(-1)[start:stop].clone()
            return found if out is None else out.copy_(found)

        return StoredTensor(value.shape, value.dtype, elements)


def build(comm, module, stage, **options):
    compute = options.pop("compute_dtype", None)
    return Engine(module, ZeroConfig(stage=stage, min_unit_bytes=0, **options), comm, compute)


def whole(engine):
    """Masters by name, on rank 0, with what the module holds on every rank at stages 0 to 2."""
    names = {id(p): name for name, p in engine.module.named_parameters()}
    return {names[id(p)]: value for p, value in engine.named_full_parameters()}


def own_elements(engine):
    return sum(
        b - a for unit in engine.units for flat in unit.flats for a, b in map(flat.own_part, range(len(flat.names)))
    )


@distributed(world_size=[1, 2, 3])
@pytest.mark.parametrize("make", [Zoo, lambda: on_meta(Zoo)], ids=["plain", "meta"])
@pytest.mark.parametrize("stage", STAGES)
def test_each_rank_reads_its_part(rank, world_size, stage, make):
    want, read = filled(), Reader()
    module = make()
    params = dict(module.named_parameters())
    expect(module, read(want.state_dict()))
    buffers = sum(b.numel() for b in module.buffers())
    assert read.elements == buffers and not any(b.is_meta for b in module.buffers())
    with communicator() as comm:
        engine = build(comm, module, stage)
        assert read.elements - buffers == own_elements(engine)
        got = whole(engine)
        if rank == 0:
            assert all(torch.equal(got[name], p) for name, p in want.named_parameters())
        if stage < 3:
            assert all(torch.equal(module.get_parameter(name), p) for name, p in want.named_parameters())
        engine.release(whole=True)
    assert all(p is params[name] and expected(p) is None for name, p in module.named_parameters())
    assert module.head.weight is module.embedding.weight
    for name, value in want.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    for name, p in want.named_parameters():
        assert module.get_parameter(name).stride() == p.stride()
        assert module.get_parameter(name).requires_grad == p.requires_grad


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_that_was_read_is_sent_but_to_make_it_whole(rank, world_size, stage):
    module = on_meta(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
    expect(module, Reader()(filled(lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))).state_dict()))
    with communicator() as comm:
        engine = build(comm, module, stage)
        total = sum(flat.layout.numel for unit in engine.units for flat in unit.flats)
        assert comm.traffic["other"] == 0
        assert comm.traffic["gather"] == (total // 2 if stage in (1, 2) else 0)


@distributed(world_size=2)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-bit module"])
@pytest.mark.parametrize("stage", STAGES)
def test_masters_and_rounding(rank, world_size, stage, precision):
    """As if the plain module had been loaded, then sharded."""
    made = torch.bfloat16 if precision == "16-bit module" else torch.float32
    want, module = filled(), on_meta(Zoo).to(made)
    plain = Zoo().to(made)
    plain.load_state_dict(want.state_dict())
    compute = {"bf16-mixed": linear_in_bf16, "bf16-true": lambda m: lambda p: torch.bfloat16}.get(precision)
    with communicator() as comm:
        got = []
        for each in (module, plain):
            if each is module:
                expect(each, Reader()(want.state_dict()))
            engine = build(comm, each, stage, compute_dtype=compute and compute(each))
            masters = {
                name: engine.homes[id(p)][0].own_master(engine.homes[id(p)][1]).clone()
                for name, p in each.named_parameters()
            }
            with engine.gathered(each, None):
                seen = {name: p.detach().clone() for name, p in each.named_parameters()}
            got.append((masters, seen))
    for mine, yours in zip(*got, strict=True):
        assert all(mine[name].dtype == yours[name].dtype and torch.equal(mine[name], yours[name]) for name in yours)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_exact_masters(rank, world_size, stage):
    want, module = filled(), on_meta(Zoo).to(torch.bfloat16)
    state, exact = Reader()(copy.deepcopy(want).bfloat16().state_dict()), Reader()(want.state_dict())
    for name, value in state.items():
        value.exact = exact[name]
    expect(module, state)
    with communicator() as comm:
        engine = build(comm, module, stage)
        for name, p in want.named_parameters():
            flat, index = engine.homes[id(module.get_parameter(name))]
            if flat.params[index].requires_grad:
                slot = flat.layout.slots[index]
                start, stop = (bound - slot.start for bound in flat.own_part(index))
                assert torch.equal(flat.own_master(index), slot.part(p, start, stop))
        engine.release(whole=True)
    assert all(torch.equal(p, want.get_parameter(name).bfloat16()) for name, p in module.named_parameters())


@distributed(world_size=2)
@pytest.mark.parametrize("config", [{}, {"persistence_threshold": 100}])
@pytest.mark.parametrize("stage", [1, 3])
def test_some_values_are_here(rank, world_size, stage, config):
    """What the file does not have comes from rank 0, also where both live in one flat buffer."""
    want, module, read = filled(), filled(seed=4 + rank), Reader()
    state = {name: value for name, value in want.state_dict().items() if name.endswith(("bias", "turned"))}
    expect(module, read(state), strict=False)
    mean = module.norm.running_mean.clone()
    with communicator() as comm:
        build(comm, module, stage, **config).release(whole=True)
    other = filled(seed=4)
    for name, p in module.named_parameters():
        assert torch.equal(p, (want if name in state else other).get_parameter(name)), name
    assert rank or torch.equal(module.norm.running_mean, mean)


class Watched(nn.Linear):
    """Would notice being initialised."""

    def reset_parameters(self):
        if not self.weight.is_meta or not self.bias.is_meta:
            self.weight.fill_(5)
            self.bias.fill_(5)


@distributed(world_size=2)
def test_only_what_has_no_values_is_initialised(rank, world_size):
    def make():
        return nn.Sequential(Watched(8, 8), Watched(8, 8), Watched(8, 8), nn.BatchNorm1d(8))

    torch.manual_seed(0)
    want = {name: torch.randn(v.shape).to(v.dtype) for name, v in on_meta(make).state_dict().items()}
    module = on_meta(make)
    state = Reader()({name: want[name] for name in ("0.weight", "0.bias", "1.weight")})
    expect(module, {**state, "2.weight": want["2.weight"]}, strict=False)
    assert not module[2].weight.is_meta  # a plain tensor is loaded at once
    with communicator() as comm:
        build(comm, module, 3).release(whole=True)
    for name in (*state, "2.weight"):
        assert torch.equal(module.get_parameter(name), want[name]), name
    assert (module[1].bias == 5).all() and (module[2].bias == 5).all() and (module[3].weight == 1).all()


@distributed(world_size=2)
def test_the_whole_is_never_there(rank, world_size):
    width, count = 512, 16
    block = 4 * width * width
    values = torch.randn(width, width)
    with communicator() as comm:
        module = on_meta(lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count))))
        read = Reader()
        expect(module, read({f"{i}.weight": values for i in range(count)}))
        before = allocated()
        engine = build(comm, module, 3)
        # at the end half of the model is there (the shards), and on the way a block
        assert read.highest - before < (count / 2 + 2) * block
        assert read.elements == count * width * width // 2 and not is_meta(module)
        engine.release(whole=False)


@pytest.mark.parametrize("make", [lambda: filled(seed=7), lambda: on_meta(Zoo)], ids=["plain", "meta"])
def test_what_does_not_fit_changes_nothing(make):
    module = make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    read = Reader()
    state = read(filled().state_dict())
    missing = {name: value for name, value in state.items() if name != "scale"}
    reshaped = {**state, "scale": read.store(torch.zeros(3))}
    for wrong, words in (
        (missing, "Missing key.*scale"),
        (reshaped, "size mismatch for scale"),
        ({**state, "x": 1}, "Unex"),
    ):
        with pytest.raises(RuntimeError, match=words):
            expect(module, wrong)
    assert not read.elements and not any(expected(p) for p in module.parameters())
    for name, value in module.state_dict().items():
        assert value.is_meta == before[name].is_meta and (value.is_meta or torch.equal(value, before[name]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = expect(module, {**missing, "more": state["scale"]}, strict=False)
    assert found.missing_keys == ["scale"] and found.unexpected_keys == ["more"]


def test_a_later_load_wins():
    read = Reader()
    for module in (Zoo(), on_meta(Zoo)):
        expect(module, read(filled().state_dict()))
        expect(module, filled(seed=5).state_dict())
        assert not any(expected(p) for p in module.parameters())
        assert torch.equal(module.turned, filled(seed=5).turned)
    module = on_meta(Zoo)
    expect(module, read(filled().state_dict()))
    assign_state(module, filled(seed=5).state_dict(), strict=True)
    assert not any(expected(p) for p in module.parameters()) and torch.equal(module.turned, filled(seed=5).turned)
    copied = copy.deepcopy(module)
    assert not any(expected(p) for p in copied.parameters())


@distributed(world_size=2)
def test_who_asks_first_gets_the_values(rank, world_size):
    """Also where only one rank does: then all read the whole, and rank 0's values win as ever."""
    whole = filled().state_dict()
    module = Zoo()
    expect(module, Reader()(whole))
    if rank == 0:
        assert torch.equal(module.turned + 0, whole["turned"])
        with torch.no_grad():
            module.scale.mul_(2)
    with communicator() as comm:
        engine = build(comm, module, 3)
        with engine.gathered(module):
            assert torch.equal(module.turned, whole["turned"]) and torch.equal(module.scale, 2 * whole["scale"])


def test_a_waiting_parameter_is_what_it_seems():
    whole = filled().state_dict()
    for module in (Zoo(), on_meta(Zoo)):
        expect(module, Reader()(whole))
        copied = copy.deepcopy(module)
        assert isinstance(module.turned, nn.Parameter) and module.turned.shape == whole["turned"].shape
        assert not expected(copied.turned) and torch.equal(copied.turned, whole["turned"])
        assert torch.equal(pickle.loads(pickle.dumps(module)).turned, whole["turned"])
        assert type(module.turned) is nn.Parameter
        copied.load_state_dict(whole)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_training_from_meta(rank, world_size, stage):
    """Autograd sees no writes where there are none: gathering a unit again is none."""

    def make():
        return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))

    results = []
    with communicator() as comm:
        for module in (filled(make), on_meta(make)):
            if module[0].weight.is_meta:
                expect(module, Reader()(filled(make).state_dict()))
            engine = build(comm, module, stage)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
            for _ in range(2):
                with engine.forward():
                    loss = module(torch.full((2, 16), rank + 1.0)).sin().sum()
                with engine.backward():
                    loss.backward()
                engine.step(optimizer)
                optimizer.zero_grad()
            engine.release(whole=True)
            results.append(module.state_dict())
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
