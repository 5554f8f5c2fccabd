"""What a command makes of its overrides, without composing anew each time, which takes Hydra half a second."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from specvocab_model.config import CONFIG_DIR, Config, parse_config, register_schemas

GROUPS = {path.name for path in Path(CONFIG_DIR).iterdir() if path.is_dir()}


@cache
def _composed(groups: tuple[str, ...]) -> DictConfig:
    register_schemas()
    with initialize_config_dir(CONFIG_DIR, version_base="1.3"):
        return compose("config", overrides=list(groups))


def config_of(arguments: list[str]) -> Config:
    """The configuration of these overrides: Hydra chooses the groups, values are set on what they have given."""
    parsed = dict(zip(arguments, OverridesParser.create().parse_overrides(arguments), strict=True))
    groups = tuple(argument for argument, each in parsed.items() if each.key_or_group in GROUPS)
    config = copy.deepcopy(_composed(groups))
    for argument, each in parsed.items():
        if argument not in groups:
            OmegaConf.update(config, each.key_or_group, each.value(), force_add=each.is_add())
    return parse_config(config)
