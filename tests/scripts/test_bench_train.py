"""The benchmark of the training step runs end to end at a tiny shape."""

import json

from scripts import bench_train


def test_tiny_run_prints_a_table_and_writes_json(tmp_path, capsys):
    bench_train.main(["--tiny", "--documents", "3", "--target", "all", "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(result["seq_len"], result["target"]) for result in results] == [
        (64, "no"), *((64, variant) for variant in bench_train.VARIANTS)]
    assert results[0]["target_ms"] is None and all(result["target_ms"] > 0 for result in results[1:])
    assert all(result["ms"] > 0 and result["tokens_per_second"] > 0 for result in results)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(results)
