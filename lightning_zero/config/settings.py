"""From whatever a user gives (keywords, a DeepSpeed configuration) to the schema."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from typing import Any

from lightning_zero.config.names import nearest
from lightning_zero.config.schema import ZeroConfig
from lightning_zero.config.training import TrainingConfig

Given = str | PathLike[str] | Mapping[str, Any]
"""A DeepSpeed configuration: a path, a mapping, or base64 of its JSON."""

ZERO, TRAINING = ([field.name for field in fields(kind)] for kind in (ZeroConfig, TrainingConfig))


@dataclass
class Settings:
    """All settings of a strategy, and where they come from."""

    zero: ZeroConfig
    training: TrainingConfig
    source: str = "ZeroStrategy"


def settings_from(keywords: Mapping[str, Any]) -> Settings:
    """Check keywords and sort them into the dataclasses.

    Raises:
        TypeError: a keyword is unknown; the message names the nearest valid one.
        ValueError: a value is wrong, or two contradict each other.
    """
    for name in keywords:
        if name not in ZERO + TRAINING:
            raise TypeError(f"ZeroStrategy has no setting {name!r}.{nearest(name, ZERO + TRAINING)}")
    zero, training = ({k: v for k, v in keywords.items() if k in known} for known in (ZERO, TRAINING))
    return Settings(ZeroConfig(**zero), TrainingConfig(**training))
