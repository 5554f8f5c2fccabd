"""A data set of random tokens, as data generation leaves it."""

from __future__ import annotations

from pathlib import Path

import torch

from data_gen.shards import Row, ShardWriter

PROMPT, RESPONSE = 8, 12  # tokens of every row


def write_data(folder: Path, *, num_rows: int, seed: int = 0) -> str:
    """Write a finished data set of ``num_rows`` rows to ``folder``; returns it as configurations name it."""
    ids = torch.randint(0, 250, (num_rows, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [Row(input_ids=line, loss_mask=[0] * PROMPT + [1] * RESPONSE, id=str(number), source="test",
                finish_reason="length") for number, line in enumerate(ids)]
    writer = ShardWriter(folder, target="t", settings={"target": {"fingerprint": "f"}}, num_prompts=num_rows,
                         rows_per_shard=num_rows, vocab_size=277, stop_token_ids=[])
    writer.open()
    writer.write(0, rows)
    writer.finalise()
    return str(folder)
