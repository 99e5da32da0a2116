"""Starts the ranks of a Hydra application's job on this machine, as ``torchrun`` does, and waits for them.

Lightning would run the command line again for every rank: under Hydra each makes a folder, and in a sweep each sweeps.
"""

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

JOB = "job"  # name of the configuration that ranks started here read


class JobFailed(CompactHydraException):
    """A job cannot be done. Of this class, so that Hydra prints the message alone."""


class RankFailed(JobFailed):
    """A rank failed."""


def run(work: Callable[[DictConfig], None], job: Callable[[DictConfig], None], config: DictConfig) -> None:
    """In a rank do its ``work``; otherwise do the ``job``, which starts the ranks, and show why it failed."""
    if is_rank():
        run_as_rank(work, config)
        return
    try:
        job(config)
    except JobFailed as failed:
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            print(f"\n{failed}", file=sys.stderr)
            raise  # the sweep goes on and fails at its end
        sys.exit(f"\n{failed}")


def is_rank() -> bool:
    """Whether this process is a rank: of :func:`run_ranks` or ``torchrun``, or, as Lightning sees it, of ``srun``."""
    return "LOCAL_RANK" in os.environ or _under_srun()


def _under_srun() -> bool:
    return "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in ("bash", "interactive")


def world_size(config: DictConfig) -> int:
    """The ranks of the job, here or in a rank of it."""
    if not is_rank():
        return num_ranks(config.trainer.devices)
    return int(os.environ["WORLD_SIZE" if "LOCAL_RANK" in os.environ else "SLURM_NTASKS"])


def run_ranks(program: Sequence[str], config: DictConfig, folder: Path, **changes: Any) -> None:
    """Run ``program`` on ``config.trainer.devices`` new ranks.

    ``program`` is a script, or ``-m`` and a module. ``changes`` replace values of ``config``.

    The ranks read ``folder/job.yaml``, in which every interpolation is resolved: they need neither the command line nor
    the sweep that made the configuration. If one fails, or this process gets SIGINT, SIGTERM or SIGHUP, all of them are
    stopped.

    Raises:
        JobFailed: the job wants more than this machine.
        RankFailed: a rank failed; the message is its error.
        SystemExit: a signal came.
    """
    if config.trainer.get("num_nodes", 1) > 1:
        raise JobFailed("Several nodes need a launcher that starts the ranks: torchrun or srun.")
    folder.mkdir(parents=True, exist_ok=True)
    job = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    for key, value in {**changes, "output": str(folder)}.items():
        OmegaConf.update(job, key, value, merge=False)
    OmegaConf.save(job, folder / f"{JOB}.yaml")
    hydra = [f"hydra.run.dir='{folder}'", "hydra.output_subdir=null", "hydra/job_logging=none"]
    command = [*program, "--config-path", str(folder), "--config-name", JOB, *hydra]
    settings = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks(job.trainer.devices),
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port for every job
        max_restarts=0,
        shutdown_timeout=10,
    )
    logging.disable(logging.CRITICAL)  # what the launcher has to say on a failed rank, RankFailed says shorter
    try:
        elastic_launch(settings, sys.executable)("-u", *command)
    except ChildFailedError as failed:
        raise RankFailed(_cause(failed, folder)) from None
    except SignalException as stop:
        raise SystemExit(128 + stop.sigval) from None  # not an Exception, after which a sweep would go on
    finally:
        logging.disable(logging.NOTSET)


def run_as_rank(work: Callable[[DictConfig], None], config: DictConfig) -> None:
    """Do the work of a rank. An error goes to the launcher, which shows it once, and not to the terminal."""
    try:
        record(work)(config)
    except Exception:
        if "TORCHELASTIC_ERROR_FILE" not in os.environ:
            raise  # nobody would hear of it
        sys.exit(1)


def started_elsewhere() -> bool:
    """Whether this rank was started by ``torchrun`` or ``srun``, not by :func:`run_ranks`."""
    return HydraConfig.get().job.config_name != JOB


def _cause(failed: ChildFailedError, folder: Path) -> str:
    rank, failure = min(failed.failures.items(), key=lambda item: _lateness(item[1]))
    if isinstance(failure.message, str):
        return f"Rank {rank} failed: {failure.message if failure.exitcode < 0 else f'exit code {failure.exitcode}'}"
    (folder / "error.txt").write_text(failure.message["extraInfo"]["py_callstack"])
    return f"Rank {rank} failed (traceback: {folder / 'error.txt'}):\n{failure.message['message']}"


def _lateness(failure: ProcessFailure) -> tuple[bool, bool, int]:
    """The first failure is the cause, unless it is one that another rank's failure brings about."""
    return failure.exitcode == -signal.SIGTERM, "PeerError" in str(failure.message), failure.timestamp


def num_ranks(devices: Any) -> int:
    """How many ranks ``Trainer(devices=devices)`` has on this machine."""
    if isinstance(devices, str) and devices[:1].isdigit():  # "2": so many; "0,1": these
        return len(devices.strip(",").split(",")) if "," in devices else int(devices)
    if isinstance(devices, int) and devices > 0:
        return devices
    if not isinstance(devices, int | str):
        return len(devices)  # a list of device indices
    return max(1, torch.cuda.device_count())  # -1 and "auto"
