"""Target, draft and head."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from specvocab_model.config.checks import DTYPES, ConfigError, at_least, not_empty, one_of

HEADS = ("full", "speculative", "static")
SELECTIONS = ("tile", "exact")
QUANTIZATIONS = ("fp8", "int8")


@dataclass(kw_only=True, slots=True)
class TargetConfig:
    """The frozen model whose output is reproduced."""

    model: str = MISSING  # hub id, or a folder in HF format, or a folder holding gguf_file
    gguf_file: str | None = None
    revision: str | None = None
    dtype: str = "bfloat16"
    attn_implementation: str = "sdpa"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # variables of the template: enable_thinking

    def __post_init__(self) -> None:
        not_empty("target.model", self.model)
        one_of("target.dtype", self.dtype, DTYPES)
        if reserved := sorted({"messages", "add_generation_prompt"} & self.chat_template_kwargs.keys()):
            raise ConfigError(f"target.chat_template_kwargs holds {', '.join(reserved)}, which is set for every "
                              "conversation; remove it")


@dataclass(kw_only=True, slots=True)
class DraftConfig:
    """The draft layer. Every null is taken from the target."""

    feature_layers: list[int] | None = None  # indices into HF hidden_states; null: [2, N//2, N-3]
    num_unroll_steps: int = 7
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_unroll_steps", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
                     "max_position_embeddings"):
            at_least(f"draft.{name}", getattr(self, name), 1)
        if self.head_dim is not None and self.head_dim % 2:
            raise ConfigError(f"draft.head_dim={self.head_dim} must be even: rotary embedding turns pairs")
        if self.feature_layers is not None:
            if len(self.feature_layers) != 3 or sorted(set(self.feature_layers)) != self.feature_layers:
                raise ConfigError(f"draft.feature_layers={self.feature_layers} must be three ascending, distinct ones")
            at_least("draft.feature_layers[0]", self.feature_layers[0], 1)


@dataclass(kw_only=True, slots=True)
class HeadConfig:
    """How the draft turns its hidden state into token logits. All below ``draft_vocab_size`` is the speculator's."""

    type: str = "speculative"
    draft_vocab_size: int = 32000  # of the static head: so many most frequent tokens of the training data
    rank: int | None = None  # null: hidden_size / 8
    tied: bool = True  # train W in vocab_proj = lm_head W; false: every row of vocab_proj for itself
    selection: str = "tile"  # tile: the best `keep` ids of every `tile`, one kernel; exact: the best of all
    num_candidates: int | None = None  # tile: at least so many; null: 2048, or what tile and keep give
    tile: int | None = None  # ids of a tile, a power of two; null: chosen with keep by num_candidates
    keep: int | None = None
    quantization: str | None = None  # of the exported vocab_proj: fp8 or int8, one scale a row
    init: str = "calibration"
    calibration_tokens: int = 8192

    def __post_init__(self) -> None:
        one_of("head.type", self.type, HEADS)
        one_of("head.selection", self.selection, SELECTIONS)
        one_of("head.init", self.init, ("calibration", "svd", "random"))
        if self.quantization is not None:
            one_of("head.quantization", self.quantization, QUANTIZATIONS)
            if self.type != "speculative":
                raise ConfigError(f"head.quantization={self.quantization} rounds the speculator's vocab_proj, and "
                                  f"head.type={self.type!r} has none; drop it")
        for name in ("draft_vocab_size", "rank", "num_candidates", "tile", "keep", "calibration_tokens"):
            at_least(f"head.{name}", getattr(self, name), 1)
        self._check_tiles()

    def _check_tiles(self) -> None:
        if self.tile is None and self.keep is None:
            return
        if self.tile is None or self.keep is None:
            raise ConfigError(f"head.tile={self.tile} and head.keep={self.keep} come together; set both, or neither "
                              "and head.num_candidates")
        if self.selection != "tile":
            raise ConfigError(f"head.selection={self.selection!r} has no tiles; drop head.tile={self.tile} and "
                              f"head.keep={self.keep}, or set head.selection=tile")
        if self.num_candidates is not None:
            raise ConfigError(f"head.tile={self.tile} and head.keep={self.keep} fix the number of candidates; drop "
                              f"head.num_candidates={self.num_candidates}, or drop them")
        if self.tile & (self.tile - 1):
            raise ConfigError(f"head.tile={self.tile} must be a power of two")
        if self.keep > self.tile:
            raise ConfigError(f"head.keep={self.keep} must be at most head.tile={self.tile}")
