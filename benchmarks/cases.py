"""What is compared: the cases, the strategies' names, and the settings that a command gives to its ranks."""

import json
from dataclasses import asdict, dataclass
from typing import Self

STRATEGIES = (
    *("ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_nvme", "fsdp2"),
    *("deepspeed1", "deepspeed2", "deepspeed3", "deepspeed2_offload", "deepspeed3_nvme"),
)


@dataclass(frozen=True)
class Case:
    """The size of a model and of a rank's micro-batch: ``batch`` sequences of ``seq`` bytes."""

    dim: int
    layers: int
    batch: int
    seq: int


CASES = {
    "traffic": Case(dim=1024, layers=8, batch=1, seq=128),  # 101 M parameters, few tokens: what is sent decides
    "compute": Case(dim=512, layers=8, batch=4, seq=128),  # 25 M parameters: forward and backward decide
    "small": Case(dim=128, layers=10, batch=1, seq=32),  # 2 M parameters: what a strategy does on top decides
    "tiny": Case(dim=16, layers=20, batch=1, seq=32),  # 2,000 parameters of 16 elements: the cost of each of them
}


@dataclass(frozen=True)
class Settings:
    """All that a run depends on, beside its strategy. ``steps`` are the measured ones."""

    case: str
    dim: int
    layers: int
    batch: int
    seq: int
    precision: str = "32-true"
    accumulate: int = 1
    steps: int = 8
    devices: int = 2
    return_memory: int | None = None

    def to_json(self) -> str:
        """The settings as one line, which :meth:`from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The settings that :meth:`to_json` has written."""
        return cls(**json.loads(text))
