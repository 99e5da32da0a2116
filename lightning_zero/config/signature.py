"""The schema as the signature of a function, for those who read signatures: help(), editors, LightningCLI."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from lightning_zero.config.schema import OffloadConfig, ZeroConfig
from lightning_zero.config.training import TrainingConfig

Function = TypeVar("Function", bound=Callable[..., Any])

_WIDER: dict[Any, Any] = {OffloadConfig: OffloadConfig | str | dict[str, Any] | None}
"""Types of keywords that take more than the field holds."""


def with_settings(function: Function) -> Function:
    """Show the fields of the dataclasses, with types and defaults, in the place of ``**settings``."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    annotations = dict(function.__annotations__)
    for field in [*fields(ZeroConfig), *fields(TrainingConfig)]:
        if field.name not in signature.parameters:
            kind = annotations[field.name] = _WIDER.get(field.type, field.type)
            default = None if field.default is MISSING else field.default
            own.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    function.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    function.__annotations__ = annotations
    return function
