"""Checkpoints in vLLM's own loader: the draft's logits are the trainer's, for every kind of head, RoPE and layout.

Runs with vLLM's CPU build, and with the Python files of the official wheel, which has no kernels for a CPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import ModelRegistry
from vllm.plugins import load_general_plugins

from specvocab_model.config import ConfigError, DraftConfig, HeadConfig
from specvocab_model.serving.check import Agreement, compare_logits, problems
from specvocab_model.serving.sharded_head import ShardedHead
from specvocab_model.serving.vllm_check import VllmDraft
from specvocab_model.serving.vllm_plugin import ARCHITECTURES, register
from tests.serving.pairs import Pair, random_pair

STOCK = "vllm.model_executor.models.llama_eagle3:Eagle3LlamaForCausalLM"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000.0}
CASES = {
    "shared head": {},
    "untied target": {"tie_word_embeddings": False},
    "other feature layers": {"draft": DraftConfig(feature_layers=[1, 4, 7])},
    "llama3 RoPE": {"rope_parameters": LLAMA3},
    "yarn RoPE": {"rope_parameters": YARN},
    "head_dim is not hidden_size / heads": {"hidden_size": 192},
    "draft of another shape": {"draft": DraftConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=32)},
    "Qwen3": {"kind": "qwen3"},
    "exact selection": {"head": HeadConfig(rank=24, selection="exact", num_candidates=40)},
    "fp8": {"head": HeadConfig(rank=24, num_candidates=64, quantization="fp8")},
    "int8": {"head": HeadConfig(rank=24, num_candidates=64, quantization="int8")},
    "no speculator": {"head": HeadConfig(type="full")},
    "speculators' layout": {"layout": "speculators"},
    "static head": {"head": HeadConfig(type="static", draft_vocab_size=100)},
    "own full head": {"head": HeadConfig(type="static", draft_vocab_size=1000)},
    "own full head, speculated": {"own_head": True},
}
HEADS_OF = {"no speculator": "full", "static head": "static", "own full head": "full"}


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """Registered by vLLM itself, through the entry point."""
    load_general_plugins()


def serve(pair: Pair, **arguments) -> VllmDraft:
    without_kernels = {} if find_spec("vllm._C") else {"compilation_config": {"custom_ops": ["none"]}}
    dtype = str(pair.target.lm_head_weight.dtype).removeprefix("torch.")
    return VllmDraft(pair.checkpoint, str(pair.target_folder), dtype=dtype, num_draft_tokens=3, max_model_len=256,
                     **without_kernels | arguments)


def agreement(pair: Pair, served: VllmDraft | None = None) -> Agreement:
    text = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(0))
    return compare_logits(served or serve(pair), pair.model, pair.target, text)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_trainers(case, tmp_path):
    pair = random_pair(tmp_path, **CASES[case])
    served = serve(pair)
    found = agreement(pair, served)
    print(found)
    assert found.equal and problems(served, pair.model, pair.target.spec, None, found) == []
    assert found.head == HEADS_OF.get(case, "speculative")
    assert found.engine_error < 1e-5 and served.feature_layers == pair.model.architecture.feature_layers


@pytest.mark.parametrize("case", ["shared head", "exact selection", "int8", "no speculator", "static head"])
def test_logits_are_the_trainers_within_bf16_rounding(case, tmp_path):
    found = agreement(random_pair(tmp_path, dtype=torch.bfloat16, **CASES[case]))
    print(found)
    assert found.equal and 1e-4 < found.rounding_error < 3e-2


@pytest.fixture
def stock():
    """vLLM's own class in our place; every registration costs an inspection in a process of its own."""
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, STOCK)
    yield
    register()


def test_without_the_plugin_the_full_head_is_served_and_said_to_be(stock, tmp_path):
    pair = random_pair(tmp_path)
    served = serve(pair)
    found = agreement(pair, served)
    assert found.equal and found.head == "full"
    (line,) = problems(served, pair.model, pair.target.spec, None, found)
    assert "serves the full vocabulary" in line


def test_no_more_rows_are_asked_for_than_get_candidates_on_a_gpu(tmp_path, monkeypatch):
    """The plugin takes the full head for many rows, which the check would take for the plugin's absence."""
    rows, candidates = [], ShardedHead.candidates
    monkeypatch.setattr(ShardedHead, "candidates", lambda self, hidden, lm_head: (
        rows.append(len(hidden)), candidates(self, hidden, lm_head))[1])
    assert agreement(random_pair(tmp_path)).equal
    assert max(rows) <= 8 and sum(rows) == 199


def change_config(checkpoint: Path, **changes) -> None:
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("changes", [
    {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    {"rms_norm_eps": 0.1},
    {"norm_before_residual": True},
    {"logit_scale": 0.5},
])
def test_a_flag_that_changes_the_forward_pass_is_noticed(changes, tmp_path):
    pair = random_pair(tmp_path, rope_parameters=LLAMA3)
    change_config(pair.checkpoint, **changes)
    assert not agreement(pair).equal


def test_the_targets_soft_cap_is_applied(tmp_path):
    """vLLM's own drafts have none, so candidates that are sampled would be flatter or sharper than in training."""
    pair = random_pair(tmp_path)
    change_config(pair.checkpoint, final_logit_softcapping=0.5)
    assert not agreement(pair).equal
    pair.target.spec = replace(pair.target.spec, logit_softcap=0.5)
    assert agreement(pair).equal


def test_feature_layers_that_contradict_each_other_are_refused_by_the_plugin(tmp_path):
    pair = random_pair(tmp_path)
    change_config(pair.checkpoint, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    with pytest.raises(ConfigError, match="contradicts itself"):
        agreement(pair)


def load(pair: Pair, **arguments) -> None:
    serve(pair, **arguments).logits(torch.zeros(2, 3 * pair.target.spec.hidden_size), torch.arange(2))


@pytest.mark.parametrize(("shape", "said"), [
    ({"hidden_size": 192}, "hidden_size=128, but .* has 192; use the target that the draft was trained for"),
    ({"vocab_size": 300}, "vocab_size=277, but .* has 300; use the target that the draft was trained for"),
])
def test_a_target_of_another_shape_is_refused_by_the_plugin(shape, said, tmp_path):
    other = random_pair(tmp_path / "other", **shape)
    with pytest.raises(ConfigError, match=said):
        load(replace(random_pair(tmp_path / "pair"), target_folder=other.target_folder))


def test_texts_beyond_the_drafts_context_are_refused_by_the_plugin(tmp_path):
    pair = random_pair(tmp_path)
    change_config(pair.checkpoint, max_position_embeddings=128)
    with pytest.raises(ConfigError, match="set it to 256, or serve texts of up to 128"):
        load(pair)


def test_a_reduced_head_without_its_map_is_refused_by_the_plugin(tmp_path):
    """vLLM would take its rows for the first tokens."""
    pair = random_pair(tmp_path, **CASES["static head"])
    file = pair.checkpoint / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(file).items() if name not in ("d2t", "t2d")}, file)
    with pytest.raises(ConfigError, match="d2t is missing"):
        load(pair)


def test_a_draft_of_somebody_else_is_served_as_without_the_plugin(tmp_path):
    pair = random_pair(tmp_path, **CASES["static head"])
    (pair.checkpoint / "specvocab.json").unlink()
    config = pair.checkpoint / "config.json"  # which is none of ours to judge: vLLM knows the defaults of others
    config.write_text(json.dumps({key: value for key, value in json.loads(config.read_text()).items()
                                  if key not in ("logit_scale", "final_logit_softcapping", "eagle_config")}))
    assert agreement(pair).equal


def test_a_config_whose_feature_layers_are_not_the_trained_ones_is_named(tmp_path):
    pair = random_pair(tmp_path)
    served = serve(pair)
    lines = problems(served, pair.model, pair.target.spec, {"draft": {"feature_layers": [1, 3, 4]}},
                     replace(agreement(pair, served), engine_error=0.0))
    assert len(lines) == 1 and "the draft was trained on [1, 3, 4]" in lines[0]
