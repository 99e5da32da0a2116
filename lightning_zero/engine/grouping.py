"""Cutting a model into units: which parameters are gathered and reduced together, and which modules they serve."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from lightning_zero.config import ZeroConfig

SMALL = 8 * 2**20
"""Bytes below which a unit costs more in messages than it saves in memory."""

SHARE = 16
"""A unit need not be smaller, and had better not be larger, than the model divided by this: about four are whole at a
time, as parameters or gradients. So is what of a block may go to the root, against a unit.
"""

HOOKLESS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict, torch.jit.ScriptModule)
"""Modules without a forward of their own, on which hooks would never run, and those that take none."""

FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that hand their children's weights to one kernel, and take another path where a weight is not there."""


@dataclass
class UnitSpec:
    """A unit to be: its name (the first module's), the modules whose forward needs it, and its named parameters."""

    name: str
    modules: list[nn.Module]
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    is_root: bool = False
    persistent: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameters, in the user's dtype."""
        return sum(p.numel() * p.element_size() for p in self.params.values())


def make_units(module: nn.Module, config: ZeroConfig) -> list[UnitSpec]:
    """Cut ``module`` into units (blocks, merged or split to size; large layers alone; the rest is the root).

    Returns:
        The root unit first, then the others in the order of ``module.named_modules()``. Every parameter is in exactly
        one of them; one that two units share is in the root.

    Raises:
        ValueError: a class named in the configuration does not occur in the module.
    """
    _check_classes(module, config)
    share = _nbytes(module) // SHARE
    most = min(config.max_unit_bytes, max(share, config.min_unit_bytes, SMALL))
    names = {id(m): name for name, m in module.named_modules()}  # of a module with several names, the first
    blocks = {id(block): block for block in _blocks(module, config, most)}
    specs = [UnitSpec(names[key], [block]) for key, block in blocks.items()]
    covered = {id(m) for spec in specs for m in spec.modules[0].modules()}
    largest = max((_nbytes(spec.modules[0]) for spec in specs), default=0)
    specs += _large_layers(module, covered, max(largest, config.min_unit_bytes))
    order = {name: place for place, name in enumerate(names.values())}
    specs.sort(key=lambda spec: order[spec.name])
    root = UnitSpec("", [module], is_root=True)
    _assign(module, root, specs)
    small = UnitSpec("(persistent)", [], persistent=True)
    if config.stage == 3 and config.persistence_threshold:
        _set_apart(small, [root, *specs], config.persistence_threshold, config.persistence_limit)
    least = min(config.min_unit_bytes, max(share, SMALL))
    merged = _merge([spec for spec in specs if spec.params], least)
    return [spec for spec in (root, small) if spec.params] + merged


def _nbytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _check_classes(module: nn.Module, config: ZeroConfig) -> None:
    present = {type(m).__name__ for m in module.modules()}
    for option in ("unit_classes", "leaf_classes"):
        for name in getattr(config, option):
            if name not in present:
                raise ValueError(f"{option} names {name!r}, but no module of that class is in {type(module).__name__}.")


def _blocks(module: nn.Module, config: ZeroConfig, most: int) -> Iterator[nn.Module]:
    """Modules that become units, outermost first; one that is registered twice comes twice.

    A block larger than ``most`` bytes is cut at its children where that is safe; the small ones are the root's.
    """
    small = most // SHARE

    def is_whole(block: nn.Module, kind: str, size: int, compiled: bool) -> bool:
        if size <= most or kind in config.leaf_classes:
            return True
        if size > config.max_unit_bytes:
            return isinstance(block, FUSED) or not any(block.children())
        return kind in config.unit_classes or compiled or not _is_divisible(block, small)

    def walk(parent: nn.Module, least: float, compiled: bool) -> Iterator[nn.Module]:
        compiled = compiled or _is_compiled(parent)
        if isinstance(parent, nn.ModuleList | nn.Sequential) and not config.unit_classes:
            least = 0
        for child in parent.children():
            kind, size = type(child).__name__, _nbytes(child)
            named = kind in config.leaf_classes or kind in config.unit_classes
            chosen = (named or size >= least) and not isinstance(child, HOOKLESS)
            if size and chosen and is_whole(child, kind, size, compiled):
                yield child
            elif size and chosen:
                yield from walk(child, small if _scattered(child, small) < small else 0, compiled)
            elif size:
                yield from walk(child, least if isinstance(child, HOOKLESS) else math.inf, compiled)

    return walk(module, math.inf, compiled=False)


def _is_divisible(block: nn.Module, small: int) -> bool:
    """Whether all ranks may be expected to use a block's children in one order, through the children's forward, and the
    root is not burdened.

    Not the elements of a list (experts), nor the parts of what is compiled as a whole, nor those of a layer with large
    weights of its own.
    """
    return (
        any(block.children())
        and not isinstance(block, FUSED)
        and _scattered(block, small) < small
        and not any(isinstance(m, HOOKLESS) or _is_compiled(m) for m in block.modules())
    )


def _scattered(block: nn.Module, small: int) -> int:
    """Bytes of a block that go to the root when it is cut: its own weights and its small children."""
    own = sum(p.numel() * p.element_size() for p in block.parameters(recurse=False))
    return own + sum(size for size in map(_nbytes, block.children()) if size < small)


def _is_compiled(module: nn.Module) -> bool:
    """By ``torch.compile``, ``Module.compile`` or, as Lightning does, by its forward."""
    return (
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def _large_layers(module: nn.Module, covered: set[int], threshold: int) -> list[UnitSpec]:
    """Layers outside the blocks (an embedding, an output layer) that are larger than a block; a fused module is one."""
    fused = [m for m in module.modules() if isinstance(m, FUSED)]
    covered = covered | {id(inner) for outer in fused for inner in outer.modules() if inner is not outer}

    def size(layer: nn.Module) -> int:
        own = layer.parameters(recurse=isinstance(layer, FUSED))
        return sum(p.numel() * p.element_size() for p in own)

    return [
        UnitSpec(name, [layer])
        for name, layer in module.named_modules()
        if id(layer) not in covered and name and not isinstance(layer, HOOKLESS) and size(layer) > threshold
    ]


def _assign(module: nn.Module, root: UnitSpec, specs: list[UnitSpec]) -> None:
    """Fill in the parameters; what two units share, and what no unit has, goes to the root."""
    places: dict[int, set[int]] = defaultdict(set)
    heads = {id(spec.modules[0]) for spec in specs}
    for number, spec in enumerate(specs):
        for inner in _own_modules(spec.modules[0], heads):
            places[id(inner)].add(number)
    owners: dict[int, set[int]] = defaultdict(set)
    for inner in module.modules():
        for param in inner.parameters(recurse=False):
            owners[id(param)] |= places.get(id(inner), {-1})
    for name, param in module.named_parameters():
        homes = owners[id(param)]
        spec = specs[next(iter(homes))] if len(homes) == 1 and -1 not in homes else root
        spec.params[name] = param


def _own_modules(head: nn.Module, heads: set[int]) -> Iterator[nn.Module]:
    """A unit's first module and what is below it, other units excepted."""
    yield head
    for child in head.children():
        if id(child) not in heads:
            yield from _own_modules(child, heads)


def _set_apart(small: UnitSpec, specs: list[UnitSpec], threshold: int, limit: int | None) -> None:
    left = math.inf if limit is None else limit
    for spec in specs:
        for name, param in list(spec.params.items()):
            if param.numel() <= min(threshold, left):
                small.params[name] = spec.params.pop(name)
                left -= param.numel()


def _merge(specs: list[UnitSpec], threshold: int) -> list[UnitSpec]:
    """Join neighbours until each unit is at least ``threshold`` bytes."""
    merged: list[UnitSpec] = []
    for spec in specs:
        if merged and merged[-1].nbytes < threshold:
            merged[-1].modules += spec.modules
            merged[-1].params |= spec.params
        else:
            merged.append(spec)
    return merged
