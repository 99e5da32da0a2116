"""From whatever a user gives (keywords, a DeepSpeed configuration) to the schema."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any

from lightning_zero.config import checks
from lightning_zero.config.deepspeed import Given, Translation, from_environment, translate
from lightning_zero.config.deepspeed.rules import resolve_autos
from lightning_zero.config.effects import without_effect
from lightning_zero.config.schema import ZeroConfig
from lightning_zero.config.training import TrainingConfig

ZERO, TRAINING = ([item.name for item in fields(kind)] for kind in (ZeroConfig, TrainingConfig))


@dataclass
class Settings:
    """All settings of a strategy.

    Args:
        zero: the engine's.
        training: those of the run.
        source: what to call the place where they stand, in messages.
        translation: the DeepSpeed configuration that they come from, if there is one.
        keywords: what was given as such.
        overruled: keywords that were given with their default value, and of which the configuration says otherwise.
    """

    zero: ZeroConfig
    training: TrainingConfig
    source: str = "ZeroStrategy"
    translation: Translation | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)
    overruled: list[str] = field(default_factory=list)

    def place(self, name: str) -> str:
        """Where a setting was said, for messages."""
        return "ZeroStrategy" if name in self.keywords else self.source

    @property
    def any_16_bits(self) -> bool:
        """Whether ``precision`` means any precision of these 16 bits, as DeepSpeed's ``bf16`` does."""
        return self.translation is not None and self.translation.any_16_bits and "precision" not in self.keywords

    @property
    def autos(self) -> list[str]:
        """Keys whose "auto" waits for the module's hidden size."""
        return [] if self.translation is None else self.translation.autos

    def with_hidden_size(self, hidden: int) -> "Settings":
        """The settings in which "auto" has become what Hugging Face makes of it."""
        if self.translation is None:
            return self
        found = resolve_autos(self.autos, hidden, self.translation.settings)
        found = {name: value for name, value in found.items() if name not in self.keywords}
        return replace(self, zero=replace(self.zero, **found))

    def describe(self) -> str:
        """What differs from the defaults, as keywords of ZeroStrategy."""
        before = {name: value for part in (ZeroConfig(), TrainingConfig()) for name, value in asdict(part).items()}
        now = {**asdict(self.zero), **asdict(self.training)}
        changed = {name: value for name, value in now.items() if value != before[name] or name == "stage"}
        for name, value in changed.items():
            if isinstance(value, dict) and isinstance(before[name], dict):
                changed[name] = {key: each for key, each in value.items() if each != before[name][key]}
        return f"ZeroStrategy({', '.join(f'{name}={value!r}' for name, value in changed.items())})"

    def shared(self) -> dict[str, str]:
        """What must be the same on all ranks, in words: all but where things rest, which hosts may differ in."""
        values = {**_values(self.zero), **_values(self.training)}
        return {name: _shown(value) for name, value in values.items() if not name.startswith("offload_")}

    def without_effect(self) -> list[str]:
        """A sentence for each keyword that changes nothing."""
        return without_effect(self.zero, self.training, self.keywords)


def settings_from(keywords: Mapping[str, Any], config: Given | Translation | None = None) -> Settings:
    """Check what is given, and sort it into the dataclasses.

    Args:
        keywords: of :class:`lightning_zero.ZeroStrategy`. Where ``config`` says something, those that have their
            default value count as not given, but for ``stage``: Hydra and LightningCLI always give all of them.
        config: a DeepSpeed configuration, translated or not; None: the one that the environment variable
            ``PL_DEEPSPEED_CONFIG_PATH`` names, if it does.

    Raises:
        TypeError: a keyword is unknown; the message names the nearest valid one.
        ValueError: a value is wrong, or two contradict each other.
        FileNotFoundError: there is no such configuration.
    """
    keywords = {name: value for name, value in keywords.items() if name != "stage" or value is not None}
    checks.names("ZeroStrategy", keywords, ["config", *ZERO, *TRAINING])
    zero, training = _sorted(keywords)
    given = config if config is not None else from_environment()
    if given is None:
        return Settings(zero, training, keywords=keywords)
    values = _values(zero, training)
    own = {name: value for name, value in values.items() if value != _DEFAULTS[name]}
    own |= {"stage": zero.stage} if "stage" in keywords else {}
    translation = given if isinstance(given, Translation) else translate(given, keywords.get("stage"))
    translation.check()
    source, theirs = translation.source, translation.settings
    try:
        checks.names("ZeroStrategy", theirs, ZERO + TRAINING)
        read = _values(*_sorted({"stage": translation.stage, **theirs}))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{source}: {error}") from None
    for name, value in own.items():
        if name in theirs and value != read[name]:
            theirs_shown = _shown(read[name])
            raise ValueError(
                f"{name}={_shown(value)} of ZeroStrategy and {theirs_shown} of {source} differ. Say it once."
            )
    try:
        both = _sorted({"stage": translation.stage, **theirs, **own})
    except (TypeError, ValueError) as error:
        raise type(error)(f"ZeroStrategy and {source}: {error}") from None
    overruled = [name for name in keywords if name in theirs and name not in own and read[name] != values[name]]
    return Settings(*both, source, translation, own, overruled)


def _sorted(values: Mapping[str, Any]) -> tuple[ZeroConfig, TrainingConfig]:
    zero, training = ({k: v for k, v in values.items() if k in known} for known in (ZERO, TRAINING))
    return ZeroConfig(**zero), TrainingConfig(**training)


def _values(*parts: ZeroConfig | TrainingConfig) -> dict[str, Any]:
    return {item.name: getattr(part, item.name) for part in parts for item in fields(part)}


def _shown(value: Any) -> str:
    """A value in words that are the same in every process."""
    if isinstance(value, partial):
        return f"{_shown(value.func)}({', '.join(f'{key}={_shown(each)}' for key, each in value.keywords.items())})"
    return getattr(value, "__qualname__", type(value).__name__) if callable(value) else repr(value)


_DEFAULTS = _values(ZeroConfig(), TrainingConfig())
