"""The EAGLE-3 draft format that stock vLLM and SGLang load: its ``config.json`` and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specvocab_model.config import ConfigError, DraftConfig
from specvocab_model.draft import DraftArchitecture
from specvocab_model.target import TargetSpec, default_feature_layers

ARCHITECTURE = "LlamaForCausalLMEagle3"
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "max_position_embeddings")


def engine_config(architecture: DraftArchitecture, target_spec: TargetSpec, dtype: torch.dtype) -> dict[str, Any]:
    """``config.json`` of a full-vocabulary EAGLE-3 draft that shares the target's head.

    Feature layers appear twice because engines count differently: at the top level as the layer whose *input* is read
    (HF's ``hidden_states[L]``; vLLM), in ``eagle_config`` as the layer whose *output* is (SGLang). RoPE appears in the
    spelling of transformers 4 and of 5. ``draft_vocab_size`` must be there and null: absent, SGLang raises.
    """
    layers = list(architecture.feature_layers)
    rope = dict(architecture.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "hidden_size": architecture.hidden_size,
        "intermediate_size": architecture.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": architecture.num_attention_heads,
        "num_key_value_heads": architecture.num_key_value_heads,
        "head_dim": architecture.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": architecture.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": architecture.max_position_embeddings,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "rope_parameters": rope,
        "vocab_size": architecture.vocab_size,
        "draft_vocab_size": None,
        "tie_word_embeddings": False,
        "logit_scale": target_spec.logit_scale,
        "eos_token_id": list(target_spec.eos_token_ids),
        "pad_token_id": target_spec.pad_token_id,
        "num_aux_hidden_states": len(layers),
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
        },
    }


def tensor_shapes(architecture: DraftArchitecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of ``model.safetensors`` and its shape, written out: this is the contract with the engines."""
    d, m = architecture.hidden_size, architecture.intermediate_size
    query = architecture.num_attention_heads * architecture.head_dim
    key = architecture.num_key_value_heads * architecture.head_dim
    return {
        "fc.weight": (d, 3 * d),
        "midlayer.input_layernorm.weight": (d,),
        "midlayer.hidden_norm.weight": (d,),
        "midlayer.self_attn.q_proj.weight": (query, 2 * d),
        "midlayer.self_attn.k_proj.weight": (key, 2 * d),
        "midlayer.self_attn.v_proj.weight": (key, 2 * d),
        "midlayer.self_attn.o_proj.weight": (d, query),
        "midlayer.post_attention_layernorm.weight": (d,),
        "midlayer.mlp.gate_proj.weight": (m, d),
        "midlayer.mlp.up_proj.weight": (m, d),
        "midlayer.mlp.down_proj.weight": (d, m),
        "norm.weight": (d,),
    }


def check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Compare a set of tensors with what the format wants, because the engines do not.

    Raises:
        ConfigError: one line with every name that is missing, unknown, of another shape or not finite.
    """
    problems = [f"{name} is missing" for name in shapes if name not in tensors]
    for name, tensor in tensors.items():
        if name not in shapes:
            problems.append(f"{name} is unknown")
        elif tuple(tensor.shape) != shapes[name]:
            problems.append(f"{name} has shape {tuple(tensor.shape)} instead of {shapes[name]}")
        elif not torch.isfinite(tensor.float() if tensor.element_size() == 1 else tensor).all():
            problems.append(f"{name} is not finite")
    if problems:
        raise ConfigError(f"{where} is not a complete draft: {'; '.join(problems)}")


def read_architecture(
    config: Mapping[str, Any], where: str, num_unroll_steps: int | None, target_spec: TargetSpec | None
) -> DraftArchitecture:
    """The draft that a ``config.json`` describes, ours or of any EAGLE-3 draft that shares the target's head.

    Args:
        config: the parsed file.
        where: what to call it in an error.
        num_unroll_steps: null for a foreign draft, which does not say: EAGLE-3's own number is assumed.
        target_spec: where the file names no feature layers, EAGLE-3's choice for this target is meant.

    Raises:
        ConfigError: one line naming the key that this package cannot serve.
    """
    for key, wanted in {"architectures": [ARCHITECTURE], "num_hidden_layers": 1, "attention_bias": False,
                        "mlp_bias": False, "hidden_act": "silu", "norm_before_residual": False}.items():
        if config.get(key, wanted) != wanted:
            raise ConfigError(f"{where} has {key}={config[key]!r}; only {wanted!r} can be loaded")
    for key in SIZES:
        if isinstance(size := config.get(key), int) and size < 1:
            raise ConfigError(f"{where} has {key}={size}; it must be at least 1")
    try:
        # Knows both spellings of RoPE and the defaults that older drafts leave out; the type is that of the tensors.
        llama = LlamaConfig(**{key: value for key, value in config.items() if key not in ("torch_dtype", "dtype")})
    except StrictDataclassError as error:
        raise ConfigError(f"{where} describes no Llama layer: {' '.join(str(error).split())}") from error
    assert isinstance(llama.rope_parameters, dict)
    rope_type = llama.rope_parameters["rope_type"]
    if rope_type not in ("default", *ROPE_INIT_FUNCTIONS):
        raise ConfigError(f"{where} has rope_type={rope_type!r}; known are default, {', '.join(ROPE_INIT_FUNCTIONS)}")
    assert llama.num_key_value_heads is not None and llama.head_dim is not None  # LlamaConfig fills them in
    draft_vocab_size = config.get("draft_vocab_size")
    if draft_vocab_size not in (None, llama.vocab_size):
        raise ConfigError(f"{where} has a reduced head (draft_vocab_size={draft_vocab_size}); only drafts with the "
                          f"full vocabulary of {llama.vocab_size} tokens can be loaded")
    return DraftArchitecture(
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        vocab_size=llama.vocab_size,
        feature_layers=_feature_layers(config, where, target_spec),
        rms_norm_eps=llama.rms_norm_eps,
        rope_parameters=dict(llama.rope_parameters),
        max_position_embeddings=llama.max_position_embeddings,
        num_unroll_steps=num_unroll_steps or DraftConfig().num_unroll_steps,
    )


def _feature_layers(config: Mapping[str, Any], where: str, target_spec: TargetSpec | None) -> tuple[int, int, int]:
    key = "eagle_aux_hidden_state_layer_ids"
    nested = config.get("eagle_config") or {}  # null and absent mean the same
    if not isinstance(nested, dict):
        raise ConfigError(f"{where} has eagle_config={nested!r}; it must be an object or null")
    inputs, outputs = config.get(key), nested.get(key)
    for layers in (inputs, outputs):
        if layers is not None and not (isinstance(layers, list) and [type(layer) for layer in layers] == [int] * 3):
            raise ConfigError(f"{where} has {key}={layers!r}; a draft reads exactly three layers, given by number")
    if inputs is None and outputs is not None:
        inputs = [layer + 1 for layer in outputs]
    if inputs is None:
        if target_spec is None:
            raise ConfigError(f"{where} names no {key}; say which target it is for")
        return default_feature_layers(target_spec.num_hidden_layers)
    if outputs is not None and [layer + 1 for layer in outputs] != inputs:
        raise ConfigError(f"{where} contradicts itself: {key} is {inputs} (layers whose input is read), so "
                          f"eagle_config must have one less each (layers whose output is read), but has {outputs}")
    return inputs[0], inputs[1], inputs[2]
