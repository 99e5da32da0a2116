"""Values that come later: a module that will be sharded is told where its values lie, and nothing is read yet.

What a file holds of a parameter hangs on the parameter until the flat buffers are built: then each rank reads its own
part of it. Whoever asks for its values before that gets all of them.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_zero.engine.comm import Communicator
from lightning_zero.engine.elsewhere import StoredTensor
from lightning_zero.engine.layout import Layout
from lightning_zero.engine.metadata import METADATA


class Expected:
    """Where the values of a parameter are; it hangs on the parameter as ``_zero_expected``."""

    __slots__ = ("plain", "stored")

    def __init__(self, stored: StoredTensor, plain: type) -> None:
        self.stored, self.plain = stored, plain


def expected(param: Tensor) -> Expected | None:
    """What a parameter waits for; None: nothing."""
    return getattr(param, "_zero_expected", None)


def forget(param: Tensor) -> None:
    """The parameter has its values."""
    if later := vars(param).pop("_zero_expected", None):
        param.__class__ = later.plain


@torch.no_grad()
def read(param: nn.Parameter) -> None:
    """Read all values of a parameter that waits for them."""
    later = expected(param)
    if later is not None:
        forget(param)
        values = torch.empty_like(param, device="cpu").copy_(later.stored) if param.is_meta else later.stored
        if param.is_meta:
            give_memory(param, values)
        else:
            param.copy_(values)


_classes: dict[type, type] = {}


def _waiting_class(plain: type) -> type:
    """The class that a parameter has while it waits: whoever asks for its values gets them, read at that moment."""
    if plain not in _classes:
        body = {
            "__torch_function__": classmethod(_torch_function),
            "__deepcopy__": _read_first("__deepcopy__"),
            "__reduce_ex__": _read_first("__reduce_ex__"),
            "__module__": __name__,
        }
        _classes[plain] = type(plain)(f"Expected{plain.__name__}", (plain,), body)
    return _classes[plain]


def _torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    overwritten = args[0] if func is Tensor.copy_ and args[0].shape == args[1].shape else None
    if func not in METADATA:
        for leaf in tree_leaves((args, kwargs)):
            if overwritten is not None and leaf is overwritten and not overwritten.is_meta:
                forget(overwritten)
            elif isinstance(leaf, nn.Parameter):
                read(leaf)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


def _read_first(name: str) -> Any:
    def method(self: Any, *args: Any) -> Any:
        read(self)
        return getattr(self, name)(*args)

    return method


def lacks(tensor: Tensor) -> bool:
    """Whether a tensor is on ``meta`` and waits for nothing."""
    return tensor.is_meta and expected(tensor) is None


def expect(module: nn.Module, state: Mapping[str, Any], strict: bool = True) -> Any:
    """``module.load_state_dict(state, strict)`` for a module that is going to be sharded, and may be on ``meta``.

    Parameters keep their identity. Those for which ``state`` has a :class:`StoredTensor` get its values when the engine
    is built on the module, or somebody asks for them. Everything else is loaded at once;
    what is on ``meta`` comes to lie in host memory. Dtypes become the module's. No collective.

    Returns:
        What ``load_state_dict`` does.

    Raises:
        RuntimeError: names or shapes do not fit, in torch's words; no parameter and no buffer has changed.
    """
    copies, found = catch(module, state, strict)
    take(module, copies, later=True)
    return found


Copies = dict[int, tuple[Tensor, Tensor]]
"""Tensors of a module with what is to be copied into them, by the target's id."""


def catch(module: nn.Module, state: Mapping[str, Any], strict: bool) -> tuple[Copies, Any]:
    """What ``module.load_state_dict(state, strict)`` would copy, and what it returns; nothing is copied.

    Raises:
        RuntimeError: names or shapes do not fit, in torch's words.
    """
    with _Caught(module) as caught, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*which is a no-op")  # a copy to meta, which is caught
        found = module.load_state_dict(state, strict=strict)
    return caught.copies, found


def take(module: nn.Module, copies: Copies, later: bool) -> None:
    """Copy what :func:`catch` has caught, also to ``meta``; parameters on ``meta``, or all of them if they can have
    their values ``later``, wait for what is stored.
    """
    for target, value in copies.values():
        if isinstance(value, StoredTensor) and isinstance(target, nn.Parameter) and (later or target.is_meta):
            forget(target)
            target._zero_expected = Expected(value, type(target))  # type: ignore[attr-defined]
            target.__class__ = _waiting_class(type(target))
        else:
            _fill(module, target, value)


class _Caught(TorchFunctionMode):
    """Keeps what would be copied into the module's tensors, so that torch's own code decides what goes where."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self.copies: Copies = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_ and id(args[0]) in self._own:
            self.copies[id(args[0])] = args[0], args[1]
            return args[0]
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def _fill(module: nn.Module, target: Tensor, value: Tensor) -> None:
    """Load one tensor at once."""
    if not target.is_meta:
        target.copy_(value)
    elif isinstance(target, nn.Parameter):
        give_memory(target, torch.empty_like(target, device="cpu").copy_(value))
    else:
        new = torch.empty_like(target, device="cpu").copy_(value)
        for inner in module.modules():
            for key, buffer in inner._buffers.items():
                if buffer is target:
                    inner._buffers[key] = new
    forget(target)


def give_memory(param: nn.Parameter, values: Tensor) -> None:
    """Make ``values`` a parameter's data, also where it was on ``meta``: optimizers, tied modules and users hold the
    old object.

    (``torch.utils.swap_tensors`` would exchange attributes, too, and refuses what an LSTM refers to weakly.)
    """
    if param.is_meta:
        # of its own version: autograd counts writes to the flat buffer, of which it is a part, by another
        torch._C._swap_tensor_impl(param, nn.Parameter(values.data, requires_grad=param.requires_grad))
    else:
        param.data = values


def settle(module: nn.Module, comm: Communicator) -> None:
    """The engine is about to be built: what one rank has read, and may have changed, all read now; for the rest,
    nobody's reading counts any more (initialisers will not find values). Collective.
    """
    params = list(module.parameters())
    has_values = comm.any_of([expected(param) is None for param in params], "expected values")
    for param, somewhere in zip(params, has_values, strict=True):
        if somewhere:
            read(param)
        elif later := expected(param):
            param.__class__ = later.plain


@torch.no_grad()
def collect(
    params: Sequence[nn.Parameter], layout: Layout, out: Tensor, own: tuple[int, int], user: torch.dtype,
    comm: Communicator,
) -> bool:  # fmt: skip
    """The values of parameters in the order of their flat buffer: rank 0's of those that are here, and this rank's part
    of those in files. Collective.

    Args:
        params, layout: of the flat buffer.
        out: 1-D, ``layout.numel`` zeros; other ranks' parts of what is in files stay zero.
        own: start and stop of this rank's part.
        user: the parameters' dtype, to which values are rounded that are not master weights.

    Returns:
        Whether anything came from a file.
    """
    places = list(zip(layout.slots, params, strict=True))
    here = [(slot, param) for slot, param in places if expected(param) is None]
    for slot, param in here:
        out[slot.start : slot.stop].copy_(slot.flatten(param.detach()))
    if len(here) == len(places):
        comm.broadcast_(out)
        return False
    for slot, _ in here:
        comm.broadcast_(out[slot.start : slot.stop])
    for slot, param in places:
        later = expected(param)
        if later is None:
            continue
        exact = later.stored.exact
        stored = later.stored if exact is None else exact
        start, stop = (min(max(bound, slot.start), slot.stop) for bound in own)
        if start < stop:
            room = (
                out[start:stop] if exact is not None or out.dtype == user else out.new_empty(stop - start, dtype=user)
            )
            slot.copy_part(stored, start - slot.start, stop - slot.start, room)
            if room.dtype != out.dtype:
                out[start:stop].copy_(room)
        forget(param)
    return True
