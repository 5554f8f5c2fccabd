"""Packing: every token once, documents whole, masks in place, and an order that no number of ranks changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from train.packing import (
    PADDING_DOCUMENT,
    PackedDataset,
    StepSampler,
    any_supervised,
    document_lengths,
    pack,
    split_documents,
    step_loader,
)

LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=40)
SEQ_LEN = 32


def rows_of(lengths: list[int]) -> Dataset:
    """Documents whose token ids tell where they come from: 1000 * document + position."""
    return Dataset.from_dict({
        "input_ids": [[1000 * n + at for at in range(length)] for n, length in enumerate(lengths)],
        "loss_mask": [[(n + at) % 3 % 2 for at in range(length)] for n, length in enumerate(lengths)],
        "id": [f"row-{n}" for n in range(len(lengths))],
    })


def sampler_of(lengths: list[int], **changes) -> StepSampler:
    options = {"seed": 0, "rank": 0, "world_size": 1, "micro_batch_size": 1, "accumulation": 1} | changes
    return StepSampler(split_documents(np.array(lengths), SEQ_LEN), SEQ_LEN, **options)


def dataset_of(lengths: list[int], *, trim: bool = False, micro_batch_size: int = 1) -> PackedDataset:
    return PackedDataset(rows_of(lengths), seq_len=SEQ_LEN, micro_batch_size=micro_batch_size, pad_token_id=999_999,
                         trim=trim)


@given(lengths=LENGTHS, seed=st.integers(0, 5))
def test_every_token_is_packed_once_and_no_row_overflows(lengths, seed):
    pieces = split_documents(np.array(lengths), SEQ_LEN)
    packed = pack(pieces, SEQ_LEN, np.random.default_rng(seed))
    tokens = [(row, first + offset) for piece in packed for row, first, length in piece for offset in range(length)]
    assert sorted(tokens) == [(row, at) for row, length in enumerate(lengths) for at in range(length)]
    assert all(row[:, 2].sum() <= SEQ_LEN for row in packed)


@given(lengths=LENGTHS)
def test_only_documents_longer_than_a_row_are_cut(lengths):
    pieces = split_documents(np.array(lengths), SEQ_LEN)
    for row, length in enumerate(lengths):
        own = pieces[pieces[:, 0] == row, 2].tolist()
        assert own == [SEQ_LEN] * (length // SEQ_LEN) + [length % SEQ_LEN] * (length % SEQ_LEN > 0)


@given(lengths=LENGTHS, epoch=st.integers(1, 5))
def test_number_of_rows_is_the_same_in_every_epoch_and_close_to_the_least(lengths, epoch):
    sampler = sampler_of(lengths)
    assert len(sampler.plan_epoch(epoch)) == sampler.num_rows
    # Of two rows at most half full, the second would have gone into the first.
    assert sampler.num_rows <= max(1, 2 * sum(lengths) / SEQ_LEN + 1)


@settings(deadline=None, max_examples=30)
@given(lengths=LENGTHS, trim=st.booleans())
def test_batches_keep_tokens_masks_and_document_borders(lengths, trim):
    dataset, rows = dataset_of(lengths, trim=trim), rows_of(lengths)
    seen = 0
    for plan in sampler_of(lengths):
        for batch in dataset[plan]:
            real = batch.document_ids != PADDING_DOCUMENT
            assert (batch.input_ids[~real] == 999_999).all() and not batch.loss_mask[~real].any()
            for n, at, mask, position, document in zip(
                batch.input_ids[real] // 1000, batch.input_ids[real] % 1000, batch.loss_mask[real],
                batch.position_ids[real], batch.document_ids[real], strict=True,
            ):
                assert mask == rows[int(n)]["loss_mask"][int(at)]
                assert position == at % SEQ_LEN  # starts again in every document, and in every piece of a long one
                assert batch.row_ids[int(document)] == f"row-{n}"
            seen += int(real.sum())
    assert seen == sum(lengths)


def test_padding_positions_restart_so_that_the_target_sees_a_document_of_its_own():
    (batch,) = dataset_of([5, 4])[[[np.array([[0, 0, 5], [1, 0, 4]])]]]
    assert batch.position_ids[0, :12].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2]
    assert batch.document_ids[0, :12].tolist() == [0] * 5 + [1] * 4 + [-1] * 3
    assert batch.input_ids.shape == (1, SEQ_LEN)


def test_trimming_cuts_only_columns_that_are_padding_in_every_row():
    rows = [np.array([[0, 0, 20]]), np.array([[1, 0, 7]])]
    (trimmed,), (full,) = (dataset_of([20, 7], trim=trim, micro_batch_size=3)[[rows]] for trim in (True, False))
    assert trimmed.input_ids.shape == (2, 20)
    assert full.input_ids.shape == (3, SEQ_LEN)  # a GPU sees one shape only
    assert torch.equal(full.input_ids[:2, :20], trimmed.input_ids)
    assert trimmed.num_slots == full.num_slots == 2 * SEQ_LEN


def flat(plans: list[list[list[np.ndarray]]]) -> list[tuple]:
    """The packed rows of several ranks' plans of one step, in the global order."""
    return [tuple(map(tuple, row)) for micro_batch in zip(*plans, strict=True) for rows in micro_batch for row in rows]


@given(lengths=LENGTHS, world_size=st.sampled_from([1, 2, 4]), micro_batch_size=st.sampled_from([1, 2]))
def test_a_step_trains_on_the_same_rows_however_it_is_split(lengths, world_size, micro_batch_size):
    alone = [flat([plan]) for plan in sampler_of(lengths, accumulation=8)]
    split = {"world_size": world_size, "micro_batch_size": micro_batch_size,
             "accumulation": 8 // (world_size * micro_batch_size)}
    ranks = [list(sampler_of(lengths, rank=rank, **split)) for rank in range(world_size)]
    assert [flat(list(plans)) for plans in zip(*ranks, strict=True)] == alone


def test_every_rank_has_the_same_number_of_micro_batches_in_a_partial_group():
    lengths = [SEQ_LEN] * 11  # 11 rows, 8 in a step: the second step has 3
    ranks = [list(sampler_of(lengths, rank=rank, world_size=2, micro_batch_size=2, accumulation=2)) for rank in (0, 1)]
    sizes = [[[len(rows) for rows in plan] for plan in plans] for plans in ranks]
    assert sizes == [[[2, 2], [2]], [[2, 2], [1]]]


def test_an_empty_micro_batch_has_no_supervised_token():
    (batch,) = dataset_of([3], trim=True)[[[]]]
    assert batch.input_ids.shape[0] == 1 and not batch.loss_mask.any() and batch.num_slots == 0 and batch.row_ids == ()


@pytest.mark.parametrize("first_step", [1, 3, 5])
def test_resuming_continues_the_order(first_step):
    lengths = list(range(1, 65))
    whole, resumed = (sampler_of(lengths, accumulation=16) for _ in range(2))
    whole.num_steps = resumed.num_steps = 3 * whole.steps_per_epoch
    resumed.first_step = first_step
    assert [flat([plan]) for plan in resumed] == [flat([plan]) for plan in whole][first_step:]


def test_epochs_and_seeds_differ():
    lengths = list(range(1, 30))
    orders = [sampler_of(lengths, seed=seed).plan_epoch(epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    first, second, third = (flat([[order]]) for order in orders)
    assert first != second and first != third and second != third


def test_loader_with_workers_gives_what_the_dataset_gives_and_leaves_the_random_state_alone():
    lengths = [9, 30, 12, 5, 31, 2]
    dataset, sampler = dataset_of(lengths), sampler_of(lengths)
    before = torch.get_rng_state()
    loaded = list(step_loader(dataset, sampler, num_workers=1, pin_memory=False))
    assert torch.equal(before, torch.get_rng_state())
    for batches, plan in zip(loaded, sampler, strict=True):
        for batch, expected in zip(batches, dataset[plan], strict=True):
            assert torch.equal(batch.input_ids, expected.input_ids) and batch.row_ids == expected.row_ids


def test_lengths_are_read_from_the_offsets():
    assert document_lengths(rows_of([4, 1, 70])).tolist() == [4, 1, 70]


@pytest.mark.parametrize(("mask", "seq_len", "expected"), [
    ([0, 1], 8, False),
    ([1, 1, 0, 0], 8, False),
    ([0, 0, 1], 8, True),
    ([0, 0, 0, 1], 2, False),
    ([0, 0, 0, 1, 0, 1], 3, True),
])
def test_a_draft_predicts_no_token_before_a_pieces_third(mask, seq_len, expected):
    rows = Dataset.from_dict({"input_ids": [[5], [5] * len(mask)], "loss_mask": [[1], mask]})
    assert any_supervised(rows, split_documents(document_lengths(rows), seq_len)) == expected
