"""Figures of the comparison of heads, from rounds written by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specvocab_model.comparison.costs import RoundCost
from specvocab_model.comparison.records import (
    Records,
    Round,
    TurnRecord,
    acceptance_per_position,
    kind_of,
    kinds_outside,
    outside,
    recall,
    rounds,
    summarise,
    tau,
    tau_by_context,
)
from specvocab_model.config import ConfigError

# Prefill gives 10. Three drafts, two right, then 13. Three drafts, none right: 14. One draft, right, then 16.
RECORD = TurnRecord(
    head="h", prompt="p", turn=0, category="code", num_prompt_tokens=125, sequences=[10, 11, 12, 13, 14, 15, 16],
    num_target_forwards=4, accepted=[2, 0, 1], proposed=[3, 3, 1], seconds=2.0, num_baseline_tokens=9,
    baseline_seconds=5.0, recall=[6, 3, 5], top2_gap=None,
)
# The second draft accepted is an EOS, which ends the text inside the chain.
ENDED = replace(RECORD, prompt="q", category="chat", sequences=[10, 11, 2], num_target_forwards=2, accepted=[2],
                proposed=[3], recall=None, top2_gap=1e-5)


def test_rounds_of_a_turn():
    assert list(rounds(RECORD)) == [
        Round(125, 1, 0, 0, None), Round(126, 3, 2, 3, 13), Round(129, 1, 0, 3, 14), Round(130, 2, 1, 1, None)]
    assert list(rounds(ENDED)) == [Round(125, 1, 0, 0, None), Round(126, 2, 2, 3, None)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8), st.integers(0, 3))
def test_rounds_give_every_token_once(chains, cut):
    proposed = [max(pair) for pair in chains]
    accepted = [min(pair) for pair in chains]
    num_tokens = 1 + sum(count + 1 for count in accepted)
    if accepted and cut <= accepted[-1]:  # an EOS in the last chain, which is cut after it
        num_tokens -= cut
        accepted[-1] -= max(0, cut - 1)
    record = replace(RECORD, sequences=list(range(num_tokens)), accepted=accepted, proposed=proposed)
    found = list(rounds(record))
    assert sum(one.num_emitted for one in found) == num_tokens and len(found) == 1 + len(chains)
    for number, one in enumerate(found):
        assert one.context == 125 + sum(earlier.num_emitted for earlier in found[:number])


def test_figures_of_a_head():
    both = [RECORD, ENDED]
    assert tau(both) == (7 + 3) / (4 + 2)
    assert tau_by_context(both) == {"0": (1 + 3 + 1 + 2) / 4, "128": (1 + 2) / 2}
    assert acceptance_per_position(both) == [3 / 4, 2 / 3, 0 / 3]
    assert recall(both) == {"target_top1": 0.5, "draft_top1": 5 / 6} and recall([ENDED]) is None
    summary = summarise(both)
    assert summary["tau_per_category"] == {"code": 7 / 4, "chat": 3 / 2}
    assert (summary["tokens_per_second"], summary["num_tokens"]) == (10 / 4, 10)
    assert summary["speed_up"] == (10 / 4) / (18 / 10)  # when sampled, plain decoding ends elsewhere
    assert (summary["differing_turns"], summary["largest_gap_of_a_difference"]) == (1, 1e-5)
    json.dumps(summary)


def test_what_a_static_vocabulary_cannot_say():
    kept = torch.ones(20, dtype=torch.bool)
    kept[[13, 16]] = False
    full = replace(RECORD, accepted=[3, 2], proposed=[3, 3], num_target_forwards=3)
    found = outside([RECORD, ENDED], [full, ENDED], kept)
    assert list(found) == ["all", "code", "chat"]
    assert found["code"] == {"num_tokens": 7, "outside": 2 / 7, "ended": 1 / 3, "tau": 7 / 4, "tau_full": 7 / 3}
    assert found["chat"]["outside"] == found["chat"]["ended"] == 0
    assert found["all"]["ended"] == 1 / 4 and found["all"]["outside"] == 2 / 10

    text_of = {2: "<eos>", 10: " the", 11: " Paris", 12: "42", 13: "é", 14: "\n", 15: " x", 16: "ü"}
    kinds = kinds_outside([RECORD], kept, text_of)
    assert kinds["not ASCII"] == {"share": 2 / 7, "outside": 1.0}
    assert kinds["word"] == {"share": 2 / 7, "outside": 0.0} and set(kinds) == {
        "word", "capitalised", "number", "not ASCII", "white space"}


@pytest.mark.parametrize("text, kind", [
    (" word", "word"), ("Ġ", "not ASCII"), (" Anna", "capitalised"), ("7", "number"), ("²", "not ASCII"),
    ("def(", "punctuation and code"), ("", "white space"), ("�", "not ASCII"),
])
def test_kinds_of_tokens(text, kind):
    assert kind_of(text) == kind


def test_records_survive_a_kill(tmp_path: Path):
    path = tmp_path / "turns.jsonl"
    records = Records(path)
    second = replace(RECORD, turn=1, sequences=[1])
    for record in (RECORD, second, ENDED):
        records.append(record)
    assert records.has("h", "p", 2) and not records.has("h", "p", 3) and not records.has("other", "p", 2)
    path.write_text(path.read_text() + json.dumps(asdict(RECORD))[:40])
    again = Records(path)
    assert again.of("h", ["q", "p"]) == [ENDED, RECORD, second]
    again.append(replace(RECORD, turn=2))
    assert Records(path).has("h", "p", 3)
    path.write_text('{"head"')
    assert not Records(path).has("h", "p", 1) and path.read_text() == ""


@pytest.mark.parametrize("line", ['{"head": "of another version"}', "no JSON", "[]"])
def test_records_that_cannot_be_read_are_named(line, tmp_path: Path):
    path = tmp_path / "turns.jsonl"
    path.write_text(f"{json.dumps(asdict(RECORD))}\n{line}\n")
    with pytest.raises(ConfigError, match=r"line 2 of .*turns\.jsonl is no record of this version .* remove the file"):
        Records(path)


def test_kappa_relates_heads_to_the_rest():
    cost = RoundCost(seconds=0.5, num_bytes=1000)
    assert cost.kappa(0.1, 5) == 1.0 and cost.kappa_of_bytes(100, 3) == 0.3
