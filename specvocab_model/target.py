"""The frozen target: its hidden features, its final hidden state and its output head.

The draft needs three things from the target: hidden states of three layers at every position, the hidden state that
enters ``lm_head``, and the embeddings. One forward of the decoder without ``lm_head`` gives the first two.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, Cache, GgufConfig, PreTrainedModel, PreTrainedTokenizerBase

from specvocab_model.compiled_layers import can_compile, compiled_layers
from specvocab_model.config import ConfigError, TargetConfig, has_fast_bf16
from specvocab_model.target_files import resolve_model, target_cache_dir
from specvocab_model.target_spec import (
    LAYOUTS,
    TargetShape,
    TargetSpec,
    gguf_arguments,
    load_spec,
    load_spec_and_tokenizer,
)

__all__ = ["Target", "TargetOutput", "TargetShape", "TargetSpec", "default_feature_layers", "load_spec",
           "resolve_model", "target_cache_dir"]

logger = logging.getLogger(__name__)

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_feature_layers(num_hidden_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's choice: indices into HF ``hidden_states`` (``L`` is the input of decoder layer ``L``)."""
    return 2, num_hidden_layers // 2, num_hidden_layers - 3


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
        if feature_layers is None:
            feature_layers = default_feature_layers(spec.num_hidden_layers)
        layers = tuple(feature_layers)
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
        self.compile_layers = False
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
        decoder: bool = True,
    ) -> Target:
        """Load the target to ``device``, in ``config.dtype`` unless ``dtype`` is given.

        Args:
            decoder: False leaves out the decoder layers, for who has their outputs on disk: ``forward`` then fails.

        Raises:
            ConfigError: the target is not found, is of a kind that is not supported, or its weights are incomplete.
        """
        spec, tokenizer = load_spec_and_tokenizer(config)
        dtype = dtype or TORCH_DTYPES[config.dtype]
        if dtype == torch.bfloat16 and not has_fast_bf16():
            logger.warning("this CPU has no fast bf16 products and takes up to 70 times as long for them as in fp32; "
                           "float32 is faster here: target.dtype=float32 trainer.mixed_precision=no or, where a "
                           "command has it, --dtype float32")
        load: Any = partial(  # the return type does not know of output_loading_info
            AutoModelForCausalLM.from_pretrained, resolve_model(config), attn_implementation=config.attn_implementation,
            output_loading_info=True, ignore_mismatched_sizes=True,  # refused below, in one line
        )
        if not decoder:
            load = partial(_load_without_layers, load, config)
        if config.gguf_file:
            # Quantised blocks are unpacked to fp32 only. Then parameters alone are cast, as from_pretrained does it:
            # rotary frequencies are buffers, and bf16 would blur far positions.
            unpack = GgufConfig(dequantize=True)
            model, info = load(**gguf_arguments(config), quantization_config=unpack, dtype=torch.float32)
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype)
        else:
            model, info = load(dtype=dtype)
        _check_complete(config, info)
        model.to(device)  # type: ignore[arg-type]  # transformers' decorator hides the signature from mypy
        return cls(spec, model, tokenizer, feature_layers)

    def with_compiled_layers(self) -> Target:
        """The same model, whose layers run under torch.compile where that is possible: see ``compiled_layers``.

        The first forward waits for the compiler. Not for layers whose weights hooks gather from other processes.
        """
        target = copy.copy(self)
        target.compile_layers = LAYOUTS[self.spec.model_type].compiles
        return target

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
        return scale_and_cap(logits, self.spec)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor] | None = None,
        past_key_values: Cache | None = None,
    ) -> TargetOutput:
        """Run the decoder, without ``lm_head``, on ``input_ids [B, T]``.

        Packed rows: give ``position_ids [B, T]`` that restart at every document, and neither a mask nor a cache; then
        no document sees another, in full and in sliding-window layers (transformers finds the boundaries itself, and
        the host waits for it; ``packed_attention`` needs neither).

        Args:
            attention_mask: 1 for tokens, 0 for padding, ``[B, past + T]``; or what is added to the attention scores,
                ``[B, 1, T, past + T]``, by type of layer where the target has several.
            past_key_values: a cache that this forward extends.
        """
        with self._captured_inputs() as captured, self._compiled(past_key_values):
            output = self._decoder(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                use_cache=past_key_values is not None,
                **{self._cache_argument: past_key_values},
            )
        features = torch.cat([captured[layer] for layer in self.feature_layers], dim=-1)
        return TargetOutput(features, output.last_hidden_state, past_key_values)

    def _compiled(self, memory: Cache | None) -> AbstractContextManager[None]:
        if not self.compile_layers or not can_compile(self.device, memory):
            return nullcontext()
        return compiled_layers(self._decoder, self.device, memory, self._cache_argument)

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


def scale_and_cap(logits: Tensor, spec: TargetSpec) -> Tensor:
    """See ``Target.scale_and_cap``."""
    if spec.logit_scale != 1.0:
        logits = logits * spec.logit_scale
    if spec.logit_softcap is not None:
        logits = spec.logit_softcap * torch.tanh(logits / spec.logit_softcap)
    return logits


def _check_complete(config: TargetConfig, loading_info: dict[str, Any]) -> None:
    """Refuse what transformers only warns of: a tensor that the weights lack, or have in another shape, is random.

    Raises:
        ConfigError: naming the first such tensors.
    """
    wrong = sorted(loading_info["missing_keys"]) + sorted(name for name, *_ in loading_info["mismatched_keys"])
    if wrong:
        raise ConfigError(f"target.model={config.model!r}: config.json describes another model than the weights are of "
                          f"({len(wrong)} tensors are missing or of another shape, among them {', '.join(wrong[:3])}); "
                          "fetch it again")


def _load_without_layers(load: Callable[..., Any], config: TargetConfig, **arguments: Any) -> Any:
    """Load into a model of no layers: transformers reads the embeddings, and warns that it was given all the rest."""
    no_layers = AutoConfig.from_pretrained(resolve_model(config), num_hidden_layers=0, **gguf_arguments(config))
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return load(config=no_layers, **arguments)
    finally:
        transformers.logging.set_verbosity(verbosity)
