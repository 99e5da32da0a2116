"""How the loss scale moves, and steps that are left out without one."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from harness import distributed, run_ranks
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from test_offload import everywhere
from test_precision import Buffered, Steps, assert_equal, spoiled
from test_strategy import Net, fitted, loader, trainer, zero
from torch.amp import GradScaler

from lightning_zero.config.training import LossScaleConfig
from lightning_zero.precision.scaler import LossScaler, scaler_of


def moved(scaler, overflow):
    """The scale after a step, or ``error`` where it cannot fall."""
    scaler.scale(torch.ones(()))
    scaler._per_optimizer_states[0]["found_inf_per_device"] = {"cpu": torch.tensor(float(overflow))}
    lowest = overflow and isinstance(scaler, LossScaler) and scaler.is_lowest
    scaler.update()
    return "error" if lowest else scaler.get_scale()


def scales(scaler, script):
    """The scales after each step of a script, in which ``x`` is an overflow; an error ends it."""
    said = []
    for step in script:
        said.append(moved(scaler, step == "x"))
        if said[-1] == "error":
            break
    return said


# What DeepSpeed 0.19.8's DynamicLossScaler says after each step, from a scale of 2**power. Its first doubling after an
# overflow, and at the beginning, comes after a step more than its window; so it got one more "." before each run of
# those, whose number is left out here. Settings: power, window, hysteresis, consecutive_hysteresis, min_loss_scale.
DEEPSPEED = [
    ("..x....xx.....", (4, 2, 1, False, 1.0), [16, 32, 16, 16, 32, 32, 64, 32, 16, 16, 32, 32, 64, 64]),
    ("..x....xx.....", (4, 2, 2, False, 1.0), [16, 32, 32, 32, 64, 64, 128, 128, 64, 64, 128, 128, 256, 256]),
    ("x.x.x..xxx....x.x", (4, 2, 2, False, 1.0), [16, 16, 8, 8, 4, 4, 8, 8, 4, 2, 2, 4, 4, 8, 8, 8, 4]),
    ("x.x.x..xxx....x.x", (4, 2, 2, True, 1.0), [*[16] * 6, 32, 32, 16, 8, 8, 16, 16, *[32] * 4]),
    ("xx.xxx...xx", (4, 3, 3, False, 1.0), [16, 16, 16, 8, 4, 2, 2, 2, 4, 4, 4]),
    ("xx.xxx...xx", (4, 3, 3, True, 1.0), [16, 16, 16, 16, 16, 8, 8, 8, 16, 16, 16]),
    ("xxxxx", (4, 2, 1, False, 4.0), [8, 4, "error"]),
    ("xxxxxx", (3, 2, 2, False, 4.0), [8, 4, "error"]),
    ("xxx", (1, 2, 1, False, 1.5), [1.5, "error"]),
]


def config(power, window, hysteresis, consecutive, least):
    return LossScaleConfig(
        initial_scale_power=power,
        loss_scale_window=window,
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive,
        min_loss_scale=least,
    )


SOME_STAGES = [*(pytest.param(stage, marks=pytest.mark.full) for stage in (0, 2)), 1, 3]
"""Of the two ways to reduce gradients; stages 0 and 2 are in them."""


@pytest.mark.parametrize(("script", "settings", "want"), DEEPSPEED)
def test_scales_are_deepspeeds(script, settings, want):
    assert scales(LossScaler(config(*settings), "cpu"), script) == want


@pytest.mark.parametrize(("script", "settings", "want"), DEEPSPEED)
def test_a_resumed_scale_goes_on_exactly(script, settings, want):
    for stop in range(1, len(want)):
        early, late = LossScaler(config(*settings), "cpu"), LossScaler(config(*settings), "cpu")
        scales(early, script[:stop])
        late.load_state_dict(early.state_dict())
        assert scales(late, script[stop:]) == want[stop:]


def test_defaults_are_torchs():
    script = "x" * 3 + "." * 2001 + "x" + "." * 1999 + "x" + "." * 4001
    assert scales(LossScaler(LossScaleConfig(), "cpu"), script) == scales(GradScaler("cpu"), script)


def test_torchs_states_and_these_are_read_by_either():
    plain, own = GradScaler("cpu", growth_interval=3), LossScaler(LossScaleConfig(loss_scale_window=3), "cpu")
    scales(plain, "xx..")
    own.load_state_dict(plain.state_dict())
    scales(own, "..")
    plain = GradScaler("cpu")
    plain.load_state_dict(own.state_dict())
    assert plain.get_scale() == own.get_scale() == 2.0**15 and scales(plain, ".x..") == scales(own, ".x..")


def test_a_shorter_window_than_that_of_the_file_still_ends():
    plain, own = GradScaler("cpu"), LossScaler(LossScaleConfig(loss_scale_window=3), "cpu")
    scales(plain, "." * 10)
    own.load_state_dict(plain.state_dict())
    assert scales(own, "....") == [2.0**17] * 3 + [2.0**18]


def test_a_fixed_scale_never_moves_and_never_fails():
    scaler, plain = LossScaler(LossScaleConfig(loss_scale=0.5, loss_scale_window=1), "cpu"), GradScaler("cpu")
    assert scales(scaler, "x..xx...") == [0.5] * 8
    scaler.load_state_dict(plain.state_dict())
    assert scales(scaler, "x.") == [0.5] * 2


# In a run


def plugin(name, **settings):
    """Lightning's own plugin, with a configuration as the strategy gives it."""
    made = MixedPrecision(name, "cpu") if name == "16-mixed" else HalfPrecision(name)
    made.loss_scale = LossScaleConfig(**settings)
    return {"plugins": [made]}


NAMES = ["16-mixed", "16-true"]


@pytest.mark.parametrize("stage", SOME_STAGES)
@pytest.mark.parametrize("name", NAMES)
def test_an_overflow_on_one_rank_moves_the_scale_on_all(name, stage, tmp_path):
    def body(rank, world_size):
        steps = Steps()
        kwargs = plugin(name, initial_scale_power=10, loss_scale_window=3, hysteresis=2)
        model = spoiled(1, 1, math.inf, scheduled=True)
        fitted(rank, world_size, tmp_path, zero(stage), model, callbacks=[steps], max_epochs=2, **kwargs)
        if rank == 0:
            assert [any(steps.changed(step)) for step in range(8)] == [step not in (1, 5) for step in range(8)]
        return steps.rates, steps.scales

    for rates, got in run_ranks(body, 2):
        assert rates == [0.01 * (1 / (1 + taken)) for taken in (0, 1, 1, 2, 3, 4, 4, 5, 6)]
        # the overflow of step 1 is the first of two; the doubling after step 4 lets the counting begin anew
        assert got == [1024] * 5 + [2048] * 4


@distributed(world_size=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_fixed_scale_skips_and_says_so_once(rank, world_size, name, tmp_path):
    steps, kwargs = Steps(), plugin(name, loss_scale=64.0)
    model = spoiled(1, "all", math.inf)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fitted(rank, world_size, tmp_path, zero(3), model, callbacks=[steps], **kwargs)
    texts = [str(each.message) for each in said if "fixed loss scale of 64.0" in str(each.message)]
    assert len(texts) == (rank == 0) and all("'blocks.1.weight' (on rank 1)" in text for text in texts)
    assert steps.scales == [64] * 5 and kwargs["plugins"][0].skipped_steps == 4
    assert_equal(dict(model.named_parameters()), dict(Buffered().named_parameters()))


@distributed(world_size=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_scale_at_its_minimum_is_an_error_on_all_ranks(rank, world_size, name, tmp_path):
    kwargs = plugin(name, initial_scale_power=4, min_loss_scale=8.0)
    with pytest.raises(RuntimeError, match=r"'blocks.1.weight' \(on rank 1\) is not finite at a loss scale of 8.0"):
        fitted(rank, world_size, tmp_path, zero(3), spoiled(1, "all", math.inf), **kwargs)
    low = plugin(name, initial_scale_power=0, min_loss_scale=0.25)
    fitted(rank, world_size, tmp_path, zero(3), spoiled(1, 2, math.inf), **low)
    assert low["plugins"][0].scaler.get_scale() == 0.5


@distributed(world_size=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_run_is_resumed_in_the_middle_of_its_hysteresis_and_ddp_reads_it(rank, world_size, name, tmp_path):
    def run(epochs, path=None, strategy=None):
        steps = Steps()
        kwargs = plugin(name, initial_scale_power=10, loss_scale_window=9, hysteresis=2) if strategy is None else {}
        model = spoiled(0, 3, math.inf, scheduled=True)
        kwargs |= {"callbacks": [steps], "max_epochs": epochs}
        runner = trainer(rank, world_size, tmp_path, zero(3), **kwargs)
        runner.fit(model, loader(), ckpt_path=path)
        return runner, model, steps

    path = tmp_path / "early.ckpt"
    early, _, _ = run(1)
    early.save_checkpoint(path)
    assert torch.load(path)[type(early.precision_plugin).__qualname__]["overflows_left"] == 1
    (_, want, straight), (_, got, resumed) = run(2), run(2, path)
    assert resumed.scales == straight.scales[4:] == [1024] * 4 + [512]
    assert_equal(got.state_dict(), want.state_dict())
    if name == "16-mixed":
        other = MixedPrecision(name, "cpu")
        trainer(rank, world_size, tmp_path, DDPStrategy(), plugins=[other], max_epochs=2).fit(
            Buffered(), loader(), ckpt_path=path
        )
        assert other.scaler.get_scale() == 1024


@distributed(world_size=2)
@pytest.mark.parametrize("before", [True, False])
def test_ddps_file_is_read(rank, world_size, before, tmp_path):
    ddp = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2048.0))
    there = trainer(rank, world_size, tmp_path, DDPStrategy(), plugins=[ddp])
    there.fit(Buffered(), loader())
    there.save_checkpoint(tmp_path / "ddp.ckpt")
    kwargs = plugin("16-mixed", loss_scale_window=6)
    runner = trainer(rank, world_size, tmp_path, zero(3), max_epochs=1 if before else 2, **kwargs)
    if before:
        runner.precision_plugin.load_state_dict(torch.load(tmp_path / "ddp.ckpt")["MixedPrecision"])
        runner.fit(Buffered(), loader())
    else:
        runner.fit(Buffered(), loader(), ckpt_path=tmp_path / "ddp.ckpt")
    assert type(runner.precision_plugin.scaler) is LossScaler
    assert runner.precision_plugin.scaler.get_scale() == 4096  # of the window's six steps, four were ddp's


def test_a_scaler_of_ones_own_and_a_configuration_contradict():
    config = LossScaleConfig()
    with pytest.raises(ValueError, match="a GradScaler of your own"):
        scaler_of(config, GradScaler("cpu", init_scale=8.0), "cpu")
    made = scaler_of(config, GradScaler("cpu"), "cpu")
    assert scaler_of(LossScaleConfig(), made, "cpu") is made
    assert scaler_of(LossScaleConfig(hysteresis=2), made, "cpu") is not made


@distributed(world_size=1)
def test_only_fp16_is_scaled(rank, world_size, tmp_path):
    bf16 = MixedPrecision("bf16-mixed", "cpu")
    bf16.loss_scale = LossScaleConfig(loss_scale=8.0)
    fitted(rank, world_size, tmp_path, zero(3), plugins=[bf16])
    assert bf16.scaler is None


# Steps that are left out without a loss scale


class Batches(Buffered):
    """The gradient of a weight is not finite where the batch is NaN; optimized automatically or by hand."""

    automatic = True
    clip = None
    rate = None
    scheduled = True

    def training_step(self, batch, batch_idx):
        if self.automatic:
            return self.loss(batch)
        optimizer = self.optimizers()
        if batch_idx % self.every == 0:
            optimizer.zero_grad()
        last = batch_idx % self.every == self.every - 1
        with self.trainer.strategy.block_backward_sync() if not last else nullcontext():
            self.manual_backward(self.loss(batch) / self.every)
        if last:
            if self.clip:
                self.clip_gradients(optimizer, *self.clip)
            optimizer.step()
            self.lr_schedulers().step()

    def loss(self, batch):
        weight = self.blocks[1].weight * 1
        if batch[0].isnan().any():
            weight.register_hook(lambda grad: grad + self.poison)
        x = batch[0].nan_to_num()
        return (self(x).float() - batch[1]).square().mean() + 0 * weight.float().sum()

    def on_train_end(self):
        self.rate = self.trainer.optimizers[0].param_groups[0]["lr"]


def batches(poisoned, left_out=()):
    """Two ranks' batches: NaN in the inputs of the second rank's ``poisoned`` ones, and some left out on both."""
    whole = loader(n=48)
    data = []
    for rank in range(2):
        for index, (x, y) in enumerate(list(whole)[rank::2]):
            if index not in left_out:
                data.append((index, rank, x if rank == 0 or index not in poisoned else x * math.nan, y))
    return [(x, y) for _, _, x, y in sorted(data, key=lambda each: each[:2])]


def skipping(rank, world_size, folder, stage, poisoned, left_out=(), *, name="32-true", every=1, how=None, **options):
    """Weights, the last learning rate, the plugin and warnings after a run on 12 batches of each rank."""
    model = Batches()
    poison, manual = options.pop("poison", math.nan), options.pop("manual", False)
    model.poison, model.automatic, model.every, model.clip = poison, not manual, every, how
    model.automatic_optimization = not manual
    kwargs = {"precision": name}
    if not manual:
        kwargs["accumulate_grad_batches"] = every
        if how:
            kwargs |= {"gradient_clip_val": how[0], "gradient_clip_algorithm": how[1]}
    own = torch.utils.data.DataLoader(batches(poisoned, left_out)[rank::2], batch_size=None)
    runner = trainer(
        rank,
        world_size,
        folder,
        zero(stage, nonfinite_gradients="skip", **options),
        use_distributed_sampler=False,
        **kwargs,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runner.fit(model, own)
    texts = [str(each.message) for each in said if "not finite" in str(each.message)]
    return model.state_dict(), model.rate, runner.precision_plugin.skipped_steps, texts


CASES = [
    {},
    {"name": "bf16-mixed"},
    {"name": "bf16-true", "poison": math.inf},
    {"how": (0.01, "norm")},
    {"how": (0.01, "value"), "poison": math.inf},
    {"every": 3},
    {"every": 3, "reduce_at": "window"},
    {"every": 3, "reduce_at": "micro_batch", "how": (0.01, "norm")},
    {"manual": True},
    {"manual": True, "how": (0.01, "norm"), "poison": math.inf},
    {"manual": True, "every": 3},
]


@distributed(world_size=2)
@pytest.mark.parametrize("stage", SOME_STAGES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(f"{k}={v}" for k, v in case.items()) or "plain")
def test_a_poisoned_step_is_as_if_it_were_not_there(rank, world_size, case, stage, tmp_path):
    """On all ranks, with a gradient that is not finite on rank 1 alone; twice, and one warning."""
    every = case.get("every", 1)
    windows = {4 // every, 7 // every}
    without = [index for index in range(12) if index // every in windows]
    got, rate, skipped, said = skipping(rank, world_size, tmp_path, stage, (4, 7), **case)
    want, want_rate, none, silent = skipping(rank, world_size, tmp_path, stage, (), without, **case)
    assert_equal(got, want)
    assert not torch.equal(got["head.weight"], Buffered().head.weight)
    assert rate == want_rate and skipped == len(windows) and none == 0 and not silent
    assert len(said) == (rank == 0)
    for text in said:
        assert (
            f"Step {4 // every}: the gradient of 'blocks.1.weight' (on rank 1) is not finite. The step is left" in text
        )


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_poisoned_step_beside_offload(rank, world_size, stage, tmp_path):
    places = everywhere(stage, {"device": "nvme", "nvme_path": str(tmp_path)})
    options = {"every": 2, "how": (0.01, "norm")}
    got = skipping(rank, world_size, tmp_path, stage, (5,), **options, **places)
    want = skipping(rank, world_size, tmp_path, stage, (), (4, 5), **options)
    assert_equal(got[0], want[0])
    assert got[1] == want[1] and got[2] == 1


class Two(Net):
    """Two optimizers step after one backward; the gradients of one of them, or of both, are not finite."""

    spoiled = ()

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        factor = math.inf if batch_idx == 1 and self.global_rank == 1 else 0.0
        for name in self.spoiled:
            loss = loss + (self.get_parameter(name) * factor).sum()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.blocks, self.head)]


class After(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = trainer.strategy.lightning_module_state_dict()
        setattr(self, f"after_{batch_idx}", {name: value.clone() for name, value in state.items()})


@pytest.mark.parametrize("stage", SOME_STAGES)
@pytest.mark.parametrize("names", [["blocks.1.weight"], ["head.weight"], ["blocks.1.weight", "head.weight"]])
def test_of_two_optimizers_those_are_skipped_whose_gradients_are_bad(names, stage, tmp_path):
    def body(rank, world_size):
        model, after = Two(), After()
        model.spoiled = names
        fitted(rank, world_size, tmp_path, zero(stage, nonfinite_gradients="skip"), model, callbacks=[after])
        assert all(value.isfinite().all() for value in model.state_dict().values())
        for name in ("blocks.1.weight", "head.weight"):
            same = rank or torch.equal(after.after_0[name], after.after_1[name])
            assert rank or same == (name in names)
        return model.trainer.precision_plugin.skipped_steps

    assert run_ranks(body, 2) == [len(names)] * 2


@distributed(world_size=2)
def test_a_gradient_that_is_mended_before_a_manual_step_is_no_matter(rank, world_size, tmp_path):
    """Infinities that are clipped by value before the step, as under fp16."""
    options = {"manual": True, "how": (0.01, "value"), "poison": math.inf}
    state, _, skipped, said = skipping(rank, world_size, tmp_path, 3, (4,), **options)
    assert skipped == 0 and not said and all(value.isfinite().all() for value in state.values())
