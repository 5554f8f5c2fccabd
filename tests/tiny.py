"""Tiny random targets: ordinary HF folders with a real tokenizer, small enough for every test to build its own.

They are awkward on purpose, as real models are: head_dim is not hidden_size / num_attention_heads, ``lm_head`` has more
rows than the tokenizer has tokens, there are two EOS ids, and the Gemma kinds alternate sliding-window and full layers,
scale their embeddings and cap their logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from gguf import GGUFWriter, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from specvocab_model.config import TargetConfig
from specvocab_model.target import Target

KINDS = ("llama", "qwen3", "gemma2", "gemma3")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
TOKENIZER_LENGTH = 256 + len(SPECIAL_TOKENS)
ENDOFTEXT_ID, IM_START_ID, IM_END_ID, PAD_ID = range(256, TOKENIZER_LENGTH)
EOS_IDS = (IM_END_ID, ENDOFTEXT_ID)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_GEMMA = {"sliding_window": 6, "query_pre_attn_scalar": 20, "attn_logit_softcapping": None}
_KINDS: dict[str, tuple[type[PreTrainedConfig], dict]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False}),
    "gemma2": (Gemma2Config, {"tie_word_embeddings": True, "final_logit_softcapping": 5.0, **_GEMMA}),
    "gemma3": (Gemma3TextConfig, {"tie_word_embeddings": True, **_GEMMA, "layer_types": None}),
}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer (one token per byte) with ChatML special tokens and chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", chat_template=CHAT_TEMPLATE
    )


def tiny_config(
    kind: str, *, vocab_size: int = TOKENIZER_LENGTH + 17, num_hidden_layers: int = 8, tie: bool | None = None,
    head_dim: int = 20,
) -> PreTrainedConfig:
    """Config of a tiny model. ``tie=None`` keeps what models of this kind usually do.

    Args:
        head_dim: flash attention wants a multiple of 8.
    """
    config_class, specifics = _KINDS[kind]
    specifics = dict(specifics)
    if tie is not None:
        specifics["tie_word_embeddings"] = tie
    if kind == "gemma3":
        specifics["layer_types"] = ["sliding_attention", "sliding_attention", "full_attention"] * num_hidden_layers
        specifics["layer_types"] = specifics["layer_types"][:num_hidden_layers]
    return config_class(
        vocab_size=vocab_size,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=list(EOS_IDS),
        **specifics,
    )


def random_model(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    """A random fp32 model. The global random state is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _randomise(model)
    model.generation_config.eos_token_id = list(EOS_IDS)
    model.generation_config.pad_token_id = PAD_ID
    return model.eval()


def tiny_model(kind: str, *, seed: int = 0, **config_kwargs) -> PreTrainedModel:
    """A random fp32 model of one of ``KINDS``; ``config_kwargs`` as ``tiny_config`` takes them."""
    return random_model(tiny_config(kind, **config_kwargs), seed=seed)


@torch.no_grad()
def _randomise(model: PreTrainedModel) -> None:
    """Weights wide enough that the context, not only the last token, decides what comes next.

    With the usual std of 0.02 the residual stream is the last token's embedding, and a tied model repeats that token
    for ever: tests of greedy output would compare constants.
    """
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            parameter.normal_(std=0.05)
        elif name == "model.norm.weight":
            parameter.normal_(mean=6.0, std=0.5)  # makes up for the small lm_head: logits of std 2
        elif parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        else:
            parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)


def save_target(model: PreTrainedModel, path: Path, **save_kwargs) -> Path:
    """Write ``model`` and the tiny tokenizer to ``path`` as ``save_pretrained`` does; returns ``path``."""
    model.save_pretrained(path, **save_kwargs)
    tiny_tokenizer().save_pretrained(path)
    return Path(path)


def tiny_target_folder(path: Path, kind: str, **model_kwargs) -> Path:
    """Write a tiny model and its tokenizer to the folder ``path``; returns ``path``."""
    return save_target(tiny_model(kind, **model_kwargs), path)


def untied(trained: dict[str, torch.Tensor], target: Target) -> dict[str, torch.Tensor]:
    """The weights of a training with ``head.tied`` as its export has them, in fp32."""
    up_proj = trained["speculator.vocab_proj.up_proj.weight"].double()
    product = (target.lm_head_weight.double() @ up_proj).float()
    rest = {name: weight for name, weight in trained.items() if "up_proj" not in name or name.startswith("draft.")}
    return rest | {"speculator.vocab_proj.weight": product}


def tiny_target(kind: str, tmp_path: Path, *, dtype: torch.dtype = torch.float32, **model_kwargs) -> Target:
    """A tiny target on the CPU, loaded from a folder as a real one is."""
    folder = tiny_target_folder(Path(tmp_path) / f"target-{kind}", kind, **model_kwargs)
    return Target.load(tiny_target_config(folder, kind), device="cpu", dtype=dtype)


def tile_candidates(scores: Sequence[float], num_tiles: int, keep: int) -> set[int]:
    """Ids of the ``keep`` largest scores of each tile, where a tile is the ids that are equal modulo ``num_tiles``."""
    tiles = [range(t, len(scores), num_tiles) for t in range(num_tiles)]
    return {i for members in tiles for i in sorted(members, key=lambda i: -scores[i])[:keep]}


def tiny_target_config(folder: Path, kind: str) -> TargetConfig:
    """The config naming a tiny target; Gemma 2 has no sdpa in transformers."""
    return TargetConfig(
        model=str(folder), dtype="float32", attn_implementation="eager" if kind == "gemma2" else "sdpa"
    )


_GGUF_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}


def tiny_gguf(file: Path, *, seed: int = 0) -> PreTrainedModel:
    """Write a tiny tied Llama, its tokenizer and chat template to one GGUF file in fp32; returns the model.

    transformers reads no GGUF tokenizer without merges (5.17: with a single one), hence the tokens "th" and "in".
    """
    model = tiny_model("llama", seed=seed, vocab_size=TOKENIZER_LENGTH + 2)
    writer = GGUFWriter(file, "llama")
    write_gguf_config(writer, model.config, model.config.rope_parameters["rope_theta"])
    _write_gguf_tokenizer(writer)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"])
    heads = {"attn_q": model.config.num_attention_heads, "attn_k": model.config.num_key_value_heads}
    for layer in range(model.config.num_hidden_layers):
        for gguf_name, name in _GGUF_LAYER_NAMES.items():
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            if gguf_name in heads:  # GGUF interleaves the two halves that rotary attention turns
                halves = weight.reshape(heads[gguf_name], 2, -1, weight.shape[-1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
            writer.add_tensor(f"blk.{layer}.{gguf_name}.weight", weight)
    close_gguf(writer)
    return model


def close_gguf(writer: GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf_config(writer: GGUFWriter, config: PreTrainedConfig, rope_theta: float) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _write_gguf_tokenizer(writer: GGUFWriter) -> None:
    vocab = tiny_tokenizer().get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "th", "in"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in SPECIAL_TOKENS else TokenType.NORMAL for token in tokens])
    writer.add_token_merges(["t h", "i n"])
    writer.add_bos_token_id(IM_START_ID)
    writer.add_eos_token_id(IM_END_ID)
    writer.add_pad_token_id(PAD_ID)
    writer.add_chat_template(CHAT_TEMPLATE)
