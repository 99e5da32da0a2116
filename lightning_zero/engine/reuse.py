"""Layers that run more than once in a forward, and whose weights are held in 16 bits.

Autograd adds up what all uses of a parameter contribute in the parameter's dtype, and a long sum in bf16 loses its
small addends. Under autocast every use rounds an fp32 weight by itself, and the sum is fp32. So, from its second use
on, such a layer runs on aliases: leaves of their own over the same memory, whose gradients come one by one and are
summed in the sum's dtype.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_zero.engine.flat import Flat
from lightning_zero.engine.guard import Place
from lightning_zero.engine.residency import in_backward

Arrived = Callable[[Place, Tensor], None]


class Reuse:
    """Counts the uses of layers between two backwards.

    Args:
        layers: whose own parameters are counted.
        arrived: told of the gradient of each use but the first.
    """

    def __init__(self, layers: Sequence[nn.Module], arrived: Arrived) -> None:
        self.watched = bool(layers)
        self._arrived = arrived
        self._uses: Counter[nn.Parameter] = Counter()
        self._again: set[Flat] = set()
        self._aliased: set[Flat] = set()
        self._handles = [layer.register_forward_pre_hook(self._enter) for layer in layers]

    def flats(self) -> set[Flat]:
        """The buffers of parameters used more than once since the last :meth:`reset`, recomputing apart."""
        return set(self._again)

    def reset(self) -> None:
        """A backward has ended, or a step begins."""
        self._uses.clear()
        self._again.clear()
        for flat in self._aliased:
            flat.aliases.clear()
        self._aliased.clear()

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _enter(self, layer: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        aliases = {}
        for name, param in layer._parameters.items():
            if param is None or not param.requires_grad:
                continue
            flat = param._zero_place.flat  # type: ignore[attr-defined]
            if flat.dtypes.wire == flat.dtypes.sum:
                continue
            self._uses[param] += 1
            if self._uses[param] > 1:
                aliases[name] = self._alias(param)
                if not in_backward():
                    self._again.add(flat)
        if aliases:
            self._swap(layer, aliases)

    def _swap(self, layer: nn.Module, aliases: dict[str, nn.Parameter]) -> None:
        """Run the layer's coming forward on other parameters."""
        own = dict(layer._parameters)
        layer._parameters.update(aliases)
        handles: list[RemovableHandle] = []

        def put_back(*_: Any) -> None:
            layer._parameters.update(own)
            handles[0].remove()

        handles.append(layer.register_forward_hook(put_back, always_call=True))

    def _alias(self, param: nn.Parameter) -> nn.Parameter:
        place = param._zero_place  # type: ignore[attr-defined]
        alias = nn.Parameter(param.detach())
        alias.register_post_accumulate_grad_hook(partial(self._take, place))  # type: ignore[no-untyped-call]
        place.flat.aliases.append(alias)
        self._aliased.add(place.flat)
        return alias

    def _take(self, place: Place, alias: Tensor) -> None:
        grad, alias.grad = alias.grad, None
        if grad is not None:
            self._arrived(place, grad)
