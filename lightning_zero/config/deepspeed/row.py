"""A key of DeepSpeed's JSON and what becomes of it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from lightning_zero.config.checks import is_number

OFF = (None, False, 0, "off", "none")
"""Values by which a configuration says that it does not want something."""


class Fate(Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    TRAINER = "Trainer"
    """It says what Lightning's Trainer says, too; where both say it and differ, that is an error."""
    ALIAS = "old name"
    NO_EFFECT = "no effect"
    """Accepted: it cannot change a result here, and the words say why."""
    REFUSED = "refused"
    UNKNOWN = "unknown"


Convert = Callable[[Any], Any]
"""Checks a value and turns it into that of a setting; raises ValueError."""


@dataclass(frozen=True)
class Row:
    """One key.

    Args:
        key: with dots between blocks.
        fate: what becomes of it; of what is REFUSED, values of ``off`` are accepted.
        words: why, or what to do instead.
        sets: name of the setting that it becomes, ``offload_optimizer.device`` say. Empty: other keys decide, too
            (``translate``), or nothing does.
        convert: checks the value.
        met: values that ask for what is done anyway.
        off: values that ask for nothing.
        auto: whether Hugging Face's ``"auto"`` has a meaning.
        opaque: whether what is inside is not looked at.
    """

    key: str
    fate: Fate
    words: str = ""
    sets: str = ""
    convert: Convert = lambda value: value
    met: tuple[Any, ...] = ()
    off: tuple[Any, ...] = OFF
    auto: bool = False
    opaque: bool = False


def whole(least: int = 0) -> Convert:
    """Whole numbers from ``least``; JSON's 5e8 is one."""

    def convert(value: Any) -> int:
        if not is_number(value) or value != int(value) or value < least:
            raise ValueError(f"must be a whole number, {least} or more")
        return int(value)

    return convert


def number(value: Any) -> float:
    """Finite numbers from 0."""
    if not is_number(value) or value < 0:
        raise ValueError("must be a number, 0 or more")
    return value


def flag(value: Any) -> bool:
    """Booleans."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def text(value: Any) -> str:
    """Strings."""
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def block(value: Any) -> dict[str, Any]:
    """Objects."""
    if not isinstance(value, dict):
        raise ValueError("must be an object, { ... }")
    return value


def names(value: Any) -> tuple[str, ...]:
    """Lists of class names, of which the part behind the last dot counts."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ValueError("must be a list of strings")
    return tuple(name.rpartition(".")[2] for name in value)


def one_of(*choices: Any) -> Convert:
    """One of some values."""

    def convert(value: Any) -> Any:
        for choice in choices:
            if value == choice and isinstance(value, bool) == isinstance(choice, bool):
                return choice
        raise ValueError(f"must be one of {', '.join(map(repr, choices))}")

    return convert


_DTYPES = {
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
}


def dtype(value: Any) -> str | None:
    """Names of dtypes, as ours."""
    if value is not None and (not isinstance(value, str) or value not in _DTYPES):
        raise ValueError("must be one of 'fp32', 'bf16', 'fp16'")
    return None if value is None else _DTYPES[value]
