"""Whole values out of shards and back: parameters, optimizer state, the plain module."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zero.engine.buffer import Pool
from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.elsewhere import StoredTensor
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.guard import unguard
from lightning_zero.engine.optim import ShardedOptimizer, State
from lightning_zero.engine.unit import Unit


@torch.no_grad()
def full_parameters(flat: Flat, dst: int, readable: bool) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
    """The whole masters of one flat, parameter by parameter; values on rank ``dst`` only.

    Args:
        flat: with the parameters.
        dst: rank.
        readable: whether whole parameters are there, and may have been written to.
    """
    own_values = flat.written.own_current if readable and (flat.written or flat.escaped) else flat.own_master
    for index, param in enumerate(flat.params):
        slot = flat.layout.slots[index]
        what = f"parameter {flat.names[index]}"
        value = collect(flat, index, own_values(index), flat.comm, dst, what)
        yield param, None if value is None else slot.view(value).to(flat.dtypes.user)


def collect(flat: Flat, index: int, own: Tensor, comm: Communicator, dst: int, what: str) -> Tensor | None:
    """A whole tensor of parameter ``index``'s size, 1-D on the CPU of rank ``dst``, from all ranks' own parts."""
    out = torch.empty(flat.layout.slots[index].numel, dtype=own.dtype, device="cpu") if comm.rank == dst else None
    if flat.owns_all:
        return None if out is None else out.copy_(own)
    comm.gather_pieces(own, out, flat.layout.pieces(index), dst, what)
    return out


@torch.no_grad()
def load(flat: Flat, values: Mapping[int, Tensor], readable: bool) -> None:
    """Overwrite the parameters that ``values`` has (by id): each rank its part of the masters, then, where they are
    whole, the whole. Collective.
    """
    found = [index for index, param in enumerate(flat.params) if id(param) in values]
    if not found:
        return
    if readable:
        flat.keep_writes()
    for index in found:
        value = values[id(flat.params[index])]
        if isinstance(value, StoredTensor) and value.exact is not None:
            value = value.exact
        slot = flat.layout.slots[index]
        start, stop = (bound - slot.start for bound in flat.own_part(index))
        flat.write_master(flat.own_range(index)[0], slot.part(value, start, stop))
    if readable:
        flat.gather().wait()


@torch.no_grad()
def take_over(flat: Flat, src: int) -> None:
    """Make rank ``src``'s whole values everybody's; masters of values that did not change keep their precision."""
    flat.written.take_in()
    flat.comm.broadcast_(flat.full, src)
    flat.keep_writes()


@torch.no_grad()
def restore(unit: Unit) -> None:
    """Give a unit's parameters storages of their own, in host memory, with the masters in the user's dtype, and forget
    the unit.
    """
    unguard(unit)
    for flat in unit.flats:
        for index, param in enumerate(flat.params):
            values = flat.slot(flat.full, index).clone() if flat.exact else flat.whole_master(index)
            param.data = flat.layout.slots[index].view(values).to("cpu", flat.dtypes.user)
            del param._zero_place  # type: ignore[attr-defined]
        flat.forget()


def optimizer_state(sharded: ShardedOptimizer, comm: Communicator, dst: int) -> dict[str, Any] | None:
    """The unsharded ``state_dict()``: state by index in the order of the groups, whole shapes."""
    whole: dict[int, State] = {}
    groups: list[dict[str, Any]] = []
    numbers: dict[int, int] = {}
    unsharded = _agree_on_keys(sharded, comm)
    for group in sharded.optimizer.param_groups:
        for param in group["params"]:
            if id(param) not in numbers:
                numbers[id(param)] = len(numbers)
                what = f"optimizer state {numbers[id(param)]}"
                entry = _whole_state(sharded, param, comm, dst, what, unsharded[id(param)])
                if entry:
                    whole[numbers[id(param)]] = entry
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [numbers[id(param)] for param in group["params"]]})
    return {"state": whole, "param_groups": groups} if comm.rank == dst else None


def _agree_on_keys(sharded: ShardedOptimizer, comm: Communicator) -> dict[int, dict[str, bool]]:
    """By parameter, which entries of its state are whole on every rank: one number can look like a shard of one."""
    params = {id(p): p for group in sharded.optimizer.param_groups for p in group["params"]}
    found = {key: sharded.unsharded_keys(param) for key, param in params.items()}
    bits = torch.tensor([bit for keys in found.values() for bit in keys.values()], dtype=torch.uint8, device="cpu")
    comm.all_reduce(bits, "max", "kinds of optimizer state").wait()
    agreed = iter(bits.tolist())
    return {key: {name: bool(next(agreed)) for name in keys} for key, keys in found.items()}


def _whole_state(
    sharded: ShardedOptimizer,
    param: nn.Parameter,
    comm: Communicator,
    dst: int,
    what: str,
    unsharded: Mapping[str, bool],
) -> State:
    home = sharded.homes.get(id(param))
    own = sharded.own_state(param)
    if home is None:
        return own
    flat, index = home
    slot = flat.layout.slots[index]
    whole: State = {}
    for key, value in own.items():
        if not unsharded[key]:
            gathered = collect(flat, index, value, comm, dst, f"{what} {key}")
            whole[key] = None if gathered is None else slot.view(gathered)
        else:
            whole[key] = value.detach().cpu().clone() if isinstance(value, Tensor) else value
    return whole


def memory(units: Sequence[Unit], optimizers: Iterable[ShardedOptimizer], pool: Pool) -> dict[str, int]:
    """Live bytes on the device by kind."""
    flats = [flat for unit in units for flat in unit.flats]
    return {
        "parameters": sum(flat.buffer.nbytes for flat in flats if flat.buffer.allocated),
        "master": sum(flat.shard.nbytes for flat in flats if not flat.aliased),
        "gradients": sum(t.nbytes for flat in flats for t in (flat.local, flat.backing) if t is not None),
        "optimizer": sum(optimizer.nbytes() for optimizer in optimizers),
        "buffers": pool.nbytes(),
    }


def load_optimizer_state(sharded: ShardedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Restore state and groups' options, as ``Optimizer.load_state_dict`` does."""
    groups, saved = sharded.optimizer.param_groups, state_dict["param_groups"]
    if len(groups) != len(saved):
        raise ValueError(
            f"The saved optimizer has {len(saved)} parameter groups, "
            f"{type(sharded.optimizer).__name__} has {len(groups)}."
        )
    for number, (group, old) in enumerate(zip(groups, saved, strict=True)):
        if len(group["params"]) != len(old["params"]):
            raise ValueError(
                f"Parameter group {number} of the saved optimizer has {len(old['params'])} parameters, "
                f"that of {type(sharded.optimizer).__name__} has {len(group['params'])}."
            )
    sharded.clear_state()
    for group, old in zip(groups, saved, strict=True):
        for param, number in zip(group["params"], old["params"], strict=True):
            entries = state_dict["state"].get(number)
            if entries:
                sharded.set_state(param, entries)
        group.update({key: value for key, value in old.items() if key != "params"})
