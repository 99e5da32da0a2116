"""Contiguous ranges of a row-major tensor as boxes.

A shard of a flat buffer has a contiguous range of each parameter's elements. ``torch.distributed.checkpoint`` knows
boxes: an offset and a size in each dimension. A range is at most ``2 * ndim - 1`` of them.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Box(NamedTuple):
    """A part of a tensor: offset and size in each of its dimensions."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.sizes)

    def overlap(self, other: "Box") -> "Box | None":
        """What both have in common; None if that is nothing."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        stops = [min(a, b) for a, b in zip(self.stops, other.stops, strict=True)]
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(tuple(starts), sizes) if all(size > 0 for size in sizes) else None

    @property
    def stops(self) -> tuple[int, ...]:
        """Where it ends in each dimension."""
        return tuple(offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))

    def seen_from(self, outer: "Box") -> "Box":
        """The same part, counted from the beginning of a box that holds it."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)

    def permuted(self, dims: Sequence[int]) -> "Box":
        """The box of a tensor that is permuted by ``dims``."""
        return Box(tuple(self.offsets[dim] for dim in dims), tuple(self.sizes[dim] for dim in dims))

    def of(self, tensor: Tensor) -> Tensor:
        """The part of ``tensor``, as a view."""
        for dim, (offset, size) in enumerate(zip(*self, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has an element at each place, as boxes know them."""
    return tensor.layout is torch.strided and not tensor.is_quantized


def whole(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The elements ``start`` to ``stop`` of a row-major tensor as boxes, in order; each is a contiguous range, too."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = prod(shape[1:])
    first, last = start // inner, (stop - 1) // inner
    head, tail = start - first * inner, stop - last * inner
    if first == last and tail - head < inner:
        yield from _below(first, boxes(shape[1:], head, tail))
        return
    if head:
        yield from _below(first, boxes(shape[1:], head, inner))
        first += 1
    rows = last - first + (tail == inner)
    if rows:
        yield Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:]))
    if tail < inner:
        yield from _below(last, boxes(shape[1:], 0, tail))


def _below(row: int, inner: Iterator[Box]) -> Iterator[Box]:
    for box in inner:
        yield Box((row, *box.offsets), (1, *box.sizes))
