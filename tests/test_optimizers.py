"""The user's own optimizer over shards: the same numbers and the same state as over the whole, or a clear refusal."""

import copy
import itertools
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import zoo
from harness import distributed
from oracles import (
    adamw,
    assert_same,
    assert_same_state,
    build_engine,
    communicator,
    engine_step,
    finish,
    plain,
    seeded,
    train_engine,
)
from torch import optim
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_zero.engine import check_elementwise
from lightning_zero.engine.elementwise import check_state_moves, takes_one_by_one


class SignMomentum(Optimizer):
    """Element-wise, and torch has never heard of it."""

    def __init__(self, params, lr=0.01, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["momentum"]).add_(p.grad)
                p.sub_(mean.sign(), alpha=group["lr"])


class Counting(Optimizer):
    """Element-wise, with a number in its group that one step must change once."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / group["k"])


class Collecting(Optimizer):
    """Element-wise, but looks at all groups before it changes anything."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure=None):
        found = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, group in found:
            mean = self.state[p].setdefault("mean", torch.zeros_like(p))
            mean.lerp_(p.grad, 1 - group["beta"])
            p.sub_(mean, alpha=group["lr"])


class Stepwise(SignMomentum):
    """Counts its steps by itself."""

    def __init__(self, params):
        super().__init__(params)
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.count)


class Ticking(SignMomentum):
    """Counts its steps in tensors, one of its own and one in its group."""

    def __init__(self, params):
        super().__init__(params)
        self.ticks, self.param_groups[0]["ticks"] = torch.zeros(()), torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        self.ticks += 1
        for group in self.param_groups:
            group["ticks"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (group["lr"] / self.ticks))


class Hoarding(SignMomentum):
    """Keeps its momentum beside ``self.state``."""

    def __init__(self, params):
        super().__init__(params)
        self.means = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.means.setdefault(p, torch.zeros_like(p))
                    p.sub_(mean.lerp_(p.grad, 0.1), alpha=group["lr"])


class NormScaled(Optimizer):
    """Not element-wise: the step of an element depends on all others of its parameter."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (p.grad.norm() + 1e-8), alpha=group["lr"])


OPTIMIZERS = {
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd_nesterov": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_fused": partial(optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": partial(optim.Adam, lr=0.01, weight_decay=0.01),
    "adam_amsgrad": partial(optim.Adam, lr=0.01, amsgrad=True, maximize=True),
    "adam_tensor_lr": lambda params: optim.Adam(params, lr=torch.tensor(0.01)),
    "adamw": partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "adamw_foreach": partial(optim.AdamW, lr=0.01, foreach=True),
    "adamw_fused": partial(optim.AdamW, lr=0.01, fused=True),
    "adagrad": partial(optim.Adagrad, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.1),
    "adagrad_fused": partial(optim.Adagrad, lr=0.05, fused=True),
    "rmsprop": partial(optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "nadam": partial(optim.NAdam, lr=0.01),
    "radam": partial(optim.RAdam, lr=0.01),
    "adadelta": partial(optim.Adadelta, lr=0.5),
    "adamax": partial(optim.Adamax, lr=0.01),
    "rprop": partial(optim.Rprop, lr=0.01),
    "asgd": partial(optim.ASGD, lr=0.01, t0=2),
    "custom": SignMomentum,
    "custom_group_state": Counting,
    "custom_all_together": Collecting,
    "custom_count": Stepwise,
    "custom_tensors": Ticking,
    "custom_beside": Hoarding,
}


def of_all(make):
    return lambda named: make([p for _, p in named])


def assert_equal_runs(rank, name, stages=(1, 3), **options):
    """Sharded runs equal the plain loop, in weights and in optimizer state."""
    make = partial(zoo.make, name)
    want = plain(make, **options)
    with communicator() as comm:
        for stage in stages:
            got = train_engine(make, comm, stage=stage, reduce_at="window", tile_size=64, with_state=True, **options)
            assert_same(got, want, f"stage {stage}", buffers=rank == 0)
            if rank == 0:
                assert_same_state(got.state, want.state, f"stage {stage}")
            else:
                assert got.state is None
    return want


@distributed(world_size=2)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_equals_the_whole_one(rank, world_size, name):
    assert_equal_runs(rank, "Wide", stages=(3,), optimizer=of_all(OPTIMIZERS[name]))
    assert_equal_runs(rank, "Unused", stages=(1,), optimizer=of_all(OPTIMIZERS[name]), accumulate=2)


def by_ndim(named):
    wide = [p for _, p in named if p.ndim > 1]
    return optim.AdamW(
        [{"params": wide, "weight_decay": 0.5}, {"params": [p for _, p in named if p.ndim <= 1]}], lr=0.01
    )


def by_name(named):
    groups = [[p for name, p in named if ("head" in name) == flag] for flag in (True, False)]
    return optim.AdamW([{"params": groups[0], "lr": 0.1}, {"params": groups[1], "betas": (0.5, 0.9)}], lr=0.01)


def with_names(named):
    return optim.AdamW(named, lr=0.01)


def with_empty_group(named):
    return optim.AdamW([{"params": []}, {"params": [p for _, p in named]}], lr=0.01)


def backwards(named):
    return optim.AdamW([p for _, p in reversed(list(named))], lr=0.01)


def one_each(named):
    return optim.AdamW([{"params": [p], "lr": 0.01 * (i + 1)} for i, (_, p) in enumerate(named)])


def not_all(named):
    return optim.AdamW([p for name, p in named if "lin.weight" not in name], lr=0.01)


@distributed(world_size=2)
@pytest.mark.parametrize("groups", [by_ndim, by_name, with_names, with_empty_group, backwards, one_each, not_all])
@pytest.mark.parametrize("name", ["Unused", "FewElements"])
def test_parameter_groups(rank, world_size, name, groups):
    assert_equal_runs(rank, name, optimizer=groups)


@distributed(world_size=2)
def test_group_added_during_the_run(rank, world_size):
    """Parameters that were in no group get their state, and begin to move, from then on."""

    def follow(optimizer, named):
        left = {"params": [p for name, p in named if "lin.weight" in name], "lr": 0.05}
        calls = itertools.count()
        return lambda: optimizer.add_param_group(left) if next(calls) == 2 else None

    want = assert_equal_runs(rank, "Blocks", optimizer=not_all, follow=follow)
    assert len(want.state["state"]) == 9


SCHEDULERS = {
    "lambda": lambda o, _: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)).step,
    "one_cycle": lambda o, _: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10).step,
    "sequential": lambda o, _: (
        lr_scheduler.SequentialLR(
            o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.5)], milestones=[3]
        ).step
    ),
}


@distributed(world_size=2)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_act_on_the_users_optimizer(rank, world_size, scheduler):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a scheduler warns when the optimizer that it knows is not the one that steps
        assert_equal_runs(rank, "Gpt", optimizer=by_ndim, follow=SCHEDULERS[scheduler])


@distributed(world_size=2)
def test_hooks_see_one_step_and_the_users_parameters(rank, world_size):
    with communicator() as comm:
        for stage in (0, 1, 3):
            model = zoo.make("Wide", rank)
            engine = build_engine(model, comm, stage=stage, tile_size=64)
            optimizer = adamw(model.named_parameters())
            groups, params = optimizer.param_groups, list(model.parameters())
            before, after = [], []
            optimizer.register_step_pre_hook(lambda o, args, kwargs, seen=before: seen.append(o))
            optimizer.register_step_post_hook(lambda o, args, kwargs, seen=after: seen.append(o))
            for step in range(3):
                engine_step(engine, model, optimizer, comm, step)
            assert before == after == [optimizer] * 3
            assert optimizer.param_groups is groups
            assert all(mine is theirs for mine, theirs in zip(groups[0]["params"], params, strict=True))
            engine.release(whole=True)


def test_trials_leave_no_trace():
    """Not who writes to groups or comes back to earlier parameters may step part by part."""
    calls = []
    kinds = {SignMomentum: True, Stepwise: True, optim.Adam: True}
    kinds |= dict.fromkeys((Counting, Collecting, Ticking, Hoarding), False)
    hook = register_optimizer_step_pre_hook(lambda *args: calls.append(args))
    try:
        for kind, may in kinds.items():
            param = torch.nn.Parameter(torch.ones(3))
            param.grad = torch.ones(3)
            optimizer = kind([param])
            before = copy.deepcopy({key: value for key, value in optimizer.param_groups[0].items() if key != "params"})
            check_elementwise(optimizer)
            assert takes_one_by_one(optimizer) is may, kind
            assert not optimizer.state and before.items() <= optimizer.param_groups[0].items()
            assert torch.equal(param, torch.ones(3)) and torch.equal(param.grad, torch.ones(3))
            assert getattr(optimizer, "ticks", 0) == 0 and not getattr(optimizer, "means", None)
    finally:
        hook.remove()
    assert not calls


def test_state_that_could_not_be_moved():
    for kind in (Counting, Collecting, Ticking, SignMomentum, Stepwise, optim.Adam):
        check_state_moves(kind([torch.nn.Parameter(torch.ones(3))]))
    with pytest.raises(ValueError, match="Hoarding cannot be offloaded: it keeps something .* elsewhere"):
        check_state_moves(Hoarding([torch.nn.Parameter(torch.ones(3))]))


@distributed(world_size=2)
def test_hooks_of_all_optimizers_see_the_users_groups(rank, world_size):
    seen = []

    def hook(optimizer, args, kwargs):
        seen.append(optimizer.param_groups[0]["lr"])

    with communicator() as comm:
        model = zoo.make("Wide", rank)
        engine = build_engine(model, comm, stage=3, tile_size=64)
        optimizer = adamw(model.named_parameters())
        handle = register_optimizer_step_pre_hook(hook)
        try:
            with pytest.warns(UserWarning, match="AdamW has step hooks"):
                engine_step(engine, model, optimizer, comm, 0)
        finally:
            handle.remove()
        engine.release(whole=True)
    assert seen == [0.01]


def drop_by_optimizer(model, optimizer):
    optimizer.zero_grad()


def drop_by_module(model, optimizer):
    model.zero_grad()


def drop_one_by_one(model, optimizer):
    for p in model.parameters():
        p.grad = None


@distributed(world_size=2)
@pytest.mark.parametrize("drop", [drop_by_optimizer, drop_by_module, drop_one_by_one])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_that_the_user_drops_are_gone(rank, world_size, drop, last):
    """One backward, its gradients dropped, then another backward: only the second counts."""
    make = partial(zoo.make, "Blocks")
    want = plain(make, steps=1)
    with communicator() as comm:
        for stage in (0, 1, 2, 3):
            model = make(rank)
            engine = build_engine(model, comm, stage=stage)
            optimizer = adamw(model.named_parameters())
            with engine.forward():
                loss = model.loss(seeded(model, rank, 55))
            with engine.backward(last=last):
                loss.backward()
            drop(model, optimizer)
            assert all(p.grad is None for p in model.parameters())
            losses, _ = engine_step(engine, model, optimizer, comm, 0)
            engine.release(whole=True)
            assert_same(finish(model, losses, []), want, f"stage {stage}")


@distributed(world_size=2)
@pytest.mark.parametrize("dropped", ["zeros", "nothing"])
def test_step_after_dropped_gradients(rank, world_size, dropped):
    """``set_to_none=False`` leaves zeros, with which weights decay; ``None`` leaves weights alone."""
    with communicator() as comm:
        for stage in (0, 1, 2, 3):
            model = zoo.make("Blocks", 0)
            start = {name: p.detach().clone() for name, p in model.named_parameters()}
            engine = build_engine(model, comm, stage=stage)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, weight_decay=0.5)
            with engine.forward():
                loss = model.loss(seeded(model, rank, 0))
            with engine.backward():
                loss.backward()
            optimizer.zero_grad(set_to_none=dropped == "nothing")
            engine.step(optimizer)
            engine.release(whole=True)
            for name, p in model.named_parameters():
                factor = 0.75 if dropped == "zeros" else 1.0
                torch.testing.assert_close(p.detach(), factor * start[name], msg=lambda m, s=stage: f"stage {s}: {m}")


@distributed(world_size=2)
def test_one_dropped_gradient(rank, world_size):
    """A single ``p.grad = None`` leaves the other gradients, of the same unit too."""
    with communicator() as comm:
        for stage in (0, 1, 2, 3):
            model = zoo.make("Blocks", 0)
            start = {name: p.detach().clone() for name, p in model.named_parameters()}
            engine = build_engine(model, comm, stage=stage)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            with engine.forward():
                loss = model.loss(seeded(model, rank, 0))
            with engine.backward():
                loss.backward()
            model.blocks[1].lin.weight.grad = None
            engine.step(optimizer)
            engine.release(whole=True)
            moved = {name for name, p in model.named_parameters() if (p != start[name]).any()}
            assert moved == set(start) - {"blocks.1.lin.weight"}, f"stage {stage}"


class Lookahead(Optimizer):
    """Wraps another optimizer, whose groups and state are its own."""

    def __init__(self, base):
        self.base = base
        self.param_groups, self.state, self.defaults = base.param_groups, base.state, base.defaults
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        for group in self.param_groups:
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.clone())
                p.copy_(slow.lerp_(p, 0.5))


class Larc(Optimizer):
    """Scales each layer's gradient, then lets the wrapped optimizer step; the groups are that one's, by property."""

    def __init__(self, optim):
        self.optim = optim
        self.state, self.defaults = optim.state, optim.defaults
        self._optimizer_step_pre_hooks = self._optimizer_step_post_hooks = {}

    @property
    def param_groups(self):
        return self.optim.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(p.norm() / (p.grad.norm() + 1e-8))
        self.optim.step()


class Hiding(Optimizer):
    """Wraps another optimizer where nobody looks."""

    def __init__(self, base):
        super().__init__(base.param_groups, base.defaults)
        self.steps = [base.step]

    def step(self, closure=None):
        for step in self.steps:
            step()


WRAPPERS = {"Lookahead": Lookahead, "Larc": Larc, "Hiding": Hiding}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_refused_and_the_trial_moves_nothing(name):
    """A trial of the outer one would step the inner one, on the user's weights."""
    model = zoo.make("Blocks")
    optimizer = WRAPPERS[name](optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    model.loss(model.batch(0, 0)).backward()
    before = [(p.detach().clone(), p.grad.clone()) for p in model.parameters()]
    with pytest.raises(ValueError, match=name):
        check_elementwise(optimizer)
    for p, (value, grad) in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, value) and torch.equal(p.grad, grad)
    assert not optimizer.state


class Numbering(SignMomentum):
    """Keeps a number as a tensor of one element, which looks like the state of a scalar parameter."""

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("number", torch.zeros(1)).add_(1)


@distributed(world_size=3)
def test_one_number_is_not_taken_for_a_shard(rank, world_size):
    """Ranks without a part of a scalar parameter know better than the one that has it."""
    assert_equal_runs(rank, "FewElements", optimizer=of_all(Numbering), steps=2)
    assert_equal_runs(rank, "NumbersBehind", optimizer=of_all(Numbering), steps=2)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_forgotten_optimizers_begin_anew(rank, world_size, stage):
    def train(comm, forget):
        model = zoo.make("Blocks", rank)
        engine = build_engine(model, comm, stage=stage)
        optimizer = adamw(model.named_parameters())
        for step in range(4):
            if step == 2:
                if forget:
                    engine.forget_optimizers()
                    assert engine.memory()["optimizer"] == 0
                else:
                    optimizer = adamw(model.named_parameters())
            engine_step(engine, model, optimizer, comm, step)
        assert engine.memory()["optimizer"] > 0
        state = engine.optimizer_state(optimizer)
        engine.release(whole=True)
        return finish(model, [], [], state)

    with communicator() as comm:
        got, want = train(comm, True), train(comm, False)
    assert_same(got, want)
    assert_same_state(got.state, want.state)


@distributed(world_size=2)
def test_the_own_state_dict_of_a_running_optimizer_warns(rank, world_size):
    with communicator() as comm:
        model = zoo.make("Blocks", rank)
        engine = build_engine(model, comm, stage=1)
        optimizers = [adamw(model.named_parameters()) for _ in range(2)]
        for step, optimizer in enumerate(optimizers):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                optimizer.state_dict()
            engine_step(engine, model, optimizer, comm, step)
            with pytest.warns(UserWarning, match=r"AdamW.state_dict\(\) has the options only: the state is sharded"):
                assert not optimizer.state_dict()["state"]
        engine.release(whole=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizers[0].state_dict()


class Scaled(Optimizer):
    """Its step takes an option."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None, factor=1.0):
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=factor * group["lr"])


@distributed(world_size=2)
def test_options_of_the_step_arrive(rank, world_size):
    with communicator() as comm:
        model, want = zoo.make("Blocks"), zoo.make("Blocks")
        engine = build_engine(model, comm, stage=3)
        chosen = Scaled(model.parameters())
        with engine.forward():
            loss = model.loss(seeded(model, 0, 0))
        with engine.backward():
            loss.backward()
        engine.step(chosen, factor=0.5)
        engine.release(whole=True)
    want.loss(seeded(want, 0, 0)).backward()
    Scaled(want.parameters()).step(factor=0.5)
    assert_same(finish(model, [], []), finish(want, [], []))


REFUSED = {
    "LBFGS": lambda model: optim.LBFGS(model.parameters()),
    "Muon": lambda model: optim.Muon([p for p in model.parameters() if p.ndim == 2]),
    "Adafactor": lambda model: optim.Adafactor(model.parameters()),
    "SparseAdam": lambda model: optim.SparseAdam(list(model.parameters())),
    "NormScaled": lambda model: NormScaled(model.parameters()),
}


@distributed(world_size=2)
@pytest.mark.parametrize("name", REFUSED)
def test_optimizers_that_need_whole_parameters_are_refused(rank, world_size, name):
    with communicator() as comm:
        for stage in (1, 3):
            model = zoo.make("Blocks", rank)
            engine = build_engine(model, comm, stage=stage)
            optimizer = REFUSED[name](model)
            with pytest.raises(ValueError, match=name):
                check_elementwise(optimizer)
            with engine.forward():
                loss = model.loss(seeded(model, rank, 0))
            with engine.backward():
                loss.backward()
            with pytest.raises(ValueError, match=name):
                engine.step(optimizer)
            engine.release(whole=True)


@distributed(world_size=2)
@pytest.mark.parametrize(
    "optimizer", [by_ndim, of_all(OPTIMIZERS["sgd_nesterov"]), of_all(OPTIMIZERS["adamw_fused"]), with_names]
)
def test_state_travels_between_stages_and_plain_torch(rank, world_size, optimizer):
    """Three steps, the state into a new optimizer of another stage, three more: six steps at once."""
    make = partial(zoo.make, "Unused")
    want = plain(make, optimizer=optimizer)
    half = plain(make, optimizer=optimizer, steps=3)
    with communicator() as comm:
        saved = half.state  # plain torch's own
        weights = half.weights
        for first, second in itertools.pairwise((3, 0, 2, 1, 3)):
            model = make(rank)
            model.load_state_dict(weights)
            engine = build_engine(model, comm, stage=second)
            chosen = optimizer(list(model.named_parameters()))
            engine.load_optimizer_state(chosen, copy.deepcopy(saved))
            for step in range(3, 6):
                engine_step(engine, model, chosen, comm, step)
            state = engine.optimizer_state(chosen)
            engine.release(whole=True)
            assert_same(finish(model, want.losses, []), want, f"stage {first} to {second}")
            if rank == 0:
                assert_same_state(state, want.state, f"stage {first} to {second}")
            box = [train_engine(make, comm, stage=second, steps=3, optimizer=optimizer, with_state=True).state]
            dist.broadcast_object_list(box)
            saved = box[0]
    unsharded = optimizer(list(make(0).named_parameters()))
    unsharded.load_state_dict(saved)
    assert_same_state(unsharded.state_dict(), half.state)


@distributed(world_size=2)
def test_state_of_another_shape_is_refused(rank, world_size):
    with communicator() as comm:
        model = zoo.make("Blocks", rank)
        engine = build_engine(model, comm)
        optimizer = adamw(model.named_parameters())
        other = plain(partial(zoo.make, "Blocks"), steps=1, optimizer=by_ndim).state
        with pytest.raises(ValueError, match="group"):
            engine.load_optimizer_state(optimizer, other)
        engine.release(whole=True)


@distributed(world_size=2)
def test_two_optimizers(rank, world_size):
    """Each step moves the parameters of its own optimizer only; state is kept per optimizer."""
    with communicator() as comm:
        for stage in (0, 1, 3):
            model = zoo.make("Blocks", rank)
            engine = build_engine(model, comm, stage=stage)
            body, head = adamw(model.blocks.named_parameters()), adamw(model.head.named_parameters())
            with engine.gathered(model):
                start = {name: p.detach().clone() for name, p in model.named_parameters()}
            engine_step(engine, model, body, comm, 0)
            model.zero_grad()
            with engine.gathered(model):
                moved = {name.split(".")[0] for name, p in model.named_parameters() if (p != start[name]).any()}
            assert moved == {"blocks"}, f"stage {stage}: {moved} moved"
            engine_step(engine, model, head, comm, 1)
            states = engine.optimizer_state(body), engine.optimizer_state(head)
            engine.release(whole=True)
            assert (model.head.weight != start["head.weight"]).any()
            assert (model.stem.weight == start["stem.weight"]).all()
            if rank == 0:
                assert [len(state["state"]) for state in states] == [6, 1]
