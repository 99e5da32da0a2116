"""Checks of settings, and what is said of a wrong one."""

import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypeGuard


def nearest(name: str, known: Sequence[str]) -> str:
    """A sentence with the known name that is nearest to ``name``, or with all of them."""
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Valid names: {', '.join(known)}."


def names(owner: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse names that ``owner`` has no setting for.

    Raises:
        TypeError: there is one; the message has the nearest that is known.
    """
    for name in given:
        if name not in known:
            raise TypeError(f"{owner} has no setting {name!r}.{nearest(name, known)}")


def is_whole(value: Any, least: int) -> TypeGuard[int]:
    """Whether a value is a whole number, ``least`` or more; True is not 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number and, as a float, finite; True is not 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def whole(name: str, value: Any, least: int) -> int:
    """The value.

    Raises:
        ValueError: it is no whole number, or less than ``least``.
    """
    if not is_whole(value, least):
        raise ValueError(f"{name}={value!r} must be a whole number, {least} or more.")
    return value


def number(name: str, value: Any, least: float | None = None) -> float:
    """The value.

    Raises:
        ValueError: it is no finite number, or less than ``least``.
    """
    if not is_number(value) or (least is not None and value < least):
        raise ValueError(f"{name}={value!r} must be a finite number{'' if least is None else f', {least} or more'}.")
    return value


def flag(name: str, value: Any) -> bool:
    """The value.

    Raises:
        ValueError: it is neither True nor False.
    """
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False.")
    return value
