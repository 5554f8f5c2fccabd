"""The EAGLE-3 draft format that stock vLLM and SGLang load: its ``config.json`` and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specvocab_model.config import ConfigError, DraftConfig
from specvocab_model.draft import DraftArchitecture
from specvocab_model.target import TargetShape, TargetSpec, default_feature_layers

ARCHITECTURE = "LlamaForCausalLMEagle3"
# Everything that changes the forward pass and has but one value here; null and absent mean that value.
LOADABLE = {
    "architectures": [ARCHITECTURE], "model_type": "llama", "num_hidden_layers": 1, "num_aux_hidden_states": 3,
    "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
    "norm_before_fc": False, "fc_norm": False, "use_aux_norm": False, "norm_output": False,
    "quantization_config": None,
}
# Where one is absent, readers take a default of their own and compute something else; exports have all of them.
NEEDED = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "vocab_size", "logit_scale",
    "final_logit_softcapping", "eagle_aux_hidden_state_layer_ids",
)
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
         "max_position_embeddings")


def engine_config(
    architecture: DraftArchitecture, target_spec: TargetSpec, dtype: torch.dtype, draft_vocab_size: int | None = None
) -> dict[str, Any]:
    """``config.json`` of an EAGLE-3 draft.

    Feature layers appear twice because engines count differently: at the top level as the layer whose *input* is read
    (HF's ``hidden_states[L]``; vLLM), in ``eagle_config`` as the layer whose *output* is (SGLang). RoPE appears in the
    spelling of transformers 4 and of 5. The target's factor on its logits is read by vLLM, its soft-cap by SGLang.

    Args:
        draft_vocab_size: rows of the draft's own ``lm_head``; null where it shares the target's. The key must be there
            even so: absent, SGLang raises.
    """
    layers = list(architecture.feature_layers)
    # Read by vLLM; SGLang has no such layer. Drafts trained here never need it, so theirs do not have the key.
    residual = {"norm_before_residual": True} if architecture.norm_before_residual else {}
    rope = dict(architecture.rope_parameters)
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "architectures": [ARCHITECTURE],
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
        "draft_vocab_size": draft_vocab_size,
        "tie_word_embeddings": False,
        "logit_scale": target_spec.logit_scale,
        "final_logit_softcapping": target_spec.logit_softcap,
        "eos_token_id": list(target_spec.eos_token_ids),
        "pad_token_id": target_spec.pad_token_id,
        "num_aux_hidden_states": len(layers),
        "eagle_aux_hidden_state_layer_ids": layers,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
        },
    } | residual


def tensor_shapes(
    architecture: DraftArchitecture, draft_vocab_size: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Every tensor of ``model.safetensors`` and its shape, written out: this is the contract with the engines.

    Args:
        draft_vocab_size: as in ``engine_config``. Below V the map between the two numberings comes with the head.
    """
    d, m = architecture.hidden_size, architecture.intermediate_size
    query = architecture.num_attention_heads * architecture.head_dim
    key = architecture.num_key_value_heads * architecture.head_dim
    shapes: dict[str, tuple[int, ...]] = {
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
    if draft_vocab_size is not None:
        shapes["lm_head.weight"] = (draft_vocab_size, d)
        if draft_vocab_size < architecture.vocab_size:
            shapes |= {"d2t": (draft_vocab_size,), "t2d": (architecture.vocab_size,)}
    return shapes


def check_served(
    config: Mapping[str, Any], architecture: DraftArchitecture, target: TargetShape | None, where: str
) -> None:
    """See that engines would serve what a ``config.json`` describes, and not something else without a word.

    Args:
        config: of a checkpoint in our spelling, and ``architecture`` what it describes.
        target: it is for; without it the context length is not checked.

    Raises:
        ConfigError: one line naming the key and what an engine would make of it.
    """
    if "draft_vocab_size" not in config:
        raise ConfigError(f"{where} has no draft_vocab_size, without which SGLang does not start; set it to null for a "
                          "draft that shares the target's lm_head")
    if config.get("tie_word_embeddings"):
        raise ConfigError(f"{where} has tie_word_embeddings=true, for which SGLang takes the embedding in the place of "
                          "the draft's lm_head; set it to false")
    longest = architecture.max_position_embeddings
    if target is not None and longest < target.max_position_embeddings:
        raise ConfigError(f"{where} has max_position_embeddings={longest}, but {target.name} is served up to "
                          f"{target.max_position_embeddings}: past its own end a draft is refused or drafts "
                          f"nonsense; set it to {target.max_position_embeddings}, or serve texts of up to {longest}")


def check_complete(config: Mapping[str, Any], where: str) -> None:
    """See that a ``config.json`` of ours, in either layout, says everything.

    Raises:
        ConfigError: naming what it does not say.
    """
    said = {**config, **config.get("transformer_layer_config", {})}
    rope = () if "rope_parameters" in said else ("rope_theta", "rope_scaling")  # transformers 5's spelling, and 4's
    layers = () if "transformer_layer_config" in config else ("eagle_config",)  # SGLang reads no speculators' layout
    if missing := [key for key in (*NEEDED, *rope, *layers) if key not in said]:
        raise ConfigError(f"{where} has no {', '.join(missing)}, for which engines would take values of their own; "
                          "copy or export the whole folder again")


def check_target(architecture: DraftArchitecture, target: TargetShape, where: str) -> None:
    """See that a draft can stand on this target.

    Raises:
        ConfigError: it is of another size.
    """
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(architecture, name), getattr(target, name)
        if ours != theirs:
            raise ConfigError(f"{where} has {name}={ours}, but {target.name} has {theirs}; use the target that "
                              "the draft was trained for")


def read_draft_vocab_size(config: Mapping[str, Any], where: str) -> int | None:
    """Rows of the draft's own ``lm_head``; ``None`` where it shares the target's.

    Raises:
        ConfigError: it is no number of tokens of this vocabulary.
    """
    size, vocab_size = config.get("draft_vocab_size"), config["vocab_size"]
    if size is not None and not (type(size) is int and 1 <= size <= vocab_size):
        raise ConfigError(f"{where} has draft_vocab_size={size!r}; it must be null, or between 1 and vocab_size="
                          f"{vocab_size}")
    return size


def read_architecture(
    config: Mapping[str, Any], where: str, num_unroll_steps: int | None, target: TargetShape | None
) -> DraftArchitecture:
    """The draft that a ``config.json`` in our spelling describes; ``draft_vocab_size`` is the head's affair.

    Args:
        config: the parsed file.
        where: what to call it in an error.
        num_unroll_steps: null for a foreign draft, which does not say: EAGLE-3's own number is assumed.
        target: where the file names no feature layers, EAGLE-3's choice for this target is meant.

    Raises:
        ConfigError: one line naming the key that this package cannot serve.
    """
    for key, wanted in LOADABLE.items():
        if config.get(key) not in (None, wanted):
            raise ConfigError(f"{where} has {key}={config[key]!r}; only {wanted!r} can be loaded")
    norm_before_residual = config.get("norm_before_residual") or False
    if norm_before_residual is not True and norm_before_residual is not False:
        raise ConfigError(f"{where} has norm_before_residual={norm_before_residual!r}; it must be true or false")
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
    return DraftArchitecture(
        hidden_size=llama.hidden_size,
        intermediate_size=llama.intermediate_size,
        num_attention_heads=llama.num_attention_heads,
        num_key_value_heads=llama.num_key_value_heads,
        head_dim=llama.head_dim,
        vocab_size=llama.vocab_size,
        feature_layers=_feature_layers(config, where, target),
        rms_norm_eps=llama.rms_norm_eps,
        rope_parameters=dict(llama.rope_parameters),
        max_position_embeddings=llama.max_position_embeddings,
        num_unroll_steps=num_unroll_steps or DraftConfig().num_unroll_steps,
        norm_before_residual=norm_before_residual,
    )


def _feature_layers(config: Mapping[str, Any], where: str, target: TargetShape | None) -> tuple[int, int, int]:
    key = "eagle_aux_hidden_state_layer_ids"
    nested = config.get("eagle_config") or {}  # null and absent mean the same
    if not isinstance(nested, dict):
        raise ConfigError(f"{where} has eagle_config={nested!r}; it must be an object or null")
    inputs, outputs = config.get(key), nested.get(key)
    for layers in (inputs, outputs):
        if layers is not None and not (isinstance(layers, list) and [type(layer) for layer in layers] == [int] * 3):
            raise ConfigError(f"{where} has {key}={layers!r}; a draft reads exactly three layers, given by number")
    for flag, wanted in {"use_aux_hidden_state": True, "norm_before_fc": False}.items():
        if nested.get(flag, wanted) != wanted:
            raise ConfigError(f"{where} has eagle_config.{flag}={nested[flag]!r}; only {wanted!r} can be loaded")
    if inputs is None and outputs is not None:
        inputs = [layer + 1 for layer in outputs]
    if inputs is None:
        if target is None:
            raise ConfigError(f"{where} names no {key}; say which target it is for")
        return default_feature_layers(target.num_hidden_layers)
    if outputs is not None and [layer + 1 for layer in outputs] != inputs:
        raise ConfigError(f"{where} contradicts itself: {key} is {inputs} (layers whose input is read), so "
                          f"eagle_config must have one less each (layers whose output is read), but has {outputs}")
    last = inputs[2] + 1 if target is None else target.num_hidden_layers
    if not 1 <= inputs[0] < inputs[1] < inputs[2] < last:  # engines sort them, whatever fc was trained for
        raise ConfigError(f"{where} has {key}={inputs}; they must ascend from 1 on, and lie below the number of the "
                          f"target's layers{'' if target is None else f', {last}'}")
    return inputs[0], inputs[1], inputs[2]
