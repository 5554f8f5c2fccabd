"""Which positions of a packed batch are unrolled and judged, and the unroll itself.

Rows are flattened: position ``t`` of row ``b`` is index ``b * T + t``. Prompt positions only serve as keys, so of a
document the queries, the MLP and every later step are computed from its first start position that is judged on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from specvocab_kernels.unroll_attention import Spans
from torch import Tensor
from torch.nn.functional import linear, pad

from specvocab_model.attention import UnrollMemory
from specvocab_model.layers import rotate
from specvocab_model.transfers import send

if TYPE_CHECKING:
    from specvocab_model.draft import Draft


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """The teacher rows that some step is judged by, and the student rows that belong to each."""

    teacher: Tensor  # [N] index into the flattened [B * T] positions
    student: Tensor  # [S, N] likewise; the start position of step i; 0 where not valid
    valid: Tensor  # [S, N] bool


@dataclass(frozen=True, slots=True)
class UnrolledPositions:
    """The positions that every step is computed at: of each document none, or all from some position on."""

    index: Tensor  # [M] int64 into the flattened positions, ascending; M >= 1
    spans: Spans


@dataclass(frozen=True, slots=True)
class UnrollPlan:
    """All indices of one micro-batch.

    Their number depends on the data, so on a GPU making a plan waits for the device: make it from masks on the CPU.
    """

    unrolled: UnrolledPositions
    rows: JudgedRows
    student_at: Tensor  # [S, N]: ``rows.student`` as index into the M unrolled positions

    def to(self, device: torch.device) -> UnrollPlan:
        """Asynchronous, through pinned memory, from the CPU to a GPU."""
        return self.map(partial(send, device=device))

    def map(self, function: Callable[[Tensor], Tensor]) -> UnrollPlan:
        """The plan with what ``function`` makes of each of its tensors."""
        spans, rows = self.unrolled.spans, self.rows
        mapped = Spans(function(spans.query_offsets), function(spans.key_offsets), spans.max_queries, spans.max_keys)
        return UnrollPlan(
            UnrolledPositions(function(self.unrolled.index), mapped),
            JudgedRows(function(rows.teacher), function(rows.student), function(rows.valid)),
            function(self.student_at),
        )


def judged_rows(loss_mask: Tensor, document_ids: Tensor, num_steps: int) -> JudgedRows:
    """Find the positions that enter the loss.

    Step ``i`` at position ``t`` is valid where ``loss_mask[t+2+i] == 1`` and ``t+2+i`` lies in the same document as
    ``t``; it is judged by teacher row ``t+1+i``.

    Args:
        loss_mask, document_ids: [B, T] int.
    """
    seq_len = loss_mask.shape[1]
    at = torch.arange(seq_len, device=loss_mask.device)
    predicted = (at + 1).clamp(max=seq_len - 1)  # the token that teacher row `at` predicts
    supervised = (loss_mask[:, predicted] == 1) & (at + 1 < seq_len)
    valid = []
    for step in range(num_steps):
        start = at - 1 - step
        inside = document_ids[:, start.clamp(min=0)] == document_ids[:, predicted]
        valid.append(supervised & inside & (start >= 0))
    by_step = torch.stack(valid).flatten(1)  # [S, B * T]
    teacher = by_step.any(0).nonzero()[:, 0]
    steps = torch.arange(num_steps, device=loss_mask.device)[:, None]
    kept = by_step[:, teacher]
    return JudgedRows(teacher, torch.where(kept, teacher - 1 - steps, 0), kept)


def by_start(flags: Tensor, rows: JudgedRows, num_positions: int) -> Tensor:
    """``flags`` [S, N] bool by teacher row -> [S, B * T] by start position, as chains are followed; False elsewhere.

    A GPU need not wait: what is not valid goes to a column of its own, which is dropped.
    """
    placed = torch.zeros(flags.shape[0], num_positions + 1, dtype=torch.bool, device=flags.device)
    return placed.scatter_(1, torch.where(rows.valid, rows.student, num_positions), flags)[:, :-1]


def unrolled_positions(document_ids: Tensor, needed: Tensor) -> UnrolledPositions:
    """The fewest positions that include all of ``needed`` and reach to the end of their document.

    Args:
        document_ids: [B, T]; neighbouring documents differ.
        needed: [B * T] bool. Where none is, the batch's last position is taken: a step needs something to compute.
    """
    first_column = torch.ones_like(document_ids[:, :1], dtype=torch.bool)
    begins = torch.cat([first_column, document_ids[:, 1:] != document_ids[:, :-1]], dim=1).flatten()
    document = begins.cumsum(0) - 1  # [B * T]
    at = torch.arange(len(begins), device=begins.device)
    needed = needed | ((at == len(at) - 1) & ~needed.any())
    begin = begins.nonzero()[:, 0]
    first = torch.full_like(begin, len(at)).scatter_reduce(0, document, torch.where(needed, at, len(at)), "amin")
    unrolled = at >= first[document]
    num_queries = torch.zeros_like(begin).index_add_(0, document, unrolled.long())
    num_keys = torch.zeros_like(begin).index_add_(0, document, torch.ones_like(document))

    def offsets(lengths: Tensor) -> Tensor:
        return pad(lengths.cumsum(0), (1, 0)).int()

    spans = Spans(offsets(num_queries), offsets(num_keys), int(num_queries.max()), int(num_keys.max()))
    return UnrolledPositions(unrolled.nonzero()[:, 0], spans)


def plan_unroll(loss_mask: Tensor, document_ids: Tensor, num_steps: int) -> UnrollPlan:
    """Plan a micro-batch from its masks [B, T]."""
    rows = judged_rows(loss_mask, document_ids, num_steps)
    needed = torch.zeros(loss_mask.numel(), dtype=torch.bool, device=loss_mask.device)
    needed[rows.student[rows.valid]] = True
    unrolled = unrolled_positions(document_ids, needed)
    place = torch.zeros(loss_mask.numel(), dtype=torch.int64, device=loss_mask.device)
    place[unrolled.index] = torch.arange(len(unrolled.index), device=loss_mask.device)
    return UnrollPlan(unrolled, rows, torch.where(rows.valid, place[rows.student], 0))


class _TakeRows(torch.autograd.Function):
    """``index_select`` of different rows: their gradients can be copied, where its own backward adds with atomics."""

    @staticmethod
    def forward(ctx, rows, index):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(index)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_rows, *grad.shape[1:]).index_copy_(0, index, grad), None


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Rows ``index`` [M], no two the same, of ``rows`` [N, ..]."""
    return _TakeRows.apply(rows, index)


def unroll(
    draft: Draft,
    features: Tensor,
    token_embeds: Tensor,
    position_ids: Tensor,
    unrolled: UnrolledPositions,
    num_steps: int,
) -> Sequence[Tensor]:
    """All steps of EAGLE-3's training-time test.

    Step ``i`` at position ``t`` reads the token ``x[t+1+i]`` and its own output of step ``i-1`` at the same ``t``, at
    rotary position ``t+i``. Where that token lies past the end of the document it may be any: nothing valid depends on
    it.

    Args:
        features: [B, T, 3d]; ``token_embeds``: [B, T, d] of the row's own tokens, unshifted.
        position_ids: [B, T], starting again at 0 in every document.

    Returns:
        S tensors [M, d] at the unrolled positions, before the final norm.
    """
    layer, index = draft.midlayer, unrolled.index
    positions = position_ids.flatten()
    # The embedding's share of query, key and value is linear and the same at every step: one product serves all.
    token_weight, hidden_weight = layer.self_attn.split_weights()
    tokens = pad(token_embeds.flatten(0, 1), (0, 0, 0, num_steps))  # the last positions read past the end
    token_part = linear(layer.input_layernorm(tokens), token_weight)
    hidden_weight = hidden_weight.to(token_part.dtype)
    memory = UnrollMemory(unrolled.spans)
    hidden = draft.fuse(features.flatten(0, 1))
    outputs: list[Tensor] = []
    for step in range(num_steps):
        # Step 0 leaves a key at every position, so it projects all of them.
        at = index if step else torch.arange(len(positions), device=index.device)
        part = take_rows(token_part, at + 1 + step)
        normed, residual = layer.enter(hidden)
        projected = torch.addmm(part, normed, hidden_weight.mT)
        query, key, value = layer.self_attn.split_heads(projected)
        cos, sin = draft.rotary(hidden, (positions[at] + step)[None])
        query, key = rotate(query, cos[0], sin[0]), rotate(key, cos[0], sin[0])
        if step == 0:
            query, residual = take_rows(query, index), take_rows(residual, index)
        hidden = layer.finish(residual, memory.attend(query, key, value))
        outputs.append(hidden)
    return outputs
