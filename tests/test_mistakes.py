"""Configurations that users get wrong, and what they are told: where, what was found, what to do."""

import json
import re

import pytest
from harness import distributed
from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from lightning.pytorch.cli import LightningCLI
from test_configured import Samples, Seeing
from test_strategy import Net, trainer
from torch.utils.data import DataLoader

from lightning_zero import ZeroStrategy

NVME = {"device": "nvme"}
ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}


def zero(**block):
    return {"zero_optimization": {"stage": 2, **block}}


AT_CONSTRUCTION = [
    ({"prefetchh": 2}, "ZeroStrategy has no setting 'prefetchh'. Did you mean 'prefetch'?"),
    ({"stage": 2, "offload_params": "cpu"}, "offload_params needs stage 3: at stage 2 parameters are whole"),
    (
        {"offload_optimizer": {"device": "nvme", "nvme_pth": "/scratch"}},
        "offload_optimizer has no setting 'nvme_pth'. Did you mean 'nvme_path'?",
    ),
    (
        {"config": zero(overlap_com=True)},
        "zero_optimization.overlap_com: true: there is no such key. Did you mean 'overlap_comm'?",
    ),
    (
        {"config": {"train_batchsize": 32}},
        "32: there is no such key. Did you mean 'train_batch_size'?",
    ),
    (
        {"config": {"bf16": {"enabled": True}, "fp16": {"enabled": True}}},
        "bf16.enabled: true: fp16.enabled is true as well: choose one of them",
    ),
    ({"config": zero(offload_param={"device": "cpu"})}, "offload_param.device: cpu: needs stage 3: at stage 2"),
    ({"config": zero(offload_optimizer=NVME)}, "offload_optimizer.nvme_path: null: must name a directory on a disk"),
    (
        {"config": zero(zero_quantized_gradients=True)},
        "zero_quantized_gradients: true: gradients travel unquantised: remove it",
    ),
    ({"config": zero(stage=4)}, "zero_optimization.stage: 4: must be one of 0, 1, 2, 3"),
    (
        {"config": zero(), "stage": 1},
        "stage=1 of ZeroStrategy and 2 of the DeepSpeed configuration differ.",
    ),
    ({"config": zero(offload_optimizer="cpu")}, "zero_optimization.offload_optimizer: cpu: must be an object, { ... }"),
    (
        {"config": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "wieght_decay": 0.1}}}},
        "optimizer.params.wieght_decay",
    ),
    ({"optimizer": {"type": "AdamWw", "params": {}}}, "Did you mean 'AdamW'?"),
    ({"config": {"optimizer": {"type": "OneBitAdam"}}}, "OneBitAdam"),
    ({"config": {"scheduler": {"type": "WarmupLR", "params": {"warm_num_steps": 3}}}}, "'warmup_num_steps'"),
    ({"config": {"optimizer": {"params": {"lr": 1}}}}, "optimizer.params: {'lr': 1}: optimizer.type is missing"),
    (
        {"train_batch_size": 30, "micro_batch_size": 4},
        "train_batch_size=30, micro_batch_size=4 and the number of ranks contradict one another",
    ),
    ({"precision": "bf16"}, "precision='bf16' is none of '32-true', '64-true', 'bf16-mixed', 'bf16-true'"),
    ({"loss_scale": {"hystersis": 2}}, "loss_scale has no setting 'hystersis'. Did you mean 'hysteresis'?"),
    ({"config": {"fp16": {"enabled": True, "loss_scale_window": 0}}}, "fp16.loss_scale_window: 0: must be a whole"),
    ({"config": {"lightning_zero": {"prefetchh": 2}}}, "has no setting 'prefetchh'. Did you mean 'prefetch'?"),
]


@pytest.mark.parametrize(("keywords", "words"), AT_CONSTRUCTION, ids=lambda value: str(value)[:60])
def test_a_wrong_configuration_is_refused_when_the_strategy_is_made(keywords, words):
    with pytest.raises((ValueError, TypeError)) as error:
        ZeroStrategy(**keywords)
    assert words in str(error.value)


def test_the_file_is_named(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(zero(stage3_prefetch_buckt_size=1)))
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} cannot be used:\n .*stage3_prefetch_bucket_size"):
        ZeroStrategy(config=path)


IN_A_RUN = [
    (
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8},
        {},
        "train_batch_size=32, micro_batch_size=4, gradient_accumulation_steps=8 and 2 ranks contradict one another",
    ),
    (
        {"gradient_accumulation_steps": 4},
        {"accumulate_grad_batches": 2},
        "Trainer(accumulate_grad_batches=2) and gradient_accumulation_steps=4 of the DeepSpeed configuration contr",
    ),
    (
        {"gradient_clipping": 1.0},
        {"gradient_clip_val": 0.5},
        "Trainer(gradient_clip_val=0.5 by norm) and gradient_clipping=1.0 of the DeepSpeed configuration contradict",
    ),
    (
        {"fp16": {"enabled": True}},
        {"precision": "bf16-mixed"},
        "Trainer(precision='bf16-mixed') and precision='16-true' of the DeepSpeed configuration contradict one another",
    ),
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, {}, "lr"),
]


@pytest.mark.parametrize(("config", "said", "words"), IN_A_RUN, ids=lambda value: str(value)[:60])
@distributed(world_size=2)
def test_what_contradicts_the_trainer_is_refused_on_all_ranks(rank, world_size, tmp_path, config, said, words):
    with pytest.raises(ValueError) as error:
        trainer(rank, world_size, tmp_path, ZeroStrategy(config={**zero(), **config}), **said).fit(
            Seeing(), DataLoader(Samples(), batch_size=4)
        )
    assert words in str(error.value)


def test_a_misspelt_override_of_hydra_is_refused():
    with (
        initialize_config_module("lightning_zero.conf", version_base="1.3"),
        pytest.raises(HydraException, match="'zero.prefetchh'"),
    ):
        compose("train", ["zero.prefetchh=2"])


@pytest.mark.parametrize(
    ("argument", "words"),
    [("stage=7", "stage=7 is none of 0, 1, 2, 3"), ("prefetchh=2", "Option 'prefetchh' is not accepted")],
)
def test_a_wrong_argument_of_lightning_cli_is_refused(argument, words, capsys):
    arguments = ["--trainer.strategy=lightning_zero.ZeroStrategy", f"--trainer.strategy.{argument}"]
    arguments += ["--trainer.accelerator=cpu", "--trainer.logger=false"]
    with pytest.raises((SystemExit, ValueError)) as error:
        LightningCLI(Net, run=False, args=arguments)
    assert words in str(error.value) + capsys.readouterr().err
