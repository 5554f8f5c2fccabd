"""The benchmark runs end to end on its tiny shape, and its eager variant is what it compares with."""

import json

import pytest
import torch


@pytest.fixture(scope="module")
def bench(load_benchmark):
    return load_benchmark("bench_distill")


def test_tiny_run_prints_a_table_and_writes_json(bench, tmp_path, capsys, device):
    bench.main(["--tiny", "--variants", "ours", "eager", "--json", str(tmp_path / "out.json")])
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [result["variant"] for result in results] == ["ours", "eager"]
    assert all(result["ms"] > 0 and result["ratio"] > 0 for result in results)
    assert (results[0]["peak_mib"] is not None) == (device.type == "cuda")
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(results)


def test_eager_takes_the_same_loss(bench, device):
    problem = bench.make_problem(12, 3, 101, 16, 4, device)
    problem = {name: tensor.detach().float().requires_grad_(tensor.requires_grad) for name, tensor in problem.items()}
    arguments = bench.argparse.Namespace(loss="forward_kl", max_mib=1, collect=False)
    ours = bench.build("ours", arguments)(problem)
    torch.testing.assert_close(ours, bench.eager(problem), rtol=1e-4, atol=1e-4)
