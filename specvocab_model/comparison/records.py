"""What every head did with every turn of every prompt, on disk, and what follows from it.

One line of JSON a turn, written when the turn has been decoded: a comparison that is killed, or given another head or
prompt later, decodes only what is not there yet. All figures are computed from these lines.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specvocab_model.config import ConfigError

CONTEXT_BUCKETS = (0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens, prompt included; the least of each


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn of a prompt, decoded with one head."""

    head: str  # digest of everything that decides it
    prompt: str  # digest of what is asked
    turn: int
    category: str
    num_prompt_tokens: int
    sequences: list[int]  # new tokens
    num_target_forwards: int
    accepted: list[int]  # by verification, as in DecodeOutput
    proposed: list[int]
    seconds: float
    num_baseline_tokens: int  # of plain decoding of the same turn, a moment before
    baseline_seconds: float
    recall: list[int] | None  # judged positions; of these with the target's, with the full head's token as a candidate
    top2_gap: float | None  # between the target's best logits where the output leaves the target's own; None: nowhere


@dataclass(frozen=True, slots=True)
class Round:
    """One forward of the target: the prefill, or a verification."""

    context: int  # tokens before it
    num_emitted: int
    num_accepted: int
    num_proposed: int
    rejecting: int | None  # the target's token in the place of the first rejected draft


def rounds(record: TurnRecord) -> Iterator[Round]:
    """In their order. A verification emits what it accepts and one token more, unless an EOS cuts it."""
    yield Round(record.num_prompt_tokens, 1, 0, 0, None)
    at = 1
    for accepted, proposed in zip(record.accepted, record.proposed, strict=True):
        end = min(at + accepted + 1, len(record.sequences))
        rejected = accepted < proposed and at + accepted < end
        yield Round(record.num_prompt_tokens + at, end - at, accepted, proposed,
                    record.sequences[at + accepted] if rejected else None)
        at = end


class Records:
    """The lines of one file.

    Args:
        path: made with the first line. The rest of a line that a killed run left at its end is removed.

    Raises:
        ConfigError: another line is damaged, or of another version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._of: dict[tuple[str, str], dict[int, TurnRecord]] = defaultdict(dict)
        if path.exists():
            whole, _, rest = path.read_bytes().rpartition(b"\n")
            if rest:
                path.write_bytes(whole + b"\n" if whole else b"")
            for number, line in enumerate(whole.splitlines(), start=1):
                try:
                    self._remember(TurnRecord(**json.loads(line)))
                except (ValueError, TypeError) as error:  # not JSON, or other fields
                    raise ConfigError(f"line {number} of {path} is no record of this version ({error}); remove the "
                                      "file: its turns are decoded again") from error

    def _remember(self, record: TurnRecord) -> None:
        self._of[record.head, record.prompt][record.turn] = record

    def append(self, record: TurnRecord) -> None:
        self._remember(record)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")

    def has(self, head: str, prompt: str, num_turns: int) -> bool:
        """Whether every turn of a prompt has been decoded with a head."""
        return self._of[head, prompt].keys() == set(range(num_turns))

    def of(self, head: str, prompts: Iterable[str]) -> list[TurnRecord]:
        """All turns of ``prompts`` with a head."""
        return [record for prompt in prompts for _, record in sorted(self._of[head, prompt].items())]


def tau_by_category(records: Sequence[TurnRecord]) -> dict[str, float]:
    """τ of the turns of each category, in the order of the prompts."""
    grouped: dict[str, list[TurnRecord]] = defaultdict(list)
    for record in records:
        grouped[record.category].append(record)
    return {category: tau(of_category) for category, of_category in grouped.items()}


def tau(records: Sequence[TurnRecord]) -> float:
    """Acceptance length: tokens per forward of the target, pooled."""
    return sum(len(one.sequences) for one in records) / sum(one.num_target_forwards for one in records)


def tau_by_context(records: Sequence[TurnRecord]) -> dict[str, float]:
    """τ of the forwards whose context has so many tokens: ``{"128": 2.1}`` from 128 tokens to the next bucket."""
    emitted, forwards = [0] * len(CONTEXT_BUCKETS), [0] * len(CONTEXT_BUCKETS)
    for one in (each for record in records for each in rounds(record)):
        bucket = sum(least <= one.context for least in CONTEXT_BUCKETS) - 1
        emitted[bucket] += one.num_emitted
        forwards[bucket] += 1
    return {str(least): tokens / count for least, tokens, count in zip(CONTEXT_BUCKETS, emitted, forwards, strict=True)
            if count}


def acceptance_per_position(records: Sequence[TurnRecord]) -> list[float]:
    """Share of the drafts at each place of a chain that were accepted."""
    every = [one for record in records for one in rounds(record) if one.num_proposed]
    longest = max((one.num_proposed for one in every), default=0)
    return [sum(one.num_accepted > i for one in every) / sum(one.num_proposed > i for one in every)
            for i in range(longest)]


def recall(records: Sequence[TurnRecord]) -> dict[str, float] | None:
    """Shares of judged positions whose token, the target's or the full head's, was a candidate; None: no candidates."""
    counts = [one.recall for one in records if one.recall is not None]
    judged, target, draft = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
    return {"target_top1": target / judged, "draft_top1": draft / judged} if judged else None


def baseline_tokens_per_second(records: Sequence[TurnRecord]) -> float:
    """Of plain decoding beside ``records``."""
    return sum(one.num_baseline_tokens for one in records) / sum(one.baseline_seconds for one in records)


def summarise(records: Sequence[TurnRecord]) -> dict[str, Any]:
    """The figures of one head, as JSON types."""
    gaps = [one.top2_gap for one in records if one.top2_gap is not None]
    num_tokens = sum(len(one.sequences) for one in records)
    tokens_per_second = num_tokens / sum(one.seconds for one in records)
    return {
        "tau": tau(records),
        "tau_per_category": tau_by_category(records),
        "tau_per_context": tau_by_context(records),
        "acceptance_per_position": acceptance_per_position(records),
        "candidate_recall": recall(records),
        "num_tokens": num_tokens,
        "tokens_per_second": tokens_per_second,
        "speed_up": tokens_per_second / baseline_tokens_per_second(records),
        "differing_turns": len(gaps),
        "largest_gap_of_a_difference": max(gaps, default=None),
    }


def outside(records: Sequence[TurnRecord], full: Sequence[TurnRecord], kept: Tensor) -> dict[str, dict[str, float]]:
    """By category, and under ``all``: what a static vocabulary cannot say, and what that costs.

    Args:
        records: of the static head, ``full`` of the full one on the same turns.
        kept: bool [V] (``VocabMap.t2d``).

    Returns:
        ``num_tokens`` of the target's text; ``outside``: their share that is not kept; ``ended``: the share of all
        verifications that a token outside ended; ``tau`` and ``tau_full``. The text is the target's either way.
    """
    categories = dict.fromkeys(one.category for one in records)
    found = {}
    for category in ("all", *categories):
        own, whole = ([one for one in turns if category in ("all", one.category)] for turns in (records, full))
        tokens = [token for one in own for token in one.sequences]
        ends = [one.rejecting for record in own for one in rounds(record) if one.num_proposed]
        found[category] = {
            "num_tokens": len(tokens),
            "outside": sum(not kept[token] for token in tokens) / len(tokens),
            "ended": sum(end is not None and not kept[end] for end in ends) / max(len(ends), 1),
            "tau": tau(own),
            "tau_full": tau(whole),
        }
    return found


def kinds_outside(
    records: Sequence[TurnRecord], kept: Tensor, text_of: Mapping[int, str]
) -> dict[str, dict[str, float]]:
    """By kind of token (``kind_of``): its share of the target's text, and the share of it that is not kept."""
    kinds: dict[str, list[bool]] = defaultdict(list)
    for token in (token for one in records for token in one.sequences):
        kinds[kind_of(text_of[token])].append(bool(kept[token]))
    total = sum(map(len, kinds.values()))
    return {kind: {"share": len(flags) / total, "outside": 1 - sum(flags) / len(flags)}
            for kind, flags in sorted(kinds.items())}


def kind_of(text: str) -> str:
    """A token by what it looks like. Capitalised words are mostly names and the beginnings of sentences."""
    word = text.strip()
    if any(ord(character) > 127 for character in word):
        return "not ASCII"
    if word.isdigit():
        return "number"
    if word.isalpha():
        return "capitalised" if word[0].isupper() else "word"
    return "white space" if not word else "punctuation and code"
