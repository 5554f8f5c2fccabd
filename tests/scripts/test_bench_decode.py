"""The benchmark of decoding measures every engine on the same prompts."""

import json

import pytest

from scripts import bench_decode


@pytest.mark.parametrize("options", [[], ["--temperature", "1", "--batch", "2"]], ids=["greedy", "sampled"])
def test_tiny_run_prints_a_table_and_writes_json(options, tmp_path, capsys):
    bench_decode.main(["--tiny", "--cpu", *options, "--json", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    results = report["results"]
    heads = ["speculative full", "speculative speculative", "static static"]
    assert list(results) == ["autoregressive"] + [f"{h} {s}" for h in heads for s in ("chain 3", "tree 3x3x8")]
    for name, result in results.items():
        assert result["num_tokens"] == 2 * 12  # nothing stops a random target
        assert result["differences"] == []
        assert set(result["milliseconds"]) == ({"verify"} if name == "autoregressive" else {"verify", "draft", "head"})
    assert results["autoregressive"]["speed_up"] == 1 and results["autoregressive"]["tau"] == 1
    assert capsys.readouterr().out.count("\n") == 2 + len(results)


@pytest.mark.parametrize("shape", ["", "8x10", "3x1x4", "a", "1x2x3x4"])
def test_shapes_that_are_none_are_refused(shape, capsys):
    with pytest.raises(SystemExit):
        bench_decode.main(["--tiny", "--shapes", shape])
    assert "neither a chain's length nor DEPTHxTOP_KxTOKENS" in capsys.readouterr().err


def test_what_is_missing_is_named():
    with pytest.raises(SystemExit, match="--target, --draft and --prompts are all needed"):
        bench_decode.main(["--cpu"])
