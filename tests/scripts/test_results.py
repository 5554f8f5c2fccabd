"""The tables of scripts/results.py hold what the measurements say."""

import json

import pytest

from scripts import bench_decode, results
from tests.scripts.test_report import write_run


def cells(text: str, heading: str) -> dict[str, list[str]]:
    """The rows of the first table below ``heading``, by their first column."""
    lines = text[text.index(heading) + len(heading) :].split("\n")
    first = next(number for number, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return {row[0]: row[1:] for row in rows}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results") / "new"
    bench_decode.main(["--tiny", "--cpu", "--own-heads", "--shapes", "3", "--json", str(folder / "chains.json")])
    return folder


def test_what_bench_decode_wrote_becomes_tables(measured, capsys):
    results.main([str(measured)])
    text = capsys.readouterr().out
    report = json.loads((measured / "chains.json").read_text())
    rows = cells(text, "## chains")
    assert list(rows) == ["", "---", *[label for label in report["results"] if label != "autoregressive"]]
    assert rows[""] == ["τ", "of the full head's", "first draft accepted", "random"]
    for label in ("speculative full chain 3", "speculative speculative chain 3", "static static chain 3"):
        result, full = report["results"][label], report["results"]["speculative full chain 3"]
        assert rows[label][:2] == [f"{result['tau']:.3f}", f"{result['tau'] / full['tau']:.4f}"]
    speeds = cells(text.split("τ", 1)[1].split("\n\n", 1)[1], "\n")
    assert speeds["autoregressive"][1] == "1.00" and speeds["autoregressive"][3:] == ["", ""]


def test_a_pooled_category_counts_tokens_and_forwards():
    """10 tokens in 4 forwards and 30 in 6: 40 in 10."""
    result = {"num_tokens_per_category": {"math": 10, "stem": 30, "qa": 8},
              "tau_per_category": {"math": 2.5, "stem": 5.0, "qa": 2.0}}
    assert results.pooled(result, "MT-Bench") == pytest.approx(4.0) and results.pooled(result, "qa") == 2.0


def test_answers_of_one_token_have_no_first_draft():
    result = {"tau": 1.0, "head": "full", "shape": "chain 7", "acceptance_per_position": [],
              "tau_per_category": {"qa": 1.0}, "num_tokens_per_category": {"qa": 3}}
    assert cells(results.acceptance({"one": result}), "")["one"] == ["1.000", "1.0000", "", "1.00"]


def test_runs_become_rows_with_their_last_validation(tmp_path, capsys):
    run = write_run(tmp_path / "one", 1e-3)
    lines = [{"step": step, "perf/tokens_per_second": 1000.0, "perf/seconds_per_step": 2.0} for step in (10, 30)]
    lines.append({"step": 30, **{metric: 0.5 for metric in results.VALIDATION.values()}})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tables = tmp_path / "new" / "tables.md"
    results.main([str(tmp_path), "--runs", str(run), "--output", str(tables)])
    assert capsys.readouterr().out == ""
    assert cells(tables.read_text(), "## Training")["one"] == [
        "30", "0.1", "1.0", "1,000", "", *["0.5000"] * 5]  # 30 steps of 2 s at 1000 tokens/s: a minute


def test_a_folder_without_figures_is_refused_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit):
        results.main([str(tmp_path)])
    assert "holds no JSON file of scripts/bench_decode.py; measure first" in capsys.readouterr().err


def test_a_file_of_another_command_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "evaluation.json").write_text('{"tau": 2}')
    with pytest.raises(SystemExit):
        results.main([str(tmp_path)])
    assert capsys.readouterr().err == (f"error: {tmp_path / 'evaluation.json'} is damaged: it has no results; "
                                       "keep no JSON files there but those of scripts/bench_decode.py\n")
