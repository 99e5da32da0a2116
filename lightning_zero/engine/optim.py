"""The user's optimizer on this rank's master weights.

The optimizer object, its groups and the parameters in them stay the user's. Only for the inner ``step`` each parameter
is replaced by this rank's part of the master weights, cut into tiles, and ``optimizer.state`` by the sharded state.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_zero.engine.elementwise import (
    check_state_moves,
    has_step_hooks,
    state_bytes,
    takes_one_by_one,
)
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.gradients import Gradients, Homes
from lightning_zero.engine.optimizer_state import ShardedState, State
from lightning_zero.engine.swapped import FlatState, Piece, Swap, WindowBuffers, Windows, state_tier
from lightning_zero.engine.tiers import Tier

Grads = dict[int, Tensor | None]
"""By the id of a parameter that has a gradient, this rank's part of it; None where it rests in a tier."""


class _Tiles(NamedTuple):
    """A parameter's tiles, and what they are cut from."""

    param: nn.Parameter
    flat: Flat | None
    shard: Tensor
    tiles: list[Tensor]


class ShardedOptimizer(ShardedState):
    """Steps one user's optimizer on shards and keeps the sharded state.

    State lives per tile: a tile is a 1-D view of the shard, and what the optimizer keeps for it is as long as it is.
    A 0-dim entry (``step``) is the same in all tiles of a parameter.
    """

    def __init__(self, optimizer: Optimizer, homes: Homes, tile_size: int, swap: Swap) -> None:
        self.optimizer = optimizer
        self.homes = homes
        self.tile_size = tile_size
        self.state: defaultdict[Tensor, State] = defaultdict(dict)
        self._tiles: dict[int, _Tiles] = {}
        self._swap = swap
        self._swapped: dict[Flat, FlatState] = {}
        self._buffers: list[WindowBuffers] = []
        self._one_by_one = bool(tile_size) and takes_one_by_one(optimizer)
        self._warned: set[str] = set()
        if any(self.swapped(param) is not None for group in optimizer.param_groups for param in group["params"]):
            check_state_moves(optimizer)
        self._reserve()
        self.adopt_state()
        self._warning = optimizer.register_state_dict_pre_hook(_warn_of_empty_state)

    def adopt_state(self) -> None:
        """Take over whole state that the optimizer made in its constructor (Adagrad) or that the user has loaded."""
        for param, entries in list(self.optimizer.state.items()):
            if isinstance(param, nn.Parameter) and entries:
                self.set_state(param, entries)
        self.optimizer.state.clear()

    def tiles(self, param: nn.Parameter) -> list[Tensor]:
        """This rank's part of a parameter's master weights, cut at multiples of the tile size; one empty tile if there
        is none.
        """
        known = self._tiles.get(id(param))
        if known is None or (known.flat is not None and known.flat.shard is not known.shard):
            home = self.homes.get(id(param))
            if home is None:
                known = _Tiles(param, None, param, [param])
            else:
                known = _Tiles(param, home[0], home[0].shard, self._cut(*home))
            self._tiles[id(param)] = known
        return known.tiles

    def _cut(self, flat: Flat, index: int) -> list[Tensor]:
        return [flat.shard[a - flat.low : b - flat.low] for a, b in self._bounds(flat, index)]

    def _bounds(self, flat: Flat, index: int) -> list[tuple[int, int]]:
        """Tiles' places in the flat buffer: cuts at the same places whatever the sharding (see ``layout``)."""
        start, stop = flat.own_part(index)
        size = self.tile_size or stop - start
        if start == stop:
            return [(start, stop)]
        cuts = [start, *range(start - start % size + size, stop, size), stop]
        return list(zip(cuts, cuts[1:], strict=False))

    def names(self) -> set[str]:
        """The names of its parameters."""
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return {flat.names[index] for flat, index in (self.homes[id(p)] for p in params if id(p) in self.homes)}

    def gradients(self) -> Gradients:
        """The gradients that the optimizer would step with."""
        return Gradients(self.optimizer, self.homes)

    @torch.no_grad()
    def step(self, **options: Any) -> dict[int, list[int]]:
        """One step; the closure has run before.

        Args:
            options: further arguments of the user's ``optimizer.step``.

        Returns:
            By the id of a flat, the indices of the parameters that may have changed.
        """
        self.adopt_state()
        changed: defaultdict[int, list[int]] = defaultdict(list)
        grads: Grads = {}
        for flat, indices in self.gradients().places.items():
            parts = None if flat.reduced is None else flat.own_parts(flat.reduced)
            for index in indices:
                grads[id(flat.params[index])] = None if parts is None else parts[index]
            changed[id(flat)] += indices
        with self._on_shards(grads):
            self.optimizer.step(**options)
        return changed

    @contextmanager
    def _on_shards(self, grads: "Grads") -> Iterator[None]:
        """Masters in the place of parameters, the sharded state in the place of the user's."""
        optimizer = self.optimizer
        groups, own = optimizer.param_groups, [group["params"] for group in optimizer.param_groups]
        state, optimizer.state = optimizer.state, self.state
        tiles: list[tuple[nn.Parameter, Tensor]] = []
        try:
            if self._may_tile():
                optimizer.param_groups = _TileGroups(self, groups, grads)  # type: ignore[assignment]
                yield
            else:
                windows = self._windows(groups, grads)
                swapped = windows.all_at_once(self.state)
                if swapped:
                    self._warn(
                        "steps with all of its offloaded state in memory at once: it has step hooks, writes to its "
                        "groups or comes back to earlier parameters in a step, or tile_size is 0."
                    )
                for number, group in enumerate(groups):
                    cut = [
                        (param, tile)
                        for param in group["params"]
                        if self.swapped(param) is None
                        for tile in self._with_grads(param, grads)
                    ]
                    group["params"] = [tile for _, tile in cut] + [tile for where, tile in swapped if where == number]
                    tiles += cut
                yield
                windows.end(self.state)
        finally:
            _drop_grads(tile for param, tile in tiles if tile is not param)
            optimizer.param_groups, optimizer.state = groups, state
            for group, params in zip(groups, own, strict=True):
                group["params"] = params

    def swapped(self, param: nn.Parameter) -> tuple[FlatState, int] | None:
        """Where a parameter's state rests, if it is in a tier, and the parameter's index there."""
        home = self.homes.get(id(param))
        if home is None:
            return None
        flat, index = home
        if flat not in self._swapped:
            if (tier := state_tier(flat)) is None:
                return None
            self._swapped[flat] = FlatState(flat, tier)
        return self._swapped[flat], index  # also once the flat has let go of its masters

    def _reserve(self) -> None:
        """Make room in tiers for the state of all parameters.

        Raises:
            TierError: there is none.
        """
        widths: dict[FlatState, int] = {}
        for group in self.optimizer.param_groups:
            states = {place[0] for param in group["params"] if (place := self.swapped(param)) is not None}
            dtypes = {state.flat.dtypes.master for state in states}
            of_group = {dtype: state_bytes(self.optimizer, group, dtype) for dtype in dtypes}
            for state in states:
                widths[state] = max(widths.get(state, 0), of_group[state.flat.dtypes.master])
        needs: Counter[Tier] = Counter()
        for state, width in widths.items():
            needs[state.tier] += width * (state.flat.high - state.flat.low)
        for tier, nbytes in needs.items():
            tier.reserve(nbytes, f"the state of {type(self.optimizer).__name__}")

    def _windows(self, groups: Sequence[dict[str, Any]], grads: Grads) -> Windows:
        """What of the parameters with gradients rests in tiers."""
        pieces: list[tuple[FlatState, Piece]] = []
        for number, group in enumerate(groups):
            for param in group["params"]:
                if id(param) in grads and (place := self.swapped(param)) is not None:
                    state, index = place
                    # of a parameter that lies elsewhere, too: its state has the same entries on all ranks
                    pieces.append((state, Piece(number, index, *state.flat.own_range(index), grads[id(param)])))
        return Windows(self._swap, self._buffers, pieces)

    def _may_tile(self) -> bool:
        """Whether copies of the groups may stand for the groups: nobody writes to them, nobody watches."""
        hooks = has_step_hooks(self.optimizer)
        if hooks:
            self._warn(
                "has step hooks: the parameters and gradients that they see are sharded. Change them, or take norms of "
                "them, in on_before_optimizer_step or after the step."
            )
        return self._one_by_one and not hooks

    def _warn(self, text: str) -> None:
        """Once."""
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"{type(self.optimizer).__name__} {text}", stacklevel=2)

    def _with_grads(self, param: nn.Parameter, grads: Grads) -> list[Tensor]:
        """A parameter's tiles, each with its part of the gradient in the masters' dtype."""
        tiles, own = self.tiles(param), grads.get(id(param))
        if own is None:
            return tiles
        if len(tiles) == 1:
            tiles[0].grad = own if own.dtype == tiles[0].dtype else own.to(tiles[0].dtype)
            return tiles
        offset = 0
        for tile in tiles:
            tile.grad = own[offset : offset + tile.numel()].to(tile.dtype)
            offset += tile.numel()
        return tiles

    def let_go(self) -> None:
        """Leave the user's object as it was; the state stays."""
        self._warning.remove()
        self._buffers.clear()

    def forget_masters(self, flats: Sequence[Flat]) -> None:
        """Keep the state, in host memory, but not the masters in ``flats`` that it belongs to: those are released."""
        for flat in flats:
            for param in flat.params:
                if id(param) in self._tiles:
                    self._tiles[id(param)] = self._without_memory(self._tiles[id(param)], flat)

    def _without_memory(self, known: _Tiles, flat: Flat) -> _Tiles:
        ghosts = [torch.empty_like(tile, device="meta") for tile in known.tiles]
        for tile, ghost in zip(known.tiles, ghosts, strict=True):
            if tile in self.state:
                self.state[ghost] = tree_map_only(Tensor, Tensor.cpu, self.state.pop(tile))
        return known._replace(shard=flat.shard, tiles=ghosts)

    def window_bytes(self) -> int:
        """Bytes of host memory that windows of offloaded state are brought in to."""
        return sum(buffers.nbytes() for buffers in self._buffers)

    def nbytes(self) -> int:
        """Bytes of the state on this rank."""
        values = (value for entry in self.state.values() for value in entry.values())
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _warn_of_empty_state(optimizer: Optimizer) -> None:
    warnings.warn(
        f"{type(optimizer).__name__}.state_dict() has the options only: the state is sharded. Save a checkpoint, or "
        "call trainer.strategy.optimizer_state(optimizer) on all ranks.",
        stacklevel=3,
    )


class _TileGroups:
    """An optimizer's groups, cut into groups of about one tile, made one by one: what exists for a group (its
    gradients in the masters' dtype, what the optimizer allocates) is about one tile large.
    """

    def __init__(self, sharded: ShardedOptimizer, groups: list[dict[str, Any]], grads: Grads) -> None:
        self.sharded, self.groups, self.grads = sharded, groups, grads

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self._resident()
        windows = self.sharded._windows(self.groups, self.grads)
        for tiles in windows.one_by_one(self.sharded.state):
            for number, group in enumerate(self.groups):
                batch = [tile for where, tile in tiles if where == number]
                if batch:
                    yield {**group, "params": batch}

    def _resident(self) -> Iterator[dict[str, Any]]:
        for group in self.groups:
            batch: list[Tensor] = []
            given: list[Tensor] = []
            size = 0
            for param in group["params"]:
                if self.sharded.swapped(param) is not None:
                    continue
                for tile in self.sharded._with_grads(param, self.grads):
                    numel = tile.numel()
                    if batch and size + numel > self.sharded.tile_size:
                        yield {**group, "params": batch}
                        _drop_grads(given)
                        batch, given, size = [], [], 0
                    batch.append(tile)
                    size += numel
                    if tile is not param:  # a parameter of the user's own keeps its gradient
                        given.append(tile)
            if batch:
                yield {**group, "params": batch}
                _drop_grads(given)


def _drop_grads(tiles: Iterable[Tensor]) -> None:
    for tile in tiles:
        tile.grad = None
