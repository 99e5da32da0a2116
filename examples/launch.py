"""Starts the ranks of a job on this machine, as ``torchrun`` does, and waits for them."""

import sys
import uuid
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_ranks(script: str, config: DictConfig, folder: Path, **changes: Any) -> None:
    """Run ``script`` with ``config``, in which ``changes`` replace values, on ``config.trainer.devices`` new ranks.

    The ranks read ``folder/job.yaml``, in which every interpolation is resolved: they need neither the command line nor
    the sweep that made the configuration. If one fails, or this process gets SIGINT, SIGTERM or SIGHUP, all of them are
    stopped.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: a rank failed.
        SystemExit: a signal came.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    for key, value in {**changes, "output": str(folder)}.items():
        OmegaConf.update(job, key, value, merge=False)
    OmegaConf.save(job, folder / "job.yaml")
    hydra = [f"hydra.run.dir='{folder}'", "hydra.output_subdir=null", "hydra/job_logging=none"]
    command = [script, "--config-path", str(folder), "--config-name", "job", *hydra]
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=_num_ranks(job.trainer.devices),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port for every job
        max_restarts=0,
        shutdown_timeout=10,
    )
    try:
        elastic_launch(settings, sys.executable)("-u", *command)
    except SignalException as stop:
        raise SystemExit(128 + stop.sigval) from None  # not an Exception, after which a sweep would go on


def _num_ranks(devices: Any) -> int:
    if isinstance(devices, int) and devices > 0:
        return devices
    if not isinstance(devices, int | str):
        return len(devices)  # a list of device indices
    return max(1, torch.cuda.device_count())  # -1 and "auto"
