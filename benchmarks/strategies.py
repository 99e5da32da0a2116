"""The strategies by name, each with its own defaults."""

from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy


class CPUDeepSpeed(DeepSpeedStrategy):
    """Lightning's DeepSpeed strategy without its demands for CUDA devices; DeepSpeed itself works on CPU."""

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", self.local_rank)  # DeepSpeed wants an index

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def make_strategy(name: str, devices: int) -> Any:
    """What the Trainer takes as ``strategy``. DeepSpeed is imported only if it is meant."""
    if name == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True)
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1)
    if name.startswith("deepspeed"):
        return CPUDeepSpeed(stage=int(name.removeprefix("deepspeed")))
    import lightning_zero  # noqa: F401  registers the name

    return name


def trainer_precision(name: str, precision: str) -> str:
    """The Trainer's ``precision``. FSDP2 casts by itself under ``bf16-mixed``, so autocast stays out of its way."""
    return "32-true" if name == "fsdp2" and precision == "bf16-mixed" else precision
