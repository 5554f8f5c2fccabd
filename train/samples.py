"""Drafted text for a person to read: which tokens of the target's answer the draft would have got right.

The unroll feeds every step with the true tokens, which are the drafted ones as long as all earlier steps were right. So
greedy decoding of a recorded answer can be followed through the drafts of a validation pass: a round starts at a
position, keeps the drafts that the answer agrees with, and the answer's own next token starts the next round. That is
what decoding would do, exactly, where the answer is the target's greedy one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specvocab_model.unroll import UnrollPlan
from train.packing import PADDING_DOCUMENT, Batch

MAX_PROMPT_TOKENS = 48  # the end of a prompt is shown
MAX_ANSWER_TOKENS = 128

NO_DRAFT = -1


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer with the draft's part in it."""

    id: str  # of the data set row
    pieces: list[tuple[str, str]]  # kind ("prompt", "target", "accepted" or "rejected") and text, in reading order
    num_rounds: int  # forwards of the target
    num_tokens: int  # of the answer; what was rejected is not part of it

    @property
    def tokens_per_round(self) -> float:
        return self.num_tokens / max(self.num_rounds, 1)

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.id, "tokens_per_round": round(self.tokens_per_round, 3), "pieces": self.pieces}


def by_start(drafts: Tensor, plan: UnrollPlan, num_positions: int) -> Tensor:
    """The draft of every step by the chain's start position, int64 [S, P]; ``NO_DRAFT`` where a step is not judged.

    Args:
        drafts: int64 [S, N], see ``SpecVocabDraft.forward``, on the CPU as ``plan`` is.
        num_positions: P, of the flattened rows.
    """
    rows = plan.rows
    placed = torch.full((len(drafts), num_positions + 1), NO_DRAFT, dtype=torch.int64)
    return placed.scatter_(1, torch.where(rows.valid, rows.student, num_positions), drafts)[:, :-1]


def make_samples(batch: Batch, drafts: Tensor, tokenizer: PreTrainedTokenizerBase, count: int) -> list[Sample]:
    """The first ``count`` documents of a batch in which anything was drafted.

    Args:
        batch: on the CPU; ``drafts`` [S, N] as in ``by_start``.
    """
    drafted = by_start(drafts.cpu(), batch.plan, batch.input_ids.numel()).unflatten(1, batch.input_ids.shape)
    samples = []
    names = iter(batch.row_ids)
    for row in range(batch.input_ids.shape[0]):
        documents = batch.document_ids[row]
        for document in [number for number in documents.unique().tolist() if number != PADDING_DOCUMENT]:
            name, at = next(names), (documents == document).nonzero()[:, 0]
            rounds = follow(batch.input_ids[row, at], drafted[:, row, at])
            if rounds:
                samples.append(_sample(name, batch.input_ids[row, at].tolist(), rounds, tokenizer))
            if len(samples) == count:
                return samples
    return samples


@dataclass(frozen=True, slots=True)
class Round:
    """One forward of the target over a chain of drafts."""

    first: int  # place of the first token it decides on
    num_accepted: int
    rejected: int | None  # the first draft that is wrong, if one is


def follow(input_ids: Tensor, drafted: Tensor) -> list[Round]:
    """The rounds in which decoding goes through a document [T], given the drafts [S, T] at every start.

    The chain from position ``t`` has read the token ``t + 1``, and its step ``i`` drafts token ``t + 2 + i``. Each
    round decides on the accepted tokens and one more, up to the end of the answer.
    """
    started = (drafted[0] != NO_DRAFT).nonzero()[:, 0].tolist()
    if not started:
        return []
    start, rounds = started[0], []
    while start + 2 < len(input_ids) and drafted[0, start] != NO_DRAFT:
        truth = input_ids[start + 2 : start + 2 + len(drafted)]
        chain = drafted[: len(truth), start]
        num_accepted = int((chain == truth).int().cumprod(0).sum())
        wrong = int(chain[num_accepted]) if num_accepted < len(chain) else NO_DRAFT
        rounds.append(Round(start + 2, num_accepted, None if wrong == NO_DRAFT else wrong))
        start += num_accepted + 1
    return rounds


def _sample(name: str, ids: list[int], rounds: list[Round], tokenizer: PreTrainedTokenizerBase) -> Sample:
    answer = rounds[0].first
    end = min(len(ids), answer + MAX_ANSWER_TOKENS)
    rounds = [one for one in rounds if one.first < end]
    kinds = [("prompt", max(0, answer - MAX_PROMPT_TOKENS), answer)]
    wrong_at = {}
    for one in rounds:
        accepted_end = min(one.first + one.num_accepted, end)
        kinds.append(("accepted", one.first, accepted_end))
        if one.rejected is not None:
            wrong_at[len(kinds)] = _decode([one.rejected], tokenizer)
        kinds.append(("target", accepted_end, min(accepted_end + 1, end)))
    texts = _texts(ids, [kinds[0][1], *(stop for _, _, stop in kinds)], tokenizer)
    pieces: list[tuple[str, str]] = []
    for index, ((kind, _, _), text) in enumerate(zip(kinds, texts, strict=True)):
        if index in wrong_at:
            pieces.append(("rejected", wrong_at[index]))
        if text:
            pieces.append((kind, text))
    return Sample(name, pieces, len(rounds), end - answer)


def _texts(ids: list[int], bounds: list[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the spans between ``bounds``; together they are the text of the whole.

    Decoding a span alone would lose its first space with some tokenizers, and a character whose bytes are in two spans.
    """
    begin = bounds[0]
    whole = _decode(ids[begin : bounds[-1]], tokenizer)
    cuts = [len(_decode(ids[begin:bound], tokenizer).rstrip("�")) for bound in bounds[:-1]]
    return [whole[first:last] for first, last in zip(cuts, [*cuts[1:], len(whole)], strict=True)]


def _decode(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode(ids)
    assert isinstance(text, str)  # transformers' type allows for a batch
    return text
