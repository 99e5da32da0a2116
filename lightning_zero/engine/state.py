"""Whole values out of shards and back: parameters, optimizer state, the plain module."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_zero.engine.buffer import Pool
from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.elsewhere import OwnPart, StoredTensor
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.guard import unguard
from lightning_zero.engine.optim import ShardedOptimizer
from lightning_zero.engine.optimizer_state import State
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
        exact = value.exact if isinstance(value, StoredTensor) else None
        slot = flat.layout.slots[index]
        start, stop = (bound - slot.start for bound in flat.own_part(index))
        # a plain module would have rounded them, too
        dtype = flat.dtypes.user if exact is None else flat.dtypes.master
        own, low = flat.own_room(index, dtype), flat.own_range(index)[0]
        slot.copy_part(value if exact is None else exact, start, stop, own)
        flat.write_master(low, own)
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


def own_parts(flat: Flat, readable: bool) -> Iterator[tuple[nn.Parameter, OwnPart, OwnPart | None]]:
    """By parameter: this rank's part of it in the user's dtype; and in the masters', if that is another.

    Where every rank has the whole, each has as much of it as a shard would be.
    """
    for index, param in enumerate(flat.params):
        slot, name = flat.layout.slots[index], flat.names[index]
        start, stop = flat.layout.pieces(index)[flat.comm.rank]
        place = name, slot.dims, start, stop, partial(_read_own, flat, index, readable)
        user, master = (OwnPart(slot.shape, dtype, *place) for dtype in (flat.dtypes.user, flat.dtypes.master))
        yield param, user, master if master.dtype != user.dtype else None


@torch.no_grad()
def _read_own(flat: Flat, index: int, readable: bool, start: int, stop: int) -> list[Tensor]:
    """Elements of this rank's part of a parameter's masters, counted from the slot's start."""
    low, first = flat.own_range(index)[0], flat.own_part(index)[0] - flat.layout.slots[index].start
    if readable and (flat.written or flat.escaped):
        return [flat.written.own_current(index)[start - first : stop - first]]
    return [flat.read_master(low + start - first, low + stop - first)]


def sharded_optimizer_state(sharded: ShardedOptimizer, comm: Communicator) -> dict[str, Any]:
    """State by parameters' names, this rank's part of it, and groups with names. Collective."""
    state: dict[str, Any] = {}
    groups = []
    unsharded = _agree_on_keys(sharded, comm)
    for group in sharded.optimizer.param_groups:
        names = []
        for param in group["params"]:
            name = sharded.name(param)
            names.append(name)
            if name not in state and (entries := _own_entries(sharded, param, name, unsharded[id(param)])):
                state[name] = entries
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": names})
    return {"state": state, "param_groups": groups}


def _own_entries(sharded: ShardedOptimizer, param: nn.Parameter, name: str, unsharded: Mapping[str, bool]) -> State:
    entries = sharded.plain_state(param)
    home = sharded.homes.get(id(param))
    if home is None:
        return sharded.own_state(param)
    flat, index = home
    slot, (start, stop) = flat.layout.slots[index], flat.layout.pieces(index)[flat.comm.rank]
    first = flat.own_part(index)[0] - slot.start
    for key, value in entries.items():
        if not unsharded[key]:

            def pieces(low: int, high: int, key: str = key) -> list[Tensor]:
                return sharded.read_state(param, key, low - first, high - first)

            entries[key] = OwnPart(slot.shape, value.dtype, f"{name}.{key}", slot.dims, start, stop, pieces)
        elif isinstance(value, Tensor):
            entries[key] = value.detach().cpu().clone()
    return entries


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
    bits = [bit for keys in found.values() for bit in keys.values()]
    agreed = iter(comm.any_of(bits, "kinds of optimizer state"))
    return {key: {name: next(agreed) for name in keys} for key, keys in found.items()}


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
    """Restore state and groups' options, as ``Optimizer.load_state_dict`` does.

    ``state_dict`` names parameters by their number, as torch does, or by their names, in any order within a group.

    Raises:
        ValueError: groups or their parameters are others than the optimizer's. Nothing has changed then.
    """
    kind = type(sharded.optimizer).__name__
    groups, saved = sharded.optimizer.param_groups, state_dict["param_groups"]
    if len(groups) != len(saved):
        raise ValueError(f"The saved optimizer has {len(saved)} parameter groups, {kind} has {len(groups)}.")
    keys = [_keys(sharded, number, saved[number]["params"]) for number in range(len(groups))]
    sharded.clear_state()
    for group, old, own in zip(groups, saved, keys, strict=True):
        for param, key in zip(group["params"], own, strict=True):
            entries = state_dict.get("state", {}).get(key)
            if entries:
                sharded.set_state(param, entries)
        options = {key: value for key, value in old.items() if key != "params"}
        group.update(tree_map_only(StoredTensor, StoredTensor.whole, options))


def _keys(sharded: ShardedOptimizer, number: int, saved: Sequence[Any]) -> Sequence[Any]:
    """Under what the saved state of each of a group's parameters is."""
    kind, group = type(sharded.optimizer).__name__, sharded.optimizer.param_groups[number]
    if len(group["params"]) != len(saved):
        raise ValueError(
            f"Parameter group {number} of the saved optimizer has {len(saved)} parameters, "
            f"that of {kind} has {len(group['params'])}."
        )
    if not all(isinstance(key, str) for key in saved):
        return saved
    names = [sharded.name(param) for param in group["params"]]
    if others := sorted(set(names) ^ set(saved)):
        raise ValueError(
            f"Parameter group {number} of the saved optimizer and that of {kind} hold different parameters: "
            f"{', '.join(map(repr, others[:6]))}{' and others' if len(others) > 6 else ''} only in one of them."
        )
    return names
