"""Names of parameters in files."""

from collections.abc import Mapping
from typing import Any

from torch import nn

COMPILED = "_orig_mod."
"""What ``torch.compile`` puts into the names of what is in a module that it wraps."""


def clean_name(name: str) -> str:
    """A parameter's name in the module as the user wrote it."""
    return name.replace(COMPILED, "")


def names_for(module: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """A module's state under the names that they have in ``module``, whichever parts of either are compiled."""
    own = [name for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers())]
    present = {clean_name(name): name for name in own}
    return {present.get(clean_name(name), name): value for name, value in state.items()}
