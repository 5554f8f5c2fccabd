"""The benchmark runs where there is no GPU; its figures mean nothing there."""

from __future__ import annotations

import json
from argparse import Namespace

import pytest

from scripts.bench_distributed import covered, main, write_report


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_one_rank(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    main(["--tiny", "--strategies", "single", "ddp", "--cards", "1", "--json", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    assert [(one["strategy"], one["cards"], one["target"]) for one in report["results"]] == [
        (strategy, 1, target) for strategy in ("single", "ddp") for target in ("without", "with")
    ]
    assert all(one["tokens_per_second"] > 0 and one["estimated_gib"] > 0 for one in report["results"])
    assert [one["efficiency"] for one in report["results"]] == [1.0, 1.0, 1.0, 1.0]
    assert capsys.readouterr().out.count("ddp") == 3
    assert not list(tmp_path.glob("*.partial"))


def test_efficiency_is_relative_to_one_card_of_the_same_strategy(tmp_path):
    def result(strategy: str, cards: int, tokens_per_second: float) -> dict:
        return {"strategy": strategy, "cards": cards, "target": "with", "tokens_per_second": tokens_per_second}

    results = [result("single", 1, 100.0), result("zero2", 1, 80.0), result("zero2", 2, 120.0), result("ddp", 2, 150.0)]
    write_report(Namespace(tiny=True, json=tmp_path / "out.json", strategy=None), results)
    assert [one["efficiency"] for one in results] == [1.0, 1.0, 0.75, 0.75]


@pytest.mark.parametrize(("spans", "length"), [
    ([], 0), ([(1, 3)], 2), ([(1, 3), (2, 5), (7, 8)], 5), ([(1, 10), (2, 3)], 9), ([(4, 5), (1, 2)], 2),
])
def test_covered(spans, length):
    assert covered(spans) == length
