"""The strategy in a Trainer: what Lightning calls, in which order, and how a run ends."""

import copy
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import distributed, environment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelPruning
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from test_optimizers import Scaled
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_zero
from lightning_zero import ZeroStrategy, host
from lightning_zero.precision import ZeroPrecision
from lightning_zero.precision.dtypes import compute_dtype

STAGES = [1, 2, 3]
DIM = 8


class Net(LightningModule):
    """Blocks that become units of their own, an embedding of the inputs' signs, and a norm."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.signs = nn.Embedding(2, DIM)
        self.blocks = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, 1)

    def forward(self, x):
        x = x + self.signs((x > 0).long()).mean(-2)
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(self.norm(x))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self(batch[0]).float(), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("loss", F.mse_loss(self(batch[0]).float(), batch[1]), sync_dist=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def loader(n=16, batch_size=2):
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(n, DIM, generator=generator), torch.randn(n, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def zero(stage, **settings):
    return ZeroStrategy(stage=stage, min_unit_bytes=0, **settings)


def trainer(rank, world_size, folder, strategy, **kwargs):
    """A Trainer for a rank that the harness has made."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    kwargs = {"max_epochs": 1, "enable_checkpointing": False, **kwargs}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, default_root_dir=folder, **{**quiet, **kwargs}
    )


def fitted(rank, world_size, folder, strategy, model=None, **kwargs):
    model = model or Net()
    trainer(rank, world_size, folder, strategy, **kwargs).fit(model, loader())
    return model


def is_plain(module):
    """No hooks, no guard, whole values, nothing of the engine left."""
    hooks = [m for m in module.modules() if m._forward_hooks or m._forward_pre_hooks]
    whole = all(type(p) is nn.Parameter and torch.isfinite(p).all() for p in module.parameters())
    left = [p for p in module.parameters() if hasattr(p, "_zero_place") or p._post_accumulate_grad_hooks]
    return not hooks and whole and not left


# Names and settings


def test_public_names():
    assert lightning_zero.__all__ == [
        "LossScaleConfig",
        "OffloadConfig",
        "PeerError",
        "Tier",
        "TierArray",
        "TierError",
        "TrainingConfig",
        "Transfer",
        "ZeroConfig",
        "ZeroMonitor",
        "ZeroStrategy",
        "__version__",
        "gathered",
        "load_from_checkpoint",
        "load_safetensors",
        "save_safetensors",
    ]
    assert all(hasattr(lightning_zero, name) for name in lightning_zero.__all__)


def test_importing_registers_and_importing_again_is_harmless():
    for stage in STAGES:
        strategy = StrategyRegistry.get(f"zero{stage}")
        assert type(strategy) is ZeroStrategy and strategy.config.stage == stage
    program = (
        "import sys, lightning_zero; "
        "[sys.modules.pop(name) for name in list(sys.modules) if name.startswith('lightning_zero')]; "
        "import lightning_zero; from lightning.pytorch.strategies import StrategyRegistry; "
        "assert type(StrategyRegistry.get('zero3')) is lightning_zero.ZeroStrategy; "
        # the other namespace is registered with when the program imports it, later
        "assert 'pytorch_lightning' not in sys.modules; "
        "import pytorch_lightning; from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry; "
        "strategy = StrategyRegistry.get('zero3'); "
        "assert isinstance(strategy, DDPStrategy) and strategy.config.stage == 3"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=environment(*sys.path))


def test_unknown_settings_are_refused_with_the_nearest_name():
    with pytest.raises(TypeError, match="prefetch"):
        ZeroStrategy(stage=3, prefetched=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stage", 4), ("stage", True), ("unit_classes", 3), ("leaf_classes", [3]), ("saved_tensors_hooks", "no")],
)
def test_wrong_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        ZeroStrategy(**{name: value})


def test_strategies_can_be_pickled_for_spawned_ranks():
    strategy = StrategyRegistry.get("zero2")
    strategy.precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    copy = pickle.loads(pickle.dumps(strategy))
    assert copy.config == strategy.config and copy.precision_plugin.precision == "bf16-mixed"


def test_other_devices_are_refused():
    strategy = ZeroStrategy(parallel_devices=[torch.device("mps")])
    with pytest.raises(RuntimeError, match="not on MPS"):
        strategy.setup_environment()


# Precision


@pytest.mark.parametrize(
    "plugin", [Precision(), MixedPrecision("bf16-mixed", "cpu"), HalfPrecision("bf16-true"), DoublePrecision()]
)
def test_plugins_stay_what_they_are(plugin):
    kind, strategy = type(plugin), ZeroStrategy(precision_plugin=plugin)
    assert strategy.precision_plugin is plugin is strategy.precision_plugin
    assert (
        isinstance(plugin, kind)
        and isinstance(plugin, ZeroPrecision)
        and type(plugin).__qualname__ == kind.__qualname__
    )


def test_without_a_plugin_there_is_one_object():
    strategy = ZeroStrategy()
    assert strategy.precision_plugin is strategy.precision_plugin and strategy.precision_plugin.precision == "32-true"
    assert strategy._precision_plugin is None  # or the Trainer would take it for the user's choice


def test_plugins_that_cannot_work_are_refused_by_name():
    stepping = type("OwnStep", (Precision,), {"optimizer_step": lambda *args, **kwargs: None})()
    with pytest.raises(ValueError, match="OwnStep, which steps the optimizer in its own way"):
        ZeroStrategy(precision_plugin=stepping)
    foreign = type("TransformerEnginePrecision", (Precision,), {})()
    with pytest.raises(ValueError, match="TransformerEnginePrecision"):
        ZeroStrategy(precision_plugin=foreign)


def test_which_parameters_bf16_mixed_rounds():
    class MyLinear(nn.Linear):
        pass

    module = nn.ModuleDict(
        {
            "linear": nn.Linear(2, 2),
            "conv": nn.Conv2d(1, 1, 1),
            "mine": MyLinear(2, 2),
            "norm": nn.LayerNorm(2),
            "embedding": nn.Embedding(2, 2),
            "tied": nn.Linear(2, 2, bias=False),
            "wide": nn.Linear(2, 2).double(),
            "attention": nn.MultiheadAttention(2, 1),
            "layer": nn.TransformerEncoderLayer(2, 1, 2),
        }
    )
    module["tied"].weight = module["embedding"].weight
    dtype = compute_dtype(module, "bf16-mixed")
    rounded = {name for name, param in module.named_parameters() if dtype(param) is torch.bfloat16}
    assert rounded == {"linear.weight", "linear.bias", "conv.weight", "conv.bias"}
    assert dtype(module["wide"].weight) is torch.float64
    assert compute_dtype(module, "32-true") is None


# Runs


@distributed(world_size=2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_equal_to_ddp_to_the_bit(rank, world_size, precision, tmp_path):
    kwargs = {"precision": precision, "accumulate_grad_batches": 1, "max_epochs": 2}
    want = fitted(rank, world_size, tmp_path, DDPStrategy(), **kwargs).state_dict()
    for stage in [0, *STAGES]:
        model = fitted(rank, world_size, tmp_path, zero(stage), **kwargs)
        assert is_plain(model)
        for name, value in model.state_dict().items():
            assert value.dtype == torch.float32 and torch.equal(value, want[name]), (stage, name)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_all_kinds_of_runs_after_one_another(rank, world_size, stage, tmp_path):
    runner, model = trainer(rank, world_size, tmp_path, zero(stage)), Net()
    before = runner.test(model, loader(), verbose=False)
    runner.fit(model, loader())
    after = runner.test(model, loader(), verbose=False)
    assert after[0]["loss"] < before[0]["loss"] and is_plain(model)
    runner.predict(model, loader())
    runner.fit_loop.max_epochs = 2
    runner.fit(model, loader())
    assert runner.global_step == 2 * 8 // world_size and is_plain(model)
    made = len(dist.distributed_c10d._world.pg_map)
    trainer(rank, world_size, tmp_path, zero(stage)).test(model, loader(), verbose=False)
    assert len(dist.distributed_c10d._world.pg_map) == made, "every run has made process groups"


@distributed(world_size=[2, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_with_different_numbers_of_batches_predict(rank, world_size, stage, tmp_path):
    class Writer(Callback):
        def on_predict_epoch_end(self, trainer, pl_module):
            trainer.strategy.barrier()  # as callbacks do that collect predictions

    model = Net()
    with torch.no_grad():
        want = {i: model(x) for i, (x, _) in enumerate(loader(7, 1))}
    got = trainer(rank, world_size, tmp_path, zero(stage), callbacks=[Writer()]).predict(model, loader(7, 1))
    assert len(got) == len(range(rank, 7, world_size))
    for i, out in zip(range(rank, 7, world_size), got, strict=True):
        torch.testing.assert_close(out, want[i])


@distributed(world_size=3)
def test_ranks_without_any_batch_predict(rank, world_size, tmp_path):
    model, rows = Net(), 2 * (2 - rank)
    model.allow_zero_length_dataloader_with_multiple_devices = True
    runner = trainer(rank, world_size, tmp_path, zero(3), use_distributed_sampler=False)
    got = runner.predict(model, loader(rows, 1))
    assert got is None if rank == 2 else len(got) == rows
    assert is_plain(model)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_hooks_see_final_gradients(rank, world_size, stage, tmp_path):
    seen = []

    class Model(Net):
        def on_after_backward(self):
            seen.append({name: p.grad.clone() for name, p in self.named_parameters()})

    fitted(rank, world_size, tmp_path, zero(stage), Model(), limit_train_batches=1)
    for name, grad in seen[0].items():
        both = [torch.empty_like(grad) for _ in range(world_size)]
        dist.all_gather(both, grad)
        assert torch.equal(both[0], both[1]) and grad.shape == Net().get_parameter(name).shape, name


@distributed(world_size=2)
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_is_that_of_all_ranks(rank, world_size, algorithm, tmp_path):
    class Model(Net):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    kwargs = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    want = fitted(rank, world_size, tmp_path, DDPStrategy(), Model(), **kwargs).state_dict()
    for stage in STAGES:
        for name, value in fitted(rank, world_size, tmp_path, zero(stage), Model(), **kwargs).state_dict().items():
            torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-6)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_manual_optimization_with_two_optimizers(rank, world_size, stage, tmp_path):
    class Model(Net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            for optimizer in (first, second):
                with optimizer.toggle_model():
                    optimizer.zero_grad()
                    self.manual_backward(F.mse_loss(self(batch[0]), batch[1]))
                    self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
                    optimizer.step()

        def configure_optimizers(self):
            inner = [*self.blocks.parameters(), *self.signs.parameters()]
            outer = [*self.norm.parameters(), *self.head.parameters()]
            return torch.optim.SGD(inner, lr=0.1, momentum=0.9), torch.optim.Adam(outer, lr=0.01)

    want = fitted(rank, world_size, tmp_path, DDPStrategy(find_unused_parameters=True), Model()).state_dict()
    for name, value in fitted(rank, world_size, tmp_path, zero(stage), Model()).state_dict().items():
        torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-6)


class Evaluated(Net):
    """Ranks have statistics of their own, and evaluate in the middle of a fit."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(DIM)
        self.losses = []

    def forward(self, x):
        return super().forward(self.batch_norm(x))

    def validation_step(self, batch, batch_idx):
        self.losses.append(F.mse_loss(self(batch[0]).float(), batch[1]).item())


@distributed(world_size=2)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_validation_in_a_fit_is_that_of_ddp_to_the_bit(rank, world_size, precision, tmp_path):
    def run(strategy):
        model = Evaluated()
        runner = trainer(rank, world_size, tmp_path, strategy, precision=precision, val_check_interval=2, max_epochs=2)
        runner.fit(model, loader(), loader(8))
        return model.losses, model.state_dict()

    losses, state = run(DDPStrategy())
    assert len(losses) == 2 + 4 * 2 and len(set(losses)) == len(losses)
    for stage in (1, 3):
        got = run(zero(stage))
        assert got[0] == losses, f"stage {stage}"
        assert all(torch.equal(got[1][name], value) for name, value in state.items() if "running" not in name)


class Straying(Callback):
    """Runs the module, and a layer of it, between steps."""

    def __init__(self):
        self.outputs = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert torch.is_grad_enabled()
        self.outputs += [pl_module(batch[0]).detach(), pl_module.head(batch[0]).detach()]

    def on_validation_epoch_end(self, trainer, pl_module):
        self.outputs.append(pl_module(torch.ones(2, DIM)).detach())


@distributed(world_size=2)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_forwards_between_steps(rank, world_size, precision, stage, tmp_path):
    def run(strategy, callback):
        model = Evaluated()
        runner = trainer(rank, world_size, tmp_path, strategy, callbacks=[callback], precision=precision)
        runner.fit(model, loader(), loader(8))
        return model.state_dict()

    theirs, ours = Straying(), Straying()
    want, got = run(DDPStrategy(), theirs), run(zero(stage), ours)
    assert len(ours.outputs) == 2 * 4 + 1 + 1
    for mine, other in zip(ours.outputs, theirs.outputs, strict=True):
        # ddp's are in fp32, under which this model's weights would have to be rounded first
        exact = {"rtol": 0, "atol": 0} if precision == "32-true" else {"rtol": 0.05, "atol": 0.05}
        torch.testing.assert_close(mine.float(), other, **exact)
    names = [name for name, _ in Evaluated().named_parameters()]
    assert all(torch.equal(got[name], want[name]) for name in names)


@distributed(world_size=2)
def test_options_of_the_optimizers_step_arrive(rank, world_size, tmp_path):
    class Model(Net):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(optimizer_closure, factor=0.5)

        def configure_optimizers(self):
            return Scaled(self.parameters())

    want = fitted(rank, world_size, tmp_path, DDPStrategy(), Model()).state_dict()
    for stage in (1, 3):
        got = fitted(rank, world_size, tmp_path, zero(stage), Model()).state_dict()
        assert all(torch.equal(got[name], value) for name, value in want.items()), f"stage {stage}"


# Refusals and failures


@distributed(world_size=2)
def test_an_optimizer_that_cannot_be_right_is_refused_before_anything_is_sharded(rank, world_size, tmp_path):
    class Model(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters())

    model = Model()
    with pytest.raises(ValueError, match="LBFGS"):
        fitted(rank, world_size, tmp_path, zero(3), model)
    assert is_plain(model)


@distributed(world_size=2)
def test_a_rank_that_fails_in_configure_optimizers_ends_all(rank, world_size, tmp_path):
    class Model(Net):
        def configure_optimizers(self):
            if self.global_rank == 1:
                raise KeyError("only here")
            return super().configure_optimizers()

    with pytest.raises(KeyError if rank == 1 else RuntimeError, match="only here"):
        fitted(rank, world_size, tmp_path, zero(3), Model())


@distributed(world_size=2, timeout=40)
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_that_fails_in_a_step_ends_all_and_all_can_start_again(rank, world_size, stage, tmp_path):
    class Model(Net):
        broken = True

        def training_step(self, batch, batch_idx):
            if self.broken and self.global_rank == 1 and batch_idx == 2:
                raise ValueError("a bad batch")
            return super().training_step(batch, batch_idx)

    runner = trainer(rank, world_size, tmp_path, zero(stage))
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match="a bad batch"):
        runner.fit(Model(), loader())
    with pytest.raises(RuntimeError, match="ended with an exception"):
        runner.save_checkpoint(tmp_path / "broken.ckpt")
    Model.broken = False
    model = fitted(rank, world_size, tmp_path, zero(stage), Model())
    assert is_plain(model)


@distributed(world_size=2)
def test_a_module_without_room_stays_sharded_and_usable(rank, world_size, tmp_path, monkeypatch):
    monkeypatch.setattr(host, "free_memory", lambda: 1000 if rank == 1 else 10**9)
    runner, model = trainer(rank, world_size, tmp_path, zero(3)), Net()
    with pytest.warns(UserWarning, match="stays sharded") if rank == 0 else nullcontext():
        runner.fit(model, loader())
    assert not is_plain(model)
    loss = runner.test(model, loader(), verbose=False)[0]["loss"]
    runner.save_checkpoint(tmp_path / "sharded.ckpt")
    with lightning_zero.gathered(model):
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = torch.load(tmp_path / "sharded.ckpt")
    assert all(torch.equal(saved["state_dict"][name], value) for name, value in weights.items())
    assert saved["optimizer_states"][0]["state"]
    runner.fit_loop.max_epochs = 2
    runner.fit(model, loader())
    monkeypatch.setattr(host, "free_memory", lambda: 10**9)
    assert runner.test(model, loader(), verbose=False)[0]["loss"] != loss
    assert is_plain(model)


# Callbacks that touch parameters


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_ema_is_that_of_ddp_or_refused(rank, world_size, stage, tmp_path):
    kwargs = {"max_epochs": 2, "limit_val_batches": 0}
    want = fitted(rank, world_size, tmp_path, DDPStrategy(), callbacks=[EMAWeightAveraging(decay=0.5)], **kwargs)
    callback = EMAWeightAveraging(decay=0.5)
    got = fitted(rank, world_size, tmp_path, zero(stage), callbacks=[callback], **kwargs)
    assert "on_train_batch_end" not in vars(callback)
    for name, value in got.state_dict().items():
        torch.testing.assert_close(value, want.state_dict()[name], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="EMA"):
        fitted(rank, world_size, tmp_path, zero(stage), callbacks=[callback], precision="bf16-mixed")


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_pruning_is_that_of_ddp_or_refused(rank, world_size, stage, tmp_path):
    def pruned(strategy):
        # the reset to the first values is left out: under ddp the callback trains what it has kept for it
        options = {"amount": 0.5, "parameter_names": ["weight"], "use_lottery_ticket_hypothesis": False}
        callback = ModelPruning("l1_unstructured", **options)
        return fitted(rank, world_size, tmp_path, strategy, callbacks=[callback], max_epochs=2).state_dict()

    if stage == 3:
        with pytest.raises(ValueError, match="ModelPruning replaces parameters"):
            pruned(zero(3))
        return
    want, got = pruned(DDPStrategy()), pruned(zero(stage))
    assert sum((value == 0).sum() for value in want.values()) > 100
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


class Functional(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        gradient = torch.func.grad(lambda x: self(x).sum())(batch[0])
        return loss + gradient.square().mean()


@distributed(world_size=2)
def test_torch_func_says_how_it_is_served(rank, world_size, tmp_path):
    with pytest.raises(RuntimeError, match="saved tensor hooks") as failure:
        fitted(rank, world_size, tmp_path, zero(3), Functional())
    assert "ZeroStrategy(saved_tensors_hooks=False)" in "".join(failure.value.__notes__)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_torch_func_in_a_step(rank, world_size, stage, tmp_path):
    torch.manual_seed(0)
    model = Functional()
    got = fitted(rank, world_size, tmp_path, zero(stage, saved_tensors_hooks=False), copy.deepcopy(model)).state_dict()
    want = fitted(rank, world_size, tmp_path, DDPStrategy(), model).state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


@distributed(world_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_finetuning_unfreezes_and_resumes(rank, world_size, stage, tmp_path):
    class Unfreeze(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.blocks)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.blocks, optimizer, lr=0.005)

    class Model(Net):
        def configure_optimizers(self):
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01, momentum=0.9)

    def run(epochs, model, **kwargs):
        runner = trainer(rank, world_size, tmp_path, zero(stage), callbacks=[Unfreeze()], max_epochs=epochs)
        runner.fit(model, loader(), **kwargs)
        return runner

    straight, again = Model(), Model(seed=3)
    run(3, straight)
    assert not torch.equal(straight.blocks[0].weight, Model().blocks[0].weight)
    run(1, Model()).save_checkpoint(tmp_path / "early.ckpt")
    resumed = run(3, again, ckpt_path=tmp_path / "early.ckpt")
    assert len(resumed.optimizers[0].param_groups) == 2
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, straight.state_dict()[name])


class Tracked(Net):
    """A buffer that each rank changes by itself, outside of the step, or in it through ``data``."""

    def __init__(self, outside):
        super().__init__()
        self.outside = outside
        self.register_buffer("seen", torch.zeros(()))

    def on_train_batch_start(self, batch, batch_idx):
        if self.outside:
            self.seen.copy_(batch[0].mean())

    def training_step(self, batch, batch_idx):
        out = self(batch[0])
        loss = F.mse_loss(out, batch[1]) + self.seen.clone() * out.mean()
        if not self.outside:
            self.seen.data.lerp_(batch[0].mean(), 0.5)
        return loss


@distributed(world_size=2)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("outside", [True, False])
def test_buffers_are_rank_0s_however_they_change(rank, world_size, outside, strategy, tmp_path):
    models = [Tracked(outside), Tracked(outside)]
    for model, name in zip(models, (strategy, "ddp"), strict=True):
        fitted(rank, world_size, tmp_path, name, model=model)
    assert all(torch.equal(*both) for both in zip(*(model.parameters() for model in models), strict=True))


@distributed(world_size=2, timeout=30)
def test_a_module_that_cannot_be_sharded_is_the_error_that_the_user_sees(rank, world_size, tmp_path):
    """Units are sharded already when the buffers are looked at: leaving the run must not read them."""
    module = Net()
    module.register_buffer("wide", torch.randn(1, 7).expand(4, 7))
    with pytest.raises(RuntimeError, match="single memory location"):
        trainer(rank, world_size, tmp_path, zero(3)).fit(module, loader())
