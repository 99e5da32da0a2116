"""Optimizer state that rests in a tier: it is read, stepped and written back window by window.

While one window is stepped the next one is read and the last one is written (ZeRO-Infinity, section 5.2.2). What lies
in host memory is a few windows, however large the state is.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_zero.engine.elementwise import is_per_element
from lightning_zero.engine.flat import Flat
from lightning_zero.engine.host_memory import give_back
from lightning_zero.engine.nvme import aligned_empty
from lightning_zero.engine.tiers import Tier, TierArray, Transfer

State = dict[str, Any]
Group = dict[str, Any]


class Swap(NamedTuple):
    """How optimizer state is brought in.

    Attributes:
        window: elements that are read, stepped and written at a time; a multiple of 1024.
        windows: how many are in memory, three or more: one is read, one stepped, one written.
    """

    window: int
    windows: int


def state_tier(flat: Flat) -> Tier | None:
    """Where the optimizer's state of a flat rests; None: on the device.

    Where the weights that it steps on rest elsewhere, it is in host memory at least: there the step runs.
    """
    if flat.rests.optimizer is None and flat.master is not None:
        return flat.rests.host
    return flat.rests.optimizer


class _Rests:
    """Stands in a parameter's entries for what is in an array of the tier."""


RESTS = _Rests()


_MASTER, _GRADIENT = "", " gradient"
"""The names of master weights and gradients among the entries."""


class Piece(NamedTuple):
    """A part of a parameter, elements ``start`` to ``stop`` of its flat's shard, with its gradient there; None: the
    gradient rests in a tier.
    """

    group: int
    param: int
    start: int
    stop: int
    grad: Tensor | None


class FlatState:
    """The state of one flat's shard.

    Attributes:
        arrays: by the entry's name (``exp_avg``), values as long as the shard.
        entries: by a parameter's index, its entries in order: their value, or ``RESTS`` for what is in an array. A
            parameter without state is not in it.
    """

    def __init__(self, flat: Flat, tier: Tier) -> None:
        self.flat, self.tier = flat, tier
        self.arrays: dict[str, TierArray] = {}
        self.entries: dict[int, State] = {}

    def array(self, key: str, dtype: torch.dtype) -> TierArray:
        """The array of an entry; it is made if it does not exist."""
        if key not in self.arrays:
            numel = self.flat.high - self.flat.low
            self.arrays[key] = self.tier.empty(numel, dtype, f"{key} of {self.flat.name}")
        return self.arrays[key]

    def own(self, index: int) -> State:
        """This rank's entries of a parameter."""
        start, stop = self.flat.own_range(index)
        return {
            key: self.read(key, start, stop) if value is RESTS else value
            for key, value in self.entries.get(index, {}).items()
        }

    def read(self, key: str, start: int, stop: int) -> Tensor:
        """Elements ``start`` to ``stop`` of the shard's values of an entry."""
        array = self.arrays[key]
        values = torch.empty(stop - start, dtype=array.dtype, device="cpu")
        array.fetch(start, values).wait()
        return values

    def set(self, index: int, entries: State) -> None:
        """Overwrite this rank's entries of a parameter: 1-D tensors as long as its part of the shard go to the tier."""
        start, stop = self.flat.own_range(index)
        kept: State = {}
        for key, value in entries.items():
            rests = is_per_element(value, stop - start)
            if rests:
                self.array(key, value.dtype).store(start, value.cpu()).wait()
            kept[key] = RESTS if rests else value
        self.entries[index] = kept

    def unsharded(self, index: int) -> dict[str, bool]:
        """For each entry of a parameter, whether it is something else than one element per element here."""
        return {key: value is not RESTS for key, value in self.entries.get(index, {}).items()}


class WindowBuffers:
    """Buffers for one window, used again and again."""

    def __init__(self, numel: int) -> None:
        self._numel = numel
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self.stores: list[Transfer] = []

    def buffer(self, key: str, dtype: torch.dtype) -> Tensor:
        """The buffer of an entry."""
        if (key, dtype) not in self._buffers:
            self._buffers[key, dtype] = aligned_empty(self._numel, dtype)
        return self._buffers[key, dtype]

    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def settle(self) -> None:
        """Wait until what was in it has been written."""
        stores, self.stores = self.stores, []
        for store in stores:
            store.wait()


class Window:
    """Some neighbouring pieces of one flat, brought in for a step."""

    def __init__(self, state: FlatState, pieces: Sequence[Piece], buffers: WindowBuffers) -> None:
        buffers.settle()
        self.state, self.pieces, self._buffers = state, pieces, buffers
        self.start, self.stop = min(piece.start for piece in pieces), max(piece.stop for piece in pieces)
        self._tiles: list[Tensor] = []
        self._fetches = [self._fetch(key, array) for key, array in state.arrays.items()]
        if state.flat.master is not None:
            self._fetches.append(self._fetch(_MASTER, state.flat.master))
        if state.flat.rested is not None and state.flat.rested.holds:
            self._fetches.append(self._fetch(_GRADIENT, state.flat.rested.array))

    def _part(self, key: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        return self._buffers.buffer(key, dtype)[start - self.start : stop - self.start]

    def _fetch(self, key: str, array: TierArray) -> Transfer:
        return array.fetch(self.start, self._part(key, array.dtype, self.start, self.stop))

    def _bring_masters(self) -> Tensor:
        """The master weights of the window, on the host."""
        flat = self.state.flat
        own = flat.shard[self.start : self.stop]
        if flat.master is None and own.device.type == "cpu":
            return own
        host = self._part(_MASTER, flat.dtypes.master, self.start, self.stop)
        return host if flat.master is not None else host.copy_(own)

    def open(self, states: dict[Tensor, State]) -> list[tuple[int, Tensor]]:
        """The pieces as tiles of master weights with gradients, each with its group; their state goes to ``states``."""
        for fetch in self._fetches:
            fetch.wait()
        self._masters = self._bring_masters()
        for piece in self.pieces:
            tile = self._masters[piece.start - self.start : piece.stop - self.start]
            tile.grad = self._gradient(piece).to(tile.device, tile.dtype)
            entries = self.state.entries.get(piece.param)
            if entries is not None:
                states[tile] = {key: self._value(key, value, piece) for key, value in entries.items()}
            self._tiles.append(tile)
        return [(piece.group, tile) for piece, tile in zip(self.pieces, self._tiles, strict=True)]

    def _gradient(self, piece: Piece) -> Tensor:
        if piece.grad is not None:
            return piece.grad
        return self._part(_GRADIENT, self.state.flat.dtypes.sum, piece.start, piece.stop)

    def _value(self, key: str, value: Any, piece: Piece) -> Any:
        if value is RESTS:
            return self._part(key, self.state.arrays[key].dtype, piece.start, piece.stop)
        return value.clone() if isinstance(value, Tensor) else value

    def close(self, states: dict[Tensor, State], stepped: dict[tuple[FlatState, int], State]) -> None:
        """Start to write the state back; the other entries are noted in ``stepped``, for every window of a parameter
        must begin with the same.
        """
        for piece, tile in zip(self.pieces, self._tiles, strict=True):
            tile.grad = None
            entries = {key: self._keep(key, value, piece) for key, value in states.pop(tile, {}).items()}
            if entries:
                stepped[self.state, piece.param] = entries
        flat = self.state.flat
        if flat.master is not None or flat.shard.device.type != "cpu":
            self._buffers.stores += flat.store_master(self.start, self._masters)
        for key, array in self.state.arrays.items():
            self._buffers.stores.append(array.store(self.start, self._part(key, array.dtype, self.start, self.stop)))

    def _keep(self, key: str, value: Any, piece: Piece) -> Any:
        if not is_per_element(value, piece.stop - piece.start):
            return value
        array = self.state.array(key, value.dtype)
        part = self._part(key, array.dtype, piece.start, piece.stop)
        if part.data_ptr() != value.data_ptr():  # new, in the first step
            part.copy_(value)
        return RESTS


class Windows:
    """The windows of a step, in the order of the shards; iterating reads ahead and writes behind."""

    def __init__(self, swap: Swap, buffers: list[WindowBuffers], pieces: Iterable[tuple[FlatState, Piece]]) -> None:
        self._swap, self._buffers = swap, buffers
        self._plan = list(_cut(pieces, swap.window))
        self._stepped: dict[tuple[FlatState, int], State] = {}
        self._open: list[Window] = []

    def one_by_one(self, states: dict[Tensor, State]) -> Iterator[list[tuple[int, Tensor]]]:
        """Tiles of one window after the other, each with its group. What comes between two of them is the step."""
        slots = self._take(min(self._swap.windows, len(self._plan)))
        ahead = max(1, len(slots) - 2)
        coming: deque[Window] = deque()
        for number in range(len(self._plan)):
            while number + len(coming) < min(number + 1 + ahead, len(self._plan)):
                place = number + len(coming)
                coming.append(Window(*self._plan[place], slots[place % len(slots)]))
            window = coming.popleft()
            yield window.open(states)
            window.close(states, self._stepped)
            if number % len(slots) == 0:
                give_back()  # what the optimizer has freed lies between entries that are noted
        for slot in slots:
            slot.settle()
        self._commit()

    def all_at_once(self, states: dict[Tensor, State]) -> list[tuple[int, Tensor]]:
        """The tiles of all windows: for optimizers that must see all parameters together. :meth:`end` ends the step."""
        slots = self._take(len(self._plan))
        self._open = [Window(*planned, slot) for planned, slot in zip(self._plan, slots, strict=True)]
        return [tile for window in self._open for tile in window.open(states)]

    def end(self, states: dict[Tensor, State]) -> None:
        """All windows that :meth:`all_at_once` has opened have been stepped."""
        for window in self._open:
            window.close(states, self._stepped)
        for slot in self._buffers:
            slot.settle()
        del self._buffers[self._swap.windows :]
        self._commit()

    def _take(self, count: int) -> list[WindowBuffers]:
        self._buffers += [WindowBuffers(self._swap.window) for _ in range(count - len(self._buffers))]
        return self._buffers[:count]

    def _commit(self) -> None:
        for (state, index), entries in self._stepped.items():
            state.entries[index] = entries


def _cut(pieces: Iterable[tuple[FlatState, Piece]], size: int) -> Iterator[tuple[FlatState, list[Piece]]]:
    """Pieces of parameters, by flats and in order, cut at multiples of ``size`` and put together to windows."""
    by_flat: dict[FlatState, list[Piece]] = {}
    for state, piece in pieces:
        by_flat.setdefault(state, []).append(piece)
    for state, own in by_flat.items():
        windows: dict[int, list[Piece]] = {}
        for piece in sorted(own, key=lambda piece: piece.start):
            cuts = [piece.start, *range(piece.start - piece.start % size + size, piece.stop, size), piece.stop]
            for start, stop in zip(cuts, cuts[1:], strict=False):
                grad = None if piece.grad is None else piece.grad[start - piece.start : stop - piece.start]
                windows.setdefault(start // size, []).append(piece._replace(start=start, stop=stop, grad=grad))
        yield from ((state, window) for window in windows.values())
