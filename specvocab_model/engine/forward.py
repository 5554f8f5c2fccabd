"""The target's and the draft's layers over static caches, for trees and everything that is one: chains, prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from specvocab_model.draft import SpecVocabDraft
from specvocab_model.engine.attention import NAME, additive, column_positions, tree_visible
from specvocab_model.engine.cache import DraftMemory, DraftStore, StaticCache
from specvocab_model.target import Target, TargetOutput


class TargetForward:
    """Runs the target's own modules; a target with ``sdpa`` attention is switched to ``attention.tree_attention``."""

    def __init__(self, target: Target, *, batch_size: int, num_columns: int) -> None:
        spec, config = target.spec, target.model.config.to_dict()
        if target.model.config._attn_implementation == "sdpa":
            target.model.set_attn_implementation(NAME)
        grouped = target.model.config._attn_implementation == NAME
        self.target = target
        self.num_groups = spec.num_attention_heads // spec.num_key_value_heads if grouped else 1
        self.sliding_window: int | None = config.get("sliding_window")
        self.layer_types: list[str] | None = config.get("layer_types")
        types = self.layer_types or ["full_attention"] * spec.num_hidden_layers
        self.cache = StaticCache(
            [kind == "sliding_attention" for kind in types], batch_size=batch_size, num_columns=num_columns,
            num_heads=spec.num_key_value_heads, head_dim=spec.head_dim, like=target.lm_head_weight,
        )

    def __call__(
        self, token_ids: Tensor, lengths: Tensor, ancestors: Tensor, depths: Tensor, width: int
    ) -> TargetOutput:
        """Read the nodes of a tree after ``lengths`` [B] tokens of text, and leave them in the columns from there on.

        Args:
            token_ids: int64 [B, T]; ``depths``: int64 [B or 1, T], positions counted from ``lengths``.
            ancestors: bool [B or 1, T, T], what each node sees of the tree, itself included.
            width: columns in use, at least ``lengths + T``.
        """
        cursor = self.cache.cursor
        cursor.columns = lengths[:, None] + torch.arange(token_ids.shape[1], device=lengths.device)
        cursor.width = width
        return self.target.forward(
            token_ids, position_ids=lengths[:, None] + depths, past_key_values=self.cache,
            attention_mask=self._masks(lengths, ancestors, depths, width),
        )

    def _masks(self, lengths: Tensor, ancestors: Tensor, depths: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """See ``attention.additive``; by type of layer where there are several. Arguments as in ``__call__``."""
        dtype = self.target.lm_head_weight.dtype
        visible = tree_visible(lengths, ancestors, width)
        if self.sliding_window is None:
            return additive(visible, dtype, self.num_groups)
        oldest = (lengths[:, None] + depths - self.sliding_window)[:, :, None]
        near = visible & (column_positions(lengths, depths, width)[:, None] > oldest)
        if self.layer_types is None:
            return additive(near, dtype, self.num_groups)
        return {"full_attention": additive(visible, dtype, self.num_groups),
                "sliding_attention": additive(near, dtype, self.num_groups)}


class DraftForward:
    """Runs the draft's layer."""

    def __init__(self, target: Target, model: SpecVocabDraft, *, batch_size: int, num_columns: int) -> None:
        shape, weight = model.architecture, target.lm_head_weight
        self.target, self.draft = target, model.draft
        self.num_groups = shape.num_attention_heads // shape.num_key_value_heads
        size = (batch_size, shape.num_key_value_heads, num_columns, shape.head_dim)
        self.store = DraftStore(weight.new_zeros(size), weight.new_zeros(size))

    def __call__(
        self, hidden: Tensor, token_ids: Tensor, columns: Tensor, positions: Tensor, lengths: Tensor,
        ancestors: Tensor, width: int,
    ) -> Tensor:
        """One pass of the layer: pre-norm output [B, T, d].

        Args:
            hidden: [B, T, d], fused features or this function's own output.
            token_ids: int64 [B, T], the token after each position.
            columns, positions: int64 [B, T], where keys go and their rotary positions.
            lengths: int64 [B]; everybody sees the columns before it, and those from it on that ``ancestors``, bool
                [B or 1, T, N], marks.
            width: columns in use.
        """
        mask = additive(tree_visible(lengths, ancestors, width), hidden.dtype, self.num_groups)
        memory = DraftMemory(self.store, columns, mask, width)
        rotary = self.draft.rotary(hidden, positions)
        return self.draft.midlayer(hidden, self.target.embed(token_ids), rotary, memory)

    def read(self, features: Tensor, next_ids: Tensor, starts: Tensor, width: int) -> Tensor:
        """Step 0 at verified positions ``starts``, ``starts + 1``, ...: pre-norm output [B, T, d].

        Args:
            features: [B, T, 3d], the target's there; ``next_ids``: int64 [B, T], the token after each.
        """
        length = next_ids.shape[1]
        columns = starts[:, None] + torch.arange(length, device=starts.device)
        causal = torch.ones(1, length, length, dtype=torch.bool, device=starts.device).tril()
        return self(self.draft.fuse(features), next_ids, columns, columns, starts, causal, width)
