"""The training and the validation data, from their folders to the loaders of one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader

from data_gen.features import FeatureStore
from data_gen.shards import document_lengths, load_rows, split_documents
from specvocab_model.config import Config, ConfigError
from specvocab_model.speculator import supervised_states
from specvocab_model.target import Target
from train.packing import PackedDataset, StepSampler, any_supervised, check_rows, step_loader
from train.target_outputs import TargetOutputs

logger = logging.getLogger(__name__)


def open_data(
    config: Config, accelerator: Accelerator, target: Target, *, training: bool
) -> tuple[PackedDataset, np.ndarray]:
    """The training or the validation data, and their documents as they are packed, int64 [P, 3].

    Raises:
        ConfigError: they, or the features for them, are not there, not whole, or of another target.
    """
    path, seq_len = config.data.train_path if training else config.data.validation_path, config.data.seq_len
    rows = load_rows(Path(path))
    if len(rows) == 0:
        raise ConfigError(f"{path} has no rows; generate from more prompts, or raise generation.validation_fraction")
    check_rows(rows, path, target.spec.vocab_size)
    features = None
    if config.data.features_path is not None:
        features = FeatureStore.of(config, target.spec, rows, training=training)
        features.check()
    lengths = document_lengths(rows)
    too_long = int((lengths > seq_len).sum())
    if too_long and accelerator.is_main_process:
        logger.warning("%s: %d of %d documents are longer than data.seq_len=%d and are cut into pieces of that length",
                       path, too_long, len(rows), seq_len)
    pieces = split_documents(lengths, seq_len)
    if not any_supervised(rows, pieces):
        raise ConfigError(f"{path}: no document has a supervised token after its second one, so there is nothing to "
                          f"learn or to measure; look at its loss_mask, or raise data.seq_len={seq_len}")
    dataset = PackedDataset(
        rows=rows,
        seq_len=seq_len,
        micro_batch_size=config.trainer.micro_batch_size,
        pad_token_id=target.spec.pad_token_id,
        num_unroll_steps=config.draft.num_unroll_steps,
        trim=accelerator.device.type == "cpu",
        features=features,
    )
    return dataset, pieces


def calibration_states(
    config: Config, dataset: PackedDataset, pieces: np.ndarray, target_outputs: TargetOutputs
) -> Iterator[Tensor]:
    """Final hidden states [n, d] of randomly chosen documents, ``head.calibration_tokens`` in all."""
    one_by_one = replace(dataset, micro_batch_size=1, trim=True)
    order = np.random.default_rng(config.seed).permutation(len(pieces))

    def documents() -> Iterator[tuple[Tensor, Tensor]]:
        for piece in pieces[order]:
            (batch,) = one_by_one[[[piece[None]]]]
            output = target_outputs.of(batch, batch.to(target_outputs.target.device))
            yield output.final_hidden[0], batch.loss_mask[0]

    return supervised_states(documents(), config.head.calibration_tokens)


def build_loader(
    config: Config, accelerator: Accelerator, dataset: PackedDataset, pieces: np.ndarray, *, training: bool
) -> tuple[DataLoader, StepSampler]:
    """Loader of this rank's micro-batches, one list for each optimizer step (one micro-batch in validation)."""
    sampler = StepSampler(
        pieces,
        config.data.seq_len,
        seed=config.seed,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        micro_batch_size=config.trainer.micro_batch_size,
        accumulation=config.trainer.gradient_accumulation_steps if training else 1,
    )
    pin_memory = accelerator.device.type != "cpu"
    return step_loader(dataset, sampler, num_workers=config.data.num_workers, pin_memory=pin_memory), sampler
