"""Two spellings of an EAGLE-3 draft on disk: ours, which is that of SafeAILab/EAGLE and SpecForge, and speculators'.

The library ``speculators`` (0.9) and vLLM's reader of its format keep the layer's shape in
``transformer_layer_config``, name the target in ``speculators_config``, and call ``midlayer`` ``layers.0``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specvocab_model.config import ConfigError
from specvocab_model.eagle3 import ARCHITECTURE
from specvocab_model.target import TargetSpec

SPECULATORS_VERSION = "0.9.0"  # whose layout this is
SPECULATORS_KEYS = (  # at the top level there, as here
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output",
    "eagle_aux_hidden_state_layer_ids",
)
LAYER_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias",
    "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters", "vocab_size", "tie_word_embeddings",
    "logit_scale", "final_logit_softcapping", "eos_token_id", "pad_token_id", "torch_dtype",
)


def speculators_config(
    config: Mapping[str, Any], target_spec: TargetSpec, num_draft_tokens: int
) -> dict[str, Any]:
    """``config.json`` in speculators' spelling.

    A shared head is ``draft_vocab_size`` = V there, and no ``lm_head.weight``. Flags are written although they are
    false: vLLM takes an absent ``norm_before_residual`` for true.

    Args:
        config: of ``eagle3.engine_config``.
        num_draft_tokens: how many tokens vLLM is to draft at a time.
    """
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{
                "proposal_type": "greedy", "speculative_tokens": num_draft_tokens, "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }],
            "verifier": {
                "name_or_path": target_spec.name,
                "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[target_spec.model_type]],
            },
        },
        "transformer_layer_config": {key: config[key] for key in LAYER_KEYS},
        "draft_vocab_size": config["draft_vocab_size"] or config["vocab_size"],
        "norm_before_residual": config.get("norm_before_residual", False),
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": config["eagle_aux_hidden_state_layer_ids"],
        "tie_word_embeddings": False,
        "torch_dtype": config["torch_dtype"],
    }


def speculators_name(name: str) -> str:
    """A tensor's name there."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def our_config(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """``config.json`` in our spelling, whichever it is in.

    Raises:
        ConfigError: it is of another kind of speculator, or contradicts itself.
    """
    if "speculators_model_type" not in config:
        return dict(config)
    if config["speculators_model_type"] != "eagle3":
        raise ConfigError(f"{where} has speculators_model_type={config['speculators_model_type']!r}; only 'eagle3' can "
                          "be loaded")
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ConfigError(f"{where} has transformer_layer_config={layer!r}; it must be an object")
    if layer.get("model_type", "llama") != "llama":
        raise ConfigError(f"{where} has a layer of model_type={layer['model_type']!r}; only 'llama' can be loaded")
    if "norm_before_residual" not in config:
        raise ConfigError(f"{where} has no norm_before_residual, which vLLM takes for true and speculators for false; "
                          "set it to what the draft was trained with")
    try:  # speculators leaves out what LlamaConfig has as its default
        whole = LlamaConfig(**{key: value for key, value in layer.items() if key not in ("torch_dtype", "dtype")})
    except StrictDataclassError as error:
        raise ConfigError(f"{where} describes no Llama layer: {' '.join(str(error).split())}") from error
    stated = {key: config[key] for key in SPECULATORS_KEYS if key in config}
    return whole.to_dict() | {"architectures": [ARCHITECTURE], "tie_word_embeddings": False} | stated


def shares_target_head(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether a ``config.json``, in the spelling it was found in, and our tensors mean the target's ``lm_head``.

    speculators' ``draft_vocab_size`` is never null: V stands for a head that is shared, or for one that is there.
    """
    size = config.get("draft_vocab_size")
    if "speculators_model_type" in config and size == config["transformer_layer_config"].get("vocab_size"):
        size = None
    return size is None and "lm_head.weight" not in tensors


def our_names(tensors: Mapping[str, Tensor], where: str) -> dict[str, Tensor]:
    """Tensors under our names, without what a draft does not own: rotary frequencies, copies of the target's weights.

    Raises:
        ConfigError: two of them are the same tensor of ours.
    """
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        ours = name.removeprefix("model.")
        if ours.startswith("layers.0."):
            ours = ours.replace("layers.0.", "midlayer.", 1)
        if ours.startswith("verifier_") or ours.endswith("rotary_emb.inv_freq"):
            continue
        if ours in renamed:
            raise ConfigError(f"{where} holds {ours} twice, once as {name}; remove the wrong one")
        renamed[ours] = tensor
    return renamed
