"""The state of a user's optimizer on this rank, by parameter: what is saved, and what is loaded."""

from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_zero.engine.elementwise import SCALARS, is_per_element
from lightning_zero.engine.elsewhere import StoredTensor
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.gradients import Homes
from lightning_zero.engine.layout import Slot
from lightning_zero.engine.names import clean_name
from lightning_zero.engine.swapped import FlatState

State = dict[str, Any]


class ShardedState(ABC):
    """State lives per tile, or in a tier; where that is, :class:`ShardedOptimizer` says."""

    optimizer: Optimizer
    homes: Homes
    state: defaultdict[Tensor, State]
    _swapped: dict[Flat, FlatState]

    @abstractmethod
    def adopt_state(self) -> None:
        """Take over whole state that the optimizer holds itself."""

    @abstractmethod
    def tiles(self, param: nn.Parameter) -> list[Tensor]:
        """What the state of a parameter is kept for."""

    @abstractmethod
    def _bounds(self, flat: Flat, index: int) -> list[tuple[int, int]]: ...

    @abstractmethod
    def swapped(self, param: nn.Parameter) -> tuple[FlatState, int] | None:
        """Where a parameter's state rests, if it is in a tier."""

    def name(self, param: nn.Parameter) -> str:
        """A parameter's name in the module; one that is not in it is called by its number in the optimizer."""
        if home := self.homes.get(id(param)):
            return clean_name(home[0].names[home[1]])
        params = [id(other) for group in self.optimizer.param_groups for other in group["params"]]
        return f"param_{params.index(id(param))}"

    def own_state(self, param: nn.Parameter) -> State:
        """This rank's state of a parameter: 1-D, as long as its part of the masters; other entries as they are."""
        self.adopt_state()
        if place := self.swapped(param):
            return place[0].own(place[1])
        tiles = self.tiles(param)
        entries = [self.state[tile] for tile in tiles if tile in self.state]
        if not entries:
            return {}
        return {key: _join([entry[key] for entry in entries], tiles) for key in entries[0]}

    def read_state(self, param: nn.Parameter, key: str, start: int, stop: int) -> list[Tensor]:
        """Elements ``start`` to ``stop`` of this rank's part of an entry that has one for each of the parameter's: in
        pieces, views where they are in memory.
        """
        if place := self.swapped(param):
            state, index = place
            low = state.flat.own_range(index)[0]
            return [state.read(key, low + start, low + stop)]
        parts, offset = [], 0
        for tile in self.tiles(param):
            parts.append(self.state[tile][key][max(start - offset, 0) : max(stop - offset, 0)])
            offset += tile.numel()
        return [part for part in parts if part.numel()] or parts[:1]

    def plain_state(self, param: nn.Parameter) -> State:
        """A parameter's entries without their elements: what has one per element is an empty tensor of its dtype."""
        self.adopt_state()
        if place := self.swapped(param):
            state, index = place
            entries = state.entries.get(index, {})
            return {k: state.read(k, 0, 0) if state.unsharded(index)[k] is False else v for k, v in entries.items()}
        for tile in self.tiles(param):
            if tile in self.state:
                entries = self.state[tile]
                return {k: v[:0] if is_per_element(v, tile.numel()) else v for k, v in entries.items()}
        return {}

    def unsharded_keys(self, param: nn.Parameter) -> dict[str, bool]:
        """For each entry of a parameter's state, whether it is something else than one element per element here."""
        self.adopt_state()
        if place := self.swapped(param):
            return place[0].unsharded(place[1])
        found: dict[str, bool] = {}
        for tile in self.tiles(param):
            for key, value in self.state.get(tile, {}).items():
                other = not isinstance(value, Tensor) or value.dim() != 1 or value.shape != tile.shape
                found[key] = found.get(key, False) or other
        return found

    def set_state(self, param: nn.Parameter, entries: State) -> None:
        """Overwrite a parameter's state from whole tensors of the parameter's shape (other entries are copied to all
        tiles).
        """
        home = self.homes.get(id(param))
        if home is None:
            self.state[param] = {k: v.whole() if isinstance(v, StoredTensor) else v for k, v in entries.items()}
            return
        flat, index = home
        slot = flat.layout.slots[index]
        if place := self.swapped(param):
            start, stop = (bound - slot.start for bound in flat.own_part(index))
            like = torch.empty(0, dtype=flat.dtypes.master, device="cpu")
            own = {k: _piece(value, slot, start, stop, like, k) for k, value in entries.items()}
            place[0].set(index, own)
            return
        bounds = self._bounds(flat, index)
        tiles = self.tiles(param)
        first, last = bounds[0][0], bounds[-1][1]
        own = {k: _piece(v, slot, first - slot.start, last - slot.start, tiles[0], k) for k, v in entries.items()}
        for tile, (start, stop) in zip(tiles, bounds, strict=True):
            self.state[tile] = {
                key: value[start - first : stop - first] if _is_per_element(entries[key], slot, key) else _copied(value)
                for key, value in own.items()
            }

    def clear_state(self) -> None:
        """Forget all of it, as if there had been no step yet."""
        self.state.clear()
        for flat_state in self._swapped.values():
            flat_state.entries.clear()


def _join(values: list[Any], tiles: list[Tensor]) -> Any:
    first = values[0]
    if isinstance(first, Tensor) and first.shape == tiles[0].shape and first.dim() == 1:
        return first if len(values) == 1 else torch.cat(values)
    return first


def _piece(value: Any, slot: Slot, start: int, stop: int, tile: Tensor, key: str) -> Any:
    """A part of what an entry has for each element, in memory of its own; another entry as it is."""
    if not _is_per_element(value, slot, key):
        return _copied(value)
    # as torch's load_state_dict: floating state takes the parameter's dtype
    dtype = tile.dtype if value.is_floating_point() and tile.is_floating_point() else value.dtype
    return slot.part(value, start, stop).to(device=tile.device, dtype=dtype, copy=not isinstance(value, StoredTensor))


def _is_per_element(value: Any, slot: Slot, key: str) -> bool:
    return isinstance(value, Tensor) and value.shape == slot.shape and not (not slot.shape and key in SCALARS)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
