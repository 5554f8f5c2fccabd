"""action=features: the target runs once over the training and the validation data, and its outputs go to disk."""

from __future__ import annotations

import shutil
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from data_gen.features import GIB, FeatureStore
from data_gen.shards import load_rows
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import Target, load_spec

if TYPE_CHECKING:
    from datasets import Dataset as Rows


def make_features(config: Config, state: PartialState) -> None:
    """Make the features of the training and the validation data, in ``data.features_path``.

    Raises:
        ConfigError: no ``data.features_path``, no data, features of other data or another target, or no room for them.
    """
    if config.data.features_path is None:
        raise ConfigError("data.features_path says where the features go; set it to a folder")
    spec = load_spec(config.target)
    rows = {training: load_rows(config.data.train_path if training else config.data.validation_path)
            for training in (True, False)}
    stores = {training: FeatureStore.of(config, spec, rows[training], training=training) for training in rows}
    for store in stores.values():
        store.begin()
    num_bytes = require_space(list(stores.values()), state)
    missing = any(store.missing_shards() for store in stores.values())
    state.wait_for_everyone()  # before the disk fills, and what is missing changes
    if missing:
        target = Target.load(config.target, device=state.device, feature_layers=config.draft.feature_layers)
        start = time.monotonic()
        for training, store in stores.items():
            store.fill(partial(outputs_of, target, rows[training]), state, alone=target.device.type == "cpu")
    state.wait_for_everyone()
    if missing and state.is_main_process:
        seconds = time.monotonic() - start
        print(f"features: {num_bytes / GIB:.2f} GiB written in {seconds:.0f} s, {num_bytes / seconds / 1e6:.1f} "
              f"MB/s, in {config.data.features_path}", flush=True)
    for store in stores.values():
        store.check()


def require_space(stores: list[FeatureStore], state: PartialState) -> int:
    """Print what the features will take and return the bytes still to be written.

    Raises:
        ConfigError: more than the disk has.
    """
    num_bytes = sum(store.bytes_to_write() for store in stores)
    total = sum(store.num_tokens * store.bytes_per_token for store in stores)
    free = shutil.disk_usage(stores[0].folder).free
    store = stores[0]
    size = (f"{total / GIB:.2f} GiB for {sum(store.num_tokens for store in stores)} tokens of "
            f"4 * {store.hidden_size} * {store.dtype.itemsize} bytes")
    if state.is_main_process:
        print(f"features: {size}; {num_bytes / GIB:.2f} GiB to write, {free / GIB:.2f} GiB free", flush=True)
    if num_bytes > free:
        raise ConfigError(f"the features need {size}; {num_bytes / GIB:.2f} GiB are still to be written, but the disk "
                          f"of {store.folder} has {free / GIB:.2f} GiB free; set data.features_path to another disk")
    return num_bytes


def outputs_of(target: Target, rows: Rows, pieces: np.ndarray) -> Tensor:
    """Features and final hidden state [B, T, 4d] of documents, the longest first, on the CPU.

    They are padded on the right, where no token before sees it: attention needs no mask.
    """
    input_ids = np.zeros((len(pieces), pieces[0, 2]), dtype=np.int64)
    column = rows.data.column("input_ids")
    for own, (row, first, length) in zip(input_ids, pieces.tolist(), strict=True):
        own[:length] = column[row].values.to_numpy()[first : first + length]
    output = target.forward(torch.from_numpy(input_ids).to(target.device))
    return torch.cat([output.features, output.final_hidden], dim=-1).cpu()
