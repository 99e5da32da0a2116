"""Bytes: what the process holds at most during a step, against the formulas of the ZeRO paper.

The C library is asked how many bytes are allocated, by whomever; nothing of the engine's own books is used. Two models
of one structure and different widths are compared, so that what does not grow with the parameters cancels.
"""

import ctypes
import gc
import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
import zoo
from harness import distributed
from oracles import adamw, build_engine, communicator, precision
from test_optimizers import SignMomentum
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_zero.engine import offload
from lightning_zero.engine.host_memory import allocated

DEPTH, SMALL, LARGE = 24, 32, 128
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


class Peak(list):
    """A list of the engine's events that looks at the memory at each of them."""

    highest = 0

    def append(self, event):
        self.highest = max(self.highest, allocated())


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lins = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))

    def forward(self, x):
        return torch.relu(self.lins(x))


class Tower(nn.Module):
    """Many equal blocks and a batch of one row, so that bytes are those of parameters; no shard is padded."""

    config = {}

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(DEPTH))
        self.head = nn.Linear(width, 1, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).float().mean()


def numel(width):
    return 4 * DEPTH * width * width + width


def measure(width, comm, stage, accumulate, autocast, steps=2):
    """Most bytes in the last of some steps, at all events of the engine, on top of what there was before the model."""
    gc.collect()
    before = allocated()
    model = Tower(width)
    engine = build_engine(model, comm, autocast, stage=stage)
    optimizer = adamw(model.named_parameters())
    assert len([unit for unit in engine.units if not unit.is_root]) == DEPTH
    for _ in range(steps):
        engine.events = peak = Peak()
        for micro in range(accumulate):
            with engine.forward(), precision(autocast):
                loss = model(torch.ones(1, width)) / accumulate
            with engine.backward(last=micro == accumulate - 1):
                loss.backward()
            del loss
        engine.step(optimizer)
        optimizer.zero_grad()
    engine.events = None
    engine.release(whole=True)
    return peak.highest - before


def promised(stage, accumulate, world_size, autocast):
    """Bytes a parameter: the parameter, its master, two moments and the gradient."""
    share = 1 / world_size
    if stage == 3:
        return 16 * share
    if stage == 1 and accumulate > 1:
        return 6 + 12 * share if autocast else 8 + 8 * share
    return 2 + 16 * share if autocast else 4 + 12 * share


def on_top(stage, accumulate, world_size, autocast):
    """Bytes a parameter of one unit: two gradients, and a rank's part of one as it is received, and of the mean where
    the sum's memory is not the mean's; two live units where parameters are sharded; and of a quarter of it (one of its
    four parameters) the gradient that autograd is making."""
    element = 2 if autocast else 4
    parts = 8 if stage == 1 and accumulate > 1 else element
    return (4.25 if stage == 3 else 2.25) * element + parts / world_size


needs_mallinfo = pytest.mark.skipif(allocated() is None, reason="only glibc 2.33 and newer tells what is allocated")


@needs_mallinfo
@distributed(world_size=[2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_memory_of_the_paper(rank, world_size, stage):
    with communicator() as comm:
        for autocast, accumulate in itertools.product((False, True) if world_size == 2 else (False,), (1, 2)):
            if accumulate == 1:
                measure(LARGE, comm, stage, accumulate, autocast, steps=1)  # what libraries make once and keep
            small, large = (measure(width, comm, stage, accumulate, autocast) for width in (SMALL, LARGE))
            slope = (large - small) / (numel(LARGE) - numel(SMALL))
            states = 1.01 * promised(stage, accumulate, world_size, autocast)
            allowed = states + on_top(stage, accumulate, world_size, autocast) / DEPTH
            assert slope <= allowed, (
                f"accumulate {accumulate}, bf16 {autocast}: {slope:.3f} bytes a parameter, allowed {allowed:.3f}"
            )


@needs_mallinfo
@distributed(world_size=2)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_end_of_a_run_takes_no_second_copy(rank, world_size, autocast):
    """The whole parameters and this rank's moments are there then; a unit at a time is there as master, too."""

    def measure(width):
        before = allocated()
        model = Tower(width)
        engine = build_engine(model, comm, autocast, stage=3)
        optimizer = adamw(model.named_parameters())
        with engine.forward(), precision(autocast):
            loss = model(torch.ones(1, width))
        with engine.backward():
            loss.backward()
        engine.step(optimizer)
        del loss
        with PeakOfOperations() as peak:
            engine.release(whole=True)
        return peak.highest - before

    with communicator() as comm:
        measure(LARGE)  # what libraries make once and keep
        slope = (measure(LARGE) - measure(SMALL)) / (numel(LARGE) - numel(SMALL))
    allowed = 4 + 8 / world_size + 2 * 4 / DEPTH
    assert slope <= 1.01 * allowed, f"{slope:.3f} bytes a parameter, allowed {allowed:.3f}"


STRETCH = 20


def resident():
    """Bytes of this process' own memory that take a place in RAM, whether allocated or free."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@needs_mallinfo
@distributed(world_size=2)
@pytest.mark.parametrize(
    ("stage", "rests"),
    [
        (1, ()),
        (2, ("offload_optimizer",)),
        (3, ()),
        (3, ("offload_optimizer", "offload_params")),
        pytest.param(1, ("offload_optimizer",), marks=pytest.mark.full),
        pytest.param(2, (), marks=pytest.mark.full),
        pytest.param(3, ("offload_optimizer",), marks=pytest.mark.full),
    ],
)
def test_steps_leave_nothing_behind(rank, world_size, stage, rests, tmp_path):
    """Neither objects nor bytes: what grows, grows in all of five equal stretches (malloc's own caches in some)."""
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    with communicator() as comm:
        model = zoo.make("DeepMlp")
        engine = build_engine(model, comm, stage=stage, **dict.fromkeys(rests, disk))
        optimizer = adamw(model.named_parameters())

        def after(steps):
            for _ in range(steps):
                with engine.forward():
                    loss = model(torch.ones(4, zoo.DIM))
                with engine.backward():
                    loss.sum().backward()
                engine.step(optimizer)
                optimizer.zero_grad()
            del loss
            gc.collect()
            return len(gc.get_objects()), allocated(), resident()

        looks = [after(30), *(after(STRETCH) for _ in range(5))]
        engine.release(whole=True)
    objects, nbytes, pages = (
        min(later - earlier for earlier, later in itertools.pairwise(values)) for values in zip(*looks, strict=True)
    )
    # a step that leaves one small tensor behind leaves an object, or 300 bytes; or memory of libraries: a page
    assert objects < STRETCH and nbytes < STRETCH * 200 and pages < STRETCH * 4096, looks


@needs_mallinfo
@distributed(world_size=1)
def test_windows_of_a_step_leave_no_holes(rank, world_size, tmp_path, monkeypatch):
    """What an optimizer allocates for one window does not stay in memory, once it is free, beside that of the next."""
    window, width, layers, entries = 2**18, 2**10, 32, 4
    monkeypatch.setattr(offload, "WINDOW", window)
    for option in (MMAP_THRESHOLD, TRIM_THRESHOLD):  # into the heap, as where much has been allocated and freed before
        ctypes.CDLL(None).mallopt(option, 32 * 2**20)
    disk = {"device": "nvme", "nvme_path": str(tmp_path)}
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    model.config = {}
    with communicator() as comm:
        engine = build_engine(model, comm, stage=3, offload_optimizer=disk, offload_params=disk)
        optimizer = adamw(model.named_parameters())
        for _ in range(2):
            with engine.forward():
                loss = sum(layer.weight.sum() for layer in model)
            with engine.backward():
                loss.backward()
            before = resident()
            engine.step(optimizer)
            grown = (resident() - before) / (4 * window)
            assert grown <= 4 * entries, f"by {grown:.0f} times what one tensor of a window takes"
        engine.release(whole=False)


class PeakOfOperations(TorchDispatchMode):
    """Looks at the memory after each of torch's operations."""

    highest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.highest = max(self.highest, allocated())
        return result


STEPPING = {  # and how many tiles its temporaries take at one time
    "plain": (partial(torch.optim.AdamW, foreach=False), 2),
    "foreach": (partial(torch.optim.AdamW, foreach=True), 1),
    "fused": (partial(torch.optim.AdamW, fused=True), 0),
}
TILE = 2**16


@needs_mallinfo
@distributed(world_size=2)
@pytest.mark.parametrize("gradient_dtype", [None, "bf16"])
@pytest.mark.parametrize("name", STEPPING)
def test_temporaries_of_the_step_are_tiles(rank, world_size, name, gradient_dtype):
    """What an optimizer allocates, and its gradients in the masters' dtype where they are kept in another one."""
    make, tiles = STEPPING[name]

    def measure(stage, tile_size):
        """The most bytes in a second step, on top of what was there before the first one and of the state, in tiles."""
        model = Tower(LARGE)
        engine = build_engine(model, comm, stage=stage, tile_size=tile_size, gradient_dtype=gradient_dtype)
        optimizer = make(model.parameters(), lr=0.01)
        before = 0
        for _ in range(2):
            with engine.forward():
                loss = model(torch.ones(1, LARGE))
            with engine.backward():
                loss.backward()
            before = before or allocated()
            with PeakOfOperations() as peak:
                engine.step(optimizer)
        highest = peak.highest - before - engine.memory()["optimizer"]
        engine.release(whole=True)
        return highest / (4 * TILE)

    widened = 0 if gradient_dtype is None else 2.25  # a batch, the next one, and a parameter that did not fit in
    with communicator() as comm:
        for stage in (1, 3):
            used = measure(stage, TILE)
            # three for what Python's objects take: the state has some hundred tensors and dicts
            assert used <= tiles + widened + 3, f"stage {stage}: {used} tiles"
        if name == "foreach":
            assert measure(1, 0) > 12, "without tiles they are as large as the shard, and this test sees it"


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_the_step_works_in_tiles(rank, world_size, stage):
    """Somebody's own optimizer, too, sees tiles."""
    sizes = []

    class Watching(SignMomentum):
        def step(self, closure=None):
            sizes.extend(p.numel() for group in self.param_groups for p in group["params"])
            super().step(closure)

    with communicator() as comm:
        model = Tower(SMALL)
        engine = build_engine(model, comm, stage=stage, tile_size=1024)
        optimizer = Watching(model.parameters())
        with engine.forward():
            loss = model(torch.ones(1, SMALL))
        with engine.backward():
            loss.backward()
        engine.step(optimizer)
        engine.release(whole=True)
    assert max(sizes) == 1024
