"""The draft: one Llama-style decoder layer between the target's features and its output embedding (EAGLE-3).

Parameter names are those of stock EAGLE-3 checkpoints, so exporting is a cast and a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from specvocab_kernels.vocab_head import vocab_head
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specvocab_model.acceptance import AcceptanceSums
from specvocab_model.attention import DraftCache, Memory
from specvocab_model.config import ConfigError, DraftConfig, HeadConfig
from specvocab_model.heads.base import HeadOutput
from specvocab_model.heads.static import OwnHead
from specvocab_model.layers import MLP, RMSNorm, rotate
from specvocab_model.losses import Objective, distillation_loss, static_distillation_loss
from specvocab_model.speculator import VocabSpeculator, build_selection
from specvocab_model.target import Target, TargetSpec, default_feature_layers
from specvocab_model.unroll import UnrollPlan, plan_unroll, unroll, unrolled_positions

DRAFT_ROWS = 256  # positions whose logits over the vocabulary are held at one time
FC_NOISE = 0.3  # share of torch's default initialisation that is left in fc beside the identity


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftArchitecture:
    """Everything that determines the draft's tensors and its forward pass."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    feature_layers: tuple[int, int, int]
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    max_position_embeddings: int
    num_unroll_steps: int
    norm_before_residual: bool = False  # of some public drafts: the layer adds to the normalised state

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"draft.num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"draft.num_key_value_heads={self.num_key_value_heads}"
            )

    @classmethod
    def from_target(cls, spec: TargetSpec, config: DraftConfig) -> DraftArchitecture:
        """The target's shape wherever the configuration does not say otherwise."""

        def configured(value: int | None, of_target: int) -> int:
            return of_target if value is None else value

        layers = config.feature_layers or default_feature_layers(spec.num_hidden_layers)
        if layers[-1] >= spec.num_hidden_layers:
            raise ConfigError(
                f"draft.feature_layers={list(layers)} must be below the target's {spec.num_hidden_layers} layers"
            )
        return cls(
            hidden_size=spec.hidden_size,
            intermediate_size=configured(config.intermediate_size, spec.intermediate_size),
            num_attention_heads=configured(config.num_attention_heads, spec.num_attention_heads),
            num_key_value_heads=configured(config.num_key_value_heads, spec.num_key_value_heads),
            head_dim=configured(config.head_dim, spec.head_dim),
            vocab_size=spec.vocab_size,
            feature_layers=(layers[0], layers[1], layers[2]),
            rms_norm_eps=spec.rms_norm_eps,
            rope_parameters=dict(spec.rope_parameters),
            max_position_embeddings=configured(config.max_position_embeddings, spec.max_position_embeddings),
            num_unroll_steps=config.num_unroll_steps,
        )

    def llama_config(self) -> LlamaConfig:
        """The same architecture as transformers writes it down; also what builds RoPE."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
            tie_word_embeddings=False,
            attention_bias=False,
            mlp_bias=False,
        )


class DraftAttention(nn.Module):
    """Grouped-query attention whose projections read the token embedding and the hidden state side by side."""

    def __init__(self, architecture: DraftArchitecture):
        super().__init__()
        self.head_dim = architecture.head_dim
        hidden_size = architecture.hidden_size
        query_size = architecture.num_attention_heads * self.head_dim
        key_size = architecture.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(2 * hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(2 * hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(2 * hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, hidden_size, bias=False)

    def forward(self, inputs: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        """``inputs`` [B, T, 2d] -> [B, T, H, D]; ``rotary`` = cos, sin of the positions, each [B, T, head_dim]."""
        projected = torch.cat([project(inputs) for project in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        query, key, value = self.split_heads(projected)
        return memory.attend(rotate(query, *rotary), rotate(key, *rotary), value)

    def split_weights(self) -> tuple[Tensor, Tensor]:
        """All three projections, stacked: what reads the token embedding, and what reads the hidden state.

        Each [(H + 2 H_kv) * D, d]. The first half of the input columns belongs to the embedding.
        """
        stacked = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        token_weight, hidden_weight = stacked.chunk(2, dim=1)
        return token_weight, hidden_weight

    def split_heads(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[.., (H + 2 H_kv) * D] -> query [.., H, D], key and value [.., H_kv, D]."""
        sizes = [project.out_features for project in (self.q_proj, self.k_proj, self.v_proj)]
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in projected.split(sizes, dim=-1))
        return query, key, value.contiguous()  # a view would keep the whole projection alive until backward


class DraftLayer(nn.Module):
    """EAGLE-3's decoder layer: the residual stream is the hidden state, the embedding enters through attention."""

    def __init__(self, architecture: DraftArchitecture):
        super().__init__()
        config = architecture.llama_config()
        self.norm_before_residual = architecture.norm_before_residual
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DraftAttention(architecture)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config.hidden_size, config.intermediate_size)

    def forward(self, hidden: Tensor, token_embeds: Tensor, rotary: tuple[Tensor, Tensor], memory: Memory) -> Tensor:
        """``hidden`` and ``token_embeds`` [B, T, d] -> pre-norm output [B, T, d]."""
        normed, residual = self.enter(hidden)
        inputs = torch.cat([self.input_layernorm(token_embeds), normed], dim=-1)
        return self.finish(residual, self.self_attn(inputs, rotary, memory))

    def enter(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the attention reads of ``hidden`` [.., d], and what the layer adds its output to."""
        normed = self.hidden_norm(hidden)
        return normed, normed if self.norm_before_residual else hidden

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Everything after the attention: ``residual`` [.., d], ``attended`` [.., H, D] -> [.., d]."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(-2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Draft(nn.Module):
    """``fc``, one decoder layer, final norm."""

    def __init__(self, architecture: DraftArchitecture):
        super().__init__()
        config = architecture.llama_config()
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DraftLayer(architecture)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary = LlamaRotaryEmbedding(config)  # holds no parameter and no persistent buffer
        self.reset_fc()

    @torch.no_grad()
    def reset_fc(self) -> None:
        """Start ``fc`` as the identity on the deepest feature layer, with a little of everything on top.

        That state is three layers from the target's own prediction, so the draft begins near an early exit of the
        target and not at noise (numbers in docs/DESIGN_NOTES.md).
        """
        hidden_size = self.fc.out_features
        self.fc.weight.mul_(FC_NOISE)[:, -hidden_size:].add_(torch.eye(hidden_size))

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B, T, 3d] -> step-0 hidden state [B, T, d]."""
        return self.fc(features)

    def forward_cached(self, hidden: Tensor, token_embeds: Tensor, position_ids: Tensor, cache: DraftCache) -> Tensor:
        """One pass of the layer for decoding: causal over everything in ``cache`` and the new positions, appended.

        Args:
            hidden: [B, T, d], ``fuse(features)`` or this function's own output for a drafted token.
            token_embeds: [B, T, d], the target's embedding of the token after each position.
            position_ids: [B, T] int, rotary positions.

        Returns:
            [B, T, d], before the final norm.
        """
        return self.midlayer(hidden, token_embeds, self.rotary(hidden, position_ids), cache)

    def unroll(
        self, features: Tensor, token_embeds: Tensor, position_ids: Tensor, document_ids: Tensor, num_steps: int
    ) -> Tensor:
        """``unroll.unroll`` at every position: [S, B, T, d], after the final norm."""
        everywhere = unrolled_positions(document_ids, torch.ones_like(document_ids, dtype=torch.bool).flatten())
        steps = unroll(self, features, token_embeds, position_ids, everywhere, num_steps)
        return self.norm(torch.stack(tuple(steps))).unflatten(1, document_ids.shape)


class TrainOutput(NamedTuple):
    """What one micro-batch contributes. A tuple, because DeepSpeed looks for a module's output tensors in tuples."""

    loss: Tensor  # scalar; a sum over positions that already carries the weights of ``step_weights``
    sums: AcceptanceSums | None
    drafts: Tensor | None  # int64 [S, N]: what greedy decoding would draft for the rows of ``JudgedRows``


class SpecVocabDraft(nn.Module):
    """Draft with its speculator or own head: what is trained, exported and loaded. The target is never part of it."""

    def __init__(self, architecture: DraftArchitecture, head_config: HeadConfig):
        super().__init__()
        self.architecture = architecture
        self.head_config = head_config
        self.draft = Draft(architecture)
        self.speculator: VocabSpeculator | None = None
        if head_config.type == "speculative":
            rank = max(1, architecture.hidden_size // 8) if head_config.rank is None else head_config.rank
            selection = build_selection(head_config, architecture.vocab_size)
            self.speculator = VocabSpeculator(architecture.hidden_size, rank, selection)
        self.own_head: OwnHead | None = None
        if head_config.type == "static":
            self.own_head = OwnHead.of_size(
                architecture.hidden_size, head_config.draft_vocab_size, architecture.vocab_size
            )

    def lm_head_weight(self, target: Target) -> Tensor:
        """The output embedding of the full vocabulary, [V, d]: the draft's own if it has one, or the target's."""
        own = self.own_head
        return target.lm_head_weight if own is None or not own.is_full else own.weight

    @classmethod
    def build(cls, spec: TargetSpec, draft_config: DraftConfig, head_config: HeadConfig) -> SpecVocabDraft:
        """An untrained draft for a target."""
        return cls(DraftArchitecture.from_target(spec, draft_config), head_config)

    def for_training(self) -> SpecVocabDraft:
        """This, with what is trained in the place of ``vocab_proj`` where ``head.tied`` says so."""
        if self.speculator is not None and self.head_config.tied:
            self.speculator.tie()
        return self

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, target_spec: TargetSpec | None = None) -> SpecVocabDraft:
        """Load an exported checkpoint; see ``export.load_checkpoint``."""
        from specvocab_model.export import load_checkpoint  # export builds this class

        return load_checkpoint(folder, target_spec)

    def forward(
        self,
        *,
        features: Tensor,
        final_hidden: Tensor,
        token_embeds: Tensor,
        lm_head_weight: Tensor,
        position_ids: Tensor,
        document_ids: Tensor,
        loss_mask: Tensor,
        step_weights: Tensor,
        objective: Objective,
        collect: bool = False,
        collect_drafts: bool = False,
        plan: UnrollPlan | None = None,
    ) -> TrainOutput:
        """Unroll the draft over packed rows and distil the target's distribution into it.

        The full one, unless the head is static: then its part on the tokens of that head.

        Args:
            features: [B, T, 3d], ``final_hidden`` [B, T, d]: the target's, without gradient.
            token_embeds: [B, T, d], ``lm_head_weight`` [V, d]: the target's frozen embeddings.
            position_ids, document_ids, loss_mask: [B, T], see ``unroll.judged_rows``.
            step_weights: [S] fp32, weight of one valid position of each step (``losses.step_weights``).
            collect: also measure what ``acceptance.AcceptanceSums`` holds.
            collect_drafts: also return the drafted tokens.
            plan: ``unroll.plan_unroll`` of the masks, made on the CPU to spare a GPU the wait; made here if not given.
        """
        num_steps = len(step_weights)
        if plan is None:
            plan = plan_unroll(loss_mask, document_ids, num_steps)
        steps = unroll(self.draft, features, token_embeds, position_ids, plan.unrolled, num_steps)
        judged = torch.stack([hidden.index_select(0, at) for hidden, at in zip(steps, plan.student_at, strict=True)])
        student_hidden = self.draft.norm(judged)
        judge = partial(distillation_loss, speculator=self.speculator)
        if self.own_head is not None:
            judge = partial(static_distillation_loss, head=self.own_head)
        distilled = judge(
            student_hidden,
            final_hidden.flatten(0, 1),
            lm_head_weight,
            rows=plan.rows,
            step_weights=step_weights,
            objective=objective,
            collect=collect,
        )
        drafts = self.greedy_drafts(student_hidden.detach(), lm_head_weight) if collect_drafts else None
        return TrainOutput(*distilled, drafts)

    @torch.no_grad()
    def greedy_drafts(self, student_hidden: Tensor, lm_head_weight: Tensor) -> Tensor:
        """The best token of the head that is trained, or with a speculator of its candidates: [..] for [.., d].

        A target's scale and soft-cap are monotone, so they do not change which one that is.
        """
        rows = lm_head_weight if self.own_head is None else self.own_head.weight.to(lm_head_weight.dtype)
        weights = None if self.speculator is None else self.speculator.head_weights(lm_head_weight)
        drafts = [torch.empty(0, dtype=torch.int64, device=student_hidden.device)]
        with torch.autocast(student_hidden.device.type, enabled=False):
            for hidden in student_hidden.to(lm_head_weight.dtype).flatten(0, -2).split(DRAFT_ROWS):
                if weights is not None:
                    drafts.append(HeadOutput(*vocab_head(hidden, weights)).greedy_tokens())
                else:
                    best = linear(hidden, rows).argmax(-1)
                    drafts.append(best if self.own_head is None else self.own_head.ids[best])
        return torch.cat(drafts).view(student_hidden.shape[:-1])
