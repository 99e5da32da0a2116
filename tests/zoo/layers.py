"""Models by what layers they have: ordinary ones, tied and frozen ones, odd sizes, buffers, recurrence, attention."""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.base import DIM, LENGTH, ROWS, VOCABULARY, Batch, Block, Blocks, Model


class DeepMlp(Model):
    """No root parameter at all, and elements without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(DIM, DIM), nn.Tanh())))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Wide(Model):
    """Layers larger than a tile of the optimizer step, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (DIM, 75, 99, 70, DIM)
        self.net = nn.Sequential(*map(nn.Linear, sizes, sizes[1:]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = torch.tanh(layer(x))
        return x


class Gpt(Model):
    """Token and position embeddings, attention blocks, and a head that is the embedding."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
            self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
            self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            x = x + self.out(mixed)
            return x + self.mlp(self.norm2(x))

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(self.Layer() for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def batch(self, rank: int, step: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH + 1), generator=generator)
        return Batch(tokens[:, :-1], tokens[:, 1:], rank, step)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch.x).flatten(0, 1), batch.y.flatten())


class Tied(Blocks):
    """One weight in two blocks, one in a block and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].lin.weight = self.blocks[0].lin.weight
        self.head.weight = self.blocks[1].lin.weight


class Frozen(Blocks):
    """A whole block and a part of another do not train."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks[0].lin.bias.requires_grad_(False)


class OddSizes(Model):
    """Weights of 1, 511, 513 and a prime number of elements, biases of less."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (DIM, 7, 73, 27, 19, 1, 1, 997, DIM)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Scalars(Blocks):
    """0-dim parameters in blocks and in the root."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.temperature


class ZeroElements(Blocks):
    """Parameters without elements, with and without a gradient."""

    unused = True

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0, DIM))
            self.ghost = nn.Parameter(torch.empty(0))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x), x @ self.nothing.t()], dim=1)


class FewElements(Blocks):
    """Blocks with fewer elements than there are ranks."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(2, 1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.gain + self.shift.sum()


class NumbersBehind(Blocks):
    """Single numbers behind a weight: not the first rank has them."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(DIM, DIM)
            self.gain, self.scale = nn.Parameter(torch.ones(1)), nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.gain * torch.tanh(self.scale * self.lin(x))


class ParameterContainers(Blocks):
    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.ParameterList(nn.Parameter(torch.ones(DIM) * k) for k in (1.0, 0.5))
            self.shifts = nn.ParameterDict({"one": nn.Parameter(torch.zeros(DIM)), "two": nn.Parameter(torch.ones(1))})

        def forward(self, x: Tensor) -> Tensor:
            for scale in self.scales:
                x = torch.tanh(x * scale)
            return x + self.shifts["one"] * self.shifts["two"]


class NestedContainers(Model):
    """Containers in containers."""

    def __init__(self) -> None:
        super().__init__()
        towers = {name: nn.ModuleList(nn.Sequential(Block(), nn.Tanh()) for _ in range(2)) for name in ("a", "b")}
        self.towers = nn.ModuleDict(towers)

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(*self.towers.values(), strict=True):
            x = second(first(x))
        return x


class RunningMean(Blocks):
    """A buffer that each forward reads and changes, a counter, and a buffer that no checkpoint holds."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(DIM))
            self.register_buffer("calls", torch.tensor(0))
            self.register_buffer("last", torch.zeros(()), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.calls += 1
                self.last.copy_(x.sum())
            return super().forward(x - self.mean)


class Scripted(Blocks):
    """A child whose forward is not Python's, and which takes no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.neck = torch.jit.script(nn.Linear(DIM, DIM))

    def body(self, x: Tensor) -> Tensor:
        return super().body(self.neck(x))


class BatchNorm(Blocks):
    class block(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM), nn.ReLU())


class Conv(Blocks):
    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(2, 2, 3, padding=1), nn.GroupNorm(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.conv(x.unflatten(1, (2, -1)))).flatten(1)


class Scale(nn.Module):
    """Graphs hold its weight itself, and not a view of it, as those of ``nn.Linear`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight)


class Scales(Blocks):
    block = Scale


class Lstm(Blocks):
    """Modules that keep lists of their own weights."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(4, 4, num_layers=2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x.unflatten(1, (2, 4)))[0].flatten(1)


class RnnCell(Blocks):
    """One small module, called again and again."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(2, DIM)

        def forward(self, x: Tensor) -> Tensor:
            state = x
            for part in x.split(2, dim=1):
                state = self.cell(part, state)
            return state


class Attention(Blocks):
    """A module that reads the weight of its child without calling it."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = x.unflatten(1, (2, 4))
            return (x + self.attention(x, x, x)[0]).flatten(1)


class EvalFastPath(Model):
    """In eval mode one fused operation reads all weights of a layer, whose children never run."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x.unflatten(1, (2, 4))).flatten(1))

    def loss(self, batch: Batch) -> Tensor:
        self.eval()
        with torch.no_grad():
            target = self(batch.x)
        self.train()
        return F.mse_loss(self(batch.x), batch.y + 0.1 * target)


class SparseEmbedding(Gpt):
    """Embeddings with sparse gradients, which the optimizer itself would refuse."""

    not_for_ddp = "AdamW refuses sparse gradients, which DDP leaves sparse"

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, DIM, sparse=True)


class Complex(Blocks):
    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(DIM // 2 + 1, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.fft.irfft(torch.fft.rfft(x) * self.filter)


class MixedPrecisions(Blocks):
    """A block in fp64 among blocks in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].double()
        self.blocks[2].lin.bias = nn.Parameter(self.blocks[2].lin.bias.detach().double())

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x).double())
        last = self.blocks[2].lin
        return torch.tanh(F.linear(x, last.weight.double(), last.bias)).float()


class HalfBlock(Blocks):
    """A block in bf16, which trains on fp32 masters."""

    not_for_ddp = "steps in bf16"

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].bfloat16()

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x).bfloat16())
        return self.blocks[2](x.float())


class Transposed(Blocks):
    """A parameter that is not contiguous."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.lin.weight = nn.Parameter(torch.randn(DIM, DIM).t())
