"""A tiny Gemma 3 as a GGUF file, as converters write base models of this type: BOS, no chat template, spare tokens."""

from __future__ import annotations

from pathlib import Path

import torch
from gguf import GGUFWriter, TokenType
from transformers import Gemma3TextConfig, PreTrainedModel

from tests.tiny import close_gguf, random_model, write_gguf_config

BOS_ID, EOS_ID, PAD_ID, UNK_ID, START_OF_TURN_ID, SPARE_ID = 2, 1, 0, 3, 4, 5
CONTROL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<unused0>", "<mask>")
USER_DEFINED = ("\n", "\n\n")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
NORMAL = ("th", "the", "▁the", *"▁abcdefghijklmnopqrstuvwxyz")  # the earlier, the sooner merged
TOKENS = (*CONTROL, *USER_DEFINED, *BYTES, *NORMAL)

_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "post_ffw_norm": "post_feedforward_layernorm",
}


def tiny_gemma() -> PreTrainedModel:
    """Eight layers, the sixth of them full; what a GGUF file does not say has the values that Gemma 3 270M has."""
    return random_model(Gemma3TextConfig(
        vocab_size=len(TOKENS), hidden_size=48, intermediate_size=96, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=1, head_dim=256, max_position_embeddings=512, sliding_window=6,
        rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e6},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
        pad_token_id=PAD_ID, bos_token_id=BOS_ID, eos_token_id=EOS_ID,
    ))


def tiny_gemma_gguf(file: Path) -> PreTrainedModel:
    """Write ``tiny_gemma`` to a GGUF file in fp32; returns the model."""
    model = tiny_gemma()
    writer = GGUFWriter(file, "gemma3")
    config = model.config
    write_gguf_config(writer, config, config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_sliding_window(config.sliding_window)
    _write_tokenizer(writer)
    _write_weights(writer, model)
    close_gguf(writer)
    return model


def _write_tokenizer(writer: GGUFWriter) -> None:
    types = dict.fromkeys(CONTROL, TokenType.CONTROL) | dict.fromkeys(USER_DEFINED, TokenType.USER_DEFINED)
    types |= dict.fromkeys(BYTES, TokenType.BYTE)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([-float(place) for place in range(len(TOKENS))])
    writer.add_token_types([types.get(token, TokenType.NORMAL) for token in TOKENS])
    writer.add_bos_token_id(BOS_ID)
    writer.add_eos_token_id(EOS_ID)
    writer.add_unk_token_id(UNK_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)


def _write_weights(writer: GGUFWriter, model: PreTrainedModel) -> None:
    names = {"token_embd": "embed_tokens", "output_norm": "norm"}
    names |= {f"blk.{layer}.{gguf_name}": f"layers.{layer}.{name}"
              for layer in range(model.config.num_hidden_layers) for gguf_name, name in _LAYER_NAMES.items()}
    weights = model.state_dict()
    for gguf_name, name in names.items():
        weight = weights[f"model.{name}.weight"]
        offset = torch.tensor(1.0 if name.endswith("norm") else 0.0)  # GGUF stores what the norm multiplies by
        writer.add_tensor(f"{gguf_name}.weight", (weight + offset).numpy())
