"""What belongs to the process and its host rather than to one run: communicators, free memory."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_zero.engine import Communicator, Engine, PeerError
from lightning_zero.engine.host_memory import free_memory


class _Key(NamedTuple):
    device: torch.device
    timeout: timedelta


_communicators: dict[_Key, tuple[Any, Communicator]] = {}
"""One communicator for the life of a default process group, for all Trainers in the process."""


_failed: list[Communicator] = []
"""Those that were given up after a failure."""


def find_communicator(device: torch.device, timeout: timedelta) -> Communicator | None:
    """This process' communicator over the present default process group, if there is one. No collective."""
    world, comm = _communicators.get(_Key(device, timeout), (None, None))
    return comm if world is dist.group.WORLD else None


def any_communicator() -> Communicator | None:
    """One over the present default process group, made if there is none yet; None: there is no group. Collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    for world, comm in _communicators.values():
        if world is dist.group.WORLD:
            return comm
    clean_up_at_exit()
    return make_communicator(torch.device("cpu"), timedelta(minutes=30))


def make_communicator(device: torch.device, timeout: timedelta) -> Communicator:
    """A new communicator over the default process group. Collective."""
    _, old = _communicators.pop(_Key(device, timeout), (None, None))
    if old is not None:
        old.close()
    comm = Communicator(device, timeout)
    _communicators[_Key(device, timeout)] = (dist.group.WORLD, comm)
    return comm


def drop_communicator(comm: Communicator) -> None:
    """Close a communicator that cannot be used any more. No collective."""
    for key, (_, known) in list(_communicators.items()):
        if known is comm:
            del _communicators[key]
    _failed.append(comm)
    comm.abandon()


def clean_up_at_exit() -> None:
    """Leave communicators, and close the default process group if it does not exist yet, when the process ends.

    Lightning leaves gloo's groups to the interpreter, whose end now and then aborts in their threads.
    """
    if not dist.is_initialized():
        atexit.unregister(_destroy_default_group)
        atexit.register(_destroy_default_group)
    atexit.unregister(_leave_all)
    atexit.register(_leave_all)  # before the default group: the last registered runs first


def _leave_all() -> None:
    for _, comm in _communicators.values():
        comm.close()
    _communicators.clear()
    for comm in _failed:
        comm.leave()
    _failed.clear()


def _destroy_default_group() -> None:
    with suppress(Exception):  # a broken group cannot be destroyed cleanly, and the process ends anyway
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def together(comm: Communicator | None) -> Iterator[None]:
    """Let the block end alike on all ranks: an error on some of them is raised on every one. Collective.

    A rank that failed raises its own error; the others a RuntimeError with its words.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as own:
        error = own
    if comm is not None:
        try:
            comm.agree(None if error is None else f"{type(error).__name__}: {error}")
        except RuntimeError:
            if error is None:
                raise
    if error is not None:
        raise error


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move all buffers, and tell Lightning's modules (``module.device``)."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else buffer.to(device)
        if "_device" in vars(owner):
            owner._device = device  # type: ignore[assignment]


def _missing_bytes(engine: Engine) -> int:
    """Host memory that a rank needs in addition for plain, whole parameters."""
    flats = [flat for unit in engine.units for flat in unit.flats]
    on_host = engine.comm.device.type == "cpu"
    extra = [flat for flat in flats if not (on_host and flat.aliased)]
    return sum(p.numel() * flat.dtypes.user.itemsize for flat in extra for p in flat.params)


def room_for_all(engine: Engine, ranks_here: int) -> bool:
    """Whether whole parameters for every rank of this host fit into half of its free memory. Collective.

    Says so where they do not.
    """
    need = ranks_here * _missing_bytes(engine)
    free = free_memory()
    fits = free is None or need <= free / 2
    try:
        engine.comm.agree(None if fits else f"{need:,} bytes needed, {free:,} free")
    except PeerError:
        raise
    except RuntimeError as refusal:
        rank_zero_warn(
            "Whole parameters for every rank would take more than half of the free host memory, so the module stays"
            f" sharded after the run ({refusal}). Save it with trainer.save_checkpoint(), or read it inside"
            " lightning_zero.gathered(module)."
        )
        return False
    return True
