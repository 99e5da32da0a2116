"""The schema for Hydra: typed settings, the groups of ``lightning_zero.conf`` in every application, and hints.

Imported once Hydra is, and by nothing else: other programs need not wait for it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import Field, fields, make_dataclass
from dataclasses import field as make_field
from difflib import get_close_matches
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from lightning_zero.config.schema import OffloadConfig, ZeroConfig
from lightning_zero.config.training import LossScaleConfig, TrainingConfig

CONF = "lightning_zero.conf"


def schema() -> type:
    """All keywords of :class:`lightning_zero.ZeroStrategy` with types and defaults, as a dataclass for OmegaConf."""
    target = [
        ("_target_", str, make_field(default="lightning_zero.ZeroStrategy")),
        ("_convert_", str, make_field(default="all")),  # lists and dicts, not OmegaConf's
        ("config", Any, make_field(default=None)),  # a DeepSpeed configuration
    ]
    return make_dataclass("ZeroStrategySettings", target + [*map(_typed, fields(ZeroConfig) + fields(TrainingConfig))])


def _typed(field: Field[Any]) -> tuple[str, Any, Any]:
    """A field; one that is a configuration of its own may also be set to a string or a mapping."""
    nested = field.type in (OffloadConfig, LossScaleConfig | None)
    if field.name == "stage":
        return field.name, int | None, make_field(default=field.default)  # null: as a DeepSpeed configuration says
    copy = make_field(default=field.default, default_factory=field.default_factory)
    return field.name, Any if nested else field.type, copy


class GroupsOfLightningZero(SearchPathPlugin):
    """Lets every application choose from our groups; files of its own, which come first, win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append our folder."""
        search_path.append("lightning_zero", f"pkg://{CONF}")


def register_with_hydra() -> None:
    """Make ``zero: stage3`` known to the applications of this process. Doing it again is harmless."""
    ConfigStore.instance().store(group="zero", name="schema", node=schema(), provider="lightning_zero")
    Plugins.instance().register(GroupsOfLightningZero)


def run_with_hints(application: Callable[[], Any], config_name: str) -> None:
    """Run a Hydra application of ours; if it fails on a misspelt name, say which one is near."""
    try:
        application()
    except SystemExit as end:
        if end.code == 1:  # as Hydra ends
            given = [word for word in sys.argv[1:] if "=" in word and not word.startswith("-")]
            with suppress(HydraException):  # it has been shown
                for hint in hints(config_name, given):
                    print(hint, file=sys.stderr)
        raise


def hints(config_name: str, given: list[str]) -> Iterator[str]:
    """What may have been meant by each override that sets what is not there."""
    overrides = [each for each in OverridesParser.create().parse_overrides(given) if not each.is_add()]
    GlobalHydra.instance().clear()
    with initialize_config_module(CONF, version_base="1.3"):
        names = [each.get_key_element() for each in overrides]
        choices = [str(each.input_line) for each in overrides if isinstance(each.value(), str)]
        known: dict[str, Any] = {}
        for choice in [None, *choices]:  # each alone, for one of them may be wrong
            with suppress(HydraException):
                config = compose(config_name, [choice] if choice else [], return_hydra_config=True)
                known |= dict.fromkeys([*config.hydra.runtime.choices, *_names(config)])
    for name in names:
        near = get_close_matches(name, known, n=1)
        if name in known or name.startswith("hydra") or not near:
            continue
        if name.startswith(f"{near[0]}."):
            yield f"{near[0]} has nothing to set: choose one, as in {near[0]}=..., or say +{name}=... ."
        else:
            yield f"Did you mean {near[0]}?"


def _names(config: DictConfig, prefix: str = "") -> Iterator[str]:
    """All names that can be set, with dots."""
    for key in config:
        yield f"{prefix}{key!s}"
        if not OmegaConf.is_missing(config, key) and not OmegaConf.is_interpolation(config, str(key)):
            value = config[key]
            if isinstance(value, DictConfig) and key != "hydra":
                yield from _names(value, f"{prefix}{key!s}.")
