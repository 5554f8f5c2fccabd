"""The frozen target: its facts, its hidden features, and its output head.

The draft needs three things from the target: hidden states of three layers at every position, the hidden state that
enters ``lm_head``, and the embeddings. One forward of the decoder without ``lm_head`` gives the first two.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    GenerationConfig,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.target_files import resolve_model, target_cache_dir, weights_digest

__all__ = ["Target", "TargetOutput", "TargetSpec", "default_feature_layers", "load_spec", "resolve_model",
           "target_cache_dir"]

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class _Layout:
    """What differs between model types: names of config fields. ``None``: the model has no such thing."""

    norm_eps: str = "rms_norm_eps"
    softcap: str | None = None  # logits become softcap * tanh(logits / softcap)
    multiplier: str | None = None  # logits are multiplied by this field
    divisor: str | None = None  # logits are divided by this field
    # Flash attention is in neither: it finds the documents of a packed row only in batches of one row.
    attention: tuple[str, ...] = ("sdpa", "eager")


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
    "qwen3_moe": _Layout(),
    "smollm3": _Layout(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """Facts about a target, known without its weights."""

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int  # rows of lm_head; may exceed the tokenizer's length
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # of the full-attention layers: rope_theta, rope_type, ...
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]  # as `generate` stops at them
    pad_token_id: int
    logit_softcap: float | None
    logit_scale: float
    fingerprint: str  # equal for two targets exactly if a draft of one fits the other


def default_feature_layers(num_hidden_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's choice: indices into HF ``hidden_states`` (``L`` is the input of decoder layer ``L``)."""
    return 2, num_hidden_layers // 2, num_hidden_layers - 3


def load_spec(config: TargetConfig) -> TargetSpec:
    """Read a target's facts from its config, tokenizer and a sample of its weights; nothing is loaded to a device.

    Raises:
        ConfigError: the target is not found, or is of a kind that is not supported.
    """
    folder = resolve_model(config)
    return _spec(config, folder, _model_config(config, folder), _tokenizer(config, folder))


def _model_config(config: TargetConfig, folder: Path) -> PreTrainedConfig:
    model_config = AutoConfig.from_pretrained(folder, **_gguf(config))
    if model_config.model_type not in LAYOUTS:
        raise ConfigError(
            f"target.model={config.model!r} is of type {model_config.model_type!r}; supported are text models of type "
            f"{', '.join(LAYOUTS)} (to add one, see LAYOUTS in specvocab_model/target.py)"
        )
    attention = LAYOUTS[model_config.model_type].attention
    if config.attn_implementation not in attention:
        raise ConfigError(f"target.attn_implementation={config.attn_implementation!r} does not work for type "
                          f"{model_config.model_type!r}; use {' or '.join(attention)}")
    return model_config


def _tokenizer(config: TargetConfig, folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder, **_gguf(config))


def _gguf(config: TargetConfig) -> dict[str, str]:
    return {"gguf_file": config.gguf_file} if config.gguf_file else {}


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


def _eos_token_ids(
    folder: Path, fields: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    """Where ``generate`` stops: the generation config's ids, else the model config's, else the tokenizer's."""
    eos = fields.get("eos_token_id")
    if (folder / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(folder).eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        raise ConfigError(f"target folder {folder} names no EOS token; set eos_token_id in its generation_config.json")
    return (eos,) if isinstance(eos, int) else tuple(eos)


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """One forward of the target."""

    features: Tensor  # [B, T, 3d]: the inputs of the three feature layers, concatenated
    final_hidden: Tensor  # [B, T, d]: after the final norm, what lm_head reads
    past_key_values: Cache | None  # the cache that was passed in, longer by T


class Target:
    """A frozen causal LM whose features, final hidden state and logits can be had apart."""

    def __init__(
        self,
        spec: TargetSpec,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        feature_layers: Sequence[int] | None = None,
    ) -> None:
        """
        Raises:
            ConfigError: the feature layers do not exist, or ``lm_head`` has a bias or an unexpected shape.
        """
        layers = tuple(feature_layers or default_feature_layers(spec.num_hidden_layers))
        if len(layers) != 3 or not 1 <= layers[0] < layers[1] < layers[2] < spec.num_hidden_layers:
            raise ConfigError(f"draft.feature_layers={list(layers)} must be three ascending layers between 1 and "
                              f"{spec.num_hidden_layers - 1} for the {spec.num_hidden_layers} layers of {spec.name}")
        lm_head = model.get_output_embeddings()
        if lm_head.bias is not None or lm_head.weight.shape != (spec.vocab_size, spec.hidden_size):
            raise ConfigError(f"target.model={spec.name!r}: lm_head must be bias-free and of shape "
                              f"[{spec.vocab_size}, {spec.hidden_size}], not {list(lm_head.weight.shape)}")
        self.spec = spec
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.feature_layers: tuple[int, int, int] = layers
        self._decoder = model.get_decoder()
        # transformers renamed `past_key_values` to `cache` in 5.24, class by class.
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @classmethod
    def load(
        cls,
        config: TargetConfig,
        *,
        device: torch.device | str,
        feature_layers: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Target:
        """Load the target to ``device``, in ``config.dtype`` unless ``dtype`` is given.

        Raises:
            ConfigError: the target is not found, or is of a kind that is not supported.
        """
        folder = resolve_model(config)
        model_config, tokenizer = _model_config(config, folder), _tokenizer(config, folder)
        spec = _spec(config, folder, model_config, tokenizer)
        dtype = dtype or TORCH_DTYPES[config.dtype]
        load = partial(AutoModelForCausalLM.from_pretrained, folder, attn_implementation=config.attn_implementation)
        if config.gguf_file:  # quantised blocks are unpacked to fp32 only
            unpack = GgufConfig(dequantize=True)
            model = load(**_gguf(config), quantization_config=unpack, dtype=torch.float32).to(dtype)
        else:
            model = load(dtype=dtype)
        return cls(spec, model.to(device), tokenizer, feature_layers)

    @property
    def device(self) -> torch.device:
        return self.lm_head_weight.device

    @property
    def lm_head_weight(self) -> nn.Parameter:
        """The frozen output embedding ``[V, d]``; the input embedding itself where the two are tied."""
        return self.model.get_output_embeddings().weight

    def embed(self, input_ids: Tensor) -> Tensor:
        """Input embeddings ``[..., d]`` of ``input_ids [...]``, through the model's own module (Gemma scales them)."""
        return self.model.get_input_embeddings()(input_ids)

    def logits(self, final_hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` in fp32 of hidden states ``[..., d]`` (after a final norm), scaled and soft-capped.

        The product with ``lm_head`` is taken in the target's dtype, as the target itself takes it. Gradients reach
        ``final_hidden``.
        """
        return self.scale_and_cap(F.linear(final_hidden.to(self.lm_head_weight.dtype), self.lm_head_weight).float())

    def scale_and_cap(self, logits: Tensor) -> Tensor:
        """What the target does to ``lm_head``'s product, of any shape: its constant factor, then its soft-cap."""
        if self.spec.logit_scale != 1.0:
            logits = logits * self.spec.logit_scale
        if self.spec.logit_softcap is not None:
            logits = self.spec.logit_softcap * torch.tanh(logits / self.spec.logit_softcap)
        return logits

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> TargetOutput:
        """Run the decoder, without ``lm_head``, on ``input_ids [B, T]``.

        Packed rows: give ``position_ids [B, T]`` that restart at every document, and neither a mask nor a cache; then
        no document sees another, in full and in sliding-window layers (transformers finds the boundaries itself).

        Args:
            attention_mask: 1 for tokens, 0 for padding, ``[B, past + T]``.
            past_key_values: a cache that this forward extends.
        """
        with self._captured_inputs() as captured:
            output = self._decoder(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                use_cache=past_key_values is not None,
                **{self._cache_argument: past_key_values},
            )
        features = torch.cat([captured[layer] for layer in self.feature_layers], dim=-1)
        return TargetOutput(features, output.last_hidden_state, past_key_values)

    @contextmanager
    def _captured_inputs(self) -> Iterator[dict[int, Tensor]]:
        """Collect the inputs of the feature layers; hooks are gone afterwards, so ``generate`` stays as it was."""
        captured: dict[int, Tensor] = {}

        def keep(layer: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
            captured[layer] = args[0] if args else kwargs["hidden_states"]

        handles = [
            self._decoder.layers[layer].register_forward_pre_hook(partial(keep, layer), with_kwargs=True)
            for layer in self.feature_layers
        ]
        try:
            yield captured
        finally:
            for handle in handles:
                handle.remove()
