"""Where each parameter lies in its unit's flat buffer, and which part of the buffer each rank owns.

Alignment is what makes sharding invisible in the numbers: optimizer kernels work on vectors of up to 64 elements and
treat what is left over by another code path, with other rounding. So every cut (a parameter's start, a shard's
bound, a tile's bound) is a multiple of 64 elements, and a kernel sees the same vectors whether it runs on the whole
or on a slice.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_zero.engine.elsewhere import StoredTensor

BLOCK = 64
"""Elements: the unit of all cuts."""

SMALL = 8
"""Elements: parameters shorter than a block start at a multiple of this, inside one block."""


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """One parameter's place in the flat buffer, in elements, and the order of its elements there.

    The order is that of the parameter's own memory: a transposed or channels-last parameter keeps its strides, and so
    the kernels that work on it, and their rounding.
    """

    start: int
    stop: int
    shape: torch.Size
    dims: tuple[int, ...]
    numel: int
    in_order: bool
    """Whether that order is the row-major one."""

    def view(self, elements: Tensor) -> Tensor:
        """The parameter's elements (1-D, in the flat buffer's order) in the parameter's shape."""
        stored = elements.view([self.shape[dim] for dim in self.dims])
        return stored.permute([self.dims.index(dim) for dim in range(len(self.dims))])

    def flatten(self, whole: Tensor) -> Tensor:
        """The elements of a tensor of the parameter's shape, 1-D in the flat buffer's order."""
        if len(self.dims) == 1:
            return whole
        return whole.reshape(-1) if self.in_order else whole.permute(self.dims).reshape(-1)

    def part(self, whole: Tensor, start: int, stop: int) -> Tensor:
        """Some of the elements of a tensor of the parameter's shape, counted from the slot's start; of one in a file,
        only those are read.
        """
        if isinstance(whole, StoredTensor):
            return whole.elements(self.dims, start, stop)
        return self.flatten(whole.detach())[start:stop]

    def copy_part(self, whole: Tensor, start: int, stop: int, out: Tensor) -> None:
        """The same into memory that is there; what is in a file is read straight into it if it fits."""
        if isinstance(whole, StoredTensor) and whole.dtype == out.dtype and out.device.type == "cpu":
            whole.elements(self.dims, start, stop, out)
        else:
            out.copy_(self.part(whole, start, stop))


class Layout:
    """A flat buffer: slots of parameters in order, padded so that every rank's shard is a whole number of blocks."""

    def __init__(self, tensors: Sequence[Tensor], world_size: int) -> None:
        self.world_size = world_size
        self.slots: list[Slot] = []
        cursor = 0
        for tensor in tensors:
            numel = tensor.numel()
            cursor = self._start(cursor, numel)
            dims = memory_order(tensor)
            in_order = dims == tuple(range(tensor.dim()))
            self.slots.append(Slot(cursor, cursor + numel, tensor.shape, dims, numel, in_order))
            cursor += numel
        self._starts = [slot.start for slot in self.slots]
        self.numel = round_up(cursor, BLOCK * world_size)
        self.shard_numel = self.numel // world_size
        starts, stops = [*self._starts, self.numel], [0, *(slot.stop for slot in self.slots)]
        between = list(zip(stops, starts, strict=True))
        self.gaps = [(stop, start) for stop, start in between if start > stop]
        """Padding: before, between and behind the slots."""
        sizes = zip([start - stop for stop, start in between], [*(slot.numel for slot in self.slots), 0], strict=True)
        self.piece_sizes = [size for pair in sizes for size in pair][:-1]
        """Lengths of padding and slots in turn: slot i is piece 2i + 1."""

    @staticmethod
    def _start(cursor: int, numel: int) -> int:
        if numel >= BLOCK:
            return round_up(cursor, BLOCK)
        start = round_up(cursor, SMALL)
        leaves_block = start // BLOCK != max(start, start + numel - 1) // BLOCK
        return round_up(start, BLOCK) if leaves_block else start

    def shard(self, rank: int) -> tuple[int, int]:
        """Start and stop of a rank's shard in the flat buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def shards(self) -> list[tuple[int, int]]:
        """The shards of all ranks, in rank order."""
        return [self.shard(rank) for rank in range(self.world_size)]

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """The part of slot ``index`` in each rank's shard, relative to the slot's start (empty: start == stop)."""
        slot = self.slots[index]
        cuts = []
        for low, high in self.shards():
            start = min(max(low, slot.start), slot.stop)
            stop = max(min(high, slot.stop), start)
            cuts.append((start - slot.start, stop - slot.start))
        return cuts

    def touched(self, first: int, last: int) -> range:
        """Indices of the slots that the elements ``first`` to ``last`` (inclusive) lie in."""
        begin = bisect_right(self._starts, first) - 1
        return range(max(begin, 0), bisect_right(self._starts, last))


def memory_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions from the slowest in memory to the fastest; as they are if that is not how the tensor is stored."""
    dims = tuple(range(tensor.dim()))
    order = tuple(sorted(dims, key=lambda dim: (-tensor.stride()[dim], dim)))
    return order if tensor.permute(order).is_contiguous() and not tensor.is_contiguous() else dims
