"""Precisions: what is held, sent and saved in which dtype, loss scaling, and gradients that are not finite."""

import math
import warnings
from collections import defaultdict

import pytest
import torch
from harness import distributed, run_ranks
from lightning.pytorch import Callback
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy
from oracles import assert_same_state, clip_by_norm, communicator
from test_strategy import DIM, Net, fitted, loader, trainer, zero
from torch import nn

from lightning_zero import ZeroStrategy
from lightning_zero.config import ZeroConfig
from lightning_zero.engine import Engine

SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
COLUMNS = ("in forward", "output", "p.grad", "wire", "sum", "master", "moments", "buffer", "file", "file: buffer")
TABLE = {  # of a Linear and of a LayerNorm, where they differ
    "32-true": ("fp32",) * 10,
    "64-true": ("fp64",) * 10,
    "bf16-mixed": ("bf16/fp32", "bf16", *("bf16/fp32",) * 2, *("fp32",) * 6),
    "bf16-true": (*("bf16",) * 4, *("fp32",) * 3, "bf16", "fp32", "bf16"),
    "16-mixed": ("fp16/fp32", "fp16", *("fp16/fp32",) * 2, *("fp32",) * 6),
    "16-true": (*("fp16",) * 4, *("fp32",) * 3, "fp16", "fp32", "fp16"),
}
WATCHED = ("blocks.1", "norm")


class Buffered(Net):
    """With a floating-point buffer and another one; gradients can be spoiled on one rank in one step."""

    kind = torch.optim.AdamW
    lr = 0.01
    scheduled = False
    spoil = None  # (rank, step, factor)

    def __init__(self, seed=0):
        super().__init__(seed)
        self.register_buffer("shift", torch.full((DIM,), 0.1))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return super().forward(x + self.shift)

    def training_step(self, batch, batch_idx):
        weight = self.blocks[1].weight * 1
        rank, step, factor = self.spoil or (None, None, 1)
        if self.global_rank == rank and step in (batch_idx, "all"):
            weight.register_hook(lambda grad: grad * factor)
        return super().training_step(batch, batch_idx) + 0 * weight.float().sum()

    def configure_optimizers(self):
        optimizer = self.kind(self.parameters(), lr=self.lr)
        if not self.scheduled:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def spoiled(*how, **attributes):
    model = Buffered()
    model.spoil = how or None
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def precision(name, **scaling):
    """Arguments of a Trainer: on CPU it would turn the string 16-mixed into bf16-mixed."""
    if not name.startswith("16"):
        return {"precision": name}
    scaler = torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, **scaling})
    if name == "16-mixed":
        return {"plugins": [MixedPrecision(name, "cpu", scaler)]}
    plugin = HalfPrecision(name)
    plugin.scaler = scaler
    return {"plugins": [plugin]}


def assert_equal(got, want, what=""):
    """Two states of a module are equal to the bit."""
    assert list(got) == list(want)
    for name, value in want.items():
        assert got[name].dtype == value.dtype and torch.equal(got[name], value), f"{what} {name}"


# The table


class Observe(Callback):
    """Dtypes of a Linear and of a LayerNorm, wherever their parameters go."""

    def __init__(self, path):
        self.path = path
        self.seen = defaultdict(dict)

    def on_train_start(self, trainer, pl_module):
        engine = trainer.strategy.engine
        for name in WATCHED:
            pl_module.get_submodule(name).register_forward_hook(self.on_forward(name))
        home = {engine.locate(pl_module.get_parameter(f"{name}.weight"))[0].name: name for name in WATCHED}
        send = engine.comm.exchange

        def exchange(full, receive, bounds, what):
            self.seen["wire"][home.get(what.removeprefix("reduction of "))] = full.dtype
            assert receive.dtype == full.dtype
            return send(full, receive, bounds, what)

        engine.comm.exchange = exchange

    def on_forward(self, name):
        def hook(module, args, output):
            self.seen["in forward"][name], self.seen["output"][name] = module.weight.dtype, output.dtype

        return hook

    def on_after_backward(self, trainer, pl_module):
        for name in WATCHED:
            weight = pl_module.get_parameter(f"{name}.weight")
            self.seen["p.grad"][name] = weight.grad.dtype
            self.seen["sum"][name] = trainer.strategy.engine.locate(weight)[0].reduced.dtype

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        engine, seen = trainer.strategy.engine, self.seen
        optimizer = engine.sharded(trainer.optimizers[0])
        trainer.save_checkpoint(self.path)
        saved = torch.load(self.path)["state_dict"]
        assert saved["count"].dtype == pl_module.count.dtype == torch.int64
        for name in WATCHED:
            param = pl_module.get_parameter(f"{name}.weight")
            seen["master"][name] = engine.locate(param)[0].shard.dtype
            seen["moments"][name] = optimizer.own_state(param)["exp_avg"].dtype
            seen["buffer"][name], seen["file: buffer"][name] = pl_module.shift.dtype, saved["shift"].dtype
            seen["file"][name] = saved[f"{name}.weight"].dtype

    def row(self):
        both = [[SHORT[self.seen[column][name]] for name in WATCHED] for column in COLUMNS]
        return tuple("/".join(dict.fromkeys(pair)) for pair in both)


@pytest.mark.parametrize("stage", [1, 3])
def test_table(stage, tmp_path, capsys):
    """What the README's table says is what is there; the table is printed."""

    def observe(rank, world_size):
        rows = {}
        for name in TABLE:
            observer, model = Observe(tmp_path / f"{name}.ckpt"), Buffered()
            kwargs = {"limit_train_batches": 1, "callbacks": [observer], **precision(name)}
            fitted(rank, world_size, tmp_path, zero(stage), model, **kwargs)
            own = torch.float64 if name == "64-true" else torch.float32
            assert {p.dtype for p in model.parameters()} == {model.shift.dtype} == {own}, name
            rows[name] = observer.row()
        return rows

    rows = run_ranks(observe, 2)
    lines = [("precision", *COLUMNS), *((name, *row) for name, row in rows[0].items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    with capsys.disabled():
        print(f"\nstage {stage}: Linear/LayerNorm")
        for line in lines:
            print("  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)))
    assert rows[0] == rows[1] == TABLE


# The numbers


@distributed(world_size=2)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("name", ["32-true", "bf16-mixed", "16-mixed"])
def test_equal_to_ddp_to_the_bit(rank, world_size, name, accumulate, tmp_path):
    """fp16, too: both scale by powers of two, round to fp16 at the same places, and sum and unscale in fp32."""

    def run(strategy):
        # a scale that is too high at first
        kwargs = precision(name, init_scale=2.0**18) if name == "16-mixed" else precision(name)
        kwargs |= {"accumulate_grad_batches": accumulate, "max_epochs": 3}
        state = fitted(rank, world_size, tmp_path, strategy, Buffered(), **kwargs).state_dict()
        assert name != "16-mixed" or kwargs["plugins"][0].scaler.get_scale() < 2**18
        return state

    want = run(DDPStrategy())
    assert not torch.equal(want["head.weight"], Buffered().head.weight)
    for stage in (1, 3):
        assert_equal(run(zero(stage, reduce_at="window")), want, f"stage {stage}")


class Repeating(Buffered):
    """Each block runs three times: autocast rounds its weight at each use, and the uses are summed in fp32."""

    def forward(self, x):
        return super().forward(self.repeated(x))

    def repeated(self, x):
        for _ in range(2):
            for block in self.blocks:
                x = torch.tanh(block(x))
        return x.float()


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["bf16-mixed", "16-mixed"])
def test_layers_used_several_times_are_ddps_to_the_bit(rank, world_size, name, tmp_path):
    def run(strategy):
        return fitted(rank, world_size, tmp_path, strategy, Repeating(), **precision(name)).state_dict()

    want = run(DDPStrategy())
    for stage in (1, 3):
        assert_equal(run(zero(stage)), want, f"stage {stage}")


@distributed(world_size=1)
@pytest.mark.parametrize(
    ("name", "short", "kind"), [("bf16-true", "bf16", torch.optim.AdamW), ("16-true", "fp16", torch.optim.SGD)]
)
def test_16_bit_masters_are_plain_16_bit_training(rank, world_size, name, short, kind, tmp_path):
    """What ``precision`` alone does on one device: parameters and optimizer states in the forward's dtype."""
    plain = {"precision": name} if short == "bf16" else {"plugins": [HalfPrecision(name)]}
    model = spoiled(kind=kind)
    want = fitted(rank, world_size, tmp_path, DDPStrategy(), model, max_epochs=2, **plain).state_dict()
    for stage in (1, 3):
        strategy, model = zero(stage, master_dtype=short, tile_size=64), spoiled(kind=kind)
        fitted(rank, world_size, tmp_path, strategy, model, max_epochs=2, **precision(name, init_scale=1.0))
        for key, value in model.state_dict().items():
            assert value.dtype in (torch.float32, torch.int64) and torch.equal(value.to(want[key].dtype), want[key])
            assert torch.equal(value, want[key].to(value.dtype)) or key == "shift", f"{key} was not 16-bit"


class Gradients(Callback):
    def __init__(self):
        self.sent, self.kept, self.norms = set(), 0, []

    def on_train_start(self, trainer, pl_module):
        comm = trainer.strategy.engine.comm
        send = comm.exchange
        comm.exchange = lambda full, *rest: (self.sent.add(SHORT[full.dtype]), send(full, *rest))[1]

    def on_after_backward(self, trainer, pl_module):
        self.kept = trainer.strategy.engine.memory()["gradients"]


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [2, 3])
def test_gradient_dtype(rank, world_size, stage, tmp_path):
    """What is sent is what the option says; 16-bit gradients take half of the memory."""

    def run(name, **settings):
        seen = Gradients()
        kwargs = {"callbacks": [seen], "precision": name, "limit_train_batches": 1}
        fitted(rank, world_size, tmp_path, zero(stage, **settings), Net(), **kwargs)
        return seen.sent, seen.kept

    sent, kept = run("32-true")
    assert sent == {"fp32"} and kept > 0
    assert run("32-true", gradient_dtype="bf16") == ({"bf16"}, kept / 2)
    assert run("32-true", gradient_dtype="fp64") == ({"fp64"}, kept * 2)
    sent, mixed = run("bf16-mixed")
    assert sent == {"bf16", "fp32"}
    assert run("bf16-mixed", gradient_dtype="bf16") == ({"bf16"}, mixed / 2)
    assert run("bf16-true") == ({"bf16"}, kept)
    assert run("bf16-true", gradient_dtype="fp32") == ({"fp32"}, kept)
    assert run("bf16-true", gradient_dtype="bf16") == ({"bf16"}, kept / 2)


@distributed(world_size=2)
def test_16_bit_gradients_are_rounded_once(rank, world_size, tmp_path):
    """Two ranks' bf16 gradients: kept in bf16 they are ddp's sum, rounded; so all-bf16 training is ddp's to the bit."""
    kwargs = {"max_epochs": 2, "precision": "bf16-true"}
    want = fitted(rank, world_size, tmp_path, DDPStrategy(), Buffered(), **kwargs).state_dict()
    for stage in (1, 3):
        strategy = zero(stage, master_dtype="bf16", gradient_dtype="bf16")
        got = fitted(rank, world_size, tmp_path, strategy, Buffered(), **kwargs).state_dict()
        assert_equal({name: value.to(want[name].dtype) for name, value in got.items()}, want, f"stage {stage}")


# Masters under bf16-true and 16-true


HALF = [("bf16-true", 1), ("bf16-true", 3), ("16-true", 3)]


@distributed(world_size=2)
@pytest.mark.parametrize(("name", "stage"), HALF)
def test_masters_are_made_before_rounding(rank, world_size, name, stage, tmp_path):
    model, start = spoiled(lr=0.0), Buffered().state_dict()
    assert any(not torch.equal(value, value.half().to(value.dtype)) for value in start.values())
    runner = trainer(rank, world_size, tmp_path, zero(stage), **precision(name))
    runner.fit(model, loader())
    runner.save_checkpoint(tmp_path / "it.ckpt")
    assert model.shift.dtype == torch.float32 and model.count.dtype == torch.int64
    for state in (model.state_dict(), torch.load(tmp_path / "it.ckpt")["state_dict"]):
        assert_equal({key: state[key] for key in start}, start)


class Filled(nn.Module):
    """Gets its values from ``reset_parameters``; adds one buffer, and counts with another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(DIM))
        self.register_buffer("shift", torch.empty(DIM))
        self.register_buffer("total", torch.empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        nn.init.constant_(self.shift, 0.1)
        nn.init.zeros_(self.total)

    def forward(self, x):
        self.total += 1
        return x * self.weight + self.shift


class FilledNet(Net):
    device_of_model = "meta"

    def configure_model(self):
        with torch.device(self.device_of_model):
            self.filled = Filled()

    def forward(self, x):
        return super().forward(self.filled(x))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@distributed(world_size=2)
@pytest.mark.parametrize(("name", "stage"), HALF)
def test_buffers_that_have_not_changed_get_all_bits_back(rank, world_size, name, stage, tmp_path, device):
    model = FilledNet()
    model.device_of_model = device
    trainer(rank, world_size, tmp_path, zero(stage), **precision(name)).fit(model, loader())
    assert torch.equal(model.filled.shift, torch.full((DIM,), 0.1))
    assert model.filled.total == 4 and model.filled.total.dtype == torch.float32


@distributed(world_size=2)
@pytest.mark.parametrize(("name", "stage"), HALF)
def test_resuming_is_exact_and_ddp_reads_the_file(rank, world_size, name, stage, tmp_path):
    def run(epochs, model, path=None, **kwargs):
        runner = trainer(rank, world_size, tmp_path, zero(stage), max_epochs=epochs, **precision(name))
        runner.fit(model, loader(), ckpt_path=path)
        return runner

    straight, resumed = Buffered(), Buffered(seed=1)
    want = run(2, straight)
    run(1, Buffered()).save_checkpoint(tmp_path / "early.ckpt")
    got = run(2, resumed, tmp_path / "early.ckpt")
    assert_equal(resumed.state_dict(), straight.state_dict())
    states = [runner.strategy.optimizer_state(runner.optimizers[0]) for runner in (want, got)]
    assert_same_state(*states)
    assert rank or states[0]["state"][0]["exp_avg"].dtype == torch.float32
    there = trainer(rank, world_size, tmp_path, DDPStrategy(), max_epochs=2)
    there.fit(model := Buffered(seed=1), loader(), ckpt_path=tmp_path / "early.ckpt")
    assert there.global_step == 8
    torch.testing.assert_close(model.state_dict(), straight.state_dict(), rtol=0, atol=0.01)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # no shard is padded
        self.layers = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3))).bfloat16()
        self.layers[1].requires_grad_(False)

    def forward(self, x):
        return self.layers(x).float().square().mean()


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_frozen_16_bit_parameters_have_no_master_until_they_are_trained(rank, world_size, stage):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    model, plain = Layers(), Layers()
    masters = [nn.Parameter(p.detach().float()) for p in plain.parameters()]
    reference = torch.optim.AdamW(masters, lr=0.01)
    share = 256 if stage == 0 else 256 // world_size
    with communicator() as comm:
        engine = Engine(model, ZeroConfig(stage=stage, min_unit_bytes=0), comm)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        rest = 2 * share if stage == 3 else 0  # in stages below, the frozen one is a part of the whole
        assert engine.memory()["master"] == 2 * 4 * share + rest
        for step in range(4):
            if step == 2:
                for net in (model, plain):
                    net.layers[1].requires_grad_(True)
            optimizer.zero_grad()
            plain.zero_grad()
            with engine.forward():
                loss = model(x)
            with engine.backward():
                loss.backward()
            engine.step(optimizer)
            plain(x).backward()
            for p, master in zip(plain.parameters(), masters, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
            reference.step()
            with torch.no_grad():
                for p, master in zip(plain.parameters(), masters, strict=True):
                    p.copy_(master)
        assert engine.memory()["master"] == 3 * 4 * share
        shards = [engine.locate(p)[0].own(engine.locate(p)[0].shard, engine.locate(p)[1]) for p in model.parameters()]
        assert {shard.dtype for shard in shards} == {torch.float32}
        engine.release(whole=True)
    for p, master in zip(model.parameters(), masters, strict=True):
        assert torch.equal(p, master.bfloat16())
    assert not torch.equal(model.layers[1].weight, Layers().layers[1].weight)


# Loss scaling


class Steps(Callback):
    """What there is before the first and after each step."""

    def on_train_start(self, trainer, pl_module):
        self.weights, self.moments, self.rates, self.scales = [], [], [], []
        self.on_train_batch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *args):
        optimizer = trainer.optimizers[0]
        self.weights.append(trainer.strategy.lightning_module_state_dict())
        self.moments.append(trainer.strategy.optimizer_state(optimizer).get("state"))
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.scales.append(trainer.precision_plugin.scaler.get_scale())

    def changed(self, step):
        """Whether weights and moments differ after a step."""
        pairs = [(self.weights[step][name], self.weights[step + 1][name]) for name in ("blocks.0.weight", "norm.bias")]
        before, after = (moments.get(2, {"step": 0, "exp_avg": 0}) for moments in self.moments[step : step + 2])
        return [not torch.equal(*pair) for pair in pairs] + [before["step"] != after["step"]]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["16-mixed", "16-true"])
def test_an_overflow_on_one_rank_skips_one_step_on_all(name, stage, tmp_path):
    def body(rank, world_size):
        steps = Steps()
        kwargs = {"callbacks": [steps], **precision(name, growth_interval=2)}
        fitted(rank, world_size, tmp_path, zero(stage), spoiled(1, 2, math.inf, scheduled=True), **kwargs)
        if rank == 0:
            assert [any(steps.changed(step)) for step in range(4)] == [True, True, False, True]
            assert all(all(steps.changed(step)) for step in (0, 1, 3))
            assert_same_state(steps.moments[3], steps.moments[2])
            assert_equal(steps.weights[3], steps.weights[2])
        return steps.rates, steps.scales

    for rates, scales in run_ranks(body, 2):
        assert rates == [0.01 * (1 / (1 + taken)) for taken in (0, 1, 2, 2, 3)]
        assert scales == [1024, 1024, 2048, 1024, 1024]


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["16-mixed", "16-true"])
def test_the_scale_is_saved_and_resumed(rank, world_size, name, tmp_path):
    def run(epochs, model, path=None, **scaling):
        steps = Steps()
        kwargs = {"callbacks": [steps], "max_epochs": epochs, **precision(name, **{"growth_interval": 3, **scaling})}
        runner = trainer(rank, world_size, tmp_path, zero(3), **kwargs)
        runner.fit(model, loader(), ckpt_path=path)
        return runner, steps

    model, again = spoiled(scheduled=True), spoiled(scheduled=True)
    _, want = run(2, model)
    run(1, spoiled(scheduled=True))[0].save_checkpoint(tmp_path / "early.ckpt")
    saved = torch.load(tmp_path / "early.ckpt")["MixedPrecision" if name == "16-mixed" else "HalfPrecision"]
    assert saved["scale"] == 2048 and saved["_growth_tracker"] == 1
    _, got = run(2, again, tmp_path / "early.ckpt", init_scale=8.0, growth_interval=5)
    assert got.scales == want.scales[4:] and got.scales[0] == 2048 and got.scales[-1] == 4096
    assert_equal(again.state_dict(), model.state_dict())


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["16-mixed", "16-true"])
def test_a_scale_that_cannot_get_lower_is_an_error_on_all_ranks(rank, world_size, name, tmp_path):
    kwargs = precision(name, init_scale=2.0)
    with pytest.raises(RuntimeError, match=r"'blocks.1.weight' \(on rank 1\) is not finite at a loss scale of 1.0"):
        fitted(rank, world_size, tmp_path, zero(3), spoiled(1, "all", math.inf), **kwargs)


# Gradients that are not finite


def masters(trainer):
    return [flat.shard.clone() for unit in trainer.strategy.engine.units for flat in unit.flats]


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["32-true", "bf16-mixed"])
def test_a_nan_is_reported_once_and_before_it_does_harm(rank, world_size, name, stage, tmp_path):
    said = []
    runner, model = trainer(rank, world_size, tmp_path, zero(stage), precision=name), spoiled(1, 2, math.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args: (
            said.append((str(message), all(shard.isfinite().all() for shard in masters(runner))))
            if "not finite" in str(message)
            else None
        )
        runner.fit(model, loader())
    assert model.blocks[1].weight.isnan().all()
    if rank == 0:
        [(text, was_finite)] = said
        assert text.startswith("Step 2: the gradient of 'blocks.1.weight' (on rank 1) is not finite.") and was_finite
    else:
        assert not said


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["32-true", "bf16-mixed"])
def test_a_nan_can_be_an_error_on_all_ranks(rank, world_size, name, stage, tmp_path):
    class Unchanged(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            self.before = masters(trainer)

        def on_exception(self, trainer, pl_module, exception):
            self.same = [torch.equal(*pair) for pair in zip(masters(trainer), self.before, strict=True)]

    look, strategy = Unchanged(), zero(stage, nonfinite_gradients="raise")
    with pytest.raises(RuntimeError, match=r"Step 2: the gradient of 'blocks.1.weight' \(on rank 1\) is not finite"):
        fitted(rank, world_size, tmp_path, strategy, spoiled(1, 2, math.nan), callbacks=[look], precision=name)
    assert look.same and all(look.same)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_mended_gradient_is_no_matter(rank, world_size, stage, tmp_path):
    class Mend(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for p in pl_module.parameters():
                p.grad.nan_to_num_()

    model = spoiled(1, 2, math.nan)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not finite.*")
        fitted(rank, world_size, tmp_path, zero(stage, nonfinite_gradients="raise"), model, callbacks=[Mend()])
    assert all(p.isfinite().all() for p in model.parameters())


# Clipping


class Clipped(Buffered):
    """By the strategy, or (``own``) by the oracle, whose norm is fp64 as the strategy's and torch's is not."""

    kind = torch.optim.SGD
    own = False

    def __init__(self):
        super().__init__()
        self.norms = []

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if self.own and gradient_clip_algorithm == "norm":
            self.norms.append(clip_by_norm([p.grad for p in self.parameters()], gradient_clip_val))
        else:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            if gradient_clip_algorithm == "norm" and not self.own:
                norm = self.trainer.strategy.gradient_norm
                assert norm.after <= gradient_clip_val * (1 + 1e-6) < norm.before
                self.norms.append(norm.before.item())


class ManuallyClipped(Clipped):
    how = "norm"

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip(optimizer)
        optimizer.step()

    def clip(self, optimizer):
        self.configure_gradient_clipping(optimizer, 0.01, self.how)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.full), "16-mixed"])
@pytest.mark.parametrize("how", ["norm", "value"])
@pytest.mark.parametrize("kind", [Clipped, ManuallyClipped])
def test_clipping_is_the_formula_to_the_bit(rank, world_size, kind, how, name, tmp_path):
    def run(strategy, own):
        model = kind()
        model.own, model.how = own, how
        options = {} if kind is ManuallyClipped else {"gradient_clip_val": 0.01, "gradient_clip_algorithm": how}
        return fitted(rank, world_size, tmp_path, strategy, model, **options, **precision(name))

    want = run(DDPStrategy(), own=True)
    for stage in (1, 3):
        got = run(zero(stage), own=False)
        assert got.norms == want.norms and len(got.norms) == (4 if how == "norm" else 0)
        assert_equal(got.state_dict(), want.state_dict(), f"stage {stage}")


class ClippedByFabricsName(ManuallyClipped):
    norm_type, checked, error = 2.0, 0, {}

    def clip(self, optimizer):
        grads = [p.grad.clone().double() for p in self.parameters()]
        want = torch.nn.utils.get_total_norm(grads, self.norm_type)
        strategy = self.trainer.strategy
        norm = strategy.clip_gradients_norm(self, optimizer, want.item() / 2, self.norm_type, **self.error)
        assert norm.dtype == torch.float32 and norm.dim() == 0
        torch.testing.assert_close(norm.double(), want, rtol=1e-7, atol=0, equal_nan=True)
        if want.isfinite():
            assert strategy.gradient_norm.before == norm and strategy.gradient_norm.after <= norm / 2
            halves = [p.grad.clone().double() for p in self.parameters()]
            torch.testing.assert_close(halves, [grad / 2 for grad in grads], rtol=1e-3, atol=0)
        self.checked += 1


@distributed(world_size=2)
@pytest.mark.parametrize("norm_type", [pytest.param(1, marks=pytest.mark.full), 2, 3.0, math.inf])
def test_norms_of_any_order(rank, world_size, norm_type, tmp_path):
    for stage in (0, 1, 3):
        model = ClippedByFabricsName()
        model.norm_type = norm_type
        fitted(rank, world_size, tmp_path, zero(stage), model)
        assert model.checked == 4


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_norm_that_is_not_finite_is_an_error_on_all_ranks_if_asked(rank, world_size, stage, tmp_path):
    def run(**error):
        model = ClippedByFabricsName()
        model.spoil, model.error = (1, 2, math.nan), error
        try:
            fitted(rank, world_size, tmp_path, zero(stage), model)
        finally:
            assert model.checked == (4 if error else 2)

    with pytest.raises(RuntimeError, match=r"Step 2: the total norm .* nan.* 'blocks.1.weight' \(on rank 1\)"):
        run()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not finite.*")
        run(error_if_nonfinite=False)


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["16-mixed", "16-true"])
def test_fused_optimizers_are_clipped_under_loss_scaling(rank, world_size, name, tmp_path):
    def run(fused):
        model = Clipped()
        model.kind = lambda params, lr: torch.optim.AdamW(params, lr, fused=fused)
        clipping = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "norm"}
        fitted(rank, world_size, tmp_path, zero(3), model, **clipping, **precision(name))
        assert len(model.norms) == 4
        return model.state_dict()

    want = run(fused=False)
    for key, value in run(fused=True).items():
        torch.testing.assert_close(value, want[key], rtol=1e-4, atol=1e-5)


# Plugins


def test_a_module_that_is_16_bit_already_is_noticed():
    plain = ZeroStrategy().precision_plugin
    with pytest.warns(UserWarning, match=r"4 trainable parameters \(the first: '0.weight'\) are 16-bit already"):
        plain.compute_dtype(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).bfloat16())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain.compute_dtype(nn.Linear(2, 2).bfloat16().requires_grad_(False))
        plain.compute_dtype(nn.Linear(2, 2))
        half = ZeroStrategy(precision_plugin=HalfPrecision("bf16-true")).precision_plugin
        half.compute_dtype(nn.Linear(2, 2).bfloat16())


class Passing(MixedPrecision):
    """Somebody's plugin that steps as Lightning's."""

    forwards = 0

    def forward_context(self):
        self.forwards += 1
        return super().forward_context()


class Stepping(Precision):
    def optimizer_step(self, optimizer, model, closure, **kwargs):
        return optimizer.step(closure)


@distributed(world_size=2)
def test_foreign_plugins_pass_or_are_refused_by_name(rank, world_size, tmp_path):
    plugin = Passing("bf16-mixed", "cpu")
    want = fitted(rank, world_size, tmp_path, zero(3), precision="bf16-mixed").state_dict()
    assert_equal(fitted(rank, world_size, tmp_path, zero(3), plugins=[plugin]).state_dict(), want)
    assert plugin.forwards >= 4
    with pytest.raises(ValueError, match="Stepping, which steps the optimizer in its own way"):
        trainer(rank, world_size, tmp_path, zero(3), plugins=[Stepping()])
