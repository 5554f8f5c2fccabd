"""The benchmark of the whole command runs the engine's loop over slots that decode nothing, and leaves nothing."""

import json

import pytest

import scripts.bench_data_gen as bench
from tests.data_gen.runs import overrides, write_inputs


def test_without_a_gpu_one_is_simulated(tmp_path, monkeypatch, capsys):
    root = write_inputs(tmp_path)
    monkeypatch.setattr(bench, "ANSWER_TOKENS", 12)
    monkeypatch.setattr("sys.argv", ["bench_data_gen.py", *overrides(
        root, "bench", "generation.num_prompts=90", "generation.temperature=0", "generation.max_new_tokens=16")])
    bench.main()
    result = json.loads((root / "bench" / "bench_data_gen.json").read_text())
    assert json.loads(capsys.readouterr().out.split("\n", 1)[1]) == result
    assert result["stages"]["simulated"]["prompts"] == 90
    assert 90 * 4 <= result["stages"]["simulated"]["response_tokens"] <= 90 * 16
    assert 0 <= result["gpu_idle_share"] < 1
    assert [path.name for path in (root / "bench").iterdir()] == ["bench_data_gen.json"]


def test_an_idle_gpu_is_noticed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(bench.time, "perf_counter", lambda: now[0])
    gpu = bench.SimulatedGPU()
    for wait, seconds in ((0.0, 2.0), (1.0, 1.0), (2.5, 1.0)):  # given in time; half a second late
        now[0] += wait
        gpu.give(seconds)
    assert gpu.idle_seconds == pytest.approx(0.5) and gpu.done_at == pytest.approx(104.5)
