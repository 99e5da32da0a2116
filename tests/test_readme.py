"""What the README shows: its programs are run, its commands are understood."""

import argparse
import itertools
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import hydra
import lightning.pytorch
import pytest
import torch
from harness import distributed
from hydra import compose, initialize_config_dir
from lightning.pytorch.callbacks import ModelCheckpoint
from test_strategy import trainer

import lightning_zero

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"^ {4}((?:python|torchrun) [^#\n]*)", README, re.MULTILINE)

HYDRA = {"examples/train_gpt.py": "config", "lightning_zero.train": "train"}
AS_EVER = "    ...  # training_step, configure_optimizers: as ever\n"
METHODS = """
    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
"""


class Lit(lightning.pytorch.LightningModule):
    """What the programs train that show no module of their own."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def snippet(words):
    """The one program with these words in it."""
    (found,) = [text for text in SNIPPETS if words in text]
    return found


def run(text, rank, world_size, folder, monkeypatch, width=8, **names):
    """Run a program as a rank that the harness has made; returns its variables."""

    def make(*, strategy, devices=world_size, **given):
        return trainer(rank, world_size, folder, strategy, **{"max_steps": 2, "enable_checkpointing": True, **given})

    monkeypatch.setattr(lightning.pytorch, "Trainer", make)
    monkeypatch.chdir(folder)
    data = torch.utils.data.DataLoader(torch.randn(32, width), batch_size=2)
    names = {"torch": torch, "lightning_zero": lightning_zero, "Trainer": make, "data": data, "Lit": Lit, **names}
    names |= {"ZeroStrategy": lightning_zero.ZeroStrategy, "ModelCheckpoint": ModelCheckpoint, "module": Lit()}
    exec(text, names)
    return names


@distributed(world_size=2, timeout=60)
def test_the_first_program(rank, world_size, tmp_path, monkeypatch):
    text = snippet("class Model")
    assert AS_EVER in text
    text = text.replace(AS_EVER, METHODS).replace("1024, 1024", "64, 64")
    names = run(text, rank, world_size, tmp_path, monkeypatch, width=64)
    assert names["trainer"].global_step == 2 and (tmp_path / "model.ckpt").is_file()


@distributed(world_size=2)
@pytest.mark.parametrize("words", ["unit_classes", "nvme_path", "ds_config.json"])
def test_a_strategy_with_settings(rank, world_size, words, tmp_path, monkeypatch):
    (tmp_path / "ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    text = snippet(words).replace('"/scratch"', repr(str(tmp_path))).replace('("Block",)', '("Linear",)')
    text += "" if "trainer = " in text else "\ntrainer = Trainer(strategy=strategy)"
    names = run(f"{text}\ntrainer.fit(module, data)", rank, world_size, tmp_path, monkeypatch)
    assert names["trainer"].global_step == 2


@distributed(world_size=2)
def test_a_module_on_meta(rank, world_size, tmp_path, monkeypatch):
    text = snippet("class Large").replace("LightningModule", "Lit") + "\nmodule = Large()\ndel module.model"
    text += "\nTrainer(strategy='zero3').fit(module, data)"

    def make(config):
        return torch.nn.Sequential(torch.nn.Linear(config, 8), torch.nn.Linear(8, 8))

    module = run(text, rank, world_size, tmp_path, monkeypatch, Transformer=make, config=8)["module"]
    assert type(module).__name__ == "Large" and not any(p.is_meta for p in module.parameters())


@distributed(world_size=2)
def test_checkpoints(rank, world_size, tmp_path, monkeypatch):
    text = snippet("state_dict_type").replace("every_n_train_steps=500", "every_n_train_steps=1, dirpath='.'")
    text = text.replace('ckpt_path="last"', "ckpt_path=None").replace("step=500", "step=2")
    names = run(text, rank, world_size, tmp_path, monkeypatch)
    assert isinstance(names["module"], Lit) and (tmp_path / "epoch=0-step=2.ckpt").is_dir()


@distributed(world_size=1)
def test_a_hydra_application(rank, world_size, tmp_path, monkeypatch):
    (yaml,) = re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/config.yaml").write_text(yaml.replace("devices: 4", "devices: 1"))
    body = snippet("@hydra.main").partition("def main(cfg):\n")[2]
    with initialize_config_dir(str(tmp_path / "conf"), version_base="1.3"):
        cfg = compose("config", ["batch.micro_batch_size=2"])
    body = "\n".join(line.strip() for line in body.splitlines())
    names = run(f"{body}\ntrainer.fit(module, data)", rank, world_size, tmp_path, monkeypatch, cfg=cfg, hydra=hydra)
    resolved = names["trainer"].strategy.resolved()
    assert resolved["stage"] == 3 and resolved["micro_batch_size"] == 2


class Understood(Exception):
    """An argument parser has taken what it was given."""


def _jobs(word):
    key, _, values = word.partition("=")
    return [f"{key}={value}" for value in values.split(",")] if values else [word]


@pytest.mark.parametrize("command", [each for each in COMMANDS if each.strip() != "python examples/minimal.py"])
def test_a_command_is_understood(command, monkeypatch):
    """By its own parser, or by Hydra; what the programs do then, tests of their own show."""
    words = shlex.split(command)
    if words[0] == "torchrun":
        assert words[1] == "--nproc-per-node"
        words = words[2:]
    program, arguments = (words[2], words[3:]) if words[1] == "-m" else (words[1], words[2:])
    if program in HYDRA:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            sweep = "-m" in arguments
            for choices in itertools.product(*(_jobs(word) if sweep else [word] for word in arguments)):
                assert compose(HYDRA[program], [word for word in choices if word != "-m"]).zero
        return

    def parse(parser, given=None, namespace=None):
        understood(parser, given, namespace)
        raise Understood

    understood = argparse.ArgumentParser.parse_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.syspath_prepend(str((ROOT / program).parent))
    with pytest.raises(Understood):
        if program.endswith(".py"):
            runpy.run_path(str(ROOT / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__")
