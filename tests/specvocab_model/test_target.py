"""The loaded target: features, final hidden state, logits; packed, padded, cached; from a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, DynamicCache

from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.target import Target, load_spec
from specvocab_model.target_spec import LAYOUTS
from tests import tiny

# What makes each model type special, made visible; the rest is the same small model.
SPECIFICS = {
    "cohere": {"logit_scale": 0.25},
    "cohere2": {"logit_scale": 0.25, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 4},
    "gemma2": {"final_logit_softcapping": 3.0, "sliding_window": 6},
    "gemma3_text": {"final_logit_softcapping": 3.0, "sliding_window": 6},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "mistral": {"sliding_window": 6},
    "olmo3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 4},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def attention_for(model_type: str) -> str:
    return LAYOUTS[model_type].attention[0]


@pytest.fixture(scope="module")
def layout_folder(tmp_path_factory: pytest.TempPathFactory):
    """Folder of a random tiny model of any supported type, made once."""
    made: dict[str, Path] = {}

    def make(model_type: str) -> Path:
        if model_type not in made:
            config = AutoConfig.for_model(
                model_type, vocab_size=tiny.TOKENIZER_LENGTH + 3, hidden_size=48, intermediate_size=64,
                num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
                pad_token_id=tiny.PAD_ID, bos_token_id=None, eos_token_id=list(tiny.EOS_IDS),
                **SPECIFICS.get(model_type, {}),
            )
            made[model_type] = tiny.save_target(tiny.random_model(config), tmp_path_factory.mktemp(model_type))
        return made[model_type]

    return make


@pytest.fixture(scope="module")
def layout_target(layout_folder):
    def load(model_type: str, **kwargs) -> Target:
        config = TargetConfig(model=str(layout_folder(model_type)), attn_implementation=attention_for(model_type))
        return Target.load(config, device="cpu", **{"dtype": torch.float32, **kwargs})

    return load


def token_ids(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed))


# ---- features, final hidden state, logits ----


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_forward_equals_the_whole_model(layout_target, model_type: str) -> None:
    target = layout_target(model_type, feature_layers=(1, 4, 7))
    ids = token_ids(2, 20)
    expected = target.model(ids, output_hidden_states=True)
    output = target.forward(ids)
    features = torch.cat([expected.hidden_states[layer] for layer in (1, 4, 7)], dim=-1)
    torch.testing.assert_close(output.features, features, rtol=0, atol=1e-6)
    assert output.final_hidden.shape == (2, 20, 48)
    torch.testing.assert_close(target.logits(output.final_hidden), expected.logits, rtol=1e-5, atol=1e-6)
    assert output.past_key_values is None


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_tied_and_untied_heads(kind: str, tie: bool, tmp_path: Path) -> None:
    target = tiny.tiny_target(kind, tmp_path, tie=tie)
    tied = target.lm_head_weight.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert tied == tie
    assert target.lm_head_weight.shape == (target.spec.vocab_size, target.spec.hidden_size)
    assert target.spec.vocab_size > len(target.tokenizer)
    ids = token_ids(1, 9)
    torch.testing.assert_close(target.logits(target.forward(ids).final_hidden), target.model(ids).logits)


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_embed_is_what_enters_the_decoder(layout_target, model_type: str) -> None:
    target = layout_target(model_type)
    ids = token_ids(1, 5)
    first = target.model(ids, output_hidden_states=True).hidden_states[0]
    scale = 2.0 if model_type == "granite" else 1.0  # Granite multiplies outside its embedding module
    torch.testing.assert_close(target.embed(ids) * scale, first)


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_without_its_layers_a_target_keeps_both_embeddings(layout_target, model_type: str) -> None:
    assert_only_embeddings(layout_target(model_type, decoder=False), layout_target(model_type))


def assert_only_embeddings(target: Target, whole: Target) -> None:
    ids = token_ids(1, 9)
    assert torch.equal(target.embed(ids), whole.embed(ids))
    assert torch.equal(target.lm_head_weight, whole.lm_head_weight)
    tied = whole.lm_head_weight.data_ptr() == whole.model.get_input_embeddings().weight.data_ptr()
    embeddings = (1 if tied else 2) * whole.lm_head_weight.numel()
    assert sum(parameter.numel() for parameter in target.model.parameters()) == embeddings + 48  # and the final norm
    assert target.spec == whole.spec and target.feature_layers == whole.feature_layers


def test_lm_head_is_never_run_by_forward(layout_target) -> None:
    target = layout_target("llama")
    target.model.lm_head.register_forward_hook(lambda *_: pytest.fail("lm_head was run"))
    target.forward(token_ids(1, 4))


def test_hooks_are_gone_after_forward_even_after_an_error(layout_target) -> None:
    target = layout_target("llama")
    target.forward(token_ids(1, 4))
    with pytest.raises(IndexError):
        target.forward(torch.full((1, 4), 10**6))
    assert not any(module._forward_pre_hooks for module in target.model.modules())


def test_gradients_reach_the_hidden_state_and_nothing_of_the_target(layout_target) -> None:
    target = layout_target("gemma2")
    output = target.forward(token_ids(1, 4))
    assert not output.features.requires_grad and not output.final_hidden.requires_grad
    hidden = output.final_hidden.clone().requires_grad_()
    target.logits(hidden).square().sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in target.model.parameters())


def test_logits_are_fp32_whatever_the_dtypes(layout_target) -> None:
    target = layout_target("llama", dtype=torch.bfloat16)
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    logits = target.logits(hidden)
    assert logits.dtype == torch.float32 and target.lm_head_weight.dtype == torch.bfloat16
    exact = hidden.double() @ target.lm_head_weight.double().T
    torch.testing.assert_close(logits.double(), exact, rtol=0.03, atol=0.03)


# ---- packing, padding, caches ----

DOCUMENTS = ([9, 1, 14], [1, 16, 7])  # lengths of the documents of two packed rows


@pytest.mark.parametrize("model_type", LAYOUTS)
def test_packed_documents_do_not_see_each_other(layout_target, model_type: str) -> None:
    """Documents are longer than the sliding windows, so both kinds of layer are put to the test."""
    target = layout_target(model_type)
    ids = token_ids(2, 24)
    position_ids = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in DOCUMENTS])
    packed = target.forward(ids, position_ids=position_ids)
    for row, lengths in enumerate(DOCUMENTS):
        start = 0
        for length in lengths:
            document = slice(start, start + length)
            alone = target.forward(ids[row : row + 1, document])
            torch.testing.assert_close(packed.features[row, document], alone.features[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(packed.final_hidden[row, document], alone.final_hidden[0], rtol=1e-4, atol=1e-4)
            start += length


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_cache_continues_the_sequence(kind: str, tmp_path: Path) -> None:
    target = tiny.tiny_target(kind, tmp_path)
    ids = token_ids(1, 18)
    whole = target.forward(ids)
    cache = DynamicCache(config=target.model.config)
    chunks = [target.forward(chunk, past_key_values=cache) for chunk in ids.split([8, 1, 4, 5], dim=1)]
    assert all(chunk.past_key_values is cache for chunk in chunks) and cache.get_seq_length() == 18
    features = torch.cat([chunk.features for chunk in chunks], dim=1)
    torch.testing.assert_close(features, whole.features, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_left_padding_changes_nothing(kind: str, tmp_path: Path) -> None:
    target = tiny.tiny_target(kind, tmp_path)
    ids = token_ids(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    padded = target.forward(ids, attention_mask=mask)  # positions are off by five, which rotary attention cannot see
    alone = target.forward(ids[1:, 5:])
    torch.testing.assert_close(padded.features[1, 5:], alone.features[0], rtol=1e-4, atol=1e-4)


# ---- GGUF ----


def test_a_gguf_file_is_a_target(tmp_path: Path) -> None:
    model = tiny.tiny_gguf(tmp_path / "tiny.gguf")
    config = TargetConfig(model=str(tmp_path), gguf_file="tiny.gguf")
    target = Target.load(config, device="cpu", dtype=torch.float32)
    ids = token_ids(1, 30)
    torch.testing.assert_close(target.logits(target.forward(ids).final_hidden), model(ids).logits)
    assert target.spec == load_spec(config)
    assert target.spec.eos_token_ids == (tiny.IM_END_ID,) and target.tokenizer.chat_template == tiny.CHAT_TEMPLATE
    tiny.tiny_gguf(tmp_path / "other.gguf", seed=1)
    assert load_spec(replace(config, gguf_file="other.gguf")).fingerprint != target.spec.fingerprint


def test_a_gguf_target_in_bf16_keeps_its_rotary_frequencies(tmp_path: Path) -> None:
    tiny.tiny_gguf(tmp_path / "tiny.gguf")
    target = Target.load(TargetConfig(model=str(tmp_path), gguf_file="tiny.gguf", dtype="bfloat16"), device="cpu")
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in target.model.buffers()} == {torch.float32}


def test_without_its_layers_a_gguf_target_keeps_its_embeddings(tmp_path: Path) -> None:
    tiny.tiny_gguf(tmp_path / "tiny.gguf")
    config = TargetConfig(model=str(tmp_path), gguf_file="tiny.gguf")
    assert_only_embeddings(Target.load(config, device="cpu", decoder=False), Target.load(config, device="cpu"))


# ---- what is refused ----


@pytest.mark.parametrize("layers", [(0, 4, 5), (2, 4, 8), (2, 2, 5), (5, 4, 2), (2, 4)])
def test_impossible_feature_layers_are_refused(layout_target, layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="feature_layers"):
        layout_target("llama", feature_layers=layers)


def test_an_lm_head_with_bias_or_of_another_size_is_refused(layout_target) -> None:
    target = layout_target("llama")
    with pytest.raises(ConfigError, match="lm_head"):
        Target(replace(target.spec, vocab_size=10), target.model, target.tokenizer)
    target.model.lm_head = nn.Linear(48, target.spec.vocab_size, bias=True)
    with pytest.raises(ConfigError, match="bias-free"):
        Target(target.spec, target.model, target.tokenizer)


@pytest.mark.parametrize("fast", [True, False])
def test_bf16_where_it_is_slow_is_warned_of(tmp_path, monkeypatch, caplog, fast):
    config = tiny.tiny_target_config(tiny.tiny_target_folder(tmp_path / "target", "llama"), "llama")
    monkeypatch.setattr("specvocab_model.target.has_fast_bf16", lambda: fast)
    Target.load(config, device="cpu", dtype=torch.float32)
    assert not caplog.messages
    Target.load(config, device="cpu", dtype=torch.bfloat16)
    assert any("target.dtype=float32 " in message for message in caplog.messages) is not fast
    assert any("--dtype float32" in message for message in caplog.messages) is not fast
