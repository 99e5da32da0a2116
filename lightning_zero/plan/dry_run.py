"""A dry run: the engine itself takes steps with tensors that have no memory, and what they would take is counted."""

import gc
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.config import OffloadConfig, ZeroConfig
from lightning_zero.engine import Engine, Tier
from lightning_zero.engine.layout import round_up
from lightning_zero.plan.account import Account
from lightning_zero.plan.ledger import ACCELERATOR, Ledger
from lightning_zero.plan.pretend import PlannedCommunicator, PlannedDisk, PlannedHost, as_on_a_gpu, ranks
from lightning_zero.precision.dtypes import compute_dtype

TILES = 64
"""A dry run cuts the optimizer's step into so many tiles or windows at most: each costs time."""


class Workload(NamedTuple):
    """What is trained: made anew for each dry run, on the device that the run plays."""

    module: nn.Module
    make_optimizer: Callable[[], Optimizer]
    loss: Callable[[], Tensor]
    """The loss of one micro-batch, with its activations."""


@dataclass(frozen=True)
class Case:
    """How it is trained.

    Attributes:
        world_size: ranks.
        precision: ``bf16-true`` or ``32-true``.
        micro_batches: in a step.
        optimizer, params: where the optimizer's state and the parameters rest: ``none``, ``cpu`` or ``nvme``.
        settings: further fields of :class:`ZeroConfig`.
        device: what the run plays; the accelerator, or the CPU.
    """

    stage: int
    world_size: int
    precision: str = "bf16-true"
    micro_batches: int = 1
    optimizer: str = "none"
    params: str = "none"
    settings: tuple[tuple[str, Any], ...] = ()
    device: torch.device = ACCELERATOR


def dry_run(make: Callable[[], Workload], case: Case, only_states: bool = False) -> Account:
    """Take a step, which makes the optimizer's state, and begin another: forward and backward.

    Args:
        make: makes module and optimizer.
        case: how they are trained.
        only_states: no second forward: only the account's states are right then.

    Raises:
        RuntimeError: this process is a rank of a process group already.
        ValueError: the engine refuses the module or the case.
    """
    ledger = Ledger()
    disk, host = PlannedDisk(), PlannedHost()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # torch's, of what tensors without memory answer; the engine's come in the run
        stack.enter_context(ranks(case.world_size))
        stack.enter_context(ledger.counting())
        stack.enter_context(as_on_a_gpu())
        with torch.device(case.device):
            workload = make()
        optimizer = workload.make_optimizer()
        comm = PlannedCommunicator(case.device)
        config = _config(case, workload.module, {"cpu": host, "nvme": disk})
        engine = Engine(workload.module, config, comm, compute_dtype=compute_dtype(workload.module, case.precision))
        part = _widen_windows(engine)
        if case.device.type != "cpu":
            ledger.restart()  # on its way the module was on the device as a whole: a real one comes unit by unit
        _backwards(engine, workload, case)
        states = engine.memory()
        comm.traffic.update(dict.fromkeys(comm.traffic, 0))
        engine.step(optimizer)  # whose end, and not whose begin, belongs to the time that is looked at
        optimizer.zero_grad()
        if only_states:
            states["optimizer"] = engine.memory()["optimizer"]
        else:
            _backwards(engine, workload, case)
            states = engine.memory()
        parameters = sum(param.numel() for param in workload.module.parameters())
        device, on_host = ledger.peak[case.device.type], 0.0
        if case.device.type != "cpu":
            on_host = ledger.peak["cpu"] - (1 - part) * engine.sharded(optimizer).window_bytes
        account = Account(parameters, states, device, on_host, disk.peak, {**comm.traffic})
        engine.forget_optimizers()
        engine.release(whole=False)
        comm.close()
    del engine, workload, optimizer
    gc.collect()  # cycles hold tensors of this ledger
    return account


def _config(case: Case, module: nn.Module, tiers: dict[str, Tier]) -> ZeroConfig:
    settings: dict[str, Any] = {
        f"offload_{kind}": OffloadConfig(device=(lambda tier: lambda: tier)(tiers[place]))
        for kind, place in (("optimizer", case.optimizer), ("params", case.params))
        if place != "none" and not (place == "cpu" and case.device.type == "cpu")
    }
    settings |= dict(case.settings)
    largest = max(sum(p.numel() for p in module.parameters()), 1)
    if "tile_size" not in settings and case.device.type != "cpu":
        settings["tile_size"] = max(ZeroConfig().tile_size, -(-largest // TILES // 64) * 64)
    return ZeroConfig(stage=case.stage, **settings)


def _widen_windows(engine: Engine) -> float:
    """Have offloaded state brought in by few windows; returns which part of their memory the engine's own would take.

    All of them stay in memory, so that what is too much can be told.
    """
    swap = engine.offload.swap
    own = sum(flat.high - flat.low for unit in engine.units for flat in unit.flats)
    engine.offload.swap = swap._replace(window=max(swap.window, round_up(own // TILES, 1024)))
    return swap.window / engine.offload.swap.window


def _backwards(engine: Engine, workload: Workload, case: Case) -> None:
    for micro in range(case.micro_batches):
        with engine.forward():
            loss = workload.loss()
        with engine.backward(last=micro == case.micro_batches - 1):
            loss.backward()  # type: ignore[no-untyped-call]
        del loss
