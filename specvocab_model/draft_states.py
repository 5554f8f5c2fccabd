"""What a draft's unroll leaves behind on some text: enough to judge any head on it without running a model again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from specvocab_kernels.vocab_head import HeadWeights, approximate_logits
from torch import Tensor
from torch.nn.functional import linear, pad
from tqdm import tqdm

from specvocab_model.acceptance import prefix_products
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.speculator import VocabSpeculator, candidate_rule, collect_final_hidden
from specvocab_model.target import Target
from specvocab_model.unroll import JudgedRows, UnrollPlan, by_start, plan_unroll, unroll

ROWS_AT_ONCE = 128  # whose logits over the whole vocabulary exist at one time


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStates:
    """Draft outputs of ``S`` unroll steps at ``N`` teacher rows, and what target and draft would say there."""

    hidden: Tensor  # [S, N, d], after the draft's final norm; meaningless where a step is not valid
    target_ids: Tensor  # [N] int64, the target's most probable token
    draft_ids: Tensor  # [S, N] int64, the draft's under the full head
    rows: JudgedRows  # with positions counted through all documents
    num_positions: int

    @property
    def num_valid(self) -> int:
        return int(self.rows.valid.sum())

    def share(self, flags: Tensor) -> float:
        """Share of the valid positions of all steps where ``flags`` [S, N] holds."""
        return int((flags & self.rows.valid).sum()) / self.num_valid

    def simulated_tau(self, in_candidates: Tensor | None = None) -> float:
        """Of the full head, or of one whose candidates hold the target's token where ``in_candidates`` [S, N] says so.

        The same number as ``simulated_tau/*`` of training, see ``acceptance.summarise``.
        """
        right = self.draft_ids == self.target_ids
        if in_candidates is not None:
            right = right & in_candidates
        valid = by_start(self.rows.valid, self.rows, self.num_positions)
        _, survived = prefix_products(by_start(right, self.rows, self.num_positions), valid)
        return 1.0 + int(survived.sum()) / max(int(valid[0].sum()), 1)


@torch.no_grad()
def collect_draft_states(
    target: Target, model: SpecVocabDraft, rows: Iterable[Any], *, num_steps: int, num_tokens: int
) -> DraftStates:
    """Unroll the draft over documents, one at a time, at the positions that training would judge.

    Args:
        model: placed with ``decode.place_draft``.
        rows: with ``input_ids`` and ``loss_mask``.
        num_tokens: stop after this many teacher rows.

    Raises:
        ValueError: no position of the rows can be judged.
    """
    parts: list[DraftStates] = []
    num_positions, left = 0, num_tokens
    with tqdm(total=num_tokens, desc="draft states", unit=" tokens") as progress:
        for row in rows:
            if left <= 0:
                break
            input_ids = torch.tensor([list(row["input_ids"])], dtype=torch.long, device=target.device)
            loss_mask = torch.tensor([list(row["loss_mask"])])
            plan = plan_unroll(loss_mask, torch.zeros_like(loss_mask), num_steps).to(target.device)
            if len(plan.rows.teacher):
                parts.append(_unrolled(target, model, input_ids, plan, num_positions))
                num_positions += input_ids.shape[1]
                progress.update(min(left, len(plan.rows.teacher)))
                left -= len(plan.rows.teacher)
        progress.total = progress.n  # the rows may hold less than was asked for
        progress.refresh()
    if not parts:
        raise ValueError("no document has a supervised token after its second one; give other data")
    return _join(parts, num_positions)


@torch.no_grad()
def collect_target_states(target: Target, rows: Iterable[Any], num_tokens: int) -> DraftStates:
    """The target's own final hidden states in the place of a draft's: what a perfect draft of one step would give."""
    hidden = torch.cat(list(collect_final_hidden(target, rows, num_tokens)))
    ids = _most_probable(target.lm_head_weight, hidden)
    at = torch.arange(len(hidden), device=hidden.device)
    rows_of = JudgedRows(at, at[None], torch.ones_like(at, dtype=torch.bool)[None])
    return DraftStates(hidden=hidden[None], target_ids=ids, draft_ids=ids[None], rows=rows_of, num_positions=len(at))


def _unrolled(target: Target, model: SpecVocabDraft, input_ids: Tensor, plan: UnrollPlan, offset: int) -> DraftStates:
    output = target.forward(input_ids)
    positions = torch.arange(input_ids.shape[1], device=target.device)[None]
    num_steps = plan.rows.valid.shape[0]
    steps = unroll(model.draft, output.features, target.embed(input_ids), positions, plan.unrolled, num_steps)
    hidden = model.draft.norm(torch.stack([step[at] for step, at in zip(steps, plan.student_at, strict=True)]))
    top = partial(_most_probable, model.lm_head_weight(target))
    return DraftStates(
        hidden=hidden,
        target_ids=_most_probable(target.lm_head_weight, output.final_hidden[0, plan.rows.teacher]),
        draft_ids=torch.stack([top(states) for states in hidden]),
        rows=JudgedRows(plan.rows.teacher + offset, plan.rows.student + offset, plan.rows.valid),
        num_positions=0,
    )


def _most_probable(lm_head: Tensor, hidden: Tensor) -> Tensor:
    """A target's scale and soft-cap are monotone, so they do not change which token that is."""
    return torch.cat([linear(chunk.to(lm_head.dtype), lm_head).argmax(-1) for chunk in hidden.split(ROWS_AT_ONCE)])


def _join(parts: list[DraftStates], num_positions: int) -> DraftStates:
    return DraftStates(
        hidden=torch.cat([part.hidden for part in parts], 1),
        target_ids=torch.cat([part.target_ids for part in parts]),
        draft_ids=torch.cat([part.draft_ids for part in parts], 1),
        rows=JudgedRows(
            torch.cat([part.rows.teacher for part in parts]),
            torch.cat([part.rows.student for part in parts], 1),
            torch.cat([part.rows.valid for part in parts], 1),
        ),
        num_positions=num_positions,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """How well the candidates of a head cover what target and draft say."""

    target_top1: float
    draft_top1: float
    simulated_tau: float


def coverage(states: DraftStates, in_target: Tensor, in_draft: Tensor) -> Coverage:
    """From whether the target's and the draft's most probable tokens are candidates, [S, N] bool each."""
    return Coverage(
        target_top1=states.share(in_target),
        draft_top1=states.share(in_draft),
        simulated_tau=states.simulated_tau(in_target),
    )


def measure_coverage(states: DraftStates, weights: HeadWeights) -> Coverage:
    """Of the candidates that a head with these weights selects."""
    num_tiles, keep = candidate_rule(weights.selection)
    ((target_ranks, draft_ranks),) = candidate_ranks(states, weights, [num_tiles])
    return coverage(states, target_ranks < keep, draft_ranks < keep)


def quantization_cost(
    states: DraftStates, lm_head: Tensor, *, before: VocabSpeculator, after: VocabSpeculator
) -> dict[str, Any]:
    """What rounding ``before`` to the 8 bits of ``after`` does to the coverage, as recorded in checkpoints."""
    measured = {"before": before, "after": after}
    return {
        "quantization": after.quantization,
        "num_positions": states.num_valid,
        **{name: asdict(measure_coverage(states, one.head_weights(lm_head))) for name, one in measured.items()},
    }


def describe_cost(cost: dict[str, Any], positions: str) -> str:
    """``quantization_cost`` for a person; ``positions``: of what."""
    before, after = cost["before"], cost["after"]
    return "\n".join([
        f"vocab_proj rounded to {cost['quantization']}; on {cost['num_positions']} {positions} the candidates hold",
        *(f"  {before[key]:.2%} -> {after[key]:.2%} of the {whose} most probable tokens"
          for key, whose in (("target_top1", "target's"), ("draft_top1", "full-vocabulary draft's"))),
        f"  simulated acceptance length {before['simulated_tau']:.4f} -> {after['simulated_tau']:.4f}",
    ])


@torch.no_grad()
def candidate_ranks(
    states: DraftStates, weights: HeadWeights, nums_tiles: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """Ids of the same tile that score strictly above the target's and the draft's token, for several tilings at once.

    Returns:
        For each of ``nums_tiles`` the ranks of the target's and of the draft's tokens, int64 [S, N]. See
        ``speculator.candidate_rule`` for what becomes a candidate.
    """
    shape = states.draft_ids.shape
    hidden, draft_ids = states.hidden.flatten(0, 1), states.draft_ids.flatten()
    target_ids = states.target_ids.expand(shape).flatten()
    found: list[list[Tensor]] = [[] for _ in nums_tiles]
    for at in torch.arange(len(hidden), device=hidden.device).split(ROWS_AT_ONCE):
        scores = approximate_logits(hidden[at], weights)
        ids = torch.stack([target_ids[at], draft_ids[at]], 1)
        for ranks, num_tiles in zip(found, nums_tiles, strict=True):
            ranks.append(ranks_in_tiles(scores, ids, num_tiles))
    joined = [torch.cat(ranks).unflatten(0, shape).unbind(-1) for ranks in found]
    return [(target, draft) for target, draft in joined]


def ranks_in_tiles(scores: Tensor, ids: Tensor, num_tiles: int) -> Tensor:
    """How many ids equal to ``ids`` [n, q] modulo ``num_tiles`` have a larger of the ``scores`` [n, V]; [n, q]."""
    tiled = pad(scores, (0, -scores.shape[1] % num_tiles), value=-torch.inf).unflatten(1, (-1, num_tiles))
    row = torch.arange(len(scores), device=scores.device)

    def rank(wanted: Tensor) -> Tensor:
        tile = tiled[row, :, wanted % num_tiles]  # [n, tile]
        return (tile > scores[row, wanted][:, None]).sum(1)

    return torch.stack([rank(wanted) for wanted in ids.unbind(1)], 1)
