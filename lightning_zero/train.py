"""Trains your own LightningModule: ``conf/train.yaml`` has all that can be set.

    python -m lightning_zero.train module=my_package.my_module:Lit zero=stage3 trainer.devices=2
    torchrun --nproc-per-node 2 -m lightning_zero.train module=my_package.my_module:Lit zero=stage3 trainer.devices=2

A job starts its own ranks, in new processes, unless ``torchrun`` or ``srun`` has started them.
"""

import os
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
from hydra.utils import instantiate
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from omegaconf import DictConfig, OmegaConf

from lightning_zero.config.checks import nearest
from lightning_zero.config.hydra import CONF, run_with_hints
from lightning_zero.launch import JobFailed, run, run_ranks


@hydra.main(version_base="1.3", config_path=f"pkg://{CONF}", config_name="train")
def main(cfg: DictConfig) -> None:
    """One job: in a rank the training, otherwise the ranks."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    run(fit, run_job, cfg)


def run_job(cfg: DictConfig) -> None:
    """Start the ranks, if what they are to train is there."""
    if "stage" not in cfg.zero:
        raise JobFailed("zero=ddp is for examples/train_gpt.py: choose zero=stage0, which is plain data parallelism.")
    for name in ("module", "datamodule"):
        find(cfg, name)
    print(f"Folder: {cfg.output}", flush=True)
    run_ranks(["-m", "lightning_zero.train"], cfg, Path(cfg.output))


def fit(cfg: DictConfig) -> None:
    """Train; on rank 0, print what was logged."""
    if cfg.seed is not None:
        seed_everything(cfg.seed, workers=True, verbose=False)
    module, datamodule = make(cfg, "module"), make(cfg, "datamodule")
    strategy = instantiate(cfg.zero, _convert_="all")
    trainer: Trainer = instantiate(cfg.trainer, strategy=strategy, _convert_="all")
    trainer.fit(module, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
    if trainer.is_global_zero:
        words = [f"{key} {value.item():.4f}" for key, value in trainer.callback_metrics.items()]
        print(f"\n{', '.join([f'{trainer.global_step} steps', *words])}", flush=True)


def make(cfg: DictConfig, name: str) -> Any:
    """The object that ``cfg`` names; None where it names none."""
    kind = find(cfg, name)
    if kind is None:
        return None if cfg[name] is None else instantiate(cfg[name], _convert_="all")
    return kind(**instantiate(cfg[f"{name}_args"], _convert_="all"))


def find(cfg: DictConfig, name: str) -> type | None:
    """The class that ``module`` or ``datamodule`` names; None where it is null or a node with ``_target_``.

    Raises:
        JobFailed: there is no such class, or it is of another kind.
    """
    if OmegaConf.is_missing(cfg, name):
        raise JobFailed(f"What is to be trained? Say {name}=package.module:Class or {name}=file.py:Class.")
    value = cfg[name]
    if value is None or isinstance(value, DictConfig):
        return None
    place, colon, class_name = str(value).rpartition(":")
    if not colon or not place or not class_name:
        raise JobFailed(f"{name}={value} has no colon: say {name}=package.module:Class or {name}=file.py:Class.")
    found = getattr(source := _load(place, f"{name}={value}"), class_name, None)
    expected = {"module": LightningModule, "datamodule": LightningDataModule}[name]
    if found is None:
        classes = [key for key, each in vars(source).items() if isinstance(each, type) and issubclass(each, expected)]
        raise JobFailed(f"{name}={value}: {place} has no {class_name}.{nearest(class_name, classes)}")
    if not isinstance(found, type) or not issubclass(found, expected):
        raise JobFailed(f"{name}={value}: {class_name} is no class derived from lightning.pytorch.{expected.__name__}.")
    return found


def _load(place: str, said: str) -> ModuleType:
    """The Python module at a path or of a name."""
    if not place.endswith(".py"):
        try:
            return import_module(place)
        except ModuleNotFoundError as missing:
            if missing.name is None or not f"{place}.".startswith(f"{missing.name}."):
                raise  # it is there, and imports something that is not
            raise JobFailed(f"{said}: there is no module {missing.name!r} in {os.getcwd()} or on PYTHONPATH.") from None
    path = Path(place).resolve()
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise JobFailed(f"{said}: there is no file {path}.")
    sys.modules[path.stem] = module = module_from_spec(spec)  # where pickle looks for its classes
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    run_with_hints(main, "train")
