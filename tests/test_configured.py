"""Settings of a run (batch, accumulation, clipping, precision, optimizer), wherever they are said."""

import copy
import json
import logging
import operator
import pickle
import re

import pytest
import torch
from harness import distributed, run_ranks
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from test_strategy import DIM, Net, trainer
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from lightning_zero import ZeroMonitor, ZeroStrategy

ZERO2 = """{
  "zero_optimization": {
    "stage": 2,
    "offload_optimizer": {"device": "cpu"},
    "contiguous_gradients": true,
    "overlap_comm": true
  },
  "bf16": {"enabled": true},
  "train_batch_size": 32,
  "gradient_accumulation_steps": 4
}
"""
ZERO3 = """{
  "zero_optimization": {
    "stage": 3,
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
    "stage3_gather_16bit_weights_on_model_save": true
  }
}
"""
BATCH = ("train_batch_size", "micro_batch_size", "gradient_accumulation_steps")


class Samples(TensorDataset):
    """128 of them, each with its number."""

    def __init__(self):
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(128, DIM, generator=generator)
        super().__init__(x, x.sum(1, keepdim=True), torch.arange(128))


class Seeing(Net):
    """Notes the batches of each optimizer step, as numbers of samples."""

    def __init__(self):
        super().__init__()
        self.steps, self.window = [], []

    def training_step(self, batch, batch_idx):
        self.window.append(batch[2].tolist())
        return super().training_step(batch, batch_idx)

    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)
        self.steps.append(self.window)
        self.window = []


def fit(rank, world_size, folder, strategy, loader=None, module=None, **kwargs):
    module = module or Seeing()
    fitting = trainer(rank, world_size, folder, strategy, **kwargs)
    fitting.fit(module, DataLoader(Samples(), batch_size=8) if loader is None else loader)
    return module, fitting


def weights(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# The founding configurations


@pytest.mark.parametrize("loader_batch", [1, 8])
def test_zero2_json_takes_32_samples_a_step_on_any_number_of_ranks(tmp_path, loader_batch):
    path = tmp_path / "zero2.json"
    path.write_text(ZERO2)

    def body(rank, world_size):
        loader = DataLoader(Samples(), batch_size=loader_batch)
        module, fitting = fit(rank, world_size, tmp_path, ZeroStrategy(config=path), loader, limit_val_batches=0)
        seen = fitting.strategy.resolved()
        return module.steps, [seen[name] for name in BATCH], fitting.precision, seen["stage"]

    for ranks in (1, 2, 4):
        results = run_ranks(body, ranks)
        assert {tuple(batch) for _, batch, _, _ in results} == {(32, 8 // ranks, 4)}
        assert {(precision, stage) for _, _, precision, stage in results} == {("bf16-true", 2)}
        for step in range(4):
            samples = [sample for steps, *_ in results for batch in steps[step] for sample in batch]
            assert len(samples) == len(set(samples)) == 32


def test_zero3_json_leaves_batches_and_precision_to_trainer_and_loader(tmp_path):
    def body(rank, world_size):
        strategy = ZeroStrategy(config=json.loads(ZERO3))
        module, fitting = fit(rank, world_size, tmp_path, strategy, precision="bf16-mixed", accumulate_grad_batches=2)
        seen = strategy.resolved()
        return [len(batch) for step in module.steps for batch in step], seen["stage"], fitting.precision

    for ranks in (1, 2, 4):
        assert run_ranks(body, ranks) == [([8] * (16 // ranks), 3, "bf16-mixed")] * ranks


@distributed(world_size=2)
def test_a_run_by_json_has_the_weights_of_one_by_the_trainer(rank, world_size, tmp_path):
    config = {**json.loads(ZERO2), "gradient_clipping": 0.1}
    by_json, _ = fit(rank, world_size, tmp_path, ZeroStrategy(config=config))
    settings = {"precision": "bf16-true", "accumulate_grad_batches": 4, "gradient_clip_val": 0.1}
    loader = DataLoader(Samples(), batch_size=4)
    by_trainer, _ = fit(rank, world_size, tmp_path, ZeroStrategy(2), loader, **settings)
    unclipped, _ = fit(rank, world_size, tmp_path, ZeroStrategy(config=ZERO2_MAPPING))
    assert equal(weights(by_json), weights(by_trainer))
    assert not equal(weights(by_json), weights(unclipped))


ZERO2_MAPPING = json.loads(ZERO2)

# Batches: any two give the third


@pytest.mark.parametrize(
    ("settings", "accumulate", "sizes"),
    [
        ({"train_batch_size": 32, "micro_batch_size": 4}, 1, (32, 4, 4)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 1, (32, 8, 2)),
        ({"micro_batch_size": 2, "gradient_accumulation_steps": 4}, 1, (16, 2, 4)),
        ({"train_batch_size": 32}, 4, (32, 4, 4)),
        ({"train_batch_size": 32}, 1, (32, 16, 1)),
        ({"micro_batch_size": 4}, 2, (16, 4, 2)),
        ({"gradient_accumulation_steps": 2}, 1, (32, 8, 2)),
        ({"train_batch_size": 16, "micro_batch_size": 4, "gradient_accumulation_steps": 2}, 2, (16, 4, 2)),
    ],
)
def test_two_sizes_give_the_third(tmp_path, settings, accumulate, sizes):
    def body(rank, world_size):
        strategy = ZeroStrategy(2, **settings)
        module, fitting = fit(rank, world_size, tmp_path, strategy, accumulate_grad_batches=accumulate)
        return [strategy.resolved()[name] for name in BATCH], [len(batch) for batch in module.steps[0]]

    for batch, first in run_ranks(body, 2):
        assert tuple(batch) == sizes and first == [sizes[1]] * sizes[2]


CONTRADICTIONS = [
    ({"train_batch_size": 32, "micro_batch_size": 4, "gradient_accumulation_steps": 2}, {}, "and 2 ranks contradict"),
    (
        {"train_batch_size": 30, "gradient_accumulation_steps": 4},
        {},
        "train_batch_size=30, gradient_accumulation_steps=4 and the number of ranks contradict",
    ),
    ({"train_batch_size": 4, "micro_batch_size": 4}, {}, "train_batch_size=4, micro_batch_size=4 and 2 ranks"),
    (
        {"train_batch_size": 32, "micro_batch_size": 4},
        {"accumulate_grad_batches": 2},
        r"accumulate_grad_batches=2\) and gradient_accumulation_steps=4 of ZeroStrategy contradict",
    ),
    (
        {"gradient_accumulation_steps": 4},
        {"accumulate_grad_batches": 2},
        r"accumulate_grad_batches=2\) and gradient_accumulation_steps=4 of ZeroStrategy contradict",
    ),
    (
        {"gradient_clipping": 1.0},
        {"gradient_clip_val": 0.5},
        r"gradient_clip_val=0.5 by norm\) and gradient_clipping=1.0 of ZeroStrategy contradict",
    ),
    (
        {"gradient_clipping": 1.0},
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
        r"gradient_clip_val=1.0 by value\) and gradient_clipping=1.0",
    ),
]


@pytest.mark.parametrize(("settings", "said", "words"), CONTRADICTIONS)
def test_contradictions_name_both_places_on_all_ranks(tmp_path, settings, said, words):
    def body(rank, world_size):
        with pytest.raises(ValueError, match=words):
            fit(rank, world_size, tmp_path, ZeroStrategy(2, **settings), **said)
        return True

    assert run_ranks(body, 2) == [True, True]


@distributed(world_size=1)
def test_precisions_that_contradict_are_refused_when_the_trainer_is_made(rank, world_size, tmp_path):
    for config, precision in (({"bf16": {"enabled": True}}, "16-true"), ({"fp16": {"enabled": True}}, "bf16-true")):
        with pytest.raises(ValueError, match=rf"precision=.*{precision}.* contradict one another"):
            trainer(0, 1, tmp_path, ZeroStrategy(config=config), precision=precision)
    with pytest.raises(
        ValueError, match=r"Trainer\(precision='bf16-mixed'\) and precision='bf16-true' of ZeroStrategy"
    ):
        trainer(0, 1, tmp_path, ZeroStrategy(precision="bf16-true"), precision="bf16-mixed")


@pytest.mark.parametrize(
    ("config", "said", "is_now"),
    [
        ({"bf16": {"enabled": True}}, "bf16-mixed", "bf16-mixed"),
        ({"bf16": {"enabled": True}}, "32-true", "bf16-true"),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "bf16-true", "bf16-true"),
        ({"fp16": {"enabled": True}}, "32-true", "16-true"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "32-true", "bf16-mixed"),
        ({"bf16": {"enabled": False}}, "bf16-mixed", "bf16-mixed"),
    ],
)
@distributed(world_size=1)
def test_precision_is_that_of_trainer_and_configuration(rank, world_size, tmp_path, config, said, is_now):
    assert trainer(0, 1, tmp_path, ZeroStrategy(config=config), precision=said).precision == is_now


# DataLoaders


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.ones(DIM), torch.ones(1), 0


@pytest.mark.parametrize(
    ("loader", "sizes"),
    [
        (lambda: DataLoader(Samples(), batch_size=8, shuffle=True, num_workers=0), [4, 4]),
        (lambda: DataLoader(Samples(), 8), [4, 4]),
        (lambda: DataLoader(Endless(), batch_size=8), [4, 4]),
        (lambda: DataLoader(Samples(), batch_size=8, sampler=RandomSampler(Samples())), [4, 4]),
    ],
    ids=["shuffled", "positional", "iterable", "sampler"],
)
@distributed(world_size=[1, 2])
def test_loaders_of_other_sizes_are_made_anew(rank, world_size, tmp_path, loader, sizes):
    class InHook(Seeing):
        def train_dataloader(self):
            return loader()

    strategy = ZeroStrategy(1, micro_batch_size=4)
    module, _ = fit(rank, world_size, tmp_path, strategy, loader(), max_steps=2)
    assert [len(batch) for step in module.steps for batch in step] == sizes
    module = InHook()
    trainer(rank, world_size, tmp_path, ZeroStrategy(1, micro_batch_size=4), max_steps=2).fit(module)
    assert [len(batch) for step in module.steps for batch in step] == sizes


class Doubles(BatchSampler):
    """A batch sampler of one's own."""


def test_a_batch_sampler_of_ones_own_is_not_replaced(tmp_path):
    loader = DataLoader(Samples(), batch_sampler=Doubles(RandomSampler(Samples()), 8, False))

    def body(rank, world_size):
        with pytest.raises(ValueError, match="a batch must have 4 samples, and your batch_sampler makes 8"):
            fit(rank, world_size, tmp_path, ZeroStrategy(1, micro_batch_size=4), loader)
        fit(rank, world_size, tmp_path, ZeroStrategy(1, micro_batch_size=8), loader)

    run_ranks(body, 1)


def test_data_without_a_batch_size_is_not_checked_and_that_is_said(tmp_path):
    def body(rank, world_size):
        data = [[torch.ones(2, DIM), torch.ones(2, 1), torch.zeros(2)]] * 4
        with pytest.warns(UserWarning, match="nobody can say how many yours have"):
            fit(rank, world_size, tmp_path, ZeroStrategy(1, micro_batch_size=4), DataLoader(data, batch_size=None))

    run_ranks(body, 1)


def test_validation_loaders_keep_their_size(tmp_path):
    class Validating(Seeing):
        sizes = []

        def validation_step(self, batch, batch_idx):
            self.sizes.append(len(batch[0]))

    def body(rank, world_size):
        module = Validating()
        loaders = DataLoader(Samples(), batch_size=8), DataLoader(Samples(), batch_size=16)
        trainer(rank, world_size, tmp_path, ZeroStrategy(1, micro_batch_size=4), max_steps=2).fit(module, *loaders)
        return set(module.sizes)

    assert run_ranks(body, 1) == [{16}]


# Optimizers and schedulers


class Without(LightningModule):
    """Has no configure_optimizers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(DIM, 1)
        self.rates = []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return (self.layer(batch[0]) - batch[1]).square().mean()


class With(Without):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}


ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
WARM = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}


@distributed(world_size=2)
def test_an_optimizer_of_the_configuration_is_used_where_the_module_has_none(rank, world_size, tmp_path):
    config = {"zero_optimization": {"stage": 2}, "optimizer": ADAM, "scheduler": WARM}
    module, fitting = fit(rank, world_size, tmp_path, ZeroStrategy(config=config), module=Without(), max_steps=6)
    assert type(fitting.optimizers[0]).__name__ == "AdamW" and fitting.optimizers[0].defaults["weight_decay"] == 0.1
    assert module.rates == pytest.approx([0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01])
    assert "configure_optimizers" not in vars(module)


@distributed(world_size=1)
def test_an_optimizer_of_the_configuration_goes_before_the_modules(rank, world_size, tmp_path):
    with pytest.warns(UserWarning, match="configure_optimizers of With is not called"):
        _, fitting = fit(rank, world_size, tmp_path, ZeroStrategy(2, optimizer=ADAM), module=With(), max_steps=1)
    assert type(fitting.optimizers[0]).__name__ == "AdamW" and not fitting.lr_scheduler_configs


@distributed(world_size=1)
def test_a_scheduler_of_the_configuration_moves_the_modules_optimizer(rank, world_size, tmp_path):
    with pytest.warns(UserWarning, match="The scheduler is that of ZeroStrategy"):
        strategy = ZeroStrategy(2, scheduler=WARM)
        module, fitting = fit(rank, world_size, tmp_path, strategy, module=With(), max_steps=3)
    assert type(fitting.optimizers[0]).__name__ == "SGD" and module.rates == pytest.approx([0.0, 0.0, 0.0025])


@pytest.mark.parametrize("settings", [{"optimizer": ADAM}, {"scheduler": WARM}], ids=["optimizer", "scheduler"])
@distributed(world_size=1)
def test_a_module_can_be_pickled_and_copied_during_a_fit(rank, world_size, tmp_path, settings):
    made = []

    class Copying(Callback):
        def on_train_start(self, trainer, module):
            pickled = pickle.dumps(module), pickle.dumps(module.configure_optimizers)
            whole, method = map(pickle.loads, pickled)
            for configure in (whole.configure_optimizers, method, copy.deepcopy(module).configure_optimizers):
                copied = configure.args[0]
                copied.trainer = trainer
                configured = configure()
                optimizer = configured["optimizer"] if "scheduler" in settings else configured
                assert all(map(operator.is_, optimizer.param_groups[0]["params"], copied.parameters()))
                assert copied is not module
                made.append(type(optimizer).__name__)

    fit(rank, world_size, tmp_path, ZeroStrategy(2, **settings), module=With(), max_steps=1, callbacks=[Copying()])
    assert made == ["AdamW" if "optimizer" in settings else "SGD"] * 3


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("hook", ["configure_optimizers", "on_train_start", "on_before_optimizer_step", "on_fit_end"])
@distributed(world_size=2)
def test_a_fit_that_fails_leaves_the_module_its_own_optimizer(rank, world_size, tmp_path, stage, hook):
    def fail(*args):
        raise OSError("by design")

    for configure in (None, fail):  # of the class, and of the object
        module = With()
        if configure is not None:
            module.configure_optimizers = configure
        if hook != "configure_optimizers":
            setattr(module, hook, fail)
        strategy = ZeroStrategy(stage, optimizer=fail if hook == "configure_optimizers" else ADAM)
        with pytest.raises(OSError, match="by design"):
            fit(rank, world_size, tmp_path, strategy, module=module, max_steps=2)
        assert vars(module).get("configure_optimizers") is configure


@distributed(world_size=1)
def test_a_second_fit_and_a_test_need_no_second_thought(rank, world_size, tmp_path):
    """What was set in the first one is not taken for the Trainer's own word."""
    strategy = ZeroStrategy(
        2, optimizer=ADAM, train_batch_size=16, gradient_accumulation_steps=2, gradient_clipping=1.0
    )
    module, fitting = fit(rank, world_size, tmp_path, strategy, module=Without(), max_epochs=1)
    fitting.fit_loop.max_epochs = 2
    fitting.fit(module, DataLoader(Samples(), batch_size=8))
    assert fitting.current_epoch == 2 and fitting.accumulate_grad_batches == 2


@distributed(world_size=1)
def test_a_function_makes_optimizer_and_scheduler(rank, world_size, tmp_path):
    strategy = ZeroStrategy(
        2,
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.25),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    module, _ = fit(rank, world_size, tmp_path, strategy, module=Without(), max_steps=3)
    assert module.rates == [0.25, 0.125, 0.0625]


@pytest.mark.parametrize("settings", [{"gradient_clipping": 1.0}, {"gradient_accumulation_steps": 2}])
def test_manual_optimization_decides_for_itself(tmp_path, settings):
    class Manual(Seeing):
        automatic_optimization = False

    def body(rank, world_size):
        with pytest.raises(ValueError, match="needs automatic optimization: Manual decides for itself"):
            fit(rank, world_size, tmp_path, ZeroStrategy(2, **settings), module=Manual())

    run_ranks(body, 1)


# What is said


@distributed(world_size=1)
def test_the_table_is_printed_once(rank, world_size, tmp_path, caplog):
    strategy = ZeroStrategy(config={"zero_optimization": {"stage": 2}, "my_notes": 1})
    with caplog.at_level(logging.INFO), pytest.warns(UserWarning, match="keys that DeepSpeed does not know: my_notes"):
        module, fitting = fit(rank, world_size, tmp_path, strategy, max_steps=1)
        fitting.test(module, DataLoader(Samples(), batch_size=8), verbose=False)
    said = [record.getMessage() for record in caplog.records if "what becomes of it" in record.getMessage()]
    assert len(said) == 1 and "zero_optimization.stage" in said[0] and "ZeroStrategy(stage=2)" in said[0]


@distributed(world_size=1)
def test_defaults_that_give_way_are_named(rank, world_size, tmp_path, caplog):
    config = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}}
    strategy = ZeroStrategy(prefetch=1, tile_size=2**18, config=config)
    with caplog.at_level(logging.INFO):
        fit(rank, world_size, tmp_path, strategy, max_steps=1)
    said = [record.getMessage() for record in caplog.records if "goes before" in record.getMessage()]
    assert len(said) == 1 and said[0].endswith("defaults of prefetch.") and strategy.config.prefetch == 0


@distributed(world_size=1)
def test_a_monitor_is_added_where_the_configuration_wants_one(rank, world_size, tmp_path):
    strategy = ZeroStrategy(config={"zero_optimization": {"stage": 2}, "wall_clock_breakdown": True})
    _, fitting = fit(rank, world_size, tmp_path, strategy, max_steps=1)
    assert sum(isinstance(callback, ZeroMonitor) for callback in fitting.callbacks) == 1


WITHOUT_EFFECT = [
    ({"stage": 2, "persistence_threshold": 5}, "persistence_threshold=5 has no effect at stage 2"),
    ({"stage": 1, "prefetch": 3}, "prefetch=3 has no effect at stage 1"),
    ({"stage": 2, "saved_tensors_hooks": False}, "saved_tensors_hooks=False has no effect at stage 2"),
    ({"persistence_limit": 5}, "persistence_limit has no effect without persistence_threshold"),
    ({"offload_optimizer": {"device": "cpu", "block_size": 8192}}, "block_size=8192 has no effect with device='cpu'"),
    ({"offload_optimizer": {"threads": 2}}, "threads=2 has no effect with device='none'"),
    ({"offload_params": {"device": "cpu", "ratio": 0.5}}, "offload_params: ratio=0.5 has no effect"),
    ({"offload_params": {"device": "cpu", "buffer_count": 8}}, "offload_params: buffer_count=8 has no effect"),
    ({"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp", "pin_memory": False}}, "pin_memory=False has no"),
    (
        {"precision": "bf16-true", "loss_scale": {"hysteresis": 2}},
        "loss_scale has no effect with precision=",
    ),
]


@pytest.mark.parametrize(("settings", "words"), WITHOUT_EFFECT)
@distributed(world_size=1)
def test_a_setting_without_effect_warns_once(rank, world_size, tmp_path, settings, words):
    strategy = ZeroStrategy(**settings)
    with pytest.warns(UserWarning, match=re.escape(words)) as warned:
        module, fitting = fit(rank, world_size, tmp_path, strategy, max_steps=1)
        fitting.test(module, DataLoader(Samples(), batch_size=8), verbose=False)
    assert sum(words in str(warning.message) for warning in warned) == 1


# "auto"


class Sized(Seeing):
    """Has a hidden size to reckon with."""

    class config:
        hidden_size = 2


@distributed(world_size=2)
def test_auto_is_what_hugging_face_makes_of_it(rank, world_size, tmp_path):
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    config = {
        "zero_optimization": {**zero, "stage3_param_persistence_threshold": "auto"},
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"),
        "gradient_clipping": "auto",
    }
    strategy = ZeroStrategy(config=config)
    _, fitting = fit(rank, world_size, tmp_path, strategy, module=Sized(), accumulate_grad_batches=2)
    seen = strategy.resolved()
    assert [seen[name] for name in BATCH] == [32, 8, 2]
    assert seen["persistence_threshold"] == 20 and seen["max_unit_bytes"] == 2**24 and seen["prefetch"] == 1
    strategy = ZeroStrategy(config=config)
    fit(rank, world_size, tmp_path, strategy, module=Seeing())
    assert strategy.config.persistence_threshold == 10 * DIM  # of the linear layers


# Ranks that differ


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"stage": 3}, {"stage": 1}, "stage is 3 on rank 0 and 1 on rank 1"),
        ({"train_batch_size": 32}, {"train_batch_size": 64}, "train_batch_size is 32 on rank 0 and 64 on rank 1"),
        ({}, {"gradient_dtype": "bf16"}, "gradient_dtype is None on rank 0 and 'bf16' on rank 1"),
    ],
)
@distributed(world_size=2)
def test_ranks_that_have_other_settings_are_told(rank, world_size, tmp_path, one, other, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        fit(rank, world_size, tmp_path, ZeroStrategy(**(other if rank else one)))


@distributed(world_size=2)
def test_one_ranks_quarrel_with_its_trainer_is_everybodys(rank, world_size, tmp_path):
    strategy = ZeroStrategy(2, gradient_clipping=1.0)
    with pytest.raises((ValueError, RuntimeError), match="gradient_clip_val=0.5"):
        fit(rank, world_size, tmp_path, strategy, gradient_clip_val=0.5 if rank else None)


@distributed(world_size=2)
def test_paths_and_functions_may_differ(rank, world_size, tmp_path):
    disk = {"device": "nvme", "nvme_path": str(tmp_path / f"disk{rank}")}
    fit(rank, world_size, tmp_path, ZeroStrategy(2, offload_optimizer=disk, optimizer=lambda p: torch.optim.SGD(p)))


# What else says something of the same


@pytest.mark.parametrize(
    "settings", [{"train_batch_size": 8}, {"micro_batch_size": 8, "gradient_accumulation_steps": 4}], ids=str
)
@distributed(world_size=1)
def test_a_callback_that_schedules_accumulation_contradicts_a_number(rank, world_size, tmp_path, settings):
    strategy = ZeroStrategy(2, **settings)
    with pytest.raises(ValueError, match="of ZeroStrategy and GradientAccumulationScheduler contradict one another"):
        fit(rank, world_size, tmp_path, strategy, callbacks=[GradientAccumulationScheduler({0: 4})])


@distributed(world_size=1)
def test_a_callback_schedules_accumulation_of_micro_batches(rank, world_size, tmp_path):
    callbacks = [GradientAccumulationScheduler({0: 4, 1: 2})]
    strategy = ZeroStrategy(2, micro_batch_size=16)
    with pytest.warns(UserWarning, match="ZeroStrategy: micro_batch_size=16: your DataLoader of 8 samples"):
        module, _ = fit(rank, world_size, tmp_path, strategy, max_epochs=2, callbacks=callbacks)
    assert [len(step) for step in module.steps] == [4, 4, 2, 2, 2, 2]
    assert {len(batch) for step in module.steps for batch in step} == {16}


@distributed(world_size=1)
def test_a_scheduler_needs_automatic_optimization(rank, world_size, tmp_path):
    class Manual(With):
        automatic_optimization = False

    with pytest.raises(ValueError, match="The scheduler of ZeroStrategy needs automatic optimization: Manual"):
        fit(rank, world_size, tmp_path, ZeroStrategy(2, scheduler=WARM), module=Manual())


@pytest.mark.parametrize("lists", [True, False])
@distributed(world_size=1)
def test_a_scheduler_that_is_dropped_is_named(rank, world_size, tmp_path, lists):
    class Listing(With):
        def configure_optimizers(self):
            made = super().configure_optimizers()
            return ([made["optimizer"]], [made["lr_scheduler"]]) if lists else [made]

    with pytest.warns(UserWarning, match="one of configure_optimizers is not used"):
        fit(rank, world_size, tmp_path, ZeroStrategy(2, scheduler=WARM), module=Listing(), max_steps=2)


def test_a_keyword_for_precision_is_no_family():
    class Own(Precision):
        """Of the user."""

    zero_2 = {"zero_optimization": {"stage": 2}}
    for strategy, plugin in (
        (ZeroStrategy(precision="bf16-true", config=zero_2), MixedPrecision("bf16-mixed", "cpu")),
        (ZeroStrategy(config={**zero_2, "torch_autocast": {"enabled": True}}), HalfPrecision("bf16-true")),
        (ZeroStrategy(precision="bf16-true"), Own()),
    ):
        with pytest.raises(ValueError, match="contradict one another. Say it in one place"):
            strategy.precision_plugin = plugin


@distributed(world_size=1)
def test_the_place_that_said_it_is_named(rank, world_size, tmp_path):
    strategy = ZeroStrategy(gradient_clipping=1.0, config={"zero_optimization": {"stage": 2}})
    with pytest.raises(ValueError, match="gradient_clipping=1.0 of ZeroStrategy contradict"):
        fit(rank, world_size, tmp_path, strategy, gradient_clip_val=0.5)
