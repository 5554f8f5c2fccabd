"""The benchmark of decoding measures every engine on the same prompts."""

import json
from types import SimpleNamespace

import pytest
import torch

from data_gen.chat import encode_prompt
from data_gen.prompts import parse_prompt
from scripts import bench_decode
from specvocab_model.decode import autoregressive_generate
from specvocab_model.heads import build_head
from tests.tiny import tiny_target


@pytest.mark.parametrize("options, layers", [
    (["--plain-layers"], ["", ", plain layers"]), (["--temperature", "1", "--batch", "2"], [""]),
], ids=["greedy", "sampled"])
def test_tiny_run_prints_a_table_and_writes_json(options, layers, tmp_path, capsys):
    bench_decode.main(["--tiny", "--cpu", *options, "--json", str(tmp_path / "out.json")])
    report = json.loads((tmp_path / "out.json").read_text())
    results = report["results"]
    heads = ["speculative full", "speculative speculative", "static static"]
    engines = ["autoregressive"] + [f"{h} {s}" for h in heads for s in ("chain 3", "tree 3x3x8")]
    assert list(results) == [engine + kind for kind in layers for engine in engines]
    for name, result in results.items():
        assert result["num_tokens"] == 2 * 12  # nothing stops a random target
        assert result["differences"] == []
        assert set(result["milliseconds"]) == ({"verify"} if name.startswith("auto") else {"verify", "draft", "head"})
    assert results["autoregressive"]["speed_up"] == 1 and results["autoregressive"]["tau"] == 1
    assert capsys.readouterr().out.count("\n") == 2 + len(results)


def test_what_is_called_speculative_never_takes_the_full_head(monkeypatch):
    """As it would for a large batch on a GPU, where that is faster."""
    asked = []
    monkeypatch.setattr(bench_decode, "build_head", lambda kind, *rest, **options: (
        asked.append((kind, options)), build_head(kind, *rest, **options))[1])
    bench_decode.main(["--tiny", "--cpu", "--shapes", "2"])
    assert dict((kind, options) for kind, options in asked)["speculative"] == {"impl": "candidates"}


def test_turns_whose_answers_are_equally_long_share_a_batch():
    """A batch is decoded until its longest answer ends."""
    turns = [bench_decode.Turn(str(number), "any", 0, [1] * number) for number in range(1, 8)]

    class Plain:
        def generate(self, prompts: list[list[int]], max_new_tokens: int) -> list[SimpleNamespace]:
            return [SimpleNamespace(sequences=[0] * min(max_new_tokens, 10 * (len(prompt) % 4))) for prompt in prompts]

    batches = bench_decode.alike(Plain(), bench_decode.split(turns, [1] * 7, 3), max_new_tokens=25)
    answers = [[min(25, 10 * (len(turn.prompt_ids) % 4)) for turn in batch] for batch in batches]
    assert answers == [[0, 10, 10], [20, 20, 25], [25]]
    assert sorted(turn.id for batch in batches for turn in batch) == [turn.id for turn in turns]
    assert bench_decode.split(turns, [7, 6, 5, 4, 3, 2, 1], 1) == [[turn] for turn in turns]


def test_a_later_turn_follows_on_the_greedy_answers(tmp_path):
    """Of prompts with one to three turns; the answers are those of the other decoder."""
    target = tiny_target("llama", tmp_path)
    prompts = [parse_prompt({"question_id": number, "category": "c", "turns": list("abc")[: number + 1]}, source="x")
               for number in range(3)]
    args = bench_decode.build_parser().parse_args(["--max-new-tokens", "5"])
    turns = {(turn.id, turn.number): turn.prompt_ids for turn in bench_decode.turns_of(target, prompts, args)}
    assert len(turns) == 1 + 2 + 3
    for prompt in prompts:
        answers: list[str] = []
        for number in range(prompt.num_turns):
            expected = encode_prompt(target.tokenizer, prompt.conversation(answers), {})
            assert turns[prompt.id, number] == expected
            output = autoregressive_generate(target, torch.tensor([expected]), max_new_tokens=5)
            answers.append(target.tokenizer.decode(output.sequences, skip_special_tokens=True))


@pytest.mark.parametrize("shape", ["", "8x10", "3x1x4", "a", "1x2x3x4"])
def test_shapes_that_are_none_are_refused(shape, capsys):
    with pytest.raises(SystemExit):
        bench_decode.main(["--tiny", "--shapes", shape])
    assert "neither a chain's length nor DEPTHxTOP_KxTOKENS" in capsys.readouterr().err


def test_what_is_missing_is_named(capsys):
    with pytest.raises(SystemExit) as ended:
        bench_decode.main(["--cpu"])
    assert ended.value.code == 2
    assert "--target, --draft and --prompts are all needed" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--batch=0", "--max-new-tokens=0", "--temperature=-1", "--num-prompts=0"])
def test_numbers_that_make_no_sense_are_refused(option, capsys):
    with pytest.raises(SystemExit):
        bench_decode.main(["--tiny", option])
    assert option.split("=")[0] in capsys.readouterr().err
