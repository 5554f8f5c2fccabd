"""Facts about a target, read without loading its weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.fingerprint import weights_digest
from specvocab_model.target_files import FETCH_AGAIN, check_text_files, resolve_model


@dataclass(frozen=True, slots=True)
class _Layout:
    """What differs between model types: names of config fields. ``None``: the model has no such thing."""

    norm_eps: str = "rms_norm_eps"
    softcap: str | None = None  # logits become softcap * tanh(logits / softcap)
    multiplier: str | None = None  # logits are multiplied by this field
    divisor: str | None = None  # logits are divided by this field
    # Flash attention is in neither: it finds the documents of a packed row only in batches of one row.
    attention: tuple[str, ...] = ("sdpa", "eager")
    compiles: bool = True  # its layers run compiled on a GPU (specvocab_model/compiled_layers.py)


# Text decoders with `model.embed_tokens`, `model.layers`, `model.norm` and a bias-free `lm_head`, seen to work by
# tests/specvocab_model/test_target.py. A type that is not listed may scale its logits in a way we do not know of.
LAYOUTS: dict[str, _Layout] = {
    "cohere": _Layout(norm_eps="layer_norm_eps", multiplier="logit_scale"),
    "cohere2": _Layout(norm_eps="layer_norm_eps", multiplier="logit_scale"),
    "gemma": _Layout(),
    "gemma2": _Layout(softcap="final_logit_softcapping", attention=("eager",)),  # caps attention scores too
    "gemma3_text": _Layout(softcap="final_logit_softcapping"),
    "granite": _Layout(divisor="logits_scaling"),
    "llama": _Layout(),
    "mistral": _Layout(),
    "olmo2": _Layout(),
    "olmo3": _Layout(),
    "qwen2": _Layout(),
    "qwen3": _Layout(),
    "qwen3_moe": _Layout(compiles=False),  # its products in groups of experts were not tried on a GPU
    "smollm3": _Layout(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetShape:
    """What a draft must fit; all that an engine says of the target that it serves."""

    name: str
    hidden_size: int
    vocab_size: int  # rows of lm_head; may exceed the tokenizer's length
    num_hidden_layers: int
    max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec(TargetShape):
    """Facts about a target, known without its weights."""

    model_type: str
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # of the full-attention layers: rope_theta, rope_type, ...
    eos_token_ids: tuple[int, ...]  # as `generate` stops at them
    pad_token_id: int
    logit_softcap: float | None
    logit_scale: float
    fingerprint: str  # same fingerprint, same weights: a draft trained for one target fits the other


def load_spec(config: TargetConfig) -> TargetSpec:
    """Read a target's facts from its config, its tokenizer and a sample of its weights.

    Raises:
        ConfigError: the target is not found, or is of a kind that is not supported.
    """
    return load_spec_and_tokenizer(config)[0]


def load_spec_and_tokenizer(config: TargetConfig) -> tuple[TargetSpec, PreTrainedTokenizerBase]:
    """As ``load_spec``; the tokenizer has to be read anyway."""
    folder = resolve_model(config)
    check_text_files(folder)
    model_config = _model_config(config, folder)
    tokenizer = _tokenizer(config, folder)
    return _spec(config, folder, model_config, tokenizer), tokenizer


def gguf_arguments(config: TargetConfig) -> dict[str, str]:
    """What transformers' ``from_pretrained`` methods must be told to read a GGUF file."""
    return {"gguf_file": config.gguf_file} if config.gguf_file else {}


def _model_config(config: TargetConfig, folder: Path) -> PreTrainedConfig:
    try:
        model_config = AutoConfig.from_pretrained(folder, **gguf_arguments(config))
    # No config.json, a model type that transformers does not know, or a field of the wrong type.
    except (OSError, ValueError, StrictDataclassError) as error:
        raise ConfigError(f"target.model={config.model!r}: {' '.join(str(error).split())}") from error
    if model_config.model_type not in LAYOUTS:
        raise ConfigError(
            f"target.model={config.model!r} is of type {model_config.model_type!r}; supported are text models of type "
            f"{', '.join(LAYOUTS)} (to add one, see LAYOUTS in specvocab_model/target_spec.py)"
        )
    attention = LAYOUTS[model_config.model_type].attention
    if config.attn_implementation not in attention:
        raise ConfigError(f"target.attn_implementation={config.attn_implementation!r} does not work for type "
                          f"{model_config.model_type!r}; use {' or '.join(attention)}")
    return model_config


def _tokenizer(config: TargetConfig, folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, **gguf_arguments(config))
    except Exception as error:  # the tokenizers library raises Exception itself; here only the user's files are read
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"target folder {folder}: no tokenizer can be read from "
                          f"{config.gguf_file or 'tokenizer.json'} ({reason}); {FETCH_AGAIN}") from error


def _spec(
    config: TargetConfig, folder: Path, model_config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> TargetSpec:
    layout = LAYOUTS[model_config.model_type]
    fields = model_config.to_dict()
    eos_token_ids = _eos_token_ids(folder, fields, tokenizer)
    rope = fields["rope_parameters"]
    scale = fields[layout.multiplier] if layout.multiplier else 1.0
    facts = {
        "model_type": model_config.model_type,
        "hidden_size": fields["hidden_size"],
        "vocab_size": fields["vocab_size"],
        "num_hidden_layers": fields["num_hidden_layers"],
        "num_attention_heads": fields["num_attention_heads"],
        "num_key_value_heads": fields["num_key_value_heads"],
        "head_dim": fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        "logit_softcap": fields[layout.softcap] if layout.softcap else None,
        "logit_scale": scale / fields[layout.divisor] if layout.divisor else scale,
    }
    identity = json.dumps(facts, sort_keys=True) + weights_digest(folder, config.gguf_file)
    return TargetSpec(
        **facts,
        name=config.model,
        intermediate_size=fields["intermediate_size"],
        rms_norm_eps=fields[layout.norm_eps],
        rope_parameters=rope.get("full_attention", rope),  # Gemma 3 has one set for each type of layer
        max_position_embeddings=fields["max_position_embeddings"],
        eos_token_ids=eos_token_ids,
        pad_token_id=eos_token_ids[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        fingerprint=hashlib.sha256(identity.encode()).hexdigest(),
    )


def _eos_token_ids(folder: Path, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Where ``generate`` stops: the generation config's ids, else the model config's, else the tokenizer's."""
    eos = fields.get("eos_token_id")
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        raise ConfigError(f"target folder {folder} names no EOS token; set eos_token_id in its generation_config.json")
    return (eos,) if isinstance(eos, int) else tuple(eos)
