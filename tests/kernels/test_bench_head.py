"""The benchmark runs end to end on its tiny shape."""

import json


def test_tiny_run_prints_a_table_and_writes_json(load_benchmark, tmp_path, capsys, device):
    bench = load_benchmark("bench_head")
    bench.main(["--tiny", "--rows", "1", "10", "--precisions", "bf16", "int8", "--json", str(tmp_path / "out.json")])

    report = json.loads((tmp_path / "out.json").read_text())
    results = report["results"]
    assert [(r["r"], r["k"], r["bits"], r["B"]) for r in results] == [
        (r, k, bits, rows) for r, k in ((6, 16), (3, 8), (3, 4)) for bits in ("bf16", "int8") for rows in (1, 10)
    ]
    for result in results:
        assert all(result[name] > 0 for name in ("full", "static", "floor"))
        assert (result["pipeline"] is not None) == (result["bits"] == "bf16")
        assert (result["tile"] is not None) == (device.type == "cuda")
        assert result["k"] <= result["distinct"] <= min(1003, result["B"] * result["k"])
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(results)
