"""Optimizers by their names in DeepSpeed's JSON or in ``torch.optim``, for ``ZeroStrategy(optimizer=)``."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_zero.config.checks import nearest
from lightning_zero.engine.elementwise import REASONS, STOCK
from lightning_zero.optim.auto import first_number, is_auto, number, said
from lightning_zero.optim.lion import Lion

CLASSES: dict[str, type[Optimizer]] = {**{cls.__name__: cls for cls in STOCK}, "Lion": Lion}

_MUP = "the package mup makes it for modules that mup has scaled: return it from configure_optimizers"
_REMOVED = "DeepSpeed has removed it, and it is not element-wise"
REFUSED = {
    **REASONS,
    "Lamb": "it scales a step by norms of whole parameters",
    "OneBitAdam": _REMOVED,
    "ZeroOneAdam": _REMOVED,
    "OneBitLamb": _REMOVED,
    "MuAdam": _MUP,
    "MuAdamW": _MUP,
    "MuSGD": _MUP,
}
"""Optimizers that DeepSpeed or torch knows, and why they are not made here."""

_SHARED = {"set_grad_none": (True, False), "fp32_optimizer_states": (True,)}
_ADAM = {"torch_adam": (True, False), "adam_w_mode": (True, False), "bias_correction": (True,), **_SHARED}
DEEPSPEEDS: dict[str, dict[str, tuple[bool, ...]]] = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": {"amsgrad": (False,), "fp32_optimizer_states": (True,)},
    "Lion": _SHARED,
}
"""Params of DeepSpeed's classes that torch's do not have, and the values that need nothing of torch's."""

AUTO: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
"""What may be "auto", and the defaults of Hugging Face's TrainingArguments; that of lr only stands in for checks."""

SOURCES = {"lr": ("lr", "learning_rate"), "eps": ("eps", "adam_epsilon"), "weight_decay": ("weight_decay",)}
"""Names under which a module holds what is "auto"."""


def check_optimizer(chosen: Mapping[str, Any] | Callable[..., Any]) -> None:
    """Refuse what :func:`make_optimizer` would refuse of any module.

    Raises:
        TypeError: an unknown param, or a value of a wrong type.
        ValueError: an unknown or refused optimizer, or a value that cannot be.
    """
    if not callable(chosen):
        cls, params = _parsed(chosen)
        params = {key: AUTO[key] if is_auto(value) else value for key, value in params.items()}
        _build(cls, params, [nn.Parameter(torch.zeros(1, device="cpu"))])


def make_optimizer(chosen: Mapping[str, Any] | Callable[..., Any], module: nn.Module) -> Optimizer:
    """The optimizer of the module's parameters that require gradients, or of all if none does.

    Names are those of DeepSpeed and of torch's element-wise optimizers, in upper or lower case. As in DeepSpeed, "Adam"
    is AdamW unless ``adam_w_mode`` is false, and the default weight_decay of "Adam" and "AdamW" is 0, or that of
    torch's class if ``torch_adam`` is true. The defaults of "Lion" are DeepSpeed's, all others torch's.

    "auto" is what ``module.hparams`` or an attribute of the module says: ``lr`` or ``learning_rate``; ``betas``, or
    ``adam_beta1`` and ``adam_beta2``; ``eps`` or ``adam_epsilon``; ``weight_decay``. Where the module says nothing, it
    is the default of Hugging Face's TrainingArguments, or for lr an error.

    Args:
        chosen: ``{"type": name, "params": {...}}``, or a function that makes an optimizer of a list of parameters.
        module: whose parameters it is for.

    Raises:
        TypeError: an unknown param, a value of a wrong type, or a function that makes no optimizer.
        ValueError: an unknown or refused optimizer, a value that cannot be, or an "auto" that is not resolved.
    """
    every = list(module.parameters())
    parameters = [p for p in every if p.requires_grad] or every
    if callable(chosen):
        made = chosen(parameters)
        if not isinstance(made, Optimizer):
            raise TypeError(f"optimizer={chosen!r} made a {type(made).__name__}, which is no torch.optim.Optimizer.")
        return made
    cls, params = _parsed(chosen)
    params = {key: _of_module(module, key) if is_auto(value) else value for key, value in params.items()}
    return _build(cls, params, parameters)


def _parsed(chosen: Mapping[str, Any]) -> tuple[type[Optimizer], dict[str, Any]]:
    """The class, and those of the params that are its own."""
    names = {name.lower(): name for name in (*CLASSES, *REFUSED)}
    name = names.get(chosen["type"].lower())
    if name is None:
        raise ValueError(f"optimizer.type={chosen['type']!r} is no optimizer.{nearest(chosen['type'], list(CLASSES))}")
    if name in REFUSED:
        raise ValueError(f"optimizer.type={chosen['type']!r} cannot run on sharded parameters: {REFUSED[name]}.")
    params = dict(chosen["params"])
    if "max_grad_norm" in params:
        raise ValueError("optimizer.params.max_grad_norm is no setting of an optimizer: set gradient_clipping instead.")
    as_adamw = name == "Adam" and params.get("adam_w_mode", True) is not False
    cls = CLASSES["AdamW" if as_adamw else name]
    own, extra = _own(cls), DEEPSPEEDS.get(name, {})
    for key, value in params.items():
        if key not in own and key not in extra:
            raise TypeError(f"optimizer.params.{key}: {name} has no such setting.{nearest(key, [*own, *extra])}")
        if key not in own and not (isinstance(value, bool) and value in extra[key]):
            values = " or ".join(map(str, extra[key]))
            raise ValueError(f"optimizer.params.{key}={value!r} must be {values} for {name}.")
        if isinstance(value, str) and not is_auto(value):
            raise ValueError(f"optimizer.params.{key}={value!r} is text and must be a number.")
        if is_auto(value) and key not in AUTO:
            raise ValueError(
                f"optimizer.params.{key}='auto' is not known: only {', '.join(AUTO)} may be; give a value."
            )
    if name in ("Adam", "AdamW") and not params.get("torch_adam", False):
        params = {"weight_decay": 0.0, **params}
    return cls, {key: value for key, value in params.items() if key in own}


def _build(cls: type[Optimizer], params: dict[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    given = {key: _plain(value) for key, value in params.items()}
    if "betas" in given and (not isinstance(given["betas"], tuple) or len(given["betas"]) != 2):
        raise ValueError(f"optimizer.params.betas={params['betas']!r} must be two numbers.")
    try:
        return cls(parameters, **given)
    except (TypeError, ValueError) as error:
        raise type(error)(f"optimizer.params of {cls.__name__} are {given}: {error}") from error


def _own(cls: type[Optimizer]) -> list[str]:
    """What may be given to the class beside parameters."""
    return [name for name in inspect.signature(cls.__init__).parameters if name not in ("self", "params")]


def _plain(value: Any) -> Any:
    """JSON's lists are torch's tuples."""
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _of_module(module: nn.Module, key: str) -> Any:
    """What the module says of what is "auto"."""
    if key == "betas":
        betas = said(module, "betas")
        if betas is not None:
            return betas
        halves = [number(module, name) for name in ("adam_beta1", "adam_beta2")]
        return tuple(default if half is None else half for half, default in zip(halves, AUTO["betas"], strict=True))
    found = first_number(module, SOURCES[key])
    if found is not None:
        return found
    if key == "lr":
        owner = type(module).__name__
        raise ValueError(
            f"optimizer.params.lr='auto', and neither {owner}.hparams nor {owner} has lr or learning_rate. Give a "
            "number, or call self.save_hyperparameters() in a module whose __init__ takes lr."
        )
    return AUTO[key]
