"""The verdicts on a DeepSpeed configuration, as a table to read."""

import textwrap

from lightning_zero.config.deepspeed.translate import Translation, show

_HEADS = ("key", "value", "fate", "what becomes of it")
_WIDTH = 60


def table(translation: Translation) -> str:
    """A line for each key: its value, its fate, and why."""
    rows = [(v.key, "" if v.value is None else show(v.value), v.fate.value, v.words) for v in translation.verdicts]
    widths = [max(len(row[column]) for row in (*rows, _HEADS)) for column in range(3)]
    lines = [f"{translation.source}, as DeepSpeed's keys are understood here:"]
    for row in (_HEADS, *rows):
        first, *more = textwrap.wrap(row[3], _WIDTH) or [""]
        cells = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines += [f"  {cells}  {first}".rstrip(), *(" " * (sum(widths) + 8) + line for line in more)]
    return "\n".join(lines)
