"""The order in which units are used, recorded in one pass and used in the next to gather ahead."""

from typing import Literal

Pass = Literal["train", "eval", "backward"]


class Trace:
    """One order per kind of pass; before there is one, the order of definition (backward: the reverse of the
    forward's).
    """

    def __init__(self, num_units: int) -> None:
        forward = list(range(num_units))
        self._last: dict[Pass, list[int]] = {"train": forward, "eval": forward, "backward": []}
        self._now: dict[Pass, list[int]] = {"train": [], "eval": [], "backward": []}
        self._place: dict[Pass, int] = {"train": 0, "eval": 0, "backward": 0}

    def begin(self, kind: Pass) -> None:
        """A pass starts: what the last one did is what this one is expected to do."""
        if self._now[kind]:
            self._last[kind] = self._now[kind]
        elif kind == "backward" and not self._last[kind]:
            self._last[kind] = (self._now["train"] or self._last["train"])[::-1]
        self._now[kind], self._place[kind] = [], 0

    def visit(self, kind: Pass, unit: int, ahead: int) -> list[int]:
        """A unit is used; returns the next ``ahead`` units that are expected."""
        now, last = self._now[kind], self._last[kind]
        if now and now[-1] == unit:
            place = self._place[kind]
        else:
            now.append(unit)
            place = self._find(last, unit, self._place[kind])
            self._place[kind] = place
        return last[place : place + ahead]

    @staticmethod
    def _find(order: list[int], unit: int, start: int) -> int:
        """The place after the unit's next occurrence; where it is unexpected, the place stays."""
        for place in range(start, len(order)):
            if order[place] == unit:
                return place + 1
        return order.index(unit) + 1 if unit in order else start

    def is_last(self, kind: Pass, unit: int) -> bool:
        """Whether nothing is expected after this unit."""
        order = self._last[kind]
        return bool(order) and order[-1] == unit and self._place[kind] >= len(order)
