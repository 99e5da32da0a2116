"""From a plain module to units: flat buffers that hold its parameters, each with its place in the engine."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from lightning_zero.config import ZeroConfig
from lightning_zero.engine.buffer import Pool
from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.dtypes import Dtypes, dtypes_of
from lightning_zero.engine.expected import settle
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.grouping import UnitSpec, make_units
from lightning_zero.engine.guard import Owner, Place, guard
from lightning_zero.engine.host_memory import give_back
from lightning_zero.engine.life import ParamState
from lightning_zero.engine.materialize import Materializer, is_meta
from lightning_zero.engine.offload import Offload
from lightning_zero.engine.rested import Rests
from lightning_zero.engine.stages import stage_row
from lightning_zero.engine.unit import Unit

ComputeDtype = Callable[[nn.Parameter], torch.dtype]

Group = tuple[str, Dtypes, Dtypes, dict[str, nn.Parameter]]
"""Name, dtypes now and once it is trained, and parameters by name, of what shares a flat buffer."""


def build_units(
    module: nn.Module,
    config: ZeroConfig,
    comm: Communicator,
    pool: Pool,
    compute_dtype: ComputeDtype | None,
    owner: Owner,
    offload: Offload,
) -> list[Unit]:
    """Move the parameters of ``module`` into units: rank 0's values everywhere, and what files hold of the parameters
    that wait for it (see :mod:`lightning_zero.engine.expected`). Collective.

    A sharded unit gives its whole parameters back before the next one is built: a module on the host never has to fit
    on the device, and one on ``meta`` never on the host.

    Raises:
        ValueError: a parameter has no values, and nothing gives it any.
        TierError: a tier has no room for what is to rest there.
    """
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(f"Parameter {name!r} has no shape yet: run the lazy module once first.")
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.max_norm is not None:
            warnings.warn(
                f"{name!r} has max_norm: it changes rows of its weight in the forward, each rank those of its own "
                "batch. Each shard keeps what the rank that owns it has seen (under ddp the ranks' weights part).",
                stacklevel=2,
            )
    settle(module, comm)
    row = stage_row(config.stage, config.reduce_at)  # type: ignore[arg-type]
    specs = make_units(module, config)
    groups = [_groups(spec, config, compute_dtype) for spec in specs]
    shards_params = [row.shard_parameters and not spec.persistent for spec in specs]
    tiers = offload.rests([sum(p.numel() for p in spec.params.values()) for spec in specs], shards_params)
    offload.reserve(_shards(groups, tiers, comm.world_size))
    units: dict[int, Unit] = {}
    turns: Iterable[int] = range(len(specs))
    if is_meta(module):
        turns = Materializer(module, specs, config.max_unit_bytes).units()
    for index in turns:
        spec = specs[index]
        sharded = shards_params[index]
        flats = []
        for name, dtypes, trained, params in groups[index]:
            where = not sharded, not row.shard_optimizer, tiers[index]
            flats.append(Flat(name, params, dtypes, trained, comm, pool, *where))
        unit = units[index] = Unit(index, spec, flats, sharded)
        for flat in flats:
            for number, param in enumerate(flat.params):
                param._zero_place = Place(owner, unit, flat, number)  # type: ignore[attr-defined]
        if sharded:
            guard(unit)
            unit.move(ParamState.SHARDED)
            for flat in flats:
                flat.buffer.release()
            give_back()  # what the module had held
    return [units[index] for index in range(len(specs))]


def _shards(
    groups: Sequence[Sequence[Group]], tiers: Sequence[Rests], ranks: int
) -> Iterator[tuple[Rests, int, Dtypes, bool]]:
    """What :meth:`Offload.reserve` wants to know."""
    for rests, of_unit in zip(tiers, groups, strict=True):
        for _, dtypes, _, params in of_unit:
            trained = any(param.requires_grad for param in params.values())
            yield rests, -(-sum(param.numel() for param in params.values()) // ranks), dtypes, trained


def _groups(spec: UnitSpec, config: ZeroConfig, compute_dtype: ComputeDtype | None) -> list[Group]:
    """A unit's parameters by their dtypes, now and once they are trained: what shares a flat buffer."""
    groups: dict[tuple[Dtypes, Dtypes, bool], dict[str, nn.Parameter]] = {}
    for name, param in spec.params.items():
        compute = compute_dtype(param) if compute_dtype else param.dtype
        now, trained = (dtypes_of(param, compute, config, trains) for trains in (param.requires_grad, True))
        groups.setdefault((now, trained, param.requires_grad), {})[name] = param
    unit_name = spec.name or "(root)"
    names = [unit_name if len(groups) == 1 else f"{unit_name}[{number}]" for number in range(len(groups))]
    return [
        (name, now, trained, params) for name, ((now, trained, _), params) in zip(names, groups.items(), strict=True)
    ]
