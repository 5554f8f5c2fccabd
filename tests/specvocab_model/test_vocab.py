from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from specvocab_model.config import ConfigError
from specvocab_model.vocab import VocabMap, count_ids, most_frequent, special_ids
from tests.tiny import EOS_IDS, TOKENIZER_LENGTH, tiny_tokenizer

vocabularies = st.integers(1, 40).flatmap(
    lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1), min_size=1))
)


@given(vocabularies)
def test_maps_survive_being_written_and_read(vocabulary):
    vocab_size, kept = vocabulary
    vocab = VocabMap.from_ids(kept, vocab_size)
    assert len(vocab) == len(kept) and vocab.ids.tolist() == sorted(kept)
    assert vocab.d2t.dtype == torch.int64 and vocab.t2d.dtype == torch.bool and len(vocab.t2d) == vocab_size
    assert [row + offset for row, offset in enumerate(vocab.d2t.tolist())] == sorted(kept)
    assert {token for token, is_kept in enumerate(vocab.t2d.tolist()) if is_kept} == kept
    again = VocabMap.from_tensors(vocab.d2t, vocab.t2d)
    assert torch.equal(again.ids, vocab.ids) and again.vocab_size == vocab_size
    for token, row in enumerate(vocab.rows.tolist()):
        assert (sorted(kept)[row] == token) if token in kept else row == -1


def test_offsets_of_a_hand_made_vocabulary():
    vocab = VocabMap.from_ids([7, 2, 3, 2], 9)
    assert vocab.ids.tolist() == [2, 3, 7]
    assert vocab.d2t.tolist() == [2, 2, 5]
    assert vocab.t2d.tolist() == [False, False, True, True, False, False, False, True, False]


@pytest.mark.parametrize("ids, message", [
    ([], "of no token"), ([0, 9], "token id 9 .* vocabulary of 9"), ([-1, 3], "token id -1"),
])
def test_ids_that_are_no_vocabulary_are_refused(ids, message):
    with pytest.raises(ConfigError, match=message):
        VocabMap.from_ids(ids, 9)


@pytest.mark.parametrize("d2t, t2d", [
    ([2, 2, 4], [2, 3, 7]),  # another token than t2d marks
    ([2, 3, 7], [2, 3, 7]),  # ids in the place of offsets
    ([2, 2], [2, 3, 7]),  # fewer
    ([3, 1, 5], [2, 3, 7]),  # not ascending
    ([-1, 2, 5], [2, 3, 7]),
])
def test_tensors_that_contradict_each_other_are_refused(d2t, t2d):
    marks = torch.zeros(9, dtype=torch.bool)
    marks[t2d] = True
    with pytest.raises(ConfigError, match=r"the draft: d2t .* are not the 3 that t2d marks"):
        VocabMap.from_tensors(torch.tensor(d2t), marks, "the draft")


def test_tensors_of_other_types_are_refused():
    vocab = VocabMap.from_ids([1, 4], 5)
    for d2t, t2d in [(vocab.d2t.int(), vocab.t2d), (vocab.d2t, vocab.t2d.long()), (vocab.d2t[:0], vocab.t2d)]:
        with pytest.raises(ConfigError, match=r"d2t must be int64 \[D\] and t2d bool \[V\]"):
            VocabMap.from_tensors(d2t, t2d)


def test_the_most_frequent_are_kept_and_ties_go_to_smaller_ids():
    counts = torch.tensor([0, 5, 9, 5, 0, 5, 1])
    assert most_frequent(counts, 3, []).ids.tolist() == [1, 2, 3]
    assert most_frequent(counts, 3, [6, 0]).ids.tolist() == [0, 2, 6]
    assert most_frequent(counts, 6, []).ids.tolist() == [0, 1, 2, 3, 5, 6]  # of those that never occur, 0 is first


@given(
    counts=st.lists(st.integers(0, 5), min_size=2, max_size=30).filter(any),
    size=st.integers(1, 40),
    data=st.data(),
)
def test_no_token_left_out_is_more_frequent_than_one_kept(counts, size, data):
    special = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=min(size, len(counts))))
    vocab = most_frequent(torch.tensor(counts), size, special)
    kept = set(vocab.ids.tolist())
    assert len(vocab) == min(size, len(counts)) and special <= kept
    chosen = kept - special or {next(iter(kept))}
    last = max(chosen, key=lambda token: (-counts[token], token))
    if kept > special:
        assert all((-counts[token], token) > (-counts[last], last) for token in set(range(len(counts))) - kept)


def test_what_cannot_be_chosen_is_refused():
    with pytest.raises(ConfigError, match=r"draft vocabulary of 2 has no room for the 3 special tokens.*at least 3"):
        most_frequent(torch.tensor([1, 1, 1, 1, 1]), 2, [0, 1, 2])
    with pytest.raises(ConfigError, match="no token was counted"):
        most_frequent(torch.zeros(5, dtype=torch.int64), 3, [0])
    with pytest.raises(ConfigError, match=r"draft vocabulary of 0 .* at least 1"):
        most_frequent(torch.tensor([1, 2]), 0, [])
    with pytest.raises(ConfigError, match=r"token id 5 .* vocabulary of 5"):
        most_frequent(torch.tensor([1, 2, 3, 4, 5]), 3, [5])


@given(st.lists(st.lists(st.integers(0, 11), max_size=20), max_size=5))
def test_counts_are_those_of_all_chunks(chunks):
    counted = Counter(token for chunk in chunks for token in chunk)
    counts = count_ids((np.array(chunk, dtype=np.int32) for chunk in chunks), 12)
    assert counts.dtype == torch.int64 and counts.tolist() == [counted[token] for token in range(12)]


def test_ids_outside_the_vocabulary_are_not_counted_silently():
    for chunk in ([3, 12], [-1, 3]):
        with pytest.raises(ConfigError, match="do not fit the target's vocabulary of 12"):
            count_ids([np.array(chunk)], 12)


def test_special_ids_are_special_end_and_template_tokens():
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<unused0>", special=False)])
    think = TOKENIZER_LENGTH
    ordinary = 65
    assert special_ids(tokenizer, [*EOS_IDS, ordinary], think + 2) == [ordinary, *range(256, 260)]
    tokenizer.chat_template += "{{ '<think>' }}"
    assert special_ids(tokenizer, EOS_IDS, think + 2) == [*range(256, 260), think]
    assert special_ids(tokenizer, EOS_IDS, think) == [*range(256, 260)]  # lm_head has no row for it
    tokenizer.chat_template = {"default": "", "tools": "<unused0>"}
    assert special_ids(tokenizer, EOS_IDS, think + 2) == [*range(256, 260), think + 1]
    tokenizer.chat_template = None
    assert special_ids(tokenizer, EOS_IDS, think + 2) == [*range(256, 260)]
