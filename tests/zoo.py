"""Small hostile modules: each has one habit of real models that an engine which frees parameters can get wrong.

A model makes its own data (``batch(rank, step)``) and its own scalar ``loss(batch)``. Nearly all are cut into several units
when ``min_unit_bytes=0``. ``ZOO`` holds every class that is defined here, under its name.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

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
    late_gradients: ClassVar[bool] = (
        False  # they come in parts that are reduced one after the other: the sum has another order
    )

    def __init_subclass__(cls) -> None:
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


class Reused(Blocks):
    """Blocks that run several times in one forward."""

    def body(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 2, 1):
            x = self.blocks[index](x)
        return x


class Unused(Blocks):
    """A block that nobody calls and a parameter that nobody reads: they must not even decay."""

    unused = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].ghost = nn.Parameter(torch.ones(DIM))

    def body(self, x: Tensor) -> Tensor:
        return self.blocks[2](self.blocks[0](x))


class Branchy(Blocks):
    """Ranks take different branches in the root unit."""

    unused = True

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.rare = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def loss(self, batch: Batch) -> Tensor:
        x = self(batch.x)
        x = self.odd(x) if batch.rank % 2 else self.even(x)
        return F.mse_loss(self.rare(x) if batch.rank == 0 and batch.step % 2 else x, batch.y)


class Alternating(Blocks):
    """All ranks skip the same block, another one in each step."""

    unused = True

    def loss(self, batch: Batch) -> Tensor:
        x = self.stem(batch.x)
        for index, block in enumerate(self.blocks):
            x = block(x) if index != batch.step % 3 else x
        return F.mse_loss(self.head(x), batch.y)


class NoGradBlock(Blocks):
    """A block that runs without gradients, as a feature extractor does."""

    unused = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.blocks[0](x)
        return self.head(self.blocks[2](self.stem(features)))


class Checkpointed(Blocks):
    """A part of each block is recomputed in backward."""

    class block(Block):
        reentrant = False

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class CheckpointedReentrant(Blocks):
    """The same, with a backward inside the backward."""

    class block(Checkpointed.block):
        reentrant = True


class CheckpointedBlocks(Blocks):
    """Whole blocks are recomputed in backward."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class CheckpointedBlocksReentrant(CheckpointedBlocks):
    reentrant = True


class NestedCheckpoint(Blocks):
    """Recomputed blocks inside a recomputed body."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        inner = partial(CheckpointedBlocks.body, self)
        return checkpoint(inner, x, use_reentrant=self.reentrant)


class NestedCheckpointReentrant(NestedCheckpoint):
    reentrant = True


class ReusedReentrant(Blocks):
    """One block recomputed twice: its gradients come in two separate backwards."""

    not_for_ddp = "marks a parameter ready twice"
    late_gradients = True

    def body(self, x: Tensor) -> Tensor:
        for index in (0, 1, 0, 2):
            x = checkpoint(self.blocks[index], x, use_reentrant=True)
        return x


class SelectiveCheckpoint(Blocks):
    """Matrix products are kept, all else is recomputed."""

    def body(self, x: Tensor) -> Tensor:
        def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = partial(create_selective_checkpoint_contexts, policy)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


class SaveOnCpu(Blocks):
    """Saved tensors, weights among them, are copied away."""

    def body(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().body(x)


class Dropout(Blocks):
    """Random numbers, drawn again in the recomputation."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda t: F.dropout(Block.forward(self, t), 0.3), x, use_reentrant=False)


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


class WeightNorm(Blocks):
    """A weight that is computed at each reading, from parameters of a child that is a ``ModuleList``."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            weight_norm(self.lin)


class WeightNormOld(Blocks):
    """A weight that a hook computes before the forward."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            torch.nn.utils.weight_norm(self.lin)


class SpectralNorm(Blocks):
    """A parametrisation with buffers that change in the forward."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            spectral_norm(self.lin)


class Orthogonal(Blocks):
    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            orthogonal(self.lin, orthogonal_map="cayley")


class Lora(Blocks):
    """A frozen weight, and a parametrisation that has parameters of its own."""

    class LowRank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.up = nn.Parameter(torch.randn(2, DIM)), nn.Parameter(torch.zeros(DIM, 2))

        def forward(self, weight: Tensor) -> Tensor:
            return weight + self.up @ self.down

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.lin.weight.requires_grad_(False)
            parametrize.register_parametrization(self.lin, "weight", Lora.LowRank())


class Complex(Blocks):
    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(DIM // 2 + 1, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.fft.irfft(torch.fft.rfft(x) * self.filter)


class SparseEmbedding(Gpt):
    """Embeddings with sparse gradients, which the optimizer itself would refuse."""

    not_for_ddp = "AdamW refuses sparse gradients, which DDP leaves sparse"

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, DIM, sparse=True)


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


class NoneOutput(Blocks):
    """None and other things that are no tensors beside the output."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            return None, super().forward(x), "text"

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            _, x, _ = block(x)
        return x


class DictOutput(Blocks):
    """Keywords in, nested containers out."""

    class block(Block):
        def forward(self, *, x: Tensor, gain: float) -> Any:
            return {"out": [(super().forward(x) * gain,)]}

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x, gain=0.5)["out"][0][0]
        return x


@dataclass
class Output:
    out: Tensor
    extra: Tensor | None = None


class DataclassOutput(Blocks):
    class block(Block):
        def forward(self, x: Tensor) -> Output:
            return Output(super().forward(x))

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).out
        return x


class ObjectOutput(Blocks):
    """An output in an object that no tree function knows, computed only when it is asked for."""

    class Lazy:
        def __init__(self, run: Any) -> None:
            self.run = run

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            hidden = self.lin(x)
            return ObjectOutput.Lazy(lambda: x + torch.tanh(hidden) * self.lin.bias)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).run()
        return x


class AuxiliaryLoss(Blocks):
    """Blocks leave a part of the loss on themselves."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.lin(x)
            self.auxiliary = hidden.pow(2).mean()
            return x + torch.tanh(hidden).detach()

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + sum(block.auxiliary for block in self.blocks)


class InplaceOutput(Blocks):
    """The caller changes a block's output in place."""

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            x.mul_(0.5)
            x[:, 0] = 0.0
        return x


class DetachedWeight(Blocks):
    """A weight that is also read without its gradient."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.linear(x, self.lin.weight.detach()))


class Prompt(Blocks):
    """Blocks that return a view of their own parameter."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prompt = nn.Parameter(torch.randn(1, DIM))

        def forward(self, x: Tensor) -> Tensor:
            return self.prompt.expand(len(x), -1)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(x + block(x)) * block(x)
        return x


class EarlyView(Blocks):
    """Views of a weight that are taken before its block runs and used long after."""

    def forward(self, x: Tensor) -> Tensor:
        transposed, rows = self.blocks[0].lin.weight.t(), self.blocks[1].lin.weight[:4]
        x = self.body(self.stem(x))
        return self.head(x @ transposed) + F.pad(F.linear(x, rows), (0, 4))


class Sibling(Blocks):
    """A block that computes with the weight of another."""

    class block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.sibling: list[nn.Linear] = []  # in a list, so that it does not become a child

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.linear(x, self.sibling[0].weight))

    def __init__(self) -> None:
        super().__init__()
        for index in range(3):
            self.blocks[index].sibling.append(self.blocks[index - 1].lin)


class Regularised(Blocks):
    """A loss that reads every weight."""

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class GradientPenalty(Blocks):
    """A gradient of a gradient."""

    def loss(self, batch: Batch) -> Tensor:
        x = batch.x.clone().requires_grad_()
        out = self(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, batch.y) + gradient.pow(2).mean()


class FuncGrad(Blocks):
    """The same by a transform, which refuses hooks on saved tensors."""

    config = {"saved_tensors_hooks": False}

    def loss(self, batch: Batch) -> Tensor:
        gradient = torch.func.grad(lambda x: self(x).sum())(batch.x)
        return super().loss(batch) + gradient.pow(2).mean()


class FunctionalCall(Blocks):
    """A forward with other tensors in the parameters' places."""

    def loss(self, batch: Batch) -> Tensor:
        scaled = {name: p * 0.9 for name, p in self.named_parameters()}
        return F.mse_loss(torch.func.functional_call(self, scaled, batch.x), batch.y)


class ModuleHooks(Blocks):
    """The user's own hooks on modules and on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_pre_hook(lambda module, args: (args[0] * 0.9,))
            block.register_forward_hook(lambda module, args, out: out + module.lin.bias)
            block.register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * 0.5,))
            block.lin.weight.register_hook(lambda gradient: gradient * 2)


class Siamese(Blocks):
    """Several passes, one of them without gradients, before one backward."""

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = self(batch.y)
        return F.mse_loss(self(batch.x), target) + F.mse_loss(self(-batch.x), batch.y)


class SavingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class KeepingLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad @ ctx.weight, grad.t() @ ctx.x


class CustomFunction(Blocks):
    """A function that saves its weight as one should."""

    class block(Block):
        function: type[torch.autograd.Function] = SavingLinear

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.function.apply(x, self.lin.weight) + self.lin.bias)


class CustomFunctionKeeps(Blocks):
    """A function that keeps its weight behind autograd's back."""

    class block(CustomFunction.block):
        function = KeepingLinear


class Experts(nn.Module):
    """Each row goes to one of four experts: which of them run depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index in choice.unique().tolist():
            rows = choice == index
            out[rows] = self.experts[index](x[rows])
        return x + out * weight[:, None]


class MixtureOfExperts(Blocks):
    config = {"leaf_classes": ("Experts",)}
    unused = True
    block = Experts


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
