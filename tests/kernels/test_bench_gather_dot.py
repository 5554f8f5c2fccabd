"""The benchmark runs end to end on its tiny shape."""

import json


def test_tiny_run_prints_a_table_and_writes_json(load_benchmark, tmp_path, capsys, device):
    bench = load_benchmark("bench_gather_dot")
    bench.main(["--tiny", "--rows", "1", "3", "--k", "5", "5000", "--json", str(tmp_path / "out.json")])

    report = json.loads((tmp_path / "out.json").read_text())
    assert [(r["rows"], r["k"]) for r in report["results"]] == [(1, 5), (1, 1003), (3, 5), (3, 1003)]
    for result in report["results"]:
        assert all(result[name] > 0 for name in ("full_ms", "bmm_ms", "torch_ms", "floor_ms"))
        assert (result["triton_ms"] is not None) == (device.type == "cuda")
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(report["results"])
