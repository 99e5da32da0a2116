"""The configuration for Hydra: types, forms of offload, users' applications, ``python -m lightning_zero.train``."""

import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest
from harness import environment
from hydra import compose, initialize_config_module
from hydra.errors import ConfigCompositionException, InstantiationException
from hydra.utils import instantiate

from lightning_zero.config.hydra import hints
from lightning_zero.config.settings import TRAINING, ZERO

ROOT = Path(__file__).resolve().parent.parent
MODULE = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset


class Data(LightningDataModule):
    def train_dataloader(self):
        x = torch.randn(64, 4)
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


class Lit(LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("train_loss", loss)
        self.log("width", float(self.net[0].out_features))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return Data().train_dataloader()
"""
APP = """
import hydra
{imports}
from omegaconf import OmegaConf

@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(cfg):
    strategy = hydra.utils.instantiate(cfg.zero)
    print("STRATEGY", strategy.config.stage, strategy.config.prefetch, strategy.config.offload_params.device)

main()
"""
SHORT = ["trainer.max_steps=2", "trainer.enable_progress_bar=false", "trainer.enable_checkpointing=false"]


def composed(*overrides, config="train"):
    with initialize_config_module("lightning_zero.conf", version_base="1.3"):
        return compose(config, ["output=nowhere", *overrides])


def strategy(*overrides):
    return instantiate(composed(*overrides).zero)


def run(*arguments, cwd, path=ROOT):
    """Run Python in a folder; what was printed, and the exit code."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment(path), text=True, capture_output=True, timeout=240
    )
    return done.stdout + done.stderr, done.returncode


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_has_every_setting_with_its_default(stage):
    made = strategy(f"zero=stage{stage}")
    assert made.config == type(made.config)(stage=stage)
    assert set(composed(f"zero=stage{stage}").zero) == {"_target_", "_convert_", "config", *ZERO, *TRAINING}


def test_a_deepspeed_configuration_is_a_choice_of_its_own(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": 8}')
    made = strategy("zero=deepspeed", f"zero.config={path}", "zero.prefetch=2")
    assert made.config.stage == 2 and made.training.train_batch_size == 8 and made.config.prefetch == 2
    with pytest.raises(Exception, match="stage=3 of ZeroStrategy and 2 of .* differ"):
        strategy("zero=stage3", f"zero.config={path}")


@pytest.mark.parametrize(
    ("overrides", "optimizer", "params"),
    [
        (["offload@zero.offload_optimizer=cpu"], "cpu", "none"),
        (["offload@zero.offload_params=cpu"], "none", "cpu"),
        (["offload=cpu"], "cpu", "cpu"),
        (["offload=cpu", "offload@zero.offload_params=none"], "cpu", "none"),
        (["zero=stage1", "offload=cpu"], "cpu", "none"),
        (["zero=stage2", "offload=nvme", "offload.nvme_path=/scratch"], "nvme", "none"),
        (["offload=nvme", "offload.nvme_path=/scratch"], "nvme", "nvme"),
        (["offload@zero.offload_optimizer=nvme", "zero.offload_optimizer.nvme_path=/scratch"], "nvme", "none"),
        (["zero.offload_optimizer.device=nvme", "zero.offload_optimizer.nvme_path=/scratch"], "nvme", "none"),
        (["zero.offload_optimizer=cpu"], "cpu", "none"),
        (["zero.offload_optimizer.device=cpu", "zero.offload_optimizer.ratio=0.5"], "cpu", "none"),
    ],
    ids=" ".join,
)
def test_offload(overrides, optimizer, params):
    config = strategy(*overrides).config
    assert (config.offload_optimizer.device, config.offload_params.device) == (optimizer, params)
    for each in (config.offload_optimizer, config.offload_params):
        assert each.device != "nvme" or each.nvme_path == "/scratch"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["offload=nvme"], "needs nvme_path"),
        (["zero=stage2", "offload@zero.offload_params=cpu"], "offload_params needs stage 3"),
        (["zero=stage0", "offload=cpu"], "offload_optimizer needs stage 1, 2 or 3"),
    ],
)
def test_what_does_not_go_together_is_said(overrides, says):
    with pytest.raises(InstantiationException, match=says):
        strategy(*overrides)


@pytest.mark.parametrize("wrong", ["zero.prefetch=many", "zero.unit_classes=Block", "zero.prefetchh=2"])
def test_types_and_names_are_checked_when_composing(wrong):
    with pytest.raises(ConfigCompositionException):
        composed(wrong)


def test_what_a_misspelt_name_may_have_meant():
    given = ["zero.prefetchh=2", "zerro=stage3", "zero=stage1", "trainer.devcies=2", "offload=cpu", "+module_args.w=1"]
    hinted = [*hints("train", given)]
    assert hinted == ["Did you mean zero.prefetch?", "Did you mean zero?", "Did you mean trainer.devices?"]


def test_groups_reach_strategy_and_trainer():
    cfg = composed("precision=fp16-mixed", "batch.train_batch_size=64", "batch.micro_batch_size=8", "optimizer=adamw")
    made = instantiate(cfg.zero)
    assert cfg.trainer.precision == "16-mixed"
    assert made.training.batch(4) == (64, 8, 2)
    assert made.training.optimizer.keywords["lr"] == 2e-3 and made.training.scheduler is None
    made = strategy("scheduler=warmup_cosine", "scheduler.params.total_num_steps=9", "zero.loss_scale={hysteresis: 2}")
    assert made.training.scheduler == {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 9, "warmup_num_steps": 100},
    }
    assert made.training.loss_scale.hysteresis == 2


def test_an_experiment_makes_several_choices():
    cfg = composed("experiment=gpu_large", config="config")
    assert cfg.trainer.devices == 8 and cfg.model.depth == 12 and cfg.optimizer.lr == 3e-4
    assert composed("experiment=gpu_large", "trainer.devices=2", config="config").trainer.devices == 2


BEFORE_HYDRA = """
import importlib.util
import sys

import lightning_zero

importlib.util.find_spec("hydra")
print("HYDRA", "hydra" in sys.modules)
"""


@pytest.mark.parametrize(
    ("before", "imports", "searchpath"),
    [
        pytest.param("", "import lightning_zero", False, marks=pytest.mark.full),
        ("", "", True),
        (BEFORE_HYDRA, "", False),
    ],
    ids=["imported after hydra", "search path alone", "imported before hydra"],
)
def test_an_application_of_the_users_own(tmp_path, before, imports, searchpath):
    """Its own files win; those of the package are there without ``+``. The package alone does not import Hydra."""
    (tmp_path / "app.py").write_text(before + APP.format(imports=imports))
    (tmp_path / "conf" / "offload").mkdir(parents=True)
    (tmp_path / "conf" / "offload" / "cpu.yaml").write_text("device: none\n")
    hydra = "hydra:\n  searchpath: [pkg://lightning_zero.conf]\n" if searchpath else ""
    (tmp_path / "conf" / "app.yaml").write_text(f"defaults:\n  - zero: stage3\n  - _self_\n{hydra}")
    output, code = run("app.py", "zero.prefetch=2", "offload@zero.offload_params=cpu", cwd=tmp_path)
    assert code == 0 and "STRATEGY 3 2 none" in output, output
    assert ("HYDRA False" in output) == bool(before) and "HYDRA True" not in output, output


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("mine", "module=mine has no colon: say module=package.module:Class or module=file.py:Class."),
        ("mien:Lit", "there is no module 'mien'"),
        ("mien.py:Lit", "there is no file"),
        ("mine:Litt", "mine has no Litt. Did you mean 'Lit'?"),
        ("mine:DataLoader", "is no class derived from lightning.pytorch.LightningModule."),
        ("???", "What is to be trained? Say module=package.module:Class"),
    ],
)
def test_what_is_no_module_is_said_in_a_line(tmp_path, monkeypatch, value, says):
    from lightning_zero.launch import JobFailed
    from lightning_zero.train import find

    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(JobFailed) as failed:
        find(composed(f"module={value!r}"), "module")
    assert says in str(failed.value) and "\n" not in str(failed.value)


def test_a_sweep_trains_the_users_module_in_a_folder_a_job(tmp_path):
    (tmp_path / "mine.py").write_text(MODULE)
    words = ["module=mine.py:Lit", "+module_args.width=6", "datamodule=mine.py:Data", "zero=stage1,stage3", *SHORT]
    sweep = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    output, code = forked.run("-m", "lightning_zero.train", "-m", *words, "trainer.devices=2", sweep, cwd=tmp_path)
    assert code == 0, output
    assert output.count("2 steps, ") == 2 and output.count("width 6.0000") == 2, output
    assert sorted(path.name for path in (tmp_path / "sweep").iterdir() if path.is_dir()) == ["0", "1"]
    assert all((tmp_path / "sweep" / job / "job.yaml").exists() for job in "01")
    assert "outputs" not in os.listdir(tmp_path)


def test_a_misspelt_setting_ends_the_program_with_a_hint(tmp_path):
    output, code = forked.run("-m", "lightning_zero.train", "module=mine:Lit", "zero.prefetchh=2", cwd=tmp_path)
    assert code == 1 and output.splitlines()[-1] == "Did you mean zero.prefetch?", output
