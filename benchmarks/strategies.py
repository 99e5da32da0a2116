"""The strategies by name, each with its own defaults; for NVMe, DeepSpeed has what it takes to do the same as ours."""

from typing import Any

import torch
from cases import Settings
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

    def _setup_model(self, model: Any) -> Any:
        if "offload_param" in self.config["zero_optimization"] and "bf16" not in self.config:
            import deepspeed

            # Later on, DeepSpeed would swap fp32 parameters in bf16, which rounds them: on CPU it forgets their dtype.
            deepspeed.zero.Init(module=model, config_dict_or_path=self.config)
        return model


def make_strategy(name: str, settings: Settings, disk: str) -> Any:
    """What the Trainer takes as ``strategy``; ``disk`` is the folder to offload to. DeepSpeed is imported if meant."""
    if name == "ddp":
        return DDPStrategy(gradient_as_bucket_view=True)
    if name == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=settings.devices, tensor_parallel_size=1)
    if name.startswith("deepspeed"):
        return _deepspeed(name, settings, disk)
    import lightning_zero  # registers the names

    if name == "zero3_nvme":
        place = {"device": "nvme", "nvme_path": disk}
        return lightning_zero.ZeroStrategy(stage=3, offload_optimizer=place, offload_params=place)
    return name


def _deepspeed(name: str, settings: Settings, disk: str) -> CPUDeepSpeed:
    stage, _, offload = name.removeprefix("deepspeed").partition("_")
    if not offload:
        return CPUDeepSpeed(stage=int(stage))
    options: dict[str, Any] = {}
    if offload == "nvme":
        options = {"offload_optimizer_device": "nvme", "offload_parameters": True, "offload_params_device": "nvme"}
        options |= {"nvme_path": disk, "block_size": 2**20, "queue_depth": 8, "thread_count": 1}  # our defaults
        options |= {"sub_group_size": 2**20, "optimizer_buffer_count": 16}  # windows as ours, of whole parameters
        largest = 4 * settings.dim**2  # of all parameters
        options |= {"max_in_cpu": 0, "params_buffer_count": 8, "params_buffer_size": -(-largest // settings.devices)}
    strategy = CPUDeepSpeed(stage=int(stage), offload_optimizer=True, **options)
    # DeepSpeed offloads its own optimizer only: this is its DeepSpeedCPUAdam, with the numbers of the model's AdamW.
    strategy.config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
    if offload == "nvme":
        zero = strategy.config["zero_optimization"]
        zero["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": True}
        zero["stage3_max_reuse_distance"] = 0  # or all parameters of a model this small stay in memory
        zero["stage3_prefetch_bucket_size"] = 1  # one ahead; with more, it reads one twice at once, and fails
    return strategy


def trainer_precision(name: str, precision: str) -> str:
    """The Trainer's ``precision``. FSDP2 casts by itself under ``bf16-mixed``, so autocast stays out of its way."""
    return "32-true" if name == "fsdp2" and precision == "bf16-mixed" else precision
