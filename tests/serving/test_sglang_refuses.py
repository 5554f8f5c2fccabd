"""What the plugin for SGLang refuses in one line, as SGLang would serve something else or end in a traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from specvocab_model.config import ConfigError, HeadConfig
from specvocab_model.serving.sglang_check import SGLangDraft
from specvocab_model.serving.sglang_draft import SpecVocabLlamaForCausalLMEagle3
from tests.serving.pairs import Pair, random_pair


def load(pair: Pair) -> SGLangDraft:
    return SGLangDraft(pair.checkpoint, str(pair.target_folder), dtype="float32", num_draft_tokens=3, max_model_len=256)


def refusal(pair: Pair) -> str:
    with pytest.raises(ConfigError) as caught, load(pair):
        pass
    assert "\n" not in str(caught.value)
    return str(caught.value)


def change_config(checkpoint: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    change(config)
    (checkpoint / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("shape", "said"), [
    ({"hidden_size": 192}, "hidden_size=128, but"),
    ({"vocab_size": 300}, "vocab_size=277, but"),
])
def test_a_target_of_another_shape(shape, said, tmp_path):
    other = random_pair(tmp_path / "other", **shape)
    assert said in refusal(replace(random_pair(tmp_path / "pair"), target_folder=other.target_folder))


def test_a_layer_that_sglang_does_not_have(tmp_path):
    pair = random_pair(tmp_path)
    change_config(pair.checkpoint, lambda config: config.update(norm_before_residual=True))
    assert "norm_before_residual=true" in refusal(pair)


def test_a_config_that_leaves_something_to_sglang(tmp_path):
    pair = random_pair(tmp_path)
    change_config(pair.checkpoint, lambda config: config.pop("rms_norm_eps"))
    assert "has no rms_norm_eps" in refusal(pair)


def test_a_damaged_speculator(tmp_path):
    pair = random_pair(tmp_path)
    (pair.checkpoint / "vocabulary_speculator/model.safetensors").write_bytes(b"")
    assert "damaged" in refusal(pair)


def without_its_map(tmp_path: Path) -> Pair:
    pair = random_pair(tmp_path, head=HeadConfig(type="static", draft_vocab_size=100))
    file = pair.checkpoint / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name not in ("d2t", "t2d")}, file)
    return pair


def test_a_reduced_head_without_its_map(tmp_path):
    """SGLang would take its rows for the first tokens."""
    assert "d2t is missing" in refusal(without_its_map(tmp_path))


def test_a_draft_of_somebody_else_is_sglangs_to_judge(tmp_path):
    pair = without_its_map(tmp_path)
    (pair.checkpoint / "specvocab.json").unlink()
    change_config(pair.checkpoint, lambda config: config.pop("logit_scale"))
    with load(pair) as served:
        assert type(served.draft) is SpecVocabLlamaForCausalLMEagle3 and served.draft.hot_token_id is None
