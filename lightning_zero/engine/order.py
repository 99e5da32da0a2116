"""The one order in which all ranks reduce their units, whatever the order in which gradients become ready."""

from collections.abc import Callable, Sequence

Key = bytes
"""Which units take part in a backward; each set has an order of its own (toggled networks)."""


class ReductionOrder:
    """Lets ready units go in a fixed order; an early one waits its turn.

    The first backward of a key runs in a provisional order (the reverse of the units'); afterwards the order in which
    units became ready on rank 0 is kept for good.
    """

    def __init__(self, share: Callable[[list[int]], list[int]]) -> None:
        self._share = share
        self._frozen: dict[Key, list[int]] = {}
        self._key: Key = b""
        self._order: list[int] = []
        self._seen: list[int] = []
        self._ready: set[int] = set()
        self._next = 0

    def begin(self, key: Key, members: Sequence[int]) -> None:
        """Start a backward in which the units ``members`` take part."""
        self._key = key
        self._order = self._frozen.get(key) or sorted(members, reverse=True)
        self._seen, self._ready, self._next = [], set(), 0

    def ready(self, unit: int) -> list[int]:
        """Note that a unit's gradients are in; returns the units whose turn it is now."""
        if unit in self._ready:
            return []
        self._ready.add(unit)
        self._seen.append(unit)
        turn = self._next
        while self._next < len(self._order) and self._order[self._next] in self._ready:
            self._next += 1
        return self._order[turn : self._next]

    def rest(self) -> list[int]:
        """The units that have not gone yet, in order: the backward has ended."""
        rest = self._order[self._next :]
        self._next = len(self._order)
        return rest

    def freeze(self) -> None:
        """Keep rank 0's order of this backward for its key, if there is none yet. Collective then."""
        if self._key in self._frozen:
            return
        seen = set(self._seen)
        self._frozen[self._key] = self._share(self._seen + [unit for unit in self._order if unit not in seen])
