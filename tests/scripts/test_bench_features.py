"""The benchmark of features writes and reads the same bytes both ways."""

from __future__ import annotations

import torch

from scripts import bench_features
from scripts.bench_features import measure, store_of, write_features


def test_both_ways_have_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(bench_features, "ROWS_PER_SHARD", 10)
    result = measure(tmp_path, 2_000_000, hidden_size=16, repeats=2)
    sizes = [sorted(path.stat().st_size for path in (tmp_path / name).iterdir()) for name in ("plain", "features")]
    assert sizes[0] == sizes[1] and sum(sizes[0]) / 1e9 == result["GB"]
    assert 1_500_000 < sum(sizes[0]) <= 2_000_000 and len(sizes[0]) > 1
    for name in ("features write", "features read in order", "features read shuffled"):
        assert result[f"{name} / plain"] == result[name] / result[f"plain {name.split()[1]}"] > 0


def test_what_is_written_is_what_is_read(tmp_path):
    store, numbers = store_of(tmp_path, 300_000, 16), torch.randn(20480, 64).bfloat16()
    write_features(store, numbers)
    features, final_hidden = store.zeros(1, 5)
    store.read(3, 1, 5, features[0], final_hidden[0])
    written = torch.cat([features, final_hidden], dim=-1)[0]
    assert any(torch.equal(written, numbers[at : at + 5]) for at in range(len(numbers) - 5))
