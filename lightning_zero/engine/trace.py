"""The order in which units are used, recorded in one pass and used in the next to gather ahead."""

from typing import Literal

Pass = Literal["train", "eval", "backward"]


class Trace:
    """What a forward is expected to use: what the last one used. A backward: the reverse of its forward, but what
    activation checkpointing ran again in the last backward in the order in which it did.

    What else a backward uses is not recorded: it depends on which weights this rank's graph needs, and ranks may differ
    in that, while the order of forwards is the same on all ranks. So all ranks gather the same units ahead.
    """

    def __init__(self, num_units: int) -> None:
        forward = list(range(num_units))
        self._last: dict[Pass, list[int]] = {"train": forward, "eval": forward, "backward": forward[::-1]}
        self._now: dict[Pass, list[int]] = {"train": [], "eval": [], "backward": []}
        self._place: dict[Pass, int] = {"train": 0, "eval": 0, "backward": 0}
        self._again: list[int] = []

    def begin(self, kind: Pass) -> None:
        """A pass starts."""
        if kind == "backward":
            self._last[kind] = self._backward_order()
        elif self._now[kind]:
            self._last[kind] = self._now[kind]
        self._now[kind], self._place[kind] = [], 0

    def _backward_order(self) -> list[int]:
        order = (self._now["train"] or self._last["train"])[::-1]
        again, self._again = self._again, []
        places = [place for place, unit in enumerate(order) if unit in again]
        if sorted(order[place] for place in places) == sorted(again):
            for place, unit in zip(places, again, strict=True):
                order[place] = unit
        return order

    def run_again(self, unit: int) -> None:
        """A unit's forward runs again, in the backward."""
        if not self._again or self._again[-1] != unit:
            self._again.append(unit)

    def visit(self, kind: Pass, unit: int, ahead: int) -> list[int]:
        """A unit is used; returns the next ``ahead`` units that are expected."""
        now, order = self._now[kind], self._last[kind]
        if not now or now[-1] != unit:
            now.append(unit)
            self._place[kind] = self._after(order, unit, self._place[kind], kind != "backward")
        place = self._place[kind]
        return order[place : place + ahead]

    @staticmethod
    def _after(order: list[int], unit: int, start: int, repeats: bool) -> int:
        """The place after the unit's next occurrence or, if the pass ``repeats`` itself, after its first one; where it
        is unexpected, the place stays.
        """
        for place in range(start, len(order)):
            if order[place] == unit:
                return place + 1
        return order.index(unit) + 1 if repeats and unit in order else start

    def expected(self, kind: Pass) -> list[int]:
        """The units that the pass is expected to use, in order."""
        return self._last[kind]

    def is_current(self, kind: Pass, unit: int) -> bool:
        """Whether the unit was the last one to be used."""
        now = self._now[kind]
        return bool(now) and now[-1] == unit

    def is_last(self, kind: Pass, unit: int) -> bool:
        """Whether nothing is expected after this unit."""
        order = self._last[kind]
        return bool(order) and order[-1] == unit and self._place[kind] >= len(order)
