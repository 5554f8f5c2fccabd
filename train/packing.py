"""Packing: documents of any length become rows of ``seq_len`` tokens, and rows become optimizer steps.

The order is planned globally and only then split over the ranks, so what optimizer step ``n`` trains on is a function
of (data, seed, seq_len, rows per step) and ``n`` alone. A resumed run therefore needs no loader state but its step, and
1 rank with 4 accumulated micro-batches sees what 4 ranks with 1 see.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from data_gen.features import FeatureStore
from specvocab_model.config import ConfigError
from specvocab_model.unroll import UnrollPlan, plan_unroll
from train.preemption import blocked

if TYPE_CHECKING:
    from datasets import Dataset as Rows

PADDING_DOCUMENT = -1
MIN_TRIMMED_LEN = 16
ALIGNMENT = 16  # bytes, of the tensors within a storage

PackedRow = np.ndarray  # int64 [n, 3]: (data set row, first token, number of tokens) of each document in it
StepPlan = list[list[PackedRow]]  # one rank's micro-batches of one optimizer step


def pack(pieces: np.ndarray, seq_len: int, rng: np.random.Generator) -> list[PackedRow]:
    """Best-fit decreasing: longest piece first, each into the fullest row that still has room for it.

    ``rng`` decides which of several equally long pieces comes first and the order of the finished rows. The number
    of rows depends on the lengths alone, hence is the same in every epoch.
    """
    order = rng.permutation(len(pieces))
    order = order[np.argsort(-pieces[order, 2], kind="stable")]
    contents: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}  # free tokens -> rows with that much room
    rooms: list[int] = []  # the keys of rows_by_room, ascending
    for piece, length in zip(order.tolist(), pieces[order, 2].tolist(), strict=True):
        fitting = bisect_left(rooms, length)
        if fitting == len(rooms):
            room, index = seq_len, len(contents)
            contents.append([])
        else:
            room = rooms[fitting]
            index = rows_by_room[room].pop()
            if not rows_by_room[room]:
                del rows_by_room[room], rooms[fitting]
        contents[index].append(piece)
        left = room - length
        if left and left not in rows_by_room:
            insort(rooms, left)
        if left:
            rows_by_room.setdefault(left, []).append(index)
    return [pieces[contents[index]] for index in rng.permutation(len(contents))]


class StepSampler(Sampler[StepPlan]):
    """Yields this rank's micro-batches of every optimizer step, from ``first_step`` to the last.

    A step takes ``world_size * micro_batch_size * accumulation`` packed rows; the last step of an epoch takes what is
    left. All ranks get the same number of micro-batches, some of them empty, because every one is a collective.
    """

    def __init__(
        self,
        pieces: np.ndarray,
        seq_len: int,
        *,
        seed: int,
        rank: int,
        world_size: int,
        micro_batch_size: int,
        accumulation: int,
    ) -> None:
        self.pieces = pieces
        self.seq_len = seq_len
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.micro_batch_size = micro_batch_size
        self.rows_per_step = world_size * micro_batch_size * accumulation
        self.num_rows = len(self.plan_epoch(0))
        self.padding = 1 - int(pieces[:, 2].sum()) / (self.num_rows * seq_len)  # share of the rows' token slots
        self.steps_per_epoch = -(-self.num_rows // self.rows_per_step)
        self.first_step = 0
        self.num_steps = self.steps_per_epoch

    def plan_epoch(self, epoch: int) -> list[PackedRow]:
        """All packed rows of an epoch in the order they are trained on, the same on every rank."""
        return pack(self.pieces, self.seq_len, np.random.default_rng([self.seed, epoch]))

    def __iter__(self) -> Iterator[StepPlan]:
        planned_epoch, rows = -1, []
        for step in range(self.first_step, self.num_steps):
            epoch, index = divmod(step, self.steps_per_epoch)
            if epoch != planned_epoch:
                planned_epoch, rows = epoch, self.plan_epoch(epoch)
            yield self._own_part(rows[index * self.rows_per_step : (index + 1) * self.rows_per_step])

    def __len__(self) -> int:
        return self.num_steps - self.first_step

    def _own_part(self, rows: list[PackedRow]) -> StepPlan:
        size = self.micro_batch_size
        micro_batches = -(-len(rows) // (size * self.world_size))
        starts = ((index * self.world_size + self.rank) * size for index in range(micro_batches))
        return [rows[start : start + size] for start in starts]


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch of packed rows. Padding is a document of its own without supervised tokens."""

    input_ids: Tensor  # [B, T] int64
    position_ids: Tensor  # [B, T] int64, starting again at 0 in every document
    document_ids: Tensor  # [B, T] int64, PADDING_DOCUMENT for padding
    loss_mask: Tensor  # [B, T] int64, 1 where the token is supervised
    num_slots: int  # token slots of its rows, padding included, before any trimming
    row_ids: tuple[str, ...]  # ids of the data set rows in it
    plan: UnrollPlan  # which of its positions are unrolled and judged
    features: Tensor | None = None  # [B, T, 3d] of the target, zero in padding, where they are read from disk
    final_hidden: Tensor | None = None  # [B, T, d], likewise

    def pin_memory(self) -> Batch:
        return self._map(Tensor.pin_memory)

    def to(self, device: torch.device) -> Batch:
        """Asynchronous where it lies in pinned memory."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def in_one_storage(self) -> Batch:
        """The same, in memory that one worker's message hands over.

        Every storage costs the receiving process a file descriptor and the sender an answer: for the eleven tensors
        of a batch of 4 x 2048 tokens 9 ms of the receiver's CPU time, for one storage 2.
        """
        tensors: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        self._map(note)
        views = iter(views_of_one(tensors))
        return self._map(lambda tensor: next(views))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        tensors = ((entry.name, getattr(self, entry.name)) for entry in fields(self))
        moved: dict[str, Any] = {name: function(value) for name, value in tensors if isinstance(value, Tensor)}
        return replace(self, **moved, plan=self.plan.map(function))


def views_of_one(tensors: list[Tensor]) -> list[Tensor]:
    """Copies of ``tensors`` that share one storage."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    parts = torch.empty(sum(sizes), dtype=torch.uint8).split(sizes)
    return [part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            for part, tensor in zip(parts, tensors, strict=True)]


@dataclass(kw_only=True, eq=False)
class PackedDataset(Dataset[list[Batch]]):
    """Assembles the micro-batches of a step; the index is the step's plan, so workers need no state.

    They plan the unroll too: it takes milliseconds, in which the process that trains would start nothing on its GPU.
    """

    rows: Rows  # as load_rows gives it, memory-mapped
    seq_len: int
    micro_batch_size: int
    pad_token_id: int
    num_unroll_steps: int
    # Cut the columns that are padding in every row, and leave out rows that are all padding. Saves work where shapes
    # are free (CPU); a GPU runs faster when every micro-batch has the same shape.
    trim: bool
    features: FeatureStore | None = None  # the target's outputs on disk, read with the tokens

    def __getitem__(self, plan: StepPlan) -> list[Batch]:
        return [self._assemble(packed) for packed in plan]

    def _assemble(self, packed: list[PackedRow]) -> Batch:
        used = max((int(row[:, 2].sum()) for row in packed), default=0)
        width = min(self.seq_len, max(used, MIN_TRIMMED_LEN)) if self.trim else self.seq_len
        height = max(len(packed), 1) if self.trim else self.micro_batch_size
        input_ids = np.full((height, width), self.pad_token_id, dtype=np.int64)
        position_ids = np.zeros((height, width), dtype=np.int64)
        document_ids = np.full((height, width), PADDING_DOCUMENT, dtype=np.int64)
        loss_mask = np.zeros((height, width), dtype=np.int64)
        features, final_hidden = None, None
        if self.features is not None:
            features, final_hidden = self.features.zeros(height, width)
        # Straight from the mapped arrow columns: formatting a row of `datasets` takes 0.4 ms.
        all_ids, all_masks, names = (self.rows.data.column(name) for name in ("input_ids", "loss_mask", "id"))
        row_ids = []
        for index in range(height):
            end = 0
            for document, (row, first, length) in enumerate(packed[index].tolist() if index < len(packed) else ()):
                place = (index, slice(end, end + length))
                input_ids[place] = all_ids[row].values.to_numpy()[first : first + length]
                loss_mask[place] = all_masks[row].values.to_numpy()[first : first + length]
                position_ids[place] = np.arange(length)
                document_ids[place] = document
                if self.features is not None and features is not None and final_hidden is not None:
                    self.features.read(row, first, length, features[place], final_hidden[place])
                row_ids.append(str(names[row]))
                end += length
            position_ids[index, end:] = np.arange(width - end)
        documents, mask = torch.from_numpy(document_ids), torch.from_numpy(loss_mask)
        batch = Batch(
            input_ids=torch.from_numpy(input_ids),
            position_ids=torch.from_numpy(position_ids),
            document_ids=documents,
            loss_mask=mask,
            num_slots=len(packed) * self.seq_len,
            row_ids=tuple(row_ids),
            plan=plan_unroll(mask, documents, self.num_unroll_steps),
        )
        # Features are large: they are not copied once more.
        return replace(batch.in_one_storage(), features=features, final_hidden=final_hidden)


def check_rows(rows: Rows, path: str, vocab_size: int) -> None:
    """Refuse rows that would fail, or train on the wrong tokens, somewhere in the middle of a run.

    Reads every token once, at the speed of the disk: seconds for 10^8 tokens.

    Raises:
        ConfigError: a ``loss_mask`` is not as long as its ``input_ids``, or an id lies outside ``[0, vocab_size)``.
    """
    columns = {name: rows.data.column(name) for name in ("input_ids", "loss_mask")}
    ids, masks = (pc.list_value_length(column).to_numpy() for column in columns.values())
    if len(differing := np.flatnonzero(ids != masks)):
        row = int(differing[0])
        raise ConfigError(f"{path}: row {rows[row]['id']!r} has {ids[row]} input_ids but {masks[row]} entries in "
                          f"loss_mask ({len(differing)} such rows); make the data anew")
    first = 0
    for chunk in columns["input_ids"].chunks:
        bounds = pc.min_max(chunk.flatten()).as_py()
        if len(chunk.flatten()) and not 0 <= bounds["min"] <= bounds["max"] < vocab_size:
            row = next(row for row in range(first, first + len(chunk))
                       if not all(0 <= token < vocab_size for token in rows[row]["input_ids"]))
            raise ConfigError(f"{path}: row {rows[row]['id']!r} has ids outside [0, {vocab_size}), the rows of the "
                              f"target's lm_head; the data belong to another target, or are damaged: make them anew")
        first += len(chunk)


def any_supervised(rows: Rows, pieces: np.ndarray) -> bool:
    """Whether a draft can be trained on any of ``pieces``: it predicts no token before a document's third."""
    rows = rows.with_format("numpy", columns=["loss_mask"])
    masks = (rows[row]["loss_mask"][first + 2 : first + length] for row, first, length in pieces.tolist())
    return any(mask.any() for mask in masks)


class StepLoader(DataLoader):
    """Prefetching loader whose workers outlive the signals that stop a run."""

    def __iter__(self) -> Any:  # over list[Batch]; the type that torch declares is a private one
        with blocked():
            return super().__iter__()


def step_loader(dataset: PackedDataset, sampler: StepSampler, *, num_workers: int, pin_memory: bool) -> StepLoader:
    """Loader of which each item is the list of this rank's micro-batches of one optimizer step."""
    return StepLoader(
        dataset,
        sampler=sampler,
        batch_size=None,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else the loader draws from the global one, and a resumed run would differ
    )
