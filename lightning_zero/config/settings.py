"""From whatever a user gives (keywords, a DeepSpeed configuration) to the schema."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from lightning_zero.config.deepspeed import Given, Translation, from_environment, translate
from lightning_zero.config.deepspeed.rules import resolve_autos
from lightning_zero.config.effects import without_effect
from lightning_zero.config.names import nearest
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
    """

    zero: ZeroConfig
    training: TrainingConfig
    source: str = "ZeroStrategy"
    translation: Translation | None = None
    keywords: Mapping[str, Any] = field(default_factory=dict)

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

    def without_effect(self) -> list[str]:
        """A sentence for each keyword that changes nothing."""
        return without_effect(self.zero, self.training, self.keywords)


def settings_from(keywords: Mapping[str, Any], config: Given | None = None) -> Settings:
    """Check what is given, and sort it into the dataclasses.

    Args:
        keywords: of :class:`lightning_zero.ZeroStrategy`.
        config: a DeepSpeed configuration; None: the one that the environment variable ``PL_DEEPSPEED_CONFIG_PATH``
            names, if it does.

    Raises:
        TypeError: a keyword is unknown; the message names the nearest valid one.
        ValueError: a value is wrong, or two contradict each other.
        FileNotFoundError: there is no such configuration.
    """
    for name in keywords:
        if name not in ZERO + TRAINING:
            raise TypeError(f"ZeroStrategy has no setting {name!r}.{nearest(name, ['config', *ZERO, *TRAINING])}")
    own = _sorted(keywords)
    given = config if config is not None else from_environment()
    if given is None:
        return Settings(*own, keywords=keywords)
    translation = translate(given)
    translation.check()
    source = translation.source
    for name in translation.settings:
        if name not in ZERO + TRAINING:
            raise ValueError(f"{source}: ZeroStrategy has no setting {name!r}.{nearest(name, ZERO + TRAINING)}")
    try:
        theirs = _sorted(translation.settings)
        both = _sorted({**translation.settings, **keywords})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{source}: {error}") from None
    for name in keywords:
        if name in translation.settings:
            values = [getattr(part[name in TRAINING], name) for part in (own, theirs)]
            if values[0] != values[1]:
                raise ValueError(
                    f"{name} is {values[0]!r} in ZeroStrategy(...) and {values[1]!r} in {source}. Say it in one place."
                )
    return Settings(*both, source, translation, keywords)


def _sorted(values: Mapping[str, Any]) -> tuple[ZeroConfig, TrainingConfig]:
    zero, training = ({k: v for k, v in values.items() if k in known} for known in (ZERO, TRAINING))
    return ZeroConfig(**zero), TrainingConfig(**training)
