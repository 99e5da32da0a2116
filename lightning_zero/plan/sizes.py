"""Sizes as people write them."""

import re

GIB = 2**30
DECIMAL: dict[str, int] = {f"{prefix}B": 1000**power for power, prefix in enumerate(("", *"KMGTP"))}
UNITS: dict[str, int] = DECIMAL | {f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGTP", 1)}


def nbytes(text: str) -> int:
    """Bytes that ``80GB`` (10^9), ``80GiB`` (2^30) and so on stand for.

    Raises:
        ValueError: the text is not a number with a unit.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGTP]i?B|B)\s*", text)
    if found is None:
        raise ValueError(f"{text!r} is no size: write a number and a unit, 80GB (10^9 bytes), 80GiB (2^30) or 1.5TB.")
    size: int = UNITS[found[2]]
    return round(float(found[1]) * size)


def shown(size: float) -> str:
    """Bytes in the largest decimal unit that leaves a number of 1 or more, with three digits."""
    for unit, bytes_of_unit in reversed(DECIMAL.items()):
        if size >= bytes_of_unit:
            value = size / bytes_of_unit
            return f"{value:.{max(0, 3 - len(str(int(value))))}f} {unit}"
    return "0 B"
