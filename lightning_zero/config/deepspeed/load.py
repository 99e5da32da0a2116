"""Reads DeepSpeed's JSON from wherever it comes: a mapping, a file, base64, an environment variable."""

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

Given = str | PathLike[str] | Mapping[str, Any]
"""A DeepSpeed configuration: a path, a mapping, or base64 of its JSON."""

ENVIRONMENT = "PL_DEEPSPEED_CONFIG_PATH"
"""Where Lightning's DeepSpeedStrategy looks for a path."""


def load(given: Given) -> tuple[dict[str, Any], str]:
    """The configuration, and what to call it in messages.

    Args:
        given: a mapping; a path; or, as on DeepSpeed's command line, base64 (of the URL's alphabet) of the JSON.

    Raises:
        FileNotFoundError: there is no such file, and it is no base64.
        ValueError: it is no JSON object, or a key comes twice in it; the message says in which line.
    """
    if isinstance(given, Mapping):
        return _plain(given), "the DeepSpeed configuration"
    path = Path(given).expanduser()
    if _is_file(path):
        return _parse(path.read_text(encoding="utf-8-sig"), str(given)), str(given)
    decoded = _decode(os.fspath(given))
    if decoded is None:
        raise FileNotFoundError(f"There is no DeepSpeed configuration {os.fspath(given)!r} (looked in {Path.cwd()}).")
    return _parse(decoded, "the base64 configuration"), "the base64 configuration"


def from_environment() -> str | None:
    """The path in the environment variable that Lightning's DeepSpeedStrategy reads, if there is one."""
    return os.environ.get(ENVIRONMENT) or None


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of built-in dicts, also of what OmegaConf makes."""
    copied: dict[str, Any] = {}
    for key, value in given.items():
        if not isinstance(key, str):
            raise ValueError(f"The DeepSpeed configuration has a key {key!r}, which is no string.")
        copied[key] = _plain_value(value)
    return copied


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _plain(value)
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return [_plain_value(each) for each in value] if is_list else value


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than any file's: base64
        return False


def _decode(given: str) -> str | None:
    try:
        return base64.urlsafe_b64decode(given).decode()
    except (binascii.Error, ValueError):
        return None


def _parse(text: str, source: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"{source}: the key {key!r} comes twice. Remove one of them.")
            found[key] = value
        return found

    try:
        parsed = json.loads(without_comments(text), object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}, line {error.lineno}, column {error.colno}: {error.msg}.") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{source} must be an object, {{ ... }}, and is {type(parsed).__name__}.")
    return parsed


def without_comments(text: str) -> str:
    """JSON with spaces where ``//``, ``#`` and ``/* */`` comments and commas before a closing bracket were, so that
    lines and columns stay.
    """
    out, place = list(text), 0
    comma: int | None = None  # the last one, if nothing but spaces and comments came after it
    while place < len(text):
        end = _end_of_string(text, place) if text[place] == '"' else _end_of_comment(text, place)
        if end is None:
            if text[place] in "]}" and comma is not None:
                out[comma] = " "
            if not text[place].isspace():
                comma = place if text[place] == "," else None
            place += 1
            continue
        if text[place] == '"':
            comma = None
        else:
            out[place:end] = [char if char == "\n" else " " for char in text[place:end]]
        place = end
    return "".join(out)


def _end_of_string(text: str, start: int) -> int:
    place = start + 1
    while place < len(text) and text[place] != '"':
        place += 2 if text[place] == "\\" else 1
    return min(place + 1, len(text))


def _end_of_comment(text: str, start: int) -> int | None:
    if text[start] == "#" or text.startswith("//", start):
        end = text.find("\n", start)
    elif text.startswith("/*", start):
        end = text.find("*/", start)
        end = end if end < 0 else end + 2
    else:
        return None
    return len(text) if end < 0 else end
