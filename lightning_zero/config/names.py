"""Misspelt names, and what was meant."""

from collections.abc import Sequence
from difflib import get_close_matches


def nearest(name: str, known: Sequence[str]) -> str:
    """A sentence with the known name that is nearest to ``name``, or with all of them."""
    near = get_close_matches(name, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Valid names: {', '.join(known)}."
