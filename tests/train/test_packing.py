"""Packing: every token once, documents whole, masks in place, and an order that no number of ranks changes."""

from __future__ import annotations

import signal
import subprocess
import sys

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.rows import SCHEMA
from data_gen.shards import ShardWriter, document_lengths, split_documents
from specvocab_model.config import ConfigError
from specvocab_model.unroll import UnrollPlan, plan_unroll
from train import preemption
from train.packing import (
    PADDING_DOCUMENT,
    PackedDataset,
    StepSampler,
    any_supervised,
    check_rows,
    pack,
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
    return PackedDataset(rows=rows_of(lengths), seq_len=SEQ_LEN, micro_batch_size=micro_batch_size,
                         pad_token_id=999_999, num_unroll_steps=3, trim=trim)


@given(lengths=LENGTHS, seed=st.integers(0, 5))
def test_every_token_is_packed_once_and_no_row_overflows(lengths, seed):
    pieces = split_documents(np.array(lengths), SEQ_LEN)
    packed = pack(pieces, SEQ_LEN, np.random.default_rng(seed))
    tokens = [(row, first + offset) for piece in packed for row, first, length in piece for offset in range(length)]
    assert sorted(tokens) == [(row, at) for row, length in enumerate(lengths) for at in range(length)]
    assert all(row[:, 2].sum() <= SEQ_LEN for row in packed)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), seq_len=st.sampled_from([2048, 4096]), median=st.integers(60, 900),
       sigma=st.floats(0.5, 1.3))
def test_chat_like_lengths_leave_at_most_3_percent_of_padding(seed, seq_len, median, sigma):
    """Chats are short and long. Where all documents are alike and over a third of a row (sigma 0.3), it is 3.1 %."""
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, size=5000).astype(np.int64) + 4
    packed = pack(split_documents(lengths, seq_len), seq_len, np.random.default_rng(seed))
    assert 1 - lengths.sum() / (len(packed) * seq_len) <= 0.03


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
            # Where positions begin anew, padding's too: attention by offsets and by mask see the same documents.
            begins = (batch.position_ids.flatten() == 0).nonzero()[:, 0].tolist()
            assert batch.plan.unrolled.spans.key_offsets.tolist() == [*begins, batch.position_ids.numel()]
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
            assert tensors_of(batch.plan) == tensors_of(plan_unroll(batch.loss_mask, batch.document_ids, 3))


def tensors_of(plan: UnrollPlan) -> list[list]:
    tensors: list[torch.Tensor] = []
    plan.map(lambda tensor: tensors.append(tensor) or tensor)
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_worker_hands_a_micro_batch_over_in_one_storage(num_rows):
    (batch,) = dataset_of([9])[[[np.array([[0, 0, 9]])] * num_rows]]
    storages, kinds = set(), set()
    batch._map(lambda tensor: storages.add(tensor.untyped_storage().data_ptr()) or kinds.add(tensor.dtype) or tensor)
    assert len(storages) == 1 and kinds == {torch.int64, torch.int32, torch.bool}


@pytest.mark.parametrize("number", preemption.SIGNALS)
def test_a_signal_to_a_worker_that_has_just_begun_takes_no_data_away(number):
    """As one to the whole process group may be, at the beginning of any epoch and any validation."""
    dataset, sampler = dataset_of([9, 30, 12, 5, 31, 2]), sampler_of([9, 30, 12, 5, 31, 2])
    before, others = signal.pthread_sigmask(signal.SIG_BLOCK, ()), psutil.Process().children()
    batches = iter(step_loader(dataset, sampler, num_workers=1, pin_memory=False))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before, "this process still gets them"
    (worker,) = set(psutil.Process().children()) - set(others)
    worker.send_signal(number)
    assert len(list(batches)) == len(list(sampler))


def test_lengths_are_read_from_the_offsets():
    assert document_lengths(rows_of([4, 1, 70])).tolist() == [4, 1, 70]


MEASURE = """
import sys
import numpy as np
from datasets import disable_progress_bars
from data_gen.shards import document_lengths, load_rows, split_documents
from train.packing import PackedDataset, StepSampler, check_rows

def own_memory():  # MiB, without the pages of mapped files, which the kernel takes back when it needs them
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) / 2**10

disable_progress_bars()
"""


def measured(code: str, *arguments: object) -> list[float]:
    """The numbers that ``code`` prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", MEASURE + code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [float(number) for number in done.stdout.split()]


def test_an_epoch_over_half_a_million_documents_is_planned_in_little_memory():
    code = """
lengths = np.random.default_rng(0).lognormal(5.4, 0.8, size=500_000).astype(np.int64) + 4
before = own_memory()
sampler = StepSampler(split_documents(lengths, 4096), 4096, seed=0, rank=0, world_size=1, micro_batch_size=1,
                      accumulation=1)
epoch = list(sampler)
print(own_memory() - before, int(sum(len(row) for ((row,),) in epoch) >= len(lengths)))
"""
    grown, complete = measured(code)
    assert complete and grown < 512


@pytest.mark.slow
def test_data_larger_than_the_memory_for_it_are_streamed(tmp_path):
    """80 MiB on disk (zstd leaves random numbers as they are), 200 MiB of arrays, within 40 MiB of memory."""
    rng, per_shard = np.random.default_rng(0), 10_000
    for shard in range(10):
        ends = np.arange(per_shard + 1, dtype=np.int32) * 400
        lists = {name: pa.ListArray.from_arrays(ends, rng.integers(0, top, ends[-1], dtype=kind))
                 for name, top, kind in (("input_ids", 50_000, np.int32), ("loss_mask", 2, np.int8))}
        constant = {"source": "s", "num_loss_tokens": 1, "finish_reason": "length", "messages": None}
        columns = {name: [value] * per_shard for name, value in constant.items()}
        ids = [f"{shard}-{row}" for row in range(per_shard)]
        pq.write_table(pa.table({"id": ids, **lists, **columns}).select(SCHEMA.names).cast(SCHEMA),
                       tmp_path / f"shard-{shard:05d}.parquet", compression="zstd")
    ShardWriter(tmp_path, target="t", settings={"target": {"fingerprint": "f"}}, num_prompts=10 * per_shard,
                rows_per_shard=per_shard, vocab_size=50_000, stop_token_ids=()).finalise()
    code = """
rows = load_rows(sys.argv[1])
dataset = PackedDataset(rows=rows, seq_len=4096, micro_batch_size=1, pad_token_id=0, num_unroll_steps=3, trim=False)
next(iter(dataset[[[]]]))
before = own_memory()
check_rows(rows, "", 50_000)
sampler = StepSampler(split_documents(document_lengths(rows), 4096), 4096, seed=0, rank=0, world_size=1,
                      micro_batch_size=1, accumulation=1)
highest = num_tokens = 0
for plan in sampler:
    num_tokens += sum(int((batch.document_ids >= 0).sum()) for batch in dataset[plan])
    highest = max(highest, own_memory())
print(highest - before, num_tokens)
"""
    grown, num_tokens = measured(code, tmp_path)
    assert num_tokens == 10 * per_shard * 400 and grown < 40


def broken(**changes: list) -> Dataset:
    columns = {"id": ["a", "b", "c"], "input_ids": [[1], [], [2, 7]], "loss_mask": [[0], [], [0, 1]]}
    return Dataset.from_dict(columns | changes)


def test_sound_rows_pass():
    check_rows(broken(), "data", 8)
    check_rows(broken().select(range(0)), "data", 8)


@pytest.mark.parametrize(("changes", "reason"), [
    ({"loss_mask": [[0], [], [0]]}, "row 'c' has 2 input_ids but 1 entries in loss_mask .1 such rows"),
    ({"input_ids": [[1], [], [2, 8]]}, r"row 'c' has ids outside \[0, 8\)"),
    ({"input_ids": [[-1], [], [2, 7]]}, r"row 'a' has ids outside \[0, 8\)"),
])
def test_rows_that_contradict_themselves_or_the_target_are_refused(changes, reason):
    parts = [broken(), broken(**changes)]
    with pytest.raises(ConfigError, match=f"^data: {reason}"):
        check_rows(concatenate_datasets(parts), "data", 8)


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


def test_padding_is_what_is_left_of_the_rows():
    pieces = np.array([[number, 0, length] for number, length in enumerate([1100, 1100, 900, 40])])
    sampler = StepSampler(pieces, 2048, seed=0, rank=0, world_size=1, micro_batch_size=1, accumulation=1)
    assert sampler.num_rows == 2 and sampler.padding == pytest.approx(1 - 3140 / 4096)
