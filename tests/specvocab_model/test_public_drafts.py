"""Public drafts by hand: config.json and tensor names as SafeAILab/EAGLE, SpecForge and speculators write them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specvocab_model.config import ConfigError
from specvocab_model.export import Provenance, save_checkpoint
from specvocab_model.public_drafts import PublicDraft, open_draft
from tests.specvocab_model.test_export import SPEC, make_model

KEPT = torch.tensor([3, 4, 10, 100, 101, 276])
SAFEAILAB = {  # as published for Llama 3.1: old RoPE keys, a short context, no feature layers
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 48,
    "initializer_range": 0.02, "intermediate_size": 96, "max_position_embeddings": 2048, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 1, "head_dim": 20, "pad_token_id": 0, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "float16", "use_cache": True,
    "vocab_size": 277, "draft_vocab_size": len(KEPT), "bos_token_id": 1, "eos_token_id": 2,
}
SPECFORGE = SAFEAILAB | {
    "torch_dtype": "bfloat16", "rope_scaling": None, "attention_bias": False, "mlp_bias": False,
    "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [0, 4, 7]},
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"], "draft_vocab_size": len(KEPT), "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0", "norm_before_residual": True, "norm_before_fc": False, "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [1, 5, 8], "tie_word_embeddings": False, "has_no_defaults_at_init": False,
    "speculators_config": {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"name_or_path": "some/other", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {  # only what differs from LlamaConfig's defaults
        "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20,
        "num_hidden_layers": 1, "vocab_size": 277, "model_type": "llama", "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
    },
}


def layer_tensors() -> dict[str, torch.Tensor]:
    """Of the layer, under the names that stock EAGLE-3 drafts have."""
    return {name: tensor.clone() for name, tensor in make_model(type="full").draft.state_dict().items()}


def reduced_head() -> dict[str, torch.Tensor]:
    t2d = torch.zeros(277, dtype=torch.bool)
    t2d[KEPT] = True
    weight = torch.randn(len(KEPT), 48, generator=torch.Generator().manual_seed(3))
    return {"lm_head.weight": weight, "d2t": KEPT - torch.arange(len(KEPT)), "t2d": t2d}


def write(folder: Path, config: dict, tensors: dict[str, torch.Tensor], file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return folder


def error_of(folder: Path, spec=SPEC) -> str:
    with pytest.raises(ConfigError) as caught:
        open_draft(folder, spec)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_whole(draft: PublicDraft) -> None:
    torch.testing.assert_close(dict(draft.model.draft.state_dict()), layer_tensors(), rtol=0, atol=0)
    assert draft.model.architecture.max_position_embeddings == 4096  # the target's, whatever the draft's rows were
    assert draft.model.speculator is None


def test_the_naming_of_safeailab_in_a_pickle(tmp_path):
    draft = open_draft(
        write(tmp_path / "draft", SAFEAILAB, layer_tensors() | reduced_head(), "pytorch_model.bin"), SPEC
    )
    assert_whole(draft)
    own = draft.model.own_head
    assert own.ids.tolist() == KEPT.tolist() and own.vocab_size == 277
    assert torch.equal(own.weight, reduced_head()["lm_head.weight"])
    assert draft.model.architecture.feature_layers == (2, 6, 9)  # EAGLE-3's, as the file names none
    assert draft.model.architecture.rope_parameters == {"rope_type": "default", "rope_theta": 500000.0}
    assert (draft.embed_tokens, draft.made_for) == (None, None)


def test_the_naming_of_specforge_in_shards(tmp_path):
    tensors = {f"model.{name}" if name != "lm_head.weight" else name: tensor
               for name, tensor in (layer_tensors() | {"embed_tokens.weight": torch.ones(277, 48)}).items()}
    tensors |= {"lm_head.weight": torch.ones(277, 48), "model.midlayer.self_attn.rotary_emb.inv_freq": torch.ones(10)}
    names = sorted(tensors)
    config = SPECFORGE | {"draft_vocab_size": 277}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        write(tmp_path / "draft", config, {name: tensors[name] for name in part},
              f"model-0000{number}-of-00002.safetensors")
    draft = open_draft(tmp_path / "draft", SPEC)
    assert_whole(draft)
    assert draft.model.architecture.feature_layers == (1, 5, 8)  # its file names outputs
    assert torch.equal(draft.model.own_head.weight, torch.ones(277, 48)) and draft.model.own_head.is_full
    assert torch.equal(draft.embed_tokens, torch.ones(277, 48))
    (tmp_path / "draft/model-00002-of-00002.safetensors").unlink()
    assert " is missing; " in error_of(tmp_path / "draft")


def test_the_naming_of_speculators(tmp_path):
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in layer_tensors().items()}
    tensors |= reduced_head() | {"embed_tokens.weight": torch.zeros(277, 48), "verifier_norm.weight": torch.ones(48)}
    draft = open_draft(write(tmp_path / "draft", SPECULATORS, tensors), SPEC)
    assert_whole(draft)
    architecture = draft.model.architecture
    assert architecture.norm_before_residual and architecture.feature_layers == (1, 5, 8)
    assert (architecture.rms_norm_eps, architecture.rope_parameters["rope_theta"]) == (1e-6, 1e6)
    assert draft.model.own_head.ids.tolist() == KEPT.tolist() and draft.made_for == "some/other"


@pytest.mark.parametrize("head", [{}, {"d2t": torch.zeros(277, dtype=torch.int64),
                                       "t2d": torch.ones(277, dtype=torch.bool),
                                       "lm_head.weight": torch.ones(277, 48)}])
def test_a_full_vocabulary(head, tmp_path):
    """Shared, or its own with a map that changes nothing, as some trainers write it."""
    folder = write(tmp_path / "draft", SAFEAILAB | {"draft_vocab_size": 277 if head else None}, layer_tensors() | head)
    draft = open_draft(folder, SPEC)
    assert_whole(draft)
    assert (draft.model.own_head is not None and draft.model.own_head.is_full) == bool(head)


def test_a_map_without_t2d_is_enough(tmp_path):
    """Engines read d2t alone."""
    tensors = layer_tensors() | reduced_head()
    del tensors["t2d"]
    tensors["d2t"] = tensors["d2t"].int()
    draft = open_draft(write(tmp_path / "draft", SAFEAILAB, tensors), SPEC)
    assert draft.model.own_head.ids.tolist() == KEPT.tolist()


@pytest.mark.parametrize("change, message", [
    ({"d2t": KEPT.clone()}, "are not the 6 that t2d marks"),  # ids in the place of offsets
    ({"d2t": KEPT - torch.arange(6) - 1}, "are not the 6 that t2d marks"),
    ({"d2t": None}, "a head of 6 of 277 tokens but no d2t that says which"),
    ({"d2t": torch.zeros(5, dtype=torch.int64)}, "d2t has shape (5,) instead of (6,)"),
    ({"t2d": torch.ones(300, dtype=torch.bool)}, "t2d has shape (300,) instead of (277,)"),
    ({"lm_head.weight": None}, "a reduced head (draft_vocab_size=6) but no lm_head.weight"),
    ({"lm_head.weight": torch.ones(5, 48)}, "lm_head.weight of 5 rows, but its config.json says draft_vocab_size=6"),
    ({"lm_head.weight": torch.full((6, 48), torch.nan)}, "lm_head.weight is not finite"),
    ({"fc.weight": None}, "fc.weight is missing"),
    ({"fc.bias": torch.ones(48)}, "fc.bias is unknown"),
    ({"midlayer.self_attn.q_norm.weight": torch.ones(20)}, "midlayer.self_attn.q_norm.weight is unknown"),
    ({"layers.0.hidden_norm.weight": torch.ones(48)}, "holds midlayer.hidden_norm.weight twice"),
])
def test_tensors_that_are_not_of_one_draft(change, message, tmp_path):
    tensors = layer_tensors() | reduced_head() | change
    folder = write(tmp_path / "draft", SAFEAILAB, {name: tensor for name, tensor in tensors.items()
                                                   if tensor is not None})
    assert message in error_of(folder)


def test_a_map_beside_a_full_head(tmp_path):
    head = {"lm_head.weight": torch.ones(277, 48), "d2t": torch.ones(277, dtype=torch.int64)}
    folder = write(tmp_path / "draft", SAFEAILAB | {"draft_vocab_size": 277}, layer_tensors() | head)
    assert "a head over the full vocabulary and a d2t that renumbers it" in error_of(folder)


@pytest.mark.parametrize("change, message", [
    ({"tie_word_embeddings": True}, "tie_word_embeddings=true"),
    ({"draft_vocab_size": None}, "lm_head.weight of 6 rows, but its config.json says draft_vocab_size=None"),
    ({"draft_vocab_size": 500}, "draft_vocab_size=500; it must be null, or between 1 and vocab_size=277"),
    ({"architectures": ["LlamaForCausalLMEagle"]}, "architectures=['LlamaForCausalLMEagle']"),
    ({"num_hidden_layers": 2}, "num_hidden_layers=2; only 1 can be loaded"),
    ({"norm_output": True}, "norm_output=True; only False can be loaded"),
    ({"vocab_size": 278}, "has vocab_size=278, but some/target has 277"),
    ({"hidden_size": 64}, "has hidden_size=64, but some/target has 48"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config="),
    ({"eagle_aux_hidden_state_layer_ids": [2, 6, 12]}, "lie below the number of the target's layers, 12"),
])
def test_what_a_config_must_not_say(change, message, tmp_path):
    folder = write(tmp_path / "draft", SAFEAILAB | change, layer_tensors() | reduced_head())
    assert message in error_of(folder)


def test_an_absent_draft_vocab_size_of_a_reduced_head(tmp_path):
    config = {key: value for key, value in SAFEAILAB.items() if key != "draft_vocab_size"}
    assert "draft_vocab_size=None" in error_of(write(tmp_path / "draft", config, layer_tensors() | reduced_head()))


class Payload:
    """Unpickling it would run code."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "draft", SAFEAILAB, layer_tensors(), "pytorch_model.bin")
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:100])
    assert f"{path} is damaged, or holds more than tensors" in error_of(folder)
    torch.save({"fc.weight": Payload()}, path)
    assert f"{path} is damaged, or holds more than tensors" in error_of(folder)
    assert not Path("executed").exists()
    torch.save({"state_dict": layer_tensors()}, path)
    assert "holds no plain set of tensors" in error_of(folder)
    path.unlink()
    assert "holds neither model.safetensors nor pytorch_model.bin" in error_of(folder)
    assert "config.json is missing" in error_of(tmp_path / "nowhere")


def test_feature_layers_that_the_file_does_not_name(tmp_path):
    folder = write(tmp_path / "draft", SPECFORGE, layer_tensors() | reduced_head())
    assert open_draft(folder, SPEC, [3, 4, 11]).model.architecture.feature_layers == (3, 4, 11)
    for layers, message in (([3, 4, 12], "lie below the number of the target's layers, 12"), ([4, 3, 5], "ascend")):
        with pytest.raises(ConfigError, match=message):
            open_draft(folder, SPEC, layers)
    ours = save_checkpoint(tmp_path / "ours", make_model(), SPEC, Provenance())
    with pytest.raises(ConfigError, match="is a SpecVocab checkpoint, which says itself what it reads"):
        open_draft(ours, SPEC, [3, 4, 11])


def test_the_context_is_the_targets(tmp_path):
    longer = dataclasses.replace(SPEC, max_position_embeddings=131072)
    draft = open_draft(write(tmp_path / "draft", SAFEAILAB, layer_tensors() | reduced_head()), longer)
    assert draft.model.architecture.max_position_embeddings == 131072


@pytest.mark.parametrize("rope", [
    {"type": "yarn", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
])
def test_rope_without_its_original_context_means_the_drafts_own(rope, tmp_path):
    """transformers fills it in from max_position_embeddings, which says something else once it is the target's."""
    folder = write(tmp_path / "draft", SAFEAILAB | {"rope_scaling": rope}, layer_tensors() | reduced_head())
    architecture = open_draft(folder, SPEC).model.architecture
    assert architecture.rope_parameters["original_max_position_embeddings"] == 2048
    assert architecture.max_position_embeddings == 4096


def test_rope_that_depends_on_the_context_is_refused(tmp_path):
    config = SAFEAILAB | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    folder = write(tmp_path / "draft", config, layer_tensors() | reduced_head())
    assert "rope_type='dynamic' and max_position_embeddings=2048, on which" in error_of(folder)
    open_draft(folder, dataclasses.replace(SPEC, max_position_embeddings=2048))
