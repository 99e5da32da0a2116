"""Offload: the same bits wherever state, gradients, masters and parameters rest."""

from functools import partial
from typing import ClassVar

import pytest
import torch
import zoo
from harness import distributed
from lightning.pytorch.callbacks import ModelCheckpoint
from oracles import assert_same, assert_same_state, build_engine, communicator, engine_step, train_engine
from test_optimizers import Collecting, Counting, Hoarding, SignMomentum, Stepwise, Ticking
from test_precision import precision
from test_strategy import Net, fitted, loader, trainer, zero

from lightning_zero import OffloadConfig, Tier, TierArray, Transfer
from lightning_zero.engine import offload, state
from lightning_zero.engine.offload import make_tier
from lightning_zero.engine.tiers import HostTier

STAGES = [1, 2, 3]


@pytest.fixture
def disk(tmp_path):
    return {"device": "nvme", "nvme_path": str(tmp_path / "swap")}


@pytest.fixture
def small_windows(monkeypatch):
    """Several windows in the shards of small models."""
    monkeypatch.setattr(offload, "WINDOW", 1024)


def everywhere(stage, disk):
    return {"offload_optimizer": disk, **({"offload_params": disk} if stage == 3 else {})}


# The same bits


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "name", ["Gpt", "Tied", "Scalars", "ZeroElements", "Unused", "Frozen", "ParameterContainers", "CheckpointedBlocks"]
)
@distributed(world_size=2)
def test_state_on_disk_changes_no_bit(rank, world_size, name, stage, disk, small_windows):
    make = partial(zoo.make, name)
    with communicator() as comm:
        options = {"stage": stage, "accumulate": 2, "steps": 3}
        want = train_engine(make, comm, **options)
        assert_same(train_engine(make, comm, **options, **everywhere(stage, disk)), want, "on disk")
        if stage == 3:
            assert_same(train_engine(make, comm, **options, offload_params=disk), want, "parameters on disk")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ["Gpt", "Tied", "Frozen"])
@distributed(world_size=2)
def test_masters_on_disk_change_no_bit(rank, world_size, name, stage, disk, small_windows):
    make = partial(zoo.make, name)
    with communicator() as comm:
        options = {"stage": stage, "accumulate": 2, "steps": 3, "autocast": True}
        want = train_engine(make, comm, **options)
        assert_same(train_engine(make, comm, **options, offload_optimizer=disk), want, "on disk")
        if stage == 3:
            assert_same(train_engine(make, comm, **options, **everywhere(stage, disk)), want, "parameters, too")


@distributed(world_size=1)
def test_windows_make_room_for_whole_parameters(rank, world_size, disk, small_windows, monkeypatch):
    """When a run ends, parameters become whole in the memory that windows of the step had."""
    held = []
    with communicator() as comm:
        model = zoo.make("Gpt")
        engine = build_engine(model, comm, **everywhere(3, disk))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        engine_step(engine, model, optimizer, comm, 0)
        assert engine.passing_memory()["windows"] > 0
        restore = state.restore
        monkeypatch.setattr(state, "restore", lambda unit: (held.append(engine.passing_memory()), restore(unit)))
        engine.release(whole=True)
    assert len(held) == len(engine.units) and all(not any(passing.values()) for passing in held)


@pytest.mark.parametrize("buffers", [3, 4, 7])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=3)
def test_groups_in_any_order(rank, world_size, stage, buffers, disk):
    """Parameters of one window are in several groups, and some of them lie on other ranks only."""
    offload.WINDOW = 64  # more windows than buffers

    def train(**settings):
        model = zoo.make("Gpt")
        engine = build_engine(model, comm, stage=stage, **settings)
        params = list(model.parameters())[::-1]
        groups = [{"params": params[start::3], "lr": 0.01 * (start + 1)} for start in range(3)]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.1)
        for step in range(4):
            with engine.forward():
                loss = model.loss(model.batch(rank, step))
            optimizer.zero_grad()
            with engine.backward():
                loss.backward()
            engine.step(optimizer)
        state = engine.optimizer_state(optimizer)
        engine.release(whole=True)
        return model.state_dict(), state

    with communicator() as comm:
        want, want_state = train()
        got, got_state = train(offload_optimizer={**disk, "buffer_count": buffers})
    assert all(torch.equal(got[name], want[name]) for name in want)
    for index, entries in (want_state or {"state": {}})["state"].items():
        assert all(torch.equal(got_state["state"][index][key], value) for key, value in entries.items())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [Collecting, Counting, SignMomentum, Stepwise, Ticking])
@distributed(world_size=2)
def test_optimizers_of_ones_own(rank, world_size, kind, stage, disk, small_windows):
    def make_optimizer(named):
        return kind([p for _, p in named])

    with communicator() as comm:
        options = {"stage": stage, "accumulate": 2, "steps": 3, "optimizer": make_optimizer}
        want = train_engine(partial(zoo.make, "Gpt"), comm, **options)
        for places in (everywhere(stage, disk), {"offload_optimizer": InMemory}):
            assert_same(train_engine(partial(zoo.make, "Gpt"), comm, **options, **places), want, "elsewhere")


@pytest.mark.parametrize("kind", [Collecting, torch.optim.AdamW])
@distributed(world_size=1)
def test_what_needs_all_state_at_once_says_so_and_gives_the_memory_back(rank, world_size, kind, disk, small_windows):
    with communicator() as comm:
        model = zoo.make("Gpt")
        optimizer = kind(model.parameters())
        if kind is torch.optim.AdamW:
            optimizer.register_step_pre_hook(lambda *args: None)
        engine = build_engine(model, comm, stage=1, offload_optimizer=disk)
        with pytest.warns(UserWarning, match="all of its offloaded state in memory at once"):
            engine_step(engine, model, optimizer, comm, 0)
        sharded = engine.sharded(optimizer)
        assert len(sharded._buffers) == 4
        engine.release(whole=True)
        assert not sharded._buffers


@distributed(world_size=2)
def test_state_beside_the_state_is_refused(rank, world_size, disk):
    with communicator() as comm:
        model = zoo.make("Gpt")
        engine = build_engine(model, comm, stage=1, offload_optimizer=disk)
        with pytest.raises(ValueError, match="Hoarding cannot be offloaded"):
            engine.sharded(Hoarding(model.parameters()))
        engine.release(whole=True)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_state_after_the_run_is_that_of_its_end(rank, world_size, stage, disk, tmp_path):
    """A checkpoint that is saved after ``fit``, whatever rests elsewhere."""
    places = [{}, {"offload_optimizer": disk}, everywhere(stage, disk), {"offload_params": disk} if stage == 3 else {}]
    for place in places:
        run = trainer(rank, world_size, tmp_path, zero(stage, **place), max_steps=3, max_epochs=-1)
        model = Net()
        run.fit(model, loader())
        run.save_checkpoint(tmp_path / "after.ckpt")
        saved = torch.load(tmp_path / "after.ckpt", weights_only=True)["optimizer_states"][0]["state"]
        assert len(saved) == len(list(model.parameters())), place
        if place == {}:
            want = saved
        assert_same_state({"state": saved}, {"state": want})


class Two(Net):
    """Two optimizers, one of them not torch's, each with its turn."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return SignMomentum(self.blocks.parameters(), lr=0.01), torch.optim.AdamW(self.head.parameters(), lr=0.01)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_several_optimizers_of_any_kind(rank, world_size, stage, disk, small_windows, tmp_path):
    want = fitted(rank, world_size, tmp_path, zero(stage), Two()).state_dict()
    got = fitted(rank, world_size, tmp_path, zero(stage, **everywhere(stage, disk)), Two()).state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_a_run_is_saved_and_goes_on_anywhere(rank, world_size, stage, precision, disk, small_windows, tmp_path):
    options = {"precision": precision, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "max_epochs": 2}
    on_disk = everywhere(stage, disk)

    def run(settings, **more):
        saves_folder = tmp_path / f"{len(settings)} {len(more)}"
        saves = ModelCheckpoint(saves_folder, save_top_k=-1)
        model, strategy = Net(), zero(stage, **settings)
        fit = trainer(rank, world_size, tmp_path, strategy, callbacks=[saves], enable_checkpointing=True, **options)
        fit.fit(model, loader(), **more)
        first = next(saves_folder.glob("epoch=0*"), None)  # not where it goes on behind it
        return model.state_dict(), strategy.optimizer_state(fit.optimizers[0]), first

    want, want_state, resident = run({})
    got, got_state, moved = run(on_disk)
    assert all(torch.equal(got[name], want[name]) for name in want)
    for index, entries in want_state.get("state", {}).items():
        assert all(torch.equal(got_state["state"][index][key], value) for key, value in entries.items())
    for settings, path in (({}, moved), (on_disk, resident)):
        resumed, _, _ = run(settings, ckpt_path=path)
        assert all(torch.equal(resumed[name], want[name]) for name in want), "a resumed run is another one"


@distributed(world_size=2)
def test_the_cpu_is_accepted_where_it_saves_nothing(rank, world_size, tmp_path):
    want = fitted(rank, world_size, tmp_path, "zero3").state_dict()
    for name in ("zero3_offload", "zero2_offload", "zero1_offload"):
        got = fitted(rank, world_size, tmp_path, name).state_dict()
        assert name != "zero3_offload" or all(torch.equal(got[key], want[key]) for key in want)


# Sizes that fit nothing, and a tier of somebody's own


class InMemory(Tier):
    """Somebody's own place for state: here, in memory, with what the disk would be asked for."""

    asked: ClassVar[list[str]] = []

    def __init__(self):
        super().__init__()
        self.inner = HostTier()
        self.before_fetch.append(lambda array, start, out: self.asked.append(f"fetch {array.what}"))
        self.after_store.append(lambda array, start, values: self.asked.append(f"store {array.what}"))

    def empty(self, numel, dtype, what):
        return InMemoryArray(self, numel, dtype, what)

    def nbytes(self):
        return self.inner.nbytes()


class InMemoryArray(TierArray):
    def __init__(self, tier, numel, dtype, what):
        super().__init__(tier, numel, dtype, what)
        self.inner = tier.inner.empty(numel, dtype, what)

    def _fetch(self, start, out):
        return Late(partial(self.inner.fetch, start, out))

    def _store(self, start, values):
        return self.inner.store(start, values)


class Late(Transfer):
    """Reads when somebody waits for it, and not before."""

    def __init__(self, begin):
        self.begin = begin

    def wait(self):
        self.begin().wait()


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_steps_are_the_same_wherever_things_rest(rank, world_size, stage, autocast, disk, small_windows, full):
    make = partial(zoo.make, "OddSizes")
    steps = 20 if full else 5
    options = {"stage": stage, "accumulate": 2, "steps": steps, "clip": 0.5, "autocast": autocast, "with_state": True}
    with communicator() as comm:
        want = train_engine(make, comm, **options)
        assert max(want.norms) > 0.5 > min(want.norms), "clipped in some steps, and not in others"
        none, some, everything = ({**disk, "ratio": ratio} for ratio in (0, 0.3, 1))
        places = [("cpu", "cpu"), (InMemory, InMemory), (none, disk), (some, disk), (everything, disk), (disk, "none")]
        for place, params in places:
            settings = {"offload_optimizer": place, "offload_params": params if stage == 3 else "none"}
            got = train_engine(make, comm, **options, **settings)
            assert_same(got, want, str(settings))
            assert_same_state(got.state, want.state)
            assert got.norms == want.norms
    asked = " ".join(InMemory.asked)
    names = ["exp_avg of", "exp_avg_sq of", "gradients of", *(["master weights of"] if autocast else [])]
    assert all(f"{way} {name}" in asked for way in ("fetch", "store") for name in names)
    assert ("fetch parameters of" in asked) == (stage == 3)


@distributed(world_size=2)
def test_the_ratio_is_kept(rank, world_size, disk):
    def nbytes(ratio):
        model = zoo.make("DeepMlp")
        engine = build_engine(model, comm, stage=1, offload_optimizer={**disk, "ratio": ratio})
        optimizer = torch.optim.AdamW(model.parameters())
        with engine.forward():
            loss = model.loss(model.batch(rank, 0))
        with engine.backward():
            loss.backward()
        before = engine.memory()
        engine.step(optimizer)
        memory = engine.memory()
        engine.release(whole=True)
        return before["gradients"], memory["optimizer"], memory["offload_optimizer"]

    with communicator() as comm:
        (gradients, state, _), some, (none, nothing, everything) = nbytes(0), nbytes(0.3), nbytes(1)
    assert none == nothing == 0 and everything >= gradients + state
    assert some[0] == pytest.approx(0.7 * gradients, rel=0.1) and some[1] == pytest.approx(0.7 * state, rel=0.1)


@distributed(world_size=2)
def test_gradients_on_disk_can_be_read_and_written(rank, world_size, disk):
    """Users' own looks at ``p.grad``, and their changes, between backward and step."""

    def train(**settings):
        model = zoo.make("Gpt")
        engine = build_engine(model, comm, stage=2, **settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        norms = []
        for step in range(3):
            with engine.forward():
                loss = model.loss(model.batch(rank, step))
            with engine.backward():
                loss.backward()
            first, second, *_, last = model.parameters()
            norms.append([p.grad.norm().item() for p in model.parameters()])
            first.grad.mul_(0.5)
            second.grad = torch.ones_like(second)
            last.grad = None
            engine.step(optimizer)
            optimizer.zero_grad(set_to_none=step == 1)
        engine.release(whole=True)
        return model.state_dict(), norms

    with communicator() as comm:
        want, norms = train()
        got, got_norms = train(offload_optimizer=disk)
    assert norms == got_norms and all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_loss_scales_and_skipped_steps(rank, world_size, stage, disk, small_windows, tmp_path):
    def run(**settings):
        kwargs = precision("16-mixed", init_scale=2.0**18)  # too high at first
        kwargs |= {"max_epochs": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.01}
        state = fitted(rank, world_size, tmp_path, zero(stage, **settings), Net(), **kwargs).state_dict()
        return state, kwargs["plugins"][0].scaler.get_scale()

    (want, scale), (got, got_scale) = run(), run(**everywhere(stage, disk))
    assert got_scale == scale < 2**18 and all(torch.equal(got[name], want[name]) for name in want)


class Unfreezing(Net):
    """A part trains from the second epoch on, and the schedule changes the rate in every step."""

    def __init__(self):
        super().__init__()
        self.head.requires_grad_(False)

    def on_train_epoch_start(self):
        self.head.requires_grad_(self.current_epoch > 0)

    def validation_step(self, batch, batch_idx):
        assert torch.isfinite(super().training_step(batch, batch_idx))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer), "interval": "step"}]


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_what_trains_later_and_validation_before_the_first_step(rank, world_size, stage, disk, tmp_path):
    def run(**settings):
        model, fit = Unfreezing(), trainer(rank, world_size, tmp_path, zero(stage, **settings), max_epochs=2)
        fit.validate(model, loader(), verbose=False)
        fit.fit(model, loader(), loader())
        return model.state_dict()

    want, got = run(), run(**everywhere(stage, disk))
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("stage", STAGES)
@distributed(world_size=2)
def test_a_16_bit_base_that_trains_later_gets_its_masters(rank, world_size, stage, disk, tmp_path):
    """Masters of frozen 16-bit weights have 16 bits until then, wherever they rest."""

    def run(**settings):
        model = Unfreezing()
        model.head.bfloat16()
        model.head.register_forward_pre_hook(lambda head, args: tuple(x.to(head.weight.dtype) for x in args))
        fit = trainer(rank, world_size, tmp_path, zero(stage, **settings), max_epochs=2)
        fit.fit(model, loader())
        return model.state_dict()

    want = run()
    assert not torch.equal(want["head.weight"], Unfreezing().head.weight.bfloat16())
    for settings in ({"offload_optimizer": disk}, everywhere(stage, disk)):
        got = run(**settings)
        assert all(torch.equal(got[name], want[name]) for name in want)
    if stage == 3:
        got = run(offload_params=disk)
        assert all(torch.equal(got[name], want[name]) for name in want)


def test_a_tier_that_is_none_is_refused():
    with pytest.raises(TypeError, match="has made dict, which is no lightning_zero.Tier"):
        make_tier(OffloadConfig(device=dict), torch.device("cpu"))
