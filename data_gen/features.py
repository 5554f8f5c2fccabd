"""The target's outputs on disk: training reads them, and the target's layers need not be loaded.

    features_path/train/features.json       what the numbers belong to
    features_path/train/shard-00000.bin     [tokens, 4 hidden_size] in the target's dtype, no header

A file holds the tokens of one shard of the data, row after row: the three feature layers, then the final hidden
state, from which ``lm_head`` rebuilds the logits. Every size is known before anything is computed, so a file is whole
if it has its size. It is written under another name, locked by its writer, and renamed when it is whole: whoever
continues a killed run, on any number of ranks, makes what is missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from data_gen.files import make_folder, refuse_file, write_json
from data_gen.shards import (
    MANIFEST_FILE,
    check_made_with,
    document_lengths,
    read_manifest,
    split_documents,
)
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import TORCH_DTYPES, default_feature_layers
from specvocab_model.target_spec import TargetSpec

if TYPE_CHECKING:
    from datasets import Dataset as Rows

SCHEMA_VERSION = 1
INDEX_FILE = "features.json"
TOKENS_AT_ONCE = 16384  # of one forward on a GPU, padding included
MAKE_COMMAND = "python data_gen/main.py +experiment=NAME action=features"
GIB = 2**30
Outputs = Callable[[np.ndarray], Tensor]  # of pieces [B, 3] as ``split_documents`` makes them, [B, T, 4d] on the CPU
_BITS = {2: np.int16, 4: np.int32}  # numpy has no bf16: numbers are copied as they are, whatever they mean


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureStore:
    """One folder of features, of the training or the validation data; nothing is read or written by making it."""

    folder: Path
    settings: dict[str, Any]  # everything the numbers depend on
    hidden_size: int
    dtype: torch.dtype
    seq_len: int  # longer documents are cut, and each piece is computed on its own
    first_row: np.ndarray  # int64 [S + 1], of every shard of the data
    first_token: np.ndarray  # int64 [N + 1], of every row of the data

    @classmethod
    def of(cls, config: Config, spec: TargetSpec, rows: Rows, *, training: bool) -> FeatureStore:
        """The features of ``rows``, the configuration's training or validation data."""
        assert config.data.features_path is not None
        data = Path(config.data.train_path if training else config.data.validation_path)
        lengths, seq_len = document_lengths(rows), config.data.seq_len
        settings = {
            "schema_version": SCHEMA_VERSION,
            "target": {"fingerprint": spec.fingerprint, "dtype": config.target.dtype},
            "feature_layers": list(config.draft.feature_layers or default_feature_layers(spec.num_hidden_layers)),
            "data manifest sha256": hashlib.sha256((data / MANIFEST_FILE).read_bytes()).hexdigest(),
            "documents cut at": seq_len if (lengths > seq_len).any() else None,
        }
        return cls(
            folder=Path(config.data.features_path, "train" if training else "validation"),
            settings=settings,
            hidden_size=spec.hidden_size,
            dtype=TORCH_DTYPES[config.target.dtype],
            seq_len=seq_len,
            first_row=np.cumsum([0, *(shard.num_rows for shard in read_manifest(data).shards)]),
            first_token=np.concatenate([[0], lengths.cumsum()]),
        )

    # ---- sizes ----

    @property
    def num_shards(self) -> int:
        return len(self.first_row) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.first_token[-1])

    @property
    def bytes_per_token(self) -> int:
        return 4 * self.hidden_size * self.dtype.itemsize

    def shard_bytes(self, shard: int) -> int:
        first, end = self.first_token[self.first_row[shard : shard + 2]]
        return int(end - first) * self.bytes_per_token

    def missing_shards(self) -> list[int]:
        """Those without a file of the right size."""
        return [shard for shard in range(self.num_shards) if not self._is_whole(shard)]

    # ---- reading ----

    def check(self) -> None:
        """See that all features are there and belong to this target and these data.

        Raises:
            ConfigError: naming what is missing or differs.
        """
        begun_with = self._begun_with()
        if begun_with is None:
            raise ConfigError(f"{self.folder} has no features; make them with `{MAKE_COMMAND}`")
        check_made_with(self.folder, begun_with, self.settings)
        if missing := self.missing_shards():
            path = self.path(missing[0])
            size = f"has {path.stat().st_size} bytes instead of" if path.is_file() else "is missing, of"
            raise ConfigError(f"{len(missing)} of {self.num_shards} feature files are not whole: {path} {size} "
                              f"{self.shard_bytes(missing[0])}; continue with `{MAKE_COMMAND}`")

    def zeros(self, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Room for packed rows: features [height, width, 3d] and final hidden states [height, width, d]."""
        d = self.hidden_size
        return torch.zeros(height, width, 3 * d, dtype=self.dtype), torch.zeros(height, width, d, dtype=self.dtype)

    def read(self, row: int, first: int, length: int, features: Tensor, final_hidden: Tensor) -> None:
        """Copy the outputs at ``length`` tokens of a data row, from ``first``, to the CPU tensors given.

        Args:
            features: [length, 3d]; ``final_hidden``: [length, d]; both in the target's dtype.
        """
        shard = int(np.searchsorted(self.first_row, row, side="right")) - 1
        token = int(self.first_token[row] + first - self.first_token[self.first_row[shard]])
        bits = _BITS[self.dtype.itemsize]
        stored = np.memmap(self.path(shard), bits, "r", token * self.bytes_per_token, (length, 4 * self.hidden_size))
        as_bits = {2: torch.int16, 4: torch.int32}[self.dtype.itemsize]
        features.view(as_bits).numpy()[:] = stored[:, : 3 * self.hidden_size]
        final_hidden.view(as_bits).numpy()[:] = stored[:, 3 * self.hidden_size :]

    def read_file(self, shard: int, num_bytes: int) -> Iterator[Tensor]:
        """All of a file in its order, about ``num_bytes`` at a time: [tokens, 4d], in the target's dtype."""
        with self.path(shard).open("rb") as file:
            while data := file.read(max(1, num_bytes // self.bytes_per_token) * self.bytes_per_token):
                yield torch.frombuffer(bytearray(data), dtype=self.dtype).view(-1, 4 * self.hidden_size)

    # ---- writing ----

    def begin(self) -> None:
        """Make the folder, or see that it was begun for the same target and data; all ranks may call this at once.

        Raises:
            ConfigError: it was begun for others.
        """
        refuse_file(self.folder)
        begun_with = self._begun_with()
        if begun_with is not None:
            check_made_with(self.folder, begun_with, self.settings)
        else:
            make_folder(self.folder)
            write_json(self.folder / INDEX_FILE, self.settings)

    def _begun_with(self) -> dict[str, Any] | None:
        """The settings of what is in the folder; None if nothing is."""
        index = self.folder / INDEX_FILE
        if not index.is_file():
            return None
        try:
            settings = json.loads(index.read_text())
        except ValueError as error:
            settings = str(error)
        if not isinstance(settings, dict):
            raise ConfigError(f"{index} is damaged ({settings}); restore it, or delete {self.folder} and make the "
                              f"features anew with `{MAKE_COMMAND}`")
        return settings

    def bytes_to_write(self) -> int:
        """Of the missing files, less what they already take under their temporary names."""
        return sum(self.shard_bytes(shard) - self._bytes_taken(shard) for shard in self.missing_shards())

    def _bytes_taken(self, shard: int) -> int:
        """Of the disk, by a begun file: it is written in any order, so it may have its size and be all holes."""
        path = self._temporary(shard)
        return min(path.stat().st_blocks * 512, self.shard_bytes(shard)) if path.is_file() else 0

    def fill(self, outputs: Outputs, state: PartialState, *, alone: bool) -> None:
        """Make the missing files; the ranks take one after another, so that a slow one holds up none.

        Args:
            outputs: computes what is written.
            alone: ask for one document at a time, and not for as many as ``TOKENS_AT_ONCE``.

        Raises:
            ConfigError: the disk is full, or does not take them for another reason.
        """
        every = range(self.num_shards)
        start = self.num_shards * state.process_index // state.num_processes
        with tqdm(total=self.num_tokens, desc=f"features of {self.folder.name}", unit=" tokens", unit_scale=True,
                  disable=not state.is_main_process) as progress:
            for shard in (*every[start:], *every[:start]):
                with self._claimed(shard) as file:
                    if file is not None:
                        self._write(file, outputs, shard, alone=alone)
                progress.update(self.shard_bytes(shard) // self.bytes_per_token)

    @contextmanager
    def _claimed(self, shard: int) -> Iterator[IO[bytes] | None]:
        """The file to write ``shard`` to; None if it is whole or another process is at it.

        The lock goes with the process that holds it, so a killed one leaves nothing to clean up.
        """
        if self._is_whole(shard):
            yield None
            return
        temporary = self._temporary(shard)
        with self._writing(shard):
            temporary.touch()
            opened = temporary.open("r+b", buffering=0)
        with opened as file:
            if not self._locked(file, shard):
                yield None
                return
            if self._is_whole(shard):  # its writer renamed it since we looked: this may be the whole file itself
                temporary.unlink(missing_ok=True)
                yield None
                return
            with self._writing(shard):
                file.truncate()
            yield file
            with self._writing(shard):
                os.fsync(file.fileno())
                temporary.replace(self.path(shard))

    def _locked(self, file: IO[bytes], shard: int) -> bool:
        """Lock ``file`` for this process; False if another one has it. Raises ConfigError where there are no locks."""
        with self._writing(shard):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    @contextmanager
    def _writing(self, shard: int) -> Iterator[None]:
        """Whatever the disk says in this context is about writing ``shard``; raises ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(f"cannot write {self.path(shard)}: {error.strerror or error}; "
                              f"{self.bytes_to_write() / GIB:.2f} GiB are still to be written. See to the disk and "
                              "start again: what is finished is kept") from error

    def _write(self, file: IO[bytes], outputs: Outputs, shard: int, *, alone: bool) -> None:
        """Compute and write the rows of ``shard``, the one while the other."""
        def write(hidden: Tensor, lengths: np.ndarray, offsets: np.ndarray) -> None:
            with self._writing(shard):
                _write_documents(file, hidden, lengths, offsets)

        first, end = self.first_row[shard : shard + 2]
        pieces = split_documents(np.diff(self.first_token[first : end + 1]), self.seq_len)
        pieces[:, 0] += first
        begin = self.first_token[pieces[:, 0]] + pieces[:, 1] - self.first_token[first]
        with ThreadPoolExecutor(1) as disk:
            writing: Future[None] | None = None
            for index in _batches(pieces[:, 2], alone=alone):
                hidden = outputs(pieces[index])
                if writing is not None:
                    writing.result()
                offsets = begin[index] * self.bytes_per_token
                writing = disk.submit(write, hidden, pieces[index, 2], offsets)
            if writing is not None:
                writing.result()

    def _is_whole(self, shard: int) -> bool:
        path = self.path(shard)
        return path.is_file() and path.stat().st_size == self.shard_bytes(shard)

    def path(self, shard: int) -> Path:
        return self.folder / f"shard-{shard:05d}.bin"

    def _temporary(self, shard: int) -> Path:
        return self.folder / f".shard-{shard:05d}.bin.tmp"


def _batches(lengths: np.ndarray, *, alone: bool) -> Iterator[np.ndarray]:
    """Indices of documents to be computed together, the longest first, padded to at most ``TOKENS_AT_ONCE``."""
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        count = 1 if alone else max(1, TOKENS_AT_ONCE // int(lengths[order[0]]))
        yield order[:count]
        order = order[count:]


def _write_documents(file: IO[bytes], hidden: Tensor, lengths: np.ndarray, offsets: np.ndarray) -> None:
    for document, length, offset in zip(hidden, lengths.tolist(), offsets.tolist(), strict=True):
        file.seek(offset)
        left = memoryview(document[:length].view(torch.uint8).numpy()).cast("B")
        while left:  # a single call writes 2 GiB at most
            left = left[file.write(left) :]
