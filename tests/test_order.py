"""Who runs before whom: communication is launched early enough to overlap, and in one order on all ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from harness import distributed
from oracles import adamw, assert_same, build_engine, communicator, engine_step, finish, plain
from torch import nn
from torch.utils.checkpoint import checkpoint


class Deep(zoo.Blocks):
    """Five blocks."""

    def __init__(self):
        super().__init__()
        self.blocks.extend(zoo.Block() for _ in range(2))


def events_of_a_step(model, comm, steps=3, **config):
    """What the engine records in the last of some steps (in the first it learns the order)."""
    engine = build_engine(model, comm, **config)
    optimizer = adamw(model.named_parameters())
    for step in range(steps):
        engine.events = []
        engine_step(engine, model, optimizer, comm, step)
    events = engine.events
    engine.release(whole=True)
    return events


BLOCKS = [f"blocks.{i}" for i in range(5)]


@distributed(world_size=2)
def test_stage_3_gathers_one_unit_ahead(rank, world_size):
    with communicator() as comm:
        events = events_of_a_step(Deep(), comm, stage=3)
    for unit, following in zip(BLOCKS, BLOCKS[1:], strict=False):
        first = events.index(("forward", unit))
        assert events.index(("gather", following)) < first < events.index(("forward", following))
        assert events.index(("wait", following)) > first, "the next unit was waited for too early"


@distributed(world_size=2)
def test_stage_3_frees_a_unit_after_its_forward(rank, world_size):
    with communicator() as comm:
        events = events_of_a_step(Deep(), comm, stage=3)
    for unit, following in zip(BLOCKS[:-1], BLOCKS[2:], strict=False):
        assert events.index(("reshard", unit)) < events.index(("forward", following))


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reductions_overlap_the_backward(rank, world_size, stage):
    """Unit k's reduction is launched before the backward of unit k-1 has ended."""
    with communicator() as comm:
        events = events_of_a_step(Deep(), comm, stage=stage)
    for earlier, unit in zip(BLOCKS, BLOCKS[1:], strict=False):
        assert events.index(("backward_done", unit)) < events.index(("reduce", unit))
        assert events.index(("reduce", unit)) < events.index(("backward_done", earlier))


@distributed(world_size=2)
def test_stage_3_gathers_ahead_in_backward(rank, world_size):
    """In backward the unit before is gathered while a unit runs, and each unit is freed when its gradients are in."""
    with communicator() as comm:
        events = events_of_a_step(Deep(), comm, stage=3)
    events = events[events.index(("forward", BLOCKS[-1])) + 1 :]
    for earlier, unit in zip(BLOCKS[:-2], BLOCKS[1:-1], strict=True):
        assert events.index(("gather", earlier)) < events.index(("backward_done", unit))
        assert events.index(("reshard", unit)) < events.index(("backward_done", earlier))


class Recomputed(zoo.Model):
    """Checkpointed blocks, of which each layer is a unit."""

    config = {"unit_classes": ("Linear",)}

    def __init__(self):
        super().__init__()
        layers = [nn.Sequential(*(nn.Linear(zoo.DIM, zoo.DIM) for _ in range(3))) for _ in range(4)]
        self.blocks = nn.ModuleList(layers)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@distributed(world_size=2)
def test_recomputed_layers_are_gathered_ahead_and_once(rank, world_size):
    """A block that is computed again in the backward uses its layers in the order of the forward."""
    model = Recomputed()
    names = [f"{block}.{layer}" for block in BLOCKS[:4] for layer in range(3)]
    with communicator() as comm:
        events = events_of_a_step(model, comm, stage=3)
    used = [(kind, unit) for kind, unit in events if kind in ("gather", "forward") and unit in names]
    gathered = [unit for kind, unit in used if kind == "gather"]
    ran = [unit for kind, unit in used if kind == "forward"]
    assert ran == gathered == names + [name for block in BLOCKS[3::-1] for name in names if name.startswith(block)]
    places = [place for place, (kind, _) in enumerate(used) if kind == "forward"]
    ahead = [place - index - (index + 1) for index, place in enumerate(places)]
    # the backward does not begin with what follows in the forward, and after both nothing follows
    assert ahead == ([1] * 11 + [0]) * 2


def units_of(events, kind):
    return [unit for event, unit in events if event == kind]


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 2])
def test_gathers_follow_the_step_and_waits_the_forward(rank, world_size, stage):
    """Stages 1 and 2 launch every gather at the end of the step, and wait for each at its first use."""
    with communicator() as comm:
        model = Deep()
        engine = build_engine(model, comm, stage=stage)
        optimizer = adamw(model.named_parameters())
        engine_step(engine, model, optimizer, comm, 0)
        engine.events = []
        engine_step(engine, model, optimizer, comm, 1)
        events = engine.events
        assert units_of(events, "gather") == [unit.name for unit in engine.units]
        assert events.index(("backward_done", "")) < events.index(("gather", engine.units[0].name))
        for unit, following in zip(BLOCKS, BLOCKS[1:], strict=False):
            assert (
                events.index(("forward", unit))
                < events.index(("wait", following))
                < events.index(("forward", following))
            )
        engine.release(whole=True)


class Crossing(zoo.Model):
    """Two towers whose gradients become ready in an order that differs between ranks and steps."""

    def __init__(self):
        super().__init__()
        self.towers = torch.nn.ModuleList(zoo.Block() for _ in range(4))

    def loss(self, batch):
        order = [0, 1, 2, 3] if (batch.rank + batch.step) % 2 else [3, 1, 0, 2]
        outs = {index: self.towers[index](batch.x) for index in order}
        return F.mse_loss(sum(outs[index] for index in range(4)), batch.y)


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_reduce_in_one_order(rank, world_size, stage):
    def make(seed):
        torch.manual_seed(seed)
        return Crossing()

    with communicator() as comm:
        model = make(rank)
        engine = build_engine(model, comm, stage=stage)
        optimizer = adamw(model.named_parameters())
        losses, orders = [], []
        for step in range(4):
            engine.events = []
            losses += engine_step(engine, model, optimizer, comm, step)[0]
            orders.append(units_of(engine.events, "reduce"))
        ready = units_of(engine.events, "backward_done")
        engine.release(whole=True)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, (orders, ready))
    assert all(of_rank[0] == everyone[0][0] for of_rank in everyone)
    assert everyone[0][1] != everyone[1][1], "the ranks' gradients became ready in the same order: nothing was tested"
    assert orders[1] == orders[2] == orders[3], "the order is not kept"
    assert_same(finish(model, losses, []), plain(make, steps=4))
