"""The target's and the draft's layers over static caches, for trees and everything that is one: chains, prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specvocab_model.compiled_layers import Fuse
from specvocab_model.draft import Draft, SpecVocabDraft
from specvocab_model.engine.attention import NAME, additive, causal_visible, column_positions, tree_visible
from specvocab_model.engine.cache import DraftMemory, DraftStore, StaticCache
from specvocab_model.target import Target, TargetOutput


class TargetForward:
    """Runs the target's own modules; a target with ``sdpa`` attention is switched to ``attention.tree_attention``."""

    def __init__(self, target: Target, *, batch_size: int, num_columns: int, fuse: Fuse) -> None:
        spec, config = target.spec, target.model.config.to_dict()
        if target.model.config._attn_implementation == "sdpa":
            target.model.set_attn_implementation(NAME)
        grouped = target.model.config._attn_implementation == NAME
        self.target = target
        self.num_groups = spec.num_attention_heads // spec.num_key_value_heads if grouped else 1
        self.sliding_window: int | None = config.get("sliding_window")
        self.layer_types: list[str] | None = config.get("layer_types")
        types = self.layer_types or ["full_attention"] * spec.num_hidden_layers
        self._masks = fuse(tree_masks)
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
            attention_mask=self._masks_of(lengths, ancestors, depths, width),
        )

    def _masks_of(self, lengths: Tensor, ancestors: Tensor, depths: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """By type of layer where there are several. Arguments as in ``__call__``."""
        dtype = self.target.lm_head_weight.dtype
        full, near = self._masks(lengths, ancestors, depths, self.sliding_window, width, dtype, self.num_groups)
        return near if self.layer_types is None else {"full_attention": full, "sliding_attention": near}


def tree_masks(
    lengths: Tensor, ancestors: Tensor, depths: Tensor, window: int | None, width: int, dtype: torch.dtype,
    num_groups: int,
) -> tuple[Tensor, Tensor]:
    """Of layers that see the whole text, and of those that see a window of it: see ``attention.additive``."""
    visible = tree_visible(lengths, ancestors, width)
    full = additive(visible, dtype, num_groups)
    if window is None:
        return full, full
    oldest = (lengths[:, None] + depths - window)[:, :, None]
    near = visible & (column_positions(lengths, depths, width)[:, None] > oldest)
    return full, additive(near, dtype, num_groups)


@dataclass(frozen=True, slots=True)
class DraftLayer:
    """The draft's layer with what it reads and writes beside its inputs."""

    draft: Draft
    embeddings: nn.Module  # the target's
    store: DraftStore
    cos: Tensor  # [C, D] of the rotary embedding at every position; where RoPE depends on the length, that of C tokens
    sin: Tensor

    def run(
        self, hidden: Tensor, token_ids: Tensor, columns: Tensor, positions: Tensor, visible: Tensor
    ) -> Tensor:
        """One pass: pre-norm output [B, T, d].

        Args:
            hidden: [B, T, d], fused features or this function's own output.
            token_ids: int64 [B, T], the token after each position.
            columns, positions: int64 [B, T], where keys go and their rotary positions.
            visible: bool [B, T, W], the columns that each position sees.
        """
        attention = self.draft.midlayer.self_attn
        num_groups = attention.q_proj.out_features // attention.k_proj.out_features
        memory = DraftMemory(self.store, columns, additive(visible, hidden.dtype, num_groups), visible.shape[2])
        rotary = self.cos[positions], self.sin[positions]
        return self.draft.midlayer(hidden, self.embeddings(token_ids), rotary, memory)


class DraftForward:
    """Runs the draft's layer. Every pass gives its output and, for the head, the same after the final norm."""

    def __init__(
        self, target: Target, model: SpecVocabDraft, *, batch_size: int, num_columns: int, num_steps: int, fuse: Fuse
    ) -> None:
        shape, weight = model.architecture, target.lm_head_weight
        size = (batch_size, shape.num_key_value_heads, num_columns, shape.head_dim)
        store = DraftStore(weight.new_zeros(size), weight.new_zeros(size))
        with torch.no_grad():
            cos, sin = model.draft.rotary(weight, torch.arange(num_columns, device=weight.device)[None])
        for stored in (store.keys, store.values):  # no symbols for what never varies
            torch._dynamo.mark_static(stored, [1, 3])
        self._layer = DraftLayer(model.draft, target.model.get_input_embeddings(), store, cos[0], sin[0])
        self._fill, self._read, self._follow, self._grow = fuse(fill), fuse(read), fuse(follow), fuse(grow)
        # Tensors of their own, because a number would be a constant of the code, and views may lie unaligned.
        self.steps = [torch.full((), step, device=weight.device) for step in range(num_steps)]

    def fill(self, features: Tensor, next_ids: Tensor, starts: Tensor, width: int) -> None:
        self._fill(self._layer, features, next_ids, starts, width)

    def read(
        self, features: Tensor, next_ids: Tensor, starts: Tensor, num_new: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._read(self._layer, features, next_ids, starts, num_new, width)

    def follow(
        self, hidden: Tensor, token_ids: Tensor, lengths: Tensor, step: int, width: int
    ) -> tuple[Tensor, Tensor]:
        return self._follow(self._layer, hidden, token_ids, lengths, self.steps[step], width)

    def grow(
        self, hidden: Tensor, token_ids: Tensor, seen: Tensor, lengths: Tensor, step: int, width: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._grow(self._layer, hidden, token_ids, seen, lengths, self.steps[step], width)


def fill(layer: DraftLayer, features: Tensor, next_ids: Tensor, starts: Tensor, width: int) -> Tensor:
    """Step 0 at verified positions ``starts``, ``starts + 1``, ...: pre-norm output [B, T, d].

    Args:
        features: [B, T, 3d], the target's there; ``next_ids``: int64 [B, T], the token after each.
        starts: int64 [B]; ``width``: columns in use.
    """
    columns = starts[:, None] + torch.arange(next_ids.shape[1], device=starts.device)
    return layer.run(layer.draft.fuse(features), next_ids, columns, columns, causal_visible(columns, width))


def read(
    layer: DraftLayer, features: Tensor, next_ids: Tensor, starts: Tensor, num_new: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, of which ``num_new`` int64 [B] positions count: output at the last of them, [B, 1, d] and normalised,
    and the length of the text that has been read, int64 [B]."""
    hidden = take(fill(layer, features, next_ids, starts, width), num_new[:, None] - 1)
    return hidden, layer.draft.norm(hidden), starts + num_new


def follow(
    layer: DraftLayer, hidden: Tensor, token_ids: Tensor, lengths: Tensor, step: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """The next step of a chain: output [B, 1, d], and normalised.

    Args:
        hidden: [B, 1, d], the last step's output; ``token_ids``: int64 [B], what was drafted from it.
        lengths: int64 [B], of the text; ``step``: int64 [], tokens that were drafted before. The draft reads a token at
            the position of the one before it.
    """
    columns = (lengths + step)[:, None]
    hidden = layer.run(hidden, token_ids[:, None], columns, columns, causal_visible(columns, width))
    return hidden, layer.draft.norm(hidden)


def grow(
    layer: DraftLayer, hidden: Tensor, token_ids: Tensor, seen: Tensor, lengths: Tensor, step: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A tree's layer: output [B, K, d], the same normalised, and ``seen`` with the nodes themselves.

    Args:
        hidden: [B, K, d], the output for each node's parent; ``token_ids``: int64 [B, K], the nodes.
        seen: bool [B, K, N], the nodes above each, by their columns counted from ``lengths`` int64 [B] on.
        step: int64 [], layers before this one. The nodes of a layer stand in one block of columns.
    """
    slots = step * token_ids.shape[1] + torch.arange(token_ids.shape[1], device=lengths.device)
    seen = seen | (torch.arange(seen.shape[2], device=lengths.device) == slots[:, None])
    positions = (lengths + step)[:, None].expand(token_ids.shape)
    hidden = layer.run(hidden, token_ids, lengths[:, None] + slots, positions, tree_visible(lengths, seen, width))
    return hidden, layer.draft.norm(hidden), seen


def take(rows: Tensor, index: Tensor) -> Tensor:
    """``rows`` [B, T, d] at ``index`` [B, n]: [B, n, d]."""
    return rows.gather(1, index[:, :, None].expand(-1, -1, rows.shape[2]))
