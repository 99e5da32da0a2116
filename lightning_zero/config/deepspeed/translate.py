"""From DeepSpeed's JSON to our settings, with a verdict on every key."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from lightning_zero.config.checks import nearest
from lightning_zero.config.deepspeed.keys import ROOT_ROWS
from lightning_zero.config.deepspeed.load import Given, load
from lightning_zero.config.deepspeed.row import OFF, Fate, Row
from lightning_zero.config.deepspeed.rules import AUTO, OWN, combine
from lightning_zero.config.deepspeed.zero_keys import ZERO_ROWS

ZERO = "zero_optimization"
ROWS: dict[str, Row] = {row.key: row for row in ROOT_ROWS}
ROWS |= {f"{ZERO}.{row.key}": replace(row, key=f"{ZERO}.{row.key}") for row in ZERO_ROWS}


@dataclass(frozen=True)
class Verdict:
    """What becomes of one key: its value, its fate, and why."""

    key: str
    value: Any
    fate: Fate
    words: str


@dataclass
class Translation:
    """A DeepSpeed configuration, read.

    Args:
        source: what it is called in messages.
        settings: keywords of :class:`lightning_zero.ZeroStrategy`.
        verdicts: one for each key, in the order of the file.
        autos: keys whose ``"auto"`` is found out from the module.
        stage: that of the configuration, else of ZeroStrategy, else DeepSpeed's default.
        any_16_bits: whether the precision is that of ``fp16.enabled`` or ``bf16.enabled``, which mean any of 16 bits.
    """

    source: str
    settings: dict[str, Any] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    autos: list[str] = field(default_factory=list)
    any_16_bits: bool = False
    stage: int = 0

    @property
    def refused(self) -> list[Verdict]:
        """What cannot be used."""
        return [verdict for verdict in self.verdicts if verdict.fate is Fate.REFUSED]

    @property
    def unknown(self) -> list[Verdict]:
        """What DeepSpeed has no such key for."""
        return [verdict for verdict in self.verdicts if verdict.fate is Fate.UNKNOWN]

    def check(self) -> None:
        """Raise what is refused.

        Raises:
            ValueError: with a line for each refused key.
        """
        if self.refused:
            lines = [f"  {verdict.key}: {show(verdict.value)}: {verdict.words}" for verdict in self.refused]
            raise ValueError("\n".join([f"{self.source} cannot be used:", *lines]))


def translate(given: Given, stage: int | None = None) -> Translation:
    """Read a DeepSpeed configuration.

    Args:
        given: the configuration.
        stage: what ZeroStrategy says beside it; counts where the configuration says none.

    Returns:
        Settings and verdicts. What is refused is among the verdicts; see :meth:`Translation.check`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it is no JSON; see
            :func:`lightning_zero.config.deepspeed.load.load`.
    """
    config, source = load(given)
    own = config.pop(OWN, None)
    reader = _Reader(source)
    reader.walk(config, "")
    reader.finish(own, stage)
    return reader.out


class _Reader:
    """Goes through a configuration, key by key."""

    def __init__(self, source: str) -> None:
        self.out = Translation(source)
        self.found: dict[str, Any] = {}

    def say(self, key: str, value: Any, fate: Fate, words: str) -> None:
        """Note a verdict. Passwords are not shown."""
        value = "***" if key.endswith("api_key") else value
        self.out.verdicts.append(Verdict(key, value, fate, words))

    def walk(self, block: Mapping[str, Any], prefix: str) -> None:
        """Judge all keys of a block."""
        for name, value in block.items():
            key = prefix + name
            if key == ZERO and isinstance(value, bool):
                self.say(key, value, Fate.ALIAS, f"{ZERO}.stage: {int(value)}")
                self.found[f"{ZERO}.stage"] = int(value)
            elif key == "bfloat16" and "bf16" in block:
                self.say(key, value, Fate.REFUSED, "it is an old name of bf16, which is there, too: remove one of them")
            elif key == "bfloat16" and isinstance(value, Mapping):
                self.say(key, value, Fate.ALIAS, "bf16")
                self.walk(value, "bf16.")
            elif key in ROWS:
                self.judge(ROWS[key], value)
            elif not any(row.startswith(f"{key}.") for row in ROWS):
                self.unknown(key, name, value, prefix)
            elif isinstance(value, Mapping):
                self.walk(value, f"{key}.")
            elif value is not None:
                self.say(key, value, Fate.REFUSED, "must be an object, { ... }")

    def unknown(self, key: str, name: str, value: Any, prefix: str) -> None:
        """DeepSpeed refuses unknown keys in blocks and lets those of the root pass; here those that look misspelt are
        refused, too, and others are named.
        """
        known = list(dict.fromkeys(row[len(prefix) :].partition(".")[0] for row in ROWS if row.startswith(prefix)))
        known += [] if prefix else [OWN]
        near = get_close_matches(name, known, n=1, cutoff=0.75)
        if prefix or near:
            self.say(key, value, Fate.REFUSED, f"there is no such key.{nearest(name, known)}")
        else:
            self.say(key, value, Fate.UNKNOWN, "DeepSpeed has no such key; it is left out")

    def judge(self, row: Row, value: Any) -> None:
        """A key that has a row."""
        if value == "auto" and row.fate is not Fate.REFUSED:
            self.auto(row)
        elif _is_in(value, row.met):
            self.found[row.key] = value
            self.say(row.key, value, Fate.HONOURED, row.words)
        elif row.fate is Fate.REFUSED:
            wanted = not _is_off(row, value)
            self.say(row.key, value, Fate.REFUSED if wanted else Fate.NO_EFFECT, row.words if wanted else "off")
        elif value is None:
            self.say(row.key, value, Fate.NO_EFFECT, "not given")
        else:
            try:
                self.found[row.key] = row.convert(value)
            except ValueError as error:
                self.say(row.key, value, Fate.REFUSED, str(error))
            else:
                self.say(row.key, value, row.fate, row.words)

    def auto(self, row: Row) -> None:
        """Hugging Face's "auto"."""
        if not row.auto:
            self.say(row.key, "auto", Fate.NO_EFFECT, "the default: Hugging Face fills in no such key")
        elif row.key == f"{ZERO}.stage":
            self.say(row.key, "auto", Fate.REFUSED, "write 0, 1, 2 or 3")
        elif row.key in AUTO:
            self.out.autos.append(row.key)
            self.say(row.key, "auto", row.fate, "; ".join(filter(None, (AUTO[row.key][1], row.words))))
        else:
            by = "as the Trainer says" if row.fate is Fate.TRAINER else "the default"
            self.found[row.key] = "auto"
            self.say(row.key, "auto", row.fate, f"{by}; {row.words}" if row.words else by)

    def finish(self, own: Any, stage: int | None) -> None:
        """What several keys decide together, and our own block."""
        outcome = combine(self.found, ROWS, stage)
        self.out.settings, self.out.stage = outcome.settings, outcome.stage
        self.out.any_16_bits = True in (self.found.get("fp16.enabled"), self.found.get("bf16.enabled"))
        for key, words in outcome.idle:
            self.change(key, Fate.NO_EFFECT, words)
        for key, words in outcome.wrong:
            self.change(key, Fate.REFUSED, words)
        judged = {verdict.key for verdict in self.out.verdicts}
        for key, words in outcome.implied:
            if key not in judged:
                self.say(key, None, Fate.HONOURED, words)
        if "gradient_clipping" not in self.found:
            words = "DeepSpeed clips at 1.0 where nothing is said; here gradient_clip_val of the Trainer says it"
            self.say("gradient_clipping", None, Fate.TRAINER, words)
        if own is None:
            return
        if not isinstance(own, Mapping):
            self.say(OWN, own, Fate.REFUSED, "must be an object, { ... }, with keywords of ZeroStrategy")
            return
        for name, value in own.items():
            for key in self.found:
                if ROWS[key].sets.partition(".")[0] == name:
                    self.change(key, Fate.NO_EFFECT, f"{OWN}.{name} goes before")
            self.say(f"{OWN}.{name}", value, Fate.HONOURED, "keyword of ZeroStrategy")
        self.out.settings.update(own)

    def change(self, key: str, fate: Fate, words: str) -> None:
        """Another verdict on a key, if there is not a worse one already."""
        for number, verdict in enumerate(self.out.verdicts):
            if verdict.key == key:
                if verdict.fate is not Fate.REFUSED:
                    self.out.verdicts[number] = replace(verdict, fate=fate, words=words)
                return
        self.say(key, self.found.get(key), fate, words)


def _is_in(value: Any, values: tuple[Any, ...]) -> bool:
    """Whether a value is one of ``values``; true is not 1."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def _is_off(row: Row, value: Any) -> bool:
    if _is_in(value, row.off):
        return True
    return row.opaque and isinstance(value, Mapping) and (not value or value.get("enabled", True) in OFF)


def show(value: Any) -> str:
    """A value as JSON writes it, shortened."""
    words = {None: "null", True: "true", False: "false"}
    shown = words[value] if value is None or isinstance(value, bool) else str(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."
