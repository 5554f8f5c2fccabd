"""Tiny training runs: a random target, data with awkward documents, and the overrides that train on them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from data_gen.shards import Row, ShardWriter
from specvocab_model.target import load_spec
from tests.composing import config_of
from tests.tiny import EOS_IDS, tiny_target_config, tiny_target_folder
from train.build import Run, build_run

SEQ_LEN = 48
RARE_TOKEN = 250  # appears in one document only
RARE_ROW = "row-5"
NUM_TRAIN_ROWS = 26


def write_experiment(root: Path, **model_kwargs) -> Path:
    """A target in ``root/target`` and data in ``root/train`` and ``root/validation``; returns ``root``."""
    folder = tiny_target_folder(root / "target", "qwen3", **model_kwargs)
    spec = load_spec(tiny_target_config(folder, "qwen3"))
    rng = np.random.default_rng(0)
    lengths = rng.integers(8, 30, size=NUM_TRAIN_ROWS).tolist()
    lengths[0] = 2 * SEQ_LEN + 7  # is cut
    rows = [_row(index, length, rng) for index, length in enumerate(lengths)]
    rows[5].input_ids[-2] = RARE_TOKEN
    # Fills a packed row, and its one supervised token has no draft position: whoever gets it has nothing to learn.
    rows[1] = _row(1, SEQ_LEN, rng, supervised=[1])
    _write(root / "train", rows, spec)
    held_out = [_row(index, int(length), rng) for index, length in enumerate(rng.integers(8, 40, size=7))]
    _write(root / "validation", held_out, spec)
    return root


def write_uneven_experiment(root: Path, valid: tuple[int, ...]) -> Path:
    """As ``write_experiment``; every training row fills a packed row of its own, with that many valid positions."""
    spec = load_spec(tiny_target_config(tiny_target_folder(root / "target", "qwen3"), "qwen3"))
    rng = np.random.default_rng(1)
    rows = [_row(index, 400, rng, supervised=list(range(400 - count, 400)) or [1])
            for index, count in enumerate(valid)]
    _write(root / "train", rows, spec)
    _write(root / "validation", rows[1:], spec)
    return root


def _row(index: int, length: int, rng: np.random.Generator, supervised: list[int] | None = None) -> Row:
    supervised = list(range(length // 3, length)) if supervised is None else supervised
    mask = [int(at in supervised) for at in range(length)]
    return Row(id=f"row-{index}", source="test", input_ids=rng.integers(0, 200, size=length).tolist(), loss_mask=mask,
               finish_reason="length")


def _write(folder: Path, rows: list[Row], spec) -> None:
    writer = ShardWriter(
        folder, target="tiny", settings={"target": {"fingerprint": spec.fingerprint}}, num_prompts=len(rows),
        rows_per_shard=10, vocab_size=spec.vocab_size, stop_token_ids=EOS_IDS,
    )
    writer.open()
    for shard in writer.missing_shards():
        writer.write(shard, rows[writer.prompt_range(shard)])
    writer.finalise()


def overrides(root: Path, run_name: str, *changes: str) -> list[str]:
    """Hydra overrides of a run in ``root/run_name``: fp32 on the CPU, 4 packed rows a step, 3 epochs."""
    settings = {
        "run_name": run_name,
        "output_dir": root / run_name,
        "target.model": root / "target",
        "target.dtype": "float32",
        "draft.num_unroll_steps": 3,
        "head.rank": 5,  # vocab_proj then has an odd number of weights: ranks cannot share them out evenly
        "head.num_candidates": 64,
        "head.calibration_tokens": 150,
        "data.train_path": root / "train",
        "data.validation_path": root / "validation",
        "data.seq_len": SEQ_LEN,
        "data.num_workers": 0,
        "trainer.num_epochs": 3,
        "trainer.gradient_accumulation_steps": 4,
        "trainer.mixed_precision": "no",
        "trainer.log_every": 1,
        "trainer.validate_every": 4,
        "trainer.save_every": 4,
        "optim.lr": 3e-3,
        "distributed.cpu": True,
        "eval.prompts": "unused.jsonl",
    }
    return [f"{key}={value}" for key, value in settings.items()] + list(changes)


def run_of(root: Path, name: str, *changes: str) -> Run:
    return build_run(config_of(overrides(root, name, *changes)))


def logged(root: Path, run_name: str, *names: str) -> list[list[float]]:
    """One row per line of metrics.jsonl that has the first of ``names``."""
    lines = map(json.loads, (root / run_name / "metrics.jsonl").read_text().splitlines())
    return [[line[name] for name in ("step", *names)] for line in lines if names[0] in line]


def final_weights(root: Path, run_name: str) -> dict[str, torch.Tensor]:
    return load_file(root / run_name / "final" / "model.safetensors")


def largest_difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)
