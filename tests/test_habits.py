"""Habits of users' loops: writes to parameters and gradients by other doors, graphs that differ between ranks.

The oracle is a plain loop: the same module and data on every rank, so that the mean over ranks is each one's gradient.
"""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from harness import distributed
from oracles import communicator
from torch import nn

from lightning_zero import gathered
from lightning_zero.config import ZeroConfig
from lightning_zero.engine import Communicator, Engine, check_elementwise
from lightning_zero.engine.life import ParamState

STAGES = (0, 1, 2, 3)
WIDTH = 8


class Net(nn.Module):
    """Six blocks, each with a layer that may be skipped on a rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x, skipped=()):
        for number, block in enumerate(self.blocks):
            x = block(x, number not in skipped)
        return self.head(x).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.more = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, both=True):
        x = x + torch.tanh(self.lin(x))
        return x + torch.tanh(self.more(x)) if both else x


def batch(step: int = 0):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def engine_of(model: nn.Module, comm: Communicator, stage: int, compute_dtype=None, **config) -> Engine:
    return Engine(model, ZeroConfig(stage=stage, min_unit_bytes=0, **config), comm, compute_dtype)


def run(engine: Engine, *args, last: bool = True) -> None:
    with engine.forward():
        loss = engine.module(*args)
    with engine.backward(last=last):
        loss.backward()


def assert_weights(model: nn.Module, want: nn.Module, what: str) -> None:
    for (name, value), expected in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(value, expected), f"{what}: {name}"


# Ranks with other graphs


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("skipped", [pytest.param(5, marks=pytest.mark.full), 3, 0])
def test_a_layer_unused_on_one_rank(rank, world_size, skipped):
    """One rank has all gradients of a unit, another only at its backward's end: nobody waits for ever, zeros count."""
    with communicator() as comm:
        for stage in STAGES:
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = engine_of(model, comm, stage)
            for step in range(2):
                optimizer.zero_grad()
                run(engine, batch(step), (skipped,) if rank == 0 else ())
                engine.step(optimizer)
            engine.release(whole=True)
            want = Net()
            optimizer = torch.optim.SGD(want.parameters(), lr=0.1)
            for step in range(2):
                optimizer.zero_grad()
                total = want(batch(step), (skipped,))
                for _ in range(world_size - 1):
                    total = total + want(batch(step))
                (total / world_size).backward()
                optimizer.step()
            for value, expected in zip(model.parameters(), want.parameters(), strict=True):
                # the mean of losses and the mean of gradients round differently
                torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


class Pair(nn.Module):
    """Two weights in one unit, large enough to be taken at once."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(80, 80, bias=False), nn.Linear(80, 80, bias=False)


class Wandering(nn.Module):
    """``b`` is used after the blocks, before them, or not at all; ``a`` always after them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pairs = nn.ModuleList([Pair()])
        self.blocks = nn.ModuleList(nn.Linear(80, 80) for _ in range(3))

    def forward(self, x, place):
        pair = self.pairs[0]
        x = pair.b(x) if place == "before" else x
        for block in self.blocks:
            x = torch.tanh(block(x))
        x = pair.b(x) if place == "after" else x
        return pair.a(x).square().mean()


@distributed(world_size=2)
@pytest.mark.parametrize(
    "places", [("after", None, "before"), ("before", None, "after"), ("before", "after", "before")]
)
def test_a_gradient_that_comes_after_its_unit_was_reduced(rank, world_size, places):
    """The unit is reduced when the parameters that it had the last time are in; one more comes late."""
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(0))
    with communicator() as comm:
        for stage in STAGES:
            model, want = Wandering(), Wandering()
            engine = engine_of(model, comm, stage)
            for place in places:
                for p in (*model.parameters(), *want.parameters()):
                    p.grad = None
                run(engine, x, place)
                want(x, place).backward()
                for (name, p), q in zip(model.named_parameters(), want.parameters(), strict=True):
                    assert (p.grad is None) == (q.grad is None), (stage, place, name)
                    assert p.grad is None or torch.equal(p.grad + 0, q.grad), (stage, place, name)
            engine.release(whole=True)


class Adapted(nn.Module):
    """A frozen weight that the backward needs early, and adapters whose gradients come late or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x, both):
        x = x + self.b(self.a(x)) if both else x + self.a(x).sum()
        return torch.tanh(self.base(x))


@distributed(world_size=2)
def test_adapters_are_gathered_once_a_pass(rank, world_size):
    model = nn.Module()
    model.blocks = nn.ModuleList(Adapted() for _ in range(4))
    for skip in (False, True):  # an adapter unused on one rank: the ranks' gathers stay in step
        with communicator() as comm:
            engine = engine_of(model, comm, 3)
            for _ in range(2):
                engine.events = []
                with engine.forward():
                    x = batch().requires_grad_()
                    for block in model.blocks:
                        x = block(x, not (skip and rank == 0))
                with engine.backward():
                    x.sum().backward()
            gathers = [name for event, name in engine.events if event == "gather" and name.startswith("blocks")]
            assert max(gathers.count(name) for name in gathers) <= 2, gathers
            engine.release(whole=True)


@distributed(world_size=2)
def test_one_dtype_on_the_wire_whichever_micro_batches_a_rank_uses(rank, world_size):
    model = Net()
    with communicator() as comm:
        for stage in (0, 1, 2, 3):
            engine = engine_of(model, comm, stage, lambda p: torch.bfloat16)
            for micro in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    run(engine, batch(micro).bfloat16(), (0, 3) if rank == 0 and micro < 2 else (), last=micro == 2)
            engine.step(torch.optim.SGD(model.parameters(), lr=0.1))
            engine.release(whole=True)
            assert all(p.isfinite().all() for p in model.parameters())


# Writes to parameters

WRITES = {
    "in_place": lambda p: p.detach().clamp_(-0.01, 0.01),
    "data": lambda p: p.data.clamp_(-0.01, 0.01),
    "new_data": lambda p: setattr(p, "data", p.data.clamp(-0.01, 0.01)),
}


@distributed(world_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("door", WRITES)
def test_writes_in_a_step_are_kept(rank, world_size, door, dtype):
    """A critic that is clipped after its step, in the same training step."""
    with communicator() as comm:
        for stage in STAGES:
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = engine_of(model, comm, stage, lambda p: dtype)
            with engine.forward():
                loss = model(batch().to(dtype))
                with engine.backward():
                    loss.backward()
                engine.step(optimizer)
                with torch.no_grad():
                    for p in model.parameters():
                        WRITES[door](p)
            run(engine, batch(1).to(dtype))
            engine.release(whole=True)
            assert max(p.abs().max().item() for p in model.parameters()) <= 0.0101, stage


@distributed(world_size=2)
def test_writes_after_the_last_step_are_kept(rank, world_size):
    with communicator() as comm:
        for stage in (0, 1, 2):
            model = Net()
            engine = engine_of(model, comm, stage, lambda p: torch.bfloat16)
            run(engine, batch().bfloat16())
            engine.step(torch.optim.SGD(model.parameters(), lr=0.1))
            with torch.no_grad():
                model.head.weight.fill_(0.5)
            saved = {id(p): value for p, value in engine.named_full_parameters()}
            assert rank or (saved[id(model.head.weight)] == 0.5).all()
            engine.release(whole=True)
            assert (model.head.weight == 0.5).all()


@distributed(world_size=2)
def test_data_of_another_shape_is_refused(rank, world_size):
    with communicator() as comm:
        model = Net()
        engine = engine_of(model, comm, 1)
        run(engine, batch())
        model.head.weight.data = torch.zeros(3)
        with pytest.raises(RuntimeError, match="head.weight"):
            engine.step(torch.optim.SGD(model.parameters(), lr=0.1))
        engine.release(whole=False)


@distributed(world_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_exchanged_for_a_while(rank, world_size, dtype):
    """An average that stands in through ``p.data`` during a validation, in which a checkpoint is saved."""
    with communicator() as comm:
        for stage in (0, 1, 2):

            def trained(exchanged, stage=stage):
                model = Net()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                engine = engine_of(model, comm, stage, lambda p: dtype)
                for step in range(3):
                    run(engine, batch(step).to(dtype))
                    engine.step(optimizer)
                    if exchanged:
                        kept = [p.data for p in model.parameters()]
                        for p in model.parameters():
                            p.data = torch.full_like(p.data, 3.0)
                        saved = [value for _, value in engine.named_full_parameters()]
                        assert rank or all((value == 3.0).all() for value in saved)
                        assert (model.head.weight == 3.0).all()
                        for p, before in zip(model.parameters(), kept, strict=True):
                            p.data = before
                engine.release(whole=True)
                return values(model)

            assert all(torch.equal(*both) for both in zip(trained(True), trained(False), strict=True)), stage


def tie(a, b):
    a.data = b.data


def exchange(a, b):
    a.data, b.data = b.data, a.data


def transpose(a, b):
    a.data = a.data.t()


@distributed(world_size=2)
@pytest.mark.parametrize("units", [{}, {"min_unit_bytes": 0, "max_unit_bytes": 64}])
@pytest.mark.parametrize("change", [tie, exchange, transpose])
def test_memory_of_another_parameter_is_refused(rank, world_size, change, units):
    with communicator() as comm:
        for stage in (0, 1, 2):
            model = Net()
            engine = Engine(model, ZeroConfig(stage=stage, **units), comm)
            run(engine, batch())
            change(model.blocks[0].lin.weight, model.blocks[1].lin.weight)
            with pytest.raises(RuntimeError, match="blocks.0.*was given the memory of another parameter"):
                list(engine.named_full_parameters())
            with pytest.raises(RuntimeError, match="blocks.0.*was given the memory of another parameter"):
                engine.step(torch.optim.SGD(model.parameters(), lr=0.1))
            engine.release(whole=False)


READS = {
    "numpy": lambda grad: torch.from_numpy(grad.detach().cpu().numpy()),
    "force": lambda grad: torch.from_numpy(grad.numpy(force=True)),
    "array": lambda grad: torch.from_numpy(np.asarray(grad)),
    "tolist": lambda grad: torch.tensor(grad.tolist()),
    "dlpack": torch.from_dlpack,
    "deepcopy": copy.deepcopy,
    "pickle": lambda grad: pickle.loads(pickle.dumps(grad)),
}


@distributed(world_size=2)
def test_gradients_read_past_torch(rank, world_size):
    with communicator() as comm:
        for stage in STAGES:
            model = Net()
            engine = engine_of(model, comm, stage)
            run(engine, batch())
            for param in model.parameters():
                whole = param.grad.clone()
                for door, read in READS.items():
                    found = read(param.grad)
                    assert type(found) is torch.Tensor and torch.equal(found, whole), (stage, door)
                if type(param.grad) is torch.Tensor:
                    continue
                for ask in (lambda g: g.data_ptr(), lambda g: g.storage(), lambda g: g.untyped_storage()):
                    with pytest.raises(RuntimeError, match="spread over the ranks"):
                        ask(param.grad)
                unread = torch.from_dlpack(torch.utils.dlpack.to_dlpack(param.grad))  # in C++, asking nobody
                assert unread.isnan().all()
            engine.release(whole=True)


@distributed(world_size=2)
def test_an_exception_inside_gathered_keeps_nothing(rank, world_size):
    """On all ranks: units are sharded again, with the values from before."""
    with communicator() as comm:
        for compute in (torch.float32, torch.bfloat16):
            model = Net()
            engine = engine_of(model, comm, 3, lambda p, compute=compute: compute)
            for part in (model, model.blocks[2]):
                with pytest.raises(KeyError, match="mine"), gathered(part), torch.no_grad():
                    for p in part.parameters():
                        p.fill_(7.0)
                    raise KeyError("mine")
                assert {unit.state for unit in engine.units} == {ParamState.SHARDED}
                assert engine.memory()["parameters"] == 0 and not any(unit.active for unit in engine.units)
                with pytest.raises(RuntimeError, match="head.weight"):
                    model.head.weight.sum()
                with gathered(model):
                    assert all(torch.equal(*both) for both in zip(values(model), values(Net(), compute), strict=True))
            run(engine, batch().to(compute))  # and all is in order
            engine.release(whole=True)
            assert_weights(model, Net(), str(compute))


def values(model: nn.Module, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [p.detach().to(dtype, copy=True) if dtype else p.detach().clone() for p in model.parameters()]


@distributed(world_size=2)
@pytest.mark.parametrize("classes", ["Block", [Block], ["Block"], Block, (nn.Linear, "Block")], ids=str)
def test_unit_classes_by_name_or_class_alone_or_in_a_list(rank, world_size, classes):
    with communicator() as comm:
        engine = engine_of(Net(), comm, 3, unit_classes=classes)
        names = [unit.name for unit in engine.units if not unit.is_root]
        engine.release(whole=True)
    blocks = {f"blocks.{number}" for number in range(6)}
    assert blocks <= set(names) if isinstance(classes, tuple) else blocks == set(names)


# Writes to gradients

GRADIENT_WRITES = {
    "rows": lambda g: g[:2].zero_(),
    "slice_assignment": lambda g: g.__setitem__(slice(0, 2), 0),
    "through_view": lambda g: g.view(-1)[:3].mul_(5),
    "out": lambda g: torch.mul(g, 3, out=g),
    "in_place": lambda g: g.mul_(0.25),
    "data": lambda g: g.data.add_(1),
}


@distributed(world_size=2)
@pytest.mark.parametrize("write", GRADIENT_WRITES)
def test_writes_to_gradients_are_kept(rank, world_size, write):
    want = Net()
    want(batch()).backward()
    GRADIENT_WRITES[write](want.blocks[1].lin.weight.grad)
    torch.optim.SGD(want.parameters(), lr=1.0).step()
    with communicator() as comm:
        for stage in STAGES:
            model = Net()
            engine = engine_of(model, comm, stage)
            run(engine, batch())
            GRADIENT_WRITES[write](model.blocks[1].lin.weight.grad)
            engine.step(torch.optim.SGD(model.parameters(), lr=1.0))
            engine.release(whole=True)
            assert_weights(model, want, f"stage {stage}")


@distributed(world_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replaced_gradient_is_clipped(rank, world_size, dtype):
    with communicator() as comm:
        for stage in STAGES:
            model = Net()
            before = model.head.weight.detach().clone()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            engine = engine_of(model, comm, stage, lambda p: dtype)
            run(engine, batch().to(dtype))
            model.head.weight.grad = torch.ones_like(model.head.weight)
            engine.clipper.clip_norm_(optimizer, 1e-6)
            engine.step(optimizer)
            engine.release(whole=True)
            torch.testing.assert_close(model.head.weight.detach(), before, rtol=0, atol=1e-5)


@distributed(world_size=2)
def test_zeroing_in_place_covers_all_that_was_accumulated(rank, world_size):
    want = Net()
    want(batch(1)).backward()
    torch.optim.SGD(want.parameters(), lr=1.0).step()
    with communicator() as comm:
        for stage in STAGES:
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            engine = engine_of(model, comm, stage)
            run(engine, batch())
            run(engine, batch(2), last=False)
            optimizer.zero_grad(set_to_none=False)
            run(engine, batch(1))
            engine.step(optimizer)
            engine.release(whole=True)
            assert_weights(model, want, f"stage {stage}")


@distributed(world_size=2)
def test_a_window_whose_last_backward_is_missing_is_reduced_by_the_step(rank, world_size):
    want = Net()
    for micro in range(2):
        want(batch(micro)).backward()
    torch.optim.SGD(want.parameters(), lr=1.0).step()
    with communicator() as comm:
        for stage in STAGES:
            model = Net()
            engine = engine_of(model, comm, stage)
            for micro in range(2):
                run(engine, batch(micro), last=False)
            engine.step(torch.optim.SGD(model.parameters(), lr=1.0))
            engine.release(whole=True)
            assert_weights(model, want, f"stage {stage}")


HOOKS = {
    "adds": lambda p: p.grad.add_(5),
    "adds_to_data": lambda p: p.grad.data.add_(5),
    "scales": lambda p: p.grad.mul_(0.5),
    "drops": lambda p: setattr(p, "grad", None),
    "replaces": lambda p: setattr(p, "grad", torch.full_like(p, 0.25)),
}


def hook_weight(model, name):
    def hook(param):
        HOOKS[name](param)  # such hooks have to return None

    model.blocks[1].lin.weight.register_post_accumulate_grad_hook(hook)


@distributed(world_size=2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", HOOKS)
def test_post_accumulate_hooks_of_the_user(rank, world_size, hook, when):
    """Registered before the engine's own hooks or after them, which is in the first step."""
    want = Net()
    hook_weight(want, hook)
    want(batch()).backward()
    torch.optim.SGD(want.parameters(), lr=0.1, weight_decay=0.1).step()
    with communicator() as comm:
        for stage in STAGES:
            model = Net()
            if when == "before":
                hook_weight(model, hook)
            engine = engine_of(model, comm, stage)
            with engine.forward():
                loss = model(batch())
                if when == "after":
                    hook_weight(model, hook)
            with engine.backward():
                loss.backward()
            assert (model.blocks[1].lin.weight.grad is None) == (hook == "drops"), f"stage {stage}"
            engine.step(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
            engine.release(whole=True)
            assert_weights(model, want, f"stage {stage}")


@distributed(world_size=2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("hook", ["adds", "drops", "replaces", "scales"])
def test_post_accumulate_hooks_in_a_window(rank, world_size, hook, when):
    """They run after each of its backwards, and see what has been summed so far."""
    want = Net()
    hook_weight(want, hook)
    for micro in range(2):
        want(batch(micro)).backward()
    torch.optim.SGD(want.parameters(), lr=0.1).step()
    with communicator() as comm:
        for stage, reduce_at in ((1, "window"), (3, "window"), (3, "micro_batch")):
            if hook == "scales" and reduce_at == "micro_batch":
                continue  # see the next test
            model = Net()
            if when == "before":
                hook_weight(model, hook)
            engine = engine_of(model, comm, stage, reduce_at=reduce_at)
            with engine.forward():
                model(batch())
            if when == "after":
                hook_weight(model, hook)
            for micro in range(2):
                run(engine, batch(micro), last=micro == 1)
            engine.step(torch.optim.SGD(model.parameters(), lr=0.1))
            engine.release(whole=True)
            for (name, value), expected in zip(model.named_parameters(), want.parameters(), strict=True):
                # the hook's addend has another place in the sum
                assert torch.allclose(value, expected, rtol=1e-6, atol=1e-6), f"stage {stage}, {reduce_at}: {name}"


@distributed(world_size=2)
def test_a_sum_that_is_partly_reduced_cannot_be_scaled_by_a_hook(rank, world_size):
    with communicator() as comm:
        model = Net()
        hook_weight(model, "scales")
        engine = engine_of(model, comm, 3, reduce_at="micro_batch")
        run(engine, batch(0), last=False)
        with pytest.raises(RuntimeError, match=r"'blocks.1.lin.weight' in place.*reduce_at='window'"):
            run(engine, batch(1))


# Graphs and steps


class Players(nn.Module):
    """A toy GAN without lists: both networks are in the root unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g, self.d = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)


def play(model: Players, backward, steps) -> None:
    for number in range(3):
        fake = torch.tanh(model.g(batch(number)))
        backward(model.d(fake.detach()).mean(), steps[1])
        backward(-model.d(fake).mean() + fake.square().mean(), steps[0])


@distributed(world_size=2)
def test_a_step_spoils_only_graphs_of_what_it_has_changed(rank, world_size):
    def plain(loss, optimizer):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    want = Players()
    play(want, plain, [torch.optim.SGD(net.parameters(), lr=0.1) for net in (want.g, want.d)])
    with communicator() as comm:
        for stage in STAGES:
            model = Players()
            engine = engine_of(model, comm, stage)

            def sharded(loss, optimizer, engine=engine):
                optimizer.zero_grad()
                with engine.backward():
                    loss.backward()
                engine.step(optimizer)

            with engine.forward():
                play(model, sharded, [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model.g, model.d)])
            engine.release(whole=True)
            assert_weights(model, want, f"stage {stage}")


class Conjugated(nn.Module):
    """Lazy and real views of a complex weight."""

    def __init__(self, how) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.layers = nn.ModuleList(Complex() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, self.how)
        return x.abs().square().mean()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))

    def forward(self, x, how):
        return x @ how(self.w)


VIEWS = {
    "conj": lambda w: w.conj().T,
    "view_as_real": lambda w: torch.view_as_real(w).sum(-1) + 0j,
    "real": lambda w: w.real + 0j,
    "imag": lambda w: w.conj().imag * 1j,
}


@distributed(world_size=2)
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_complex_weights(rank, world_size, view):
    want = Conjugated(VIEWS[view])
    want(batch().cfloat()).backward()
    torch.optim.SGD(want.parameters(), lr=0.1).step()
    with communicator() as comm:
        for stage in STAGES:
            model = Conjugated(VIEWS[view])
            engine = engine_of(model, comm, stage)
            run(engine, batch().cfloat())
            engine.step(torch.optim.SGD(model.parameters(), lr=0.1))
            engine.release(whole=True)
            assert_weights(model, want, f"stage {stage}")


@distributed(world_size=2)
def test_an_exception_in_the_users_own_backward_is_survived(rank, world_size):
    want = Net()
    want(batch(1)).backward()
    torch.optim.SGD(want.parameters(), lr=0.1).step()
    with communicator() as comm:
        for stage in STAGES:
            model = Net()
            engine = engine_of(model, comm, stage)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            handle = model.blocks[0].lin.weight.register_hook(lambda grad: 1 / 0)
            with engine.forward(), pytest.raises(ZeroDivisionError):
                model(batch()).backward()
            handle.remove()
            optimizer.zero_grad()
            with engine.forward():
                model(batch(1)).backward()
            engine.step(optimizer)
            engine.release(whole=True)
            assert_weights(model, want, f"stage {stage}")


# Optimizer state


@distributed(world_size=2)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adagrad])
def test_state_loaded_into_a_running_optimizer(rank, world_size, kind):
    """``optimizer.load_state_dict`` in mid-run acts, with scalar parameters too."""

    class Scaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return super().forward(x * self.scale)

    want, later = Scaled(), Scaled()
    optimizer = kind(want.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        want(batch(step)).backward()
        optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    follow = kind(later.parameters(), lr=0.01)
    follow.load_state_dict(copy.deepcopy(saved))
    later(batch(3)).backward()
    follow.step()
    with communicator() as comm:
        for stage in STAGES:
            for own_call in (True, False):
                model = Scaled()
                start = [p.detach().clone() for p in model.parameters()]
                optimizer = kind(model.parameters(), lr=0.01)
                engine = engine_of(model, comm, stage)
                run(engine, batch())
                engine.step(optimizer)
                engine.load_parameters({id(p): value for p, value in zip(model.parameters(), start, strict=True)})
                if own_call:
                    optimizer.load_state_dict(copy.deepcopy(saved))
                else:
                    engine.load_optimizer_state(optimizer, saved)
                optimizer.zero_grad()
                run(engine, batch(3))
                engine.step(optimizer)
                engine.release(whole=True)
                assert_weights(model, later, f"stage {stage}, own call {own_call}")


def test_every_group_is_tried():
    class Hybrid(torch.optim.Optimizer):
        def __init__(self, groups):
            super().__init__(groups, {"lr": 0.1, "normed": False})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad / p.grad.norm() if group["normed"] else group["lr"] * p.grad)

    model = Net()
    check_elementwise(Hybrid([{"params": list(model.parameters())}]))
    groups = [{"params": [model.head.bias]}, {"params": [model.head.weight], "normed": True}]
    with pytest.raises(ValueError, match="Hybrid"):
        check_elementwise(Hybrid(groups))


@distributed(world_size=2)
def test_a_released_engine_is_freed(rank, world_size):
    for whole in (True, False):
        with communicator() as comm:
            model = Net()
            engine = engine_of(model, comm, 3)
            run(engine, batch())
            engine.release(whole=whole)
            gone = weakref.ref(engine)
            del engine, model
            gc.collect()
            assert gone() is None, f"whole={whole}"


@distributed(world_size=2)
def test_warnings_of_what_cannot_be_as_under_ddp(rank, world_size):
    with communicator() as comm:
        model = nn.Sequential(nn.Embedding(4, WIDTH, max_norm=1.0), Net())
        with pytest.warns(UserWarning, match="'0' has max_norm"):
            engine = engine_of(model, comm, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: None)
        with pytest.warns(UserWarning, match="SGD has step hooks"):
            engine.step(optimizer)
        engine.release(whole=True)
