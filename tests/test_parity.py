"""The numbers: every stage, size and world against torch's DDP and a plain loop, to the bit."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo
from harness import distributed
from oracles import (
    STEPS,
    adamw,
    assert_close,
    assert_same,
    build_engine,
    communicator,
    differences,
    finish,
    plain,
    seeded,
    train_ddp,
    train_engine,
)

from lightning_zero.config import ZeroConfig
from lightning_zero.engine import grouping

STAGES = (0, 1, 2, 3)
REDUCE_AT = ("window", "micro_batch")


def assert_ranks_equal(run, what):
    """All ranks hold rank 0's weights."""
    for name, value in run.weights.items():
        other = value.clone()
        dist.broadcast(other, 0)
        assert torch.equal(other, value), f"{what}: {name} of rank {dist.get_rank()} is not rank 0's"


def assert_equals_plain(got, want, make, what):
    if make().late_gradients:
        assert_close(got, want, what)
        assert_ranks_equal(got, what)
    else:
        assert_same(got, want, what, buffers=dist.get_rank() == 0)


@distributed(world_size=2)
@pytest.mark.parametrize("name", zoo.ZOO)
def test_stages_are_equal(rank, world_size, name, full):
    """By default four steps: what a unit does in the first one is recorded, and some models differ in each of three."""
    make, steps = partial(zoo.make, name), STEPS if full else 4
    with communicator() as comm:
        run = assert_stages_equal_plain(comm, make, STAGES, steps=steps)
    if make().not_for_ddp is None:
        assert_same(run, train_ddp(make, rank, steps=steps), "not DDP")


@distributed(world_size=2, timeout=120)
@pytest.mark.parametrize("first", range(0, len(zoo.ZOO), 8))
def test_blocks_cut_at_their_layers_change_no_bit(rank, world_size, first, full):
    """As the user wants it, and as in a large model, where all blocks are not small; by default by turns."""
    ways = ({"max_unit_bytes": 1}, {})
    with communicator() as comm:
        for index, name in enumerate(list(zoo.ZOO)[first : first + 8]):
            make = partial(zoo.make, name)
            grouping.SMALL = 2**23
            want = train_engine(make, comm, stage=2, steps=3)
            grouping.SMALL = 0
            for config in ways if full else ways[index % 2 :][:1]:
                got = train_engine(make, comm, stage=3, steps=3, **config)
                assert_same(got, want, f"{name}, {config}")


def test_blocks_of_the_zoo_are_cut_like_those_of_large_models(monkeypatch):
    """So the test above sees what it is about."""
    whole = {name: len(grouping.make_units(zoo.make(name), ZeroConfig(min_unit_bytes=0))) for name in zoo.ZOO}
    monkeypatch.setattr(grouping, "SMALL", 0)
    cut = {name: len(grouping.make_units(zoo.make(name), ZeroConfig(min_unit_bytes=0))) for name in zoo.ZOO}
    assert {name for name in zoo.ZOO if cut[name] > whole[name]} >= {"Gpt", "Conv", "BatchNorm", "CheckpointedLayers"}


@distributed(world_size=[1, 3, 4], timeout=120)
@pytest.mark.parametrize("first", range(0, len(zoo.ZOO), 8))
def test_stages_are_equal_at_other_sizes(rank, world_size, first, full):
    """By default two steps, and each model with one stage, on 3 ranks or on 4, besides 1; all with ``--full``."""
    steps = STEPS if full else 2
    with communicator() as comm:
        for index, name in enumerate(list(zoo.ZOO)[first : first + 8]):
            turn = (first // 8 + index // 2) % 4  # so that each of both sizes sees each stage
            some = {1: (0, 3), 3 + index % 2: (turn,)}.get(world_size, ())
            if full or some:
                assert_stages_equal_plain(comm, partial(zoo.make, name), STAGES if full else some, steps=steps)


def assert_stages_equal_plain(comm, make, stages, **options):
    """Compare runs of stages with one another and with the plain loop, whose result all ranks have."""
    want = plain(make, **options)
    runs = {stage: train_engine(make, comm, stage=stage, **options) for stage in stages}
    first, *others = runs
    assert_equals_plain(runs[first], want, make, f"{make.args}: stage {first} is not the plain loop")
    for stage in others:
        assert_same(runs[stage], runs[first], f"{make.args}: stage {stage} is not stage {first}")
    return runs[first]


SOME_STAGES = {"window": (1,), "micro_batch": (3,)}
SOME_MODELS = (  # those whose gradients differ in number, time or kind between micro-batches, ranks or steps
    "Alternating Branchy Checkpointed CheckpointedBlocksReentrant Complex Dropout Gpt HalfBlock MixedPrecisions "
    "MixtureOfExperts ReusedReentrant RunningMean SparseEmbedding Tied Unused ZeroElements"
).split()


@distributed(world_size=2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SOME_MODELS else pytest.mark.full) for name in zoo.ZOO]
)
def test_accumulation(rank, world_size, name, full):
    make = partial(zoo.make, name)
    options = {"accumulate": 3, "steps": STEPS if full else 3}
    with communicator() as comm:
        for reduce_at, some in SOME_STAGES.items():
            want = plain(make, reduce_at=reduce_at, **options)
            stages = STAGES if full else some
            runs = [train_engine(make, comm, stage=s, reduce_at=reduce_at, **options) for s in stages]
            for run in runs[1:]:
                assert_same(run, runs[0], f"two stages differ, {reduce_at}")
            assert_equals_plain(runs[0], want, make, f"not the plain loop, {reduce_at}")
            if reduce_at == "window" and make().not_for_ddp is None:
                assert_same(runs[0], train_ddp(make, rank, **options), "not DDP")


@distributed(world_size=4)
@pytest.mark.parametrize("name", ["Gpt", "MixtureOfExperts"])
def test_accumulation_on_more_ranks(rank, world_size, name, full):
    """By default every stage reduces at each place, with one of the two models."""
    make = partial(zoo.make, name)
    with communicator() as comm:
        for number, reduce_at in enumerate(REDUCE_AT, start=name == "Gpt"):
            want = plain(make, reduce_at=reduce_at, accumulate=3, steps=3)
            for stage in STAGES if full else STAGES[number % 2 :: 2]:
                got = train_engine(make, comm, stage=stage, reduce_at=reduce_at, accumulate=3, steps=3)
                assert_same(got, want, f"stage {stage}, {reduce_at}", buffers=rank == 0)


@distributed(world_size=2)
def test_default_place_of_the_reduction(rank, world_size):
    make = partial(zoo.make, "Gpt")
    with communicator() as comm:
        for stage in STAGES:
            own, other = REDUCE_AT if stage < 2 else REDUCE_AT[::-1]
            got, same, different = (
                train_engine(make, comm, stage=stage, reduce_at=reduce_at, accumulate=3, steps=2)
                for reduce_at in (None, own, other)
            )
            assert_same(got, same, f"stage {stage}")
            assert differences(got, different), "both orders give the same sums: nothing was tested"


@distributed(world_size=2)
@pytest.mark.parametrize(
    ("name", "accumulate"),
    [(n, 1) for n in ("Gpt", "Tied", "Unused", "Complex", "MixedPrecisions", "ZeroElements")] + [("Branchy", 3)],
)
def test_clipping_by_the_global_norm(rank, world_size, name, accumulate):
    make = partial(zoo.make, name)
    options = {"accumulate": accumulate, "clip": 0.05}
    with communicator() as comm:
        runs = {stage: train_engine(make, comm, stage=stage, **options) for stage in STAGES}
    for reduce_at, stages in zip(REDUCE_AT, ((0, 1), (2, 3)), strict=True):
        want = plain(make, reduce_at=reduce_at, **options)
        assert min(want.norms) > 0.05, "nothing was clipped"
        for stage in stages:
            assert runs[stage].norms == want.norms
            assert_same(runs[stage], want, f"stage {stage}", buffers=rank == 0)
    assert_same(runs[0], train_ddp(make, rank, **options), "not DDP")
    theirs = train_ddp(make, rank, torch_clip=True, **options)
    torch.testing.assert_close(runs[3].norms, theirs.norms, rtol=1e-3, atol=0)
    assert_close(runs[3], theirs, "torch's clipping", rtol=1e-3)


@distributed(world_size=2)
def test_clipping_by_value(rank, world_size):
    with communicator() as comm:
        for stage in STAGES:
            model = zoo.make("Unused", rank)
            engine = build_engine(model, comm, stage=stage)
            optimizer = adamw(model.named_parameters())
            with engine.forward():
                loss = model.loss(seeded(model, rank, 0))
            with engine.backward():
                loss.backward()
            before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            engine.clipper.clip_value_(optimizer, 0.01)
            for name, p in model.named_parameters():
                if name in before:
                    assert before[name].abs().max() > 0.01
                    assert torch.equal(p.grad.clone(), before[name].clamp(-0.01, 0.01)), name
                else:
                    assert p.grad is None
            engine.release(whole=True)


SIZES = {  # by the stages that they touch
    (1, 3): [{"min_unit_bytes": 2**24}, {"min_unit_bytes": 1000}, {"max_unit_bytes": 500},
             {"unit_classes": ("Linear",)}],
    (1,): [{"tile_size": 64}, {"tile_size": 4096}, {"tile_size": 0}],
    (3,): [{"prefetch": 0}, {"prefetch": 3}, {"persistence_threshold": 10}, {"persistence_threshold": 10**6},
           {"saved_tensors_hooks": False}],
}  # fmt: skip


@distributed(world_size=3)
@pytest.mark.parametrize("name", ["Wide", "Gpt", "Tied"])
def test_sizes_change_no_bit(rank, world_size, name):
    make = partial(zoo.make, name)
    with communicator() as comm:
        want = train_engine(make, comm, stage=0, steps=3)
        for stages, configs in SIZES.items():
            for stage, config in itertools.product(stages, configs):
                got = train_engine(make, comm, stage=stage, steps=3, **config)
                assert_same(got, want, f"stage {stage}, {config}")


KEPT = ("Conv", "Scales", "Reused", "NoGradBlock", "CheckpointedBlocks", "CheckpointedBlocksReentrant",
        "GradientPenalty", "OffloadedActivations", "Frozen", "MixtureOfExperts", "CustomFunction", "Lstm")  # fmt: skip


@distributed(world_size=2)
@pytest.mark.parametrize(
    "name", [name if name in KEPT else pytest.param(name, marks=pytest.mark.full) for name in zoo.ZOO]
)
def test_without_hooks_on_saved_tensors(rank, world_size, name):
    make = partial(zoo.make, name)
    with communicator() as comm:
        options = {"steps": 2, "accumulate": 2}
        want = train_engine(make, comm, stage=2, **options)
        got = train_engine(make, comm, stage=3, saved_tensors_hooks=False, **options)
        assert_same(got, want, "stage 3 without hooks is not stage 2")


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["DeepMlp", "Gpt", "Tied", "Frozen", "Unused", "CheckpointedBlocks"])
def test_bf16_compute_equals_ddp_under_autocast(rank, world_size, name):
    make = partial(zoo.make, name)
    with communicator() as comm:
        for accumulate, steps in ((1, STEPS), (3, 2)):
            options = {"accumulate": accumulate, "steps": steps, "autocast": True}
            want = train_ddp(make, rank, **options)
            for stage in STAGES:
                got = train_engine(make, comm, stage=stage, reduce_at="window", **options)
                assert_same(got, want, f"stage {stage}, accumulate {accumulate}")
        ranks_first = [train_engine(make, comm, stage=stage, **options) for stage in (2, 3)]
        assert_same(*ranks_first, "stage 2 is not stage 3")


@distributed(world_size=2)
def test_several_backwards_of_one_forward(rank, world_size):
    """Two losses over one graph: their gradients add up, as the gradients of their sum."""

    def train(stage, split):
        model = zoo.make("Blocks", rank)
        engine = build_engine(model, comm, stage=stage)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            batch = seeded(model, rank, step)
            with engine.forward():
                out = model(batch.x)
                losses = [out.pow(2).mean(), (out - batch.y).abs().mean()]
            with engine.backward():
                if split:
                    losses[0].backward(retain_graph=True)
                    losses[1].backward()
                else:
                    (losses[0] + losses[1]).backward()
            engine.step(optimizer)
            optimizer.zero_grad()
        engine.release(whole=True)
        return finish(model, [], [])

    with communicator() as comm:
        want = train(0, split=True)
        assert_close(want, train(0, split=False), "the sum of the losses")
        for stage in STAGES[1:]:
            assert_same(train(stage, split=True), want, f"stage {stage}")


@distributed(world_size=2)
def test_evaluation_between_steps(rank, world_size):
    """Forwards without gradients, in and between steps, see the present weights and change nothing."""

    def train(stage, evaluate):
        model = zoo.make("Gpt", rank)
        engine = build_engine(model, comm, stage=stage)
        optimizer = adamw(model.named_parameters())
        seen = []
        for step in range(3):
            with engine.forward():
                loss = model.loss(seeded(model, rank, step))
            with engine.backward():
                loss.backward()
            engine.step(optimizer)
            optimizer.zero_grad()
            if evaluate:
                model.eval()
                for number in range(2):
                    with engine.forward(), torch.no_grad() if number else torch.inference_mode():
                        seen.append(model.loss(seeded(model, rank, 100)).item())
                model.train()
        engine.release(whole=True)
        return finish(model, [], []), seen

    with communicator() as comm:
        want, _ = train(0, evaluate=False)
        losses = [train(stage, evaluate=True) for stage in STAGES]
    assert losses[0][1][0] == losses[0][1][1] and len(set(losses[0][1])) == 3
    for stage in STAGES:
        assert_same(losses[stage][0], want, f"stage {stage}")
        assert losses[stage][1] == losses[0][1]
