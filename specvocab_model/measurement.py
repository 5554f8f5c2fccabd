"""What is counted while a draft is evaluated: tokens, forwards, seconds, accepted drafts, candidate recall."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from specvocab_model.decode import DecodeOutput, Proposal
from specvocab_model.heads import Head

RECALL_ROWS = 128  # positions whose full-vocabulary logits exist at one time


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Where an output leaves the autoregressive one."""

    id: str
    turn: int
    position: int  # index of the first new token that differs
    top2_gap: float  # the target's best logit there minus its second best; of the order of rounding for a tie


@dataclass(slots=True)
class Measurement:
    """Sums over all decoded turns of one way to decode."""

    num_tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))  # by category
    num_target_forwards: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    seconds: float = 0.0
    num_proposed: list[int] = field(default_factory=list)  # by position in the chain
    num_accepted: list[int] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    recall: CandidateRecall | None = None

    def add(self, category: str, output: DecodeOutput, seconds: float) -> None:
        self.num_tokens[category] += len(output.sequences)
        self.num_target_forwards[category] += output.num_target_forwards
        self.seconds += seconds
        longest = max(output.proposals, default=0)
        for counts in (self.num_proposed, self.num_accepted):
            counts.extend([0] * (longest - len(counts)))
        for proposed, accepted in zip(output.proposals, output.accepted_per_round, strict=True):
            for i in range(proposed):
                self.num_proposed[i] += 1
                self.num_accepted[i] += i < accepted

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per target forward, pooled."""
        return sum(self.num_tokens.values()) / sum(self.num_target_forwards.values())

    @property
    def tokens_per_second(self) -> float:
        return sum(self.num_tokens.values()) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """Everything a report needs, as JSON types."""
        return {
            "tau": self.tau,
            "tau_per_category": {
                name: tokens / self.num_target_forwards[name] for name, tokens in self.num_tokens.items()
            },
            "acceptance_per_position": [
                accepted / proposed for accepted, proposed in zip(self.num_accepted, self.num_proposed, strict=True)
            ],
            "tokens_per_second": self.tokens_per_second,
            "num_tokens": sum(self.num_tokens.values()),
            "num_tokens_per_category": dict(self.num_tokens),
            "num_target_forwards": sum(self.num_target_forwards.values()),
            "seconds": self.seconds,
            "differences": [asdict(difference) for difference in self.differences],
            "candidate_recall": self.recall.to_dict() if self.recall is not None else None,
        }

    def state(self) -> dict[str, Any]:
        """All sums, as JSON types, for ``restore``."""
        return {
            "num_tokens": dict(self.num_tokens), "num_target_forwards": dict(self.num_target_forwards),
            "seconds": self.seconds, "num_proposed": self.num_proposed, "num_accepted": self.num_accepted,
            "differences": [asdict(difference) for difference in self.differences],
            "recall": None if self.recall is None else self.recall.counts,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from the sums of another process, of which there are none here yet."""
        self.num_tokens.update(state["num_tokens"])
        self.num_target_forwards.update(state["num_target_forwards"])
        self.seconds, self.num_proposed, self.num_accepted = (
            state[name] for name in ("seconds", "num_proposed", "num_accepted"))
        self.differences = [Difference(**each) for each in state["differences"]]
        if self.recall is not None:
            self.recall.counts = state["recall"]


class CandidateRecall:
    """Share of judged draft positions whose reference token is among the head's candidates.

    Judged are the accepted drafts of a chain and the first rejected one: what follows a rejection, or an EOS, continues
    a text that does not exist. References: the target's argmax there (``target_top1``), and the argmax of the full head
    on the same draft output (``draft_top1``).
    """

    def __init__(self, full_head: Head):
        self.full_head = full_head
        self.hidden: list[Tensor] = []
        self.candidates: list[Tensor] = []
        self.target_ids: list[Tensor] = []
        self.counts = [0, 0, 0]  # judged positions; of these, the target's and the draft's token was a candidate

    def observe(self, proposal: Proposal, target_logits: Tensor, num_emitted: int) -> None:
        """Remember one verification of ``n`` drafts, with ``target_logits`` [n + 1, V]; see ``decode.Observer``.

        Cheap, because it happens inside the measured time.
        """
        num_judged = min(num_emitted, len(proposal.token_ids))
        self.hidden.append(proposal.hidden[:num_judged])
        for ids in proposal.candidates[:num_judged]:
            assert ids is not None
            self.candidates.append(ids)
        self.target_ids.append(target_logits[:num_judged].argmax(-1))

    @torch.inference_mode()
    def count(self) -> tuple[int, int, int]:
        """Add what was remembered to ``counts``, and forget it; returns what was added."""
        if not self.hidden:
            return 0, 0, 0
        added = [0, 0, 0]
        hidden, target_ids, remembered = torch.cat(self.hidden), torch.cat(self.target_ids), self.candidates
        self.hidden, self.target_ids, self.candidates = [], [], []
        for start in range(0, len(hidden), RECALL_ROWS):
            at = slice(start, start + RECALL_ROWS)
            rows, ids, candidates = hidden[at], target_ids[at], torch.stack(remembered[at])
            added[0] += len(rows)
            added[1] += int((candidates == ids[:, None]).any(-1).sum())
            added[2] += int((candidates == self.full_head(rows).greedy_tokens()[:, None]).any(-1).sum())
        self.counts = [before + new for before, new in zip(self.counts, added, strict=True)]
        return added[0], added[1], added[2]

    def to_dict(self) -> dict[str, float | int | None]:
        num_positions, num_target_hits, num_draft_hits = self.counts
        share = (lambda hits: hits / num_positions) if num_positions else (lambda hits: None)
        return {
            "target_top1": share(num_target_hits),
            "draft_top1": share(num_draft_hits),
            "num_positions": num_positions,
        }
