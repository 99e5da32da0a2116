"""Hugging Face's "auto": what a module says of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn


def is_auto(value: Any) -> bool:
    """Whether a value is "auto"."""
    return isinstance(value, str) and value == "auto"


def said(module: nn.Module, name: str) -> Any:
    """What ``module.hparams`` or an attribute says; hyperparameters first, as for Lightning's Tuner."""
    hparams = getattr(module, "hparams", None)
    value = hparams.get(name) if isinstance(hparams, Mapping) else None
    return getattr(module, name, None) if value is None else value


def number(module: nn.Module, name: str) -> float | None:
    """The same; a number, or None.

    Raises:
        ValueError: it is something else.
    """
    value = said(module, name)
    if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
        raise ValueError(
            f'"auto" is looked up in {type(module).__name__}, whose {name} is {value!r} and no number. Give a number '
            "in its place."
        )
    return value


def first_number(module: nn.Module, names: Sequence[str]) -> float | None:
    """What the module says under the first of ``names`` that it knows: hyperparameters of all names before attributes.

    Raises:
        ValueError: it is no number.
    """
    hparams = getattr(module, "hparams", None)
    known = [name for name in names if isinstance(hparams, Mapping) and hparams.get(name) is not None]
    for name in (*known, *names):
        value = number(module, name)
        if value is not None:
            return value
    return None
