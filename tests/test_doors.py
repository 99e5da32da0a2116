"""One training run described in four ways is one run: keywords, Hydra, DeepSpeed's JSON, LightningCLI."""

import json

import pytest
from harness import run_ranks
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from lightning.pytorch.cli import LightningCLI
from test_configured import Samples, Seeing, equal, weights
from test_strategy import trainer
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}
WARM = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "warmup_type": "linear"}}


def by_keywords(stage):
    return ZeroStrategy(
        stage,
        train_batch_size=16,
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        precision="bf16-true",
        offload_optimizer="cpu",
        max_unit_bytes=2**25,
        optimizer=ADAM,
        scheduler=WARM,
    )


def by_hydra(stage):
    overrides = [
        f"zero=stage{stage}",
        "offload@zero.offload_optimizer=cpu",
        "batch.train_batch_size=16",
        "batch.gradient_accumulation_steps=2",
        "zero.gradient_clipping=0.5",
        "zero.precision=bf16-true",
        "zero.max_unit_bytes=33554432",
        "zero.optimizer={type: AdamW, params: {lr: 0.01, weight_decay: 0.1}}",
        "zero.scheduler={type: WarmupLR, params: {warmup_max_lr: 0.01, warmup_num_steps: 4, warmup_type: linear}}",
    ]
    with initialize_config_module("lightning_zero.conf", version_base="1.3"):
        return instantiate(compose("train", overrides, return_hydra_config=False).zero)


def by_json(stage):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 2**23}
    return ZeroStrategy(
        config={
            "train_batch_size": 16,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": True, "check_grad_overflow": False},
            "zero_optimization": zero,
            "optimizer": ADAM,
            "scheduler": WARM,
        }
    )


def by_cli(stage):
    """The command line."""
    name = "--trainer.strategy"
    arguments = [
        f"{name}=lightning_zero.ZeroStrategy",
        f"{name}.stage={stage}",
        f"{name}.train_batch_size=16",
        f"{name}.gradient_accumulation_steps=2",
        f"{name}.gradient_clipping=0.5",
        f"{name}.precision=bf16-true",
        f"{name}.offload_optimizer=cpu",
        f"{name}.max_unit_bytes=33554432",
        f"{name}.optimizer={json.dumps(ADAM)}",
        f"{name}.scheduler={json.dumps(WARM)}",
    ]
    return arguments


DOORS = [by_keywords, by_hydra, by_json, by_cli]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_four_descriptions_of_a_run_are_one_run(tmp_path, stage):
    def body(rank, world_size, door):
        made = trainer(rank, world_size, tmp_path, "ddp" if door is by_cli else door(stage))
        module = Seeing()
        if door is by_cli:
            quiet = {"accelerator": "cpu", "devices": world_size, "max_epochs": 1, "default_root_dir": str(tmp_path)}
            quiet |= {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            cli = LightningCLI(Seeing, None, None, trainer_defaults=quiet, run=False, args=door(stage))
            made, module = cli.trainer, cli.model
        made.fit(module, DataLoader(Samples(), batch_size=8))
        return made.strategy.resolved(), weights(module), module.steps

    runs = [run_ranks(body, 2, door) for door in DOORS]
    resolved, trained, steps = runs[0][0]
    assert resolved["train_batch_size"] == 16 and resolved["micro_batch_size"] == 4 and len(steps) == 8
    assert resolved["optimizer"]["params"]["weight_decay"] == 0.1 and resolved["scheduler"] == "WarmupLR"
    assert not equal(trained, weights(Seeing()))
    for ranks in runs[1:]:
        for (other, weights_of, seen), (_, _, wanted) in zip(ranks, runs[0], strict=True):
            assert other == resolved and seen == wanted
            assert equal(weights_of, trained)
