"""The schema spells out the names of things that live in packages it must not import; here both are at hand."""

from pathlib import Path

import pytest
from specvocab_kernels.distill import LOSSES as KERNEL_LOSSES

from data_gen.engines import ENGINES
from specvocab_model import config
from specvocab_model.config import CONFIG_DIR, ConfigError, GenerationConfig
from specvocab_model.heads import HEADS
from specvocab_model.target import TORCH_DTYPES


def test_names_agree():
    assert set(config.LOSSES) == set(KERNEL_LOSSES)
    assert set(config.HEADS) <= set(HEADS)
    assert set(config.DTYPES) == set(TORCH_DTYPES)


def test_every_trainable_head_has_a_file():
    assert {path.stem for path in Path(CONFIG_DIR, "head").glob("*.yaml")} == set(config.HEADS)


def test_engines_agree():
    for name in ENGINES:
        base_urls = ["http://localhost:8000"] if name == "openai" else []
        assert GenerationConfig(engine=name, base_urls=base_urls).engine == name
    with pytest.raises(ConfigError, match=f"choose one of {', '.join(ENGINES)}"):
        GenerationConfig(engine="unknown")
