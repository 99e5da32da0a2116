"""Models by how weights are read (parametrised, viewed, borrowed, differentiated) and by what comes out of blocks."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from zoo.base import DIM, Batch, Block, Blocks


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
