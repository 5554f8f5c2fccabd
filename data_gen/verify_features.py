"""Whether features on disk are those of the target and the data: all numbers are read, some documents computed anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from data_gen.features import FeatureStore
from data_gen.make_features import outputs_of
from data_gen.shards import load_rows, split_documents
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import Target
from specvocab_model.target_spec import TargetSpec

if TYPE_CHECKING:
    from datasets import Dataset as Rows

RECOMPUTED = 8  # documents of each folder: the last ones of as many files, where everything before them has its place
LAST_TOKENS = 16  # of these are compared: documents may begin alike
TOLERANCE = 0.2  # of the norm. Batches and devices round otherwise, in bf16 by some 0.02; other tokens are about 1 away
READ_BYTES = 2**28  # at a time


def feature_problems(config: Config, spec: TargetSpec) -> list[str]:
    """What is wrong with the features of the training and the validation data; prints a line for each folder."""
    on_gpu = torch.cuda.is_available() and not config.distributed.cpu
    target = None
    problems: list[str] = []
    for training, path in ((True, config.data.train_path), (False, config.data.validation_path)):
        rows = load_rows(path)
        store = FeatureStore.of(config, spec, rows, training=training)
        try:
            store.check()
        except ConfigError as error:
            found = [str(error)]
        else:
            target = target or Target.load(config.target, device="cuda" if on_gpu else "cpu",
                                           feature_layers=config.draft.feature_layers)
            found = [*_not_finite(store, rows), *_of_other_tokens(store, target, rows)]
        print(f"{store.folder}: {store.num_tokens} tokens in {store.num_shards} files, {len(found)} problems with "
              "target, data, sizes, numbers and documents computed anew")
        problems += found
    return problems


def _not_finite(store: FeatureStore, rows: Rows) -> Iterator[str]:
    """A line for each file with infinities or what is no number."""
    for shard in range(store.num_shards):
        begin = store.first_token[store.first_row[shard]]
        for tokens in store.read_file(shard, READ_BYTES):
            bad = (~tokens.isfinite().all(-1)).nonzero()
            if len(bad):
                row = int(np.searchsorted(store.first_token, begin + int(bad[0]), side="right")) - 1
                yield (f"{store.path(shard)}: {len(bad)} tokens have numbers that are not finite, the first in row "
                       f"{rows[row]['id']!r}")
                break
            begin += len(tokens)


def _of_other_tokens(store: FeatureStore, target: Target, rows: Rows) -> Iterator[str]:
    """A line for each document that the target, asked anew, sees otherwise."""
    with_rows = np.flatnonzero(np.diff(store.first_row))
    evenly = np.linspace(0, len(with_rows) - 1, min(RECOMPUTED, len(with_rows))).round().astype(np.int64)
    for row in (store.first_row[with_rows[evenly] + 1] - 1).tolist():
        _, first, length = split_documents(np.diff(store.first_token[row : row + 2]), store.seq_len)[-1].tolist()
        expected = outputs_of(target, rows, np.array([[row, first, length]]))[0, -LAST_TOKENS:].float()
        features, final_hidden = store.zeros(1, length)
        store.read(row, first, length, features[0], final_hidden[0])
        stored = torch.cat([features, final_hidden], dim=-1)[0, -LAST_TOKENS:].float()
        # Each layer on its own: their norms are of different sizes.
        stored, expected = stored.view(-1, 4, store.hidden_size), expected.view(-1, 4, store.hidden_size)
        difference = float(((stored - expected).norm(dim=-1) / expected.norm(dim=-1)).mean(0).max())
        if difference > TOLERANCE:
            yield (f"{store.folder}: row {rows[row]['id']!r}: the states at its end are {difference:.2g} of their norm "
                   f"away from the target's: they belong to other tokens or to another target")
