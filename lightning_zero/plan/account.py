"""What a run takes: bytes of a rank by category and place, elements that it sends in a step."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

KINDS = ("parameters", "master", "gradients", "optimizer")
"""Of states on the device."""


@dataclass(frozen=True)
class Account:
    """Of one rank, in bytes. Sums and multiples of accounts are taken entry by entry."""

    parameters: float
    """Elements of the whole model."""
    states: Mapping[str, float]
    """On the device, at the moment when the last gradient of a step is in, by kind (as ``Engine.memory``)."""
    device: float
    """The most on the device in a step, with activations."""
    host: float
    """The most in host memory."""
    disk: float
    """On the disk."""
    sent: Mapping[str, float] = field(default_factory=dict)
    """Elements in a step, by kind of operation."""

    @property
    def steady(self) -> float:
        """Bytes of the states on the device, without what the pool keeps for reuse."""
        return sum(self.states[kind] for kind in KINDS)

    @property
    def traffic(self) -> float:
        """Elements that a rank sends in a step, as a multiple of the parameters."""
        return (self.sent["gather"] + self.sent["reduce"]) / self.parameters

    def extended(self, other: Self, times: float) -> Self:
        """This account and ``times`` the difference from it to ``other``: what further layers add."""
        values: dict[str, Any] = {}
        for name in (entry.name for entry in fields(self)):
            mine, others = getattr(self, name), getattr(other, name)
            if isinstance(mine, Mapping):
                values[name] = {key: mine[key] + times * (others[key] - mine[key]) for key in mine}
            else:
                values[name] = mine + times * (others - mine)
        return type(self)(**values)
