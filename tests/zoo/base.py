"""What the models have in common, and the list of them."""

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, ROWS, VOCABULARY, LENGTH = 8, 4, 11, 5
ZOO: dict[str, type["Model"]] = {}


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    rank: int
    step: int


class Model(nn.Module):
    config: ClassVar[dict[str, Any]] = {}  # settings of ZeroConfig without which the model cannot train
    unused: ClassVar[bool] = False  # DDP needs find_unused_parameters
    not_for_ddp: ClassVar[str | None] = None  # why torch's DDP cannot be the oracle
    late_gradients: ClassVar[bool] = False  # they come in parts, reduced one after the other: the sum has another order

    def __init_subclass__(cls) -> None:
        if cls.__module__.startswith("zoo."):  # not what a test makes for itself
            ZOO[cls.__name__] = cls

    def batch(self, rank: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        x, y = torch.randn(2, ROWS, DIM, generator=generator)
        return Batch(x, y, rank, step)

    def loss(self, batch: Batch) -> Tensor:
        return F.mse_loss(self(batch.x), batch.y)


def make(name: str, seed: int = 0) -> Model:
    """A new model of the zoo with weights that depend on the seed only."""
    torch.manual_seed(seed)
    return ZOO[name]()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.lin(x))


class Blocks(Model):
    """The ordinary case: a stem and a head in the root unit, and blocks between them."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(self.block() for _ in range(3))
        self.head = nn.Linear(DIM, DIM, bias=False)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)))
