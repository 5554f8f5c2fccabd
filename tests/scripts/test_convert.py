from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from specvocab_kernels.vocab_head import TileSelection

from scripts import convert
from specvocab_model.config import ConfigError, DraftConfig, HeadConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.draft_states import collect_draft_states, measure_coverage
from specvocab_model.export import Provenance, load_checkpoint, save_checkpoint
from specvocab_model.speculator import VocabSpeculator
from specvocab_model.target import Target
from tests.tiny import tile_candidates, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return tiny_target("qwen3", tmp_path_factory.mktemp("convert"))


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> Path:
    """A stock EAGLE-3 folder with feature layers of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SpecVocabDraft.build(target.spec, DraftConfig(feature_layers=[1, 3, 6]), HeadConfig(type="full"))
    folder = tmp_path_factory.mktemp("drafts") / "full"
    save_checkpoint(folder, model, target.spec, Provenance(), dtype=torch.float32)
    (folder / "specvocab.json").unlink()
    return folder


@pytest.fixture
def arguments(draft, target, tmp_path) -> list[str]:
    prompts = [{"prompt": f"What is {number} + 1?"} for number in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return [str(draft), "--target", target.spec.name, "--dtype", "float32", "--device", "cpu", "--num-prompts", "12",
            "--max-new-tokens", "12", "--rank", "24", "--num-candidates", "60", "--output", str(tmp_path / "converted"),
            "--prompts", str(tmp_path / "prompts.jsonl")]


def run(arguments: list[str], **changes: str) -> None:
    """``changes`` by option name without dashes."""
    arguments = list(arguments)
    for option, value in changes.items():
        arguments[arguments.index(f"--{option}") + 1] = value
    convert.main(arguments)


def test_the_draft_stays_and_gains_a_calibrated_speculator(arguments, draft, target, tmp_path, capsys):
    run(arguments)
    before, after = load_checkpoint(draft), load_checkpoint(tmp_path / "converted", target.spec)
    torch.testing.assert_close(dict(after.draft.state_dict()), dict(before.draft.state_dict()), rtol=0, atol=0)
    assert after.architecture.feature_layers == (1, 3, 6)
    assert (after.speculator.rank, after.speculator.num_candidates) == (24, 60)
    basis = after.speculator.down_proj.weight.detach()
    torch.testing.assert_close(basis @ basis.T, torch.eye(24), atol=1e-5, rtol=0)
    torch.testing.assert_close(after.speculator.vocab_proj.weight, target.lm_head_weight @ basis.T)

    recall = json.loads((tmp_path / "converted/specvocab.json").read_text())["metrics"]["candidate_recall"]
    chance = 60 / target.spec.vocab_size
    assert recall["draft_top1"] > 3 * chance  # half the rank is left of 48; an unrelated choice would hit at chance
    printed = capsys.readouterr().out
    assert "rank 24, 60 candidates of 277 tokens" in printed
    assert f"{recall['target_top1']:.2%} of the target's" in printed
    assert f"{recall['draft_top1']:.2%} of the full-vocabulary draft's" in printed


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_an_8_bit_speculator_and_what_it_costs(precision, arguments, target, tmp_path, capsys):
    run([*arguments, "--quantization", precision])
    after = load_checkpoint(tmp_path / "converted", target.spec).speculator
    assert (after.quantization, after.vocab_proj.weight.element_size()) == (precision, 1)
    record = json.loads((tmp_path / "converted/specvocab.json").read_text())
    cost = record["candidate_recall"]
    shares = record["metrics"]["candidate_recall"]
    assert cost["quantization"] == precision and cost["num_positions"] == shares["num_positions"]
    assert cost["before"]["target_top1"] == shares["target_top1"]
    assert abs(cost["after"]["draft_top1"] - shares["draft_top1"]) < 0.1
    assert (f"{cost['before']['target_top1']:.2%} -> {cost['after']['target_top1']:.2%} of the target's"
            in capsys.readouterr().out)


@pytest.mark.parametrize("options", [["--tile", "64"], ["--tile", "64", "--keep", "2"]])
def test_contradicting_selections_are_refused(options, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run([*arguments, *options])
    assert stopped.value.code == 2
    assert "head.tile=64" in capsys.readouterr().err


def test_a_speculator_of_ours_is_replaced(arguments, target, tmp_path):
    run(arguments)
    arguments[0] = str(tmp_path / "converted")
    run(arguments, rank="10", output=str(tmp_path / "again"))
    assert load_checkpoint(tmp_path / "again", target.spec).speculator.rank == 10


def test_without_prompts_the_target_invents_them(arguments, target, tmp_path):
    arguments = arguments[:-2]
    run(arguments, **{"num-prompts": "60", "max-new-tokens": "40"})
    assert load_checkpoint(tmp_path / "converted", target.spec).speculator is not None


def test_recall_is_taken_where_the_draft_predicts_the_answer(draft, target):
    """The judged states against the training-time unroll, the counts against a loop."""
    model = load_checkpoint(draft)
    target = Target(target.spec, target.model, target.tokenizer, feature_layers=model.architecture.feature_layers)
    speculator = VocabSpeculator(target.spec.hidden_size, 24, TileSelection(target.spec.vocab_size, 128, 20))
    speculator.initialise("svd", target.lm_head_weight)
    input_ids = torch.randint(0, 256, (1, 14), generator=torch.Generator().manual_seed(0))
    row = {"input_ids": input_ids[0].tolist(), "loss_mask": [0] * 6 + [1] * 8}

    hidden_states = target.model(input_ids, output_hidden_states=True).hidden_states
    features = torch.cat([hidden_states[layer] for layer in (1, 3, 6)], -1)
    positions = torch.arange(14)[None]
    with torch.no_grad():
        embeds = target.embed(input_ids)
        drafted = model.draft.unroll(features, embeds, positions, torch.zeros_like(positions), 1)[0, 0, 4:12]
    states = collect_draft_states(target, model, [row, row], num_steps=1, num_tokens=100)
    torch.testing.assert_close(states.hidden[0], torch.cat([drafted, drafted]))
    expected_ids = (hidden_states[-1][0, 5:13] @ target.lm_head_weight.T).argmax(-1).tolist()
    assert states.target_ids.tolist() == 2 * expected_ids

    recall = measure_coverage(states, speculator.head_weights(target.lm_head_weight))
    candidates = [tile_candidates(scores, num_tiles=3, keep=20) for scores in speculator(drafted).tolist()]
    draft_ids = (drafted @ target.lm_head_weight.T).argmax(-1).tolist()
    hits = [sum(token in found for token, found in zip(ids, candidates, strict=True))
            for ids in (expected_ids, draft_ids)]
    assert (states.num_valid, recall.target_top1, recall.draft_top1) == (16, hits[0] / 8, hits[1] / 8)
    assert 0 < hits[0] < 8 or 0 < hits[1] < 8


def test_the_target_gives_the_features_that_the_draft_reads(arguments, monkeypatch):
    seen = []

    def spy(target, model, rows, **options):
        seen.append((target.feature_layers, len(rows)))
        return collect_draft_states(target, model, rows, **options)

    monkeypatch.setattr(convert, "collect_draft_states", spy)
    convert.main(arguments)
    assert seen == [((1, 3, 6), 3)]  # 3 of 12 answers are held out


def test_what_the_chat_template_refuses_ends_in_one_line(arguments, tmp_path, capsys):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    target = tiny_target("qwen3", tmp_path)
    target.tokenizer.chat_template = template + target.tokenizer.chat_template
    target.tokenizer.save_pretrained(target.spec.name)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": messages}))
    with pytest.raises(SystemExit) as stopped:
        run(arguments, target=target.spec.name)
    assert stopped.value.code == 2
    assert "no system message" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_bug_keeps_its_traceback(arguments, monkeypatch):
    def broken(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr(convert, "generate", broken)
    for some in (arguments, arguments[:-2]):  # answers to prompts of a file, and invented prompts
        with pytest.raises(ValueError, match="a bug") as caught:
            run(some)
        assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target": "nowhere/at-all/x"}, "nowhere/at-all/x"),
        ({"rank": "49"}, "rank=49 must lie between 1 and hidden_size=48"),
        ({"num-prompts": "1"}, "1 usable prompts"),
        ({"max-new-tokens": "511"}, "0 usable prompts of at most 1 tokens"),
        ({"prompts": "missing.jsonl"}, "missing.jsonl"),
        ({"output": __file__}, "test_convert.py is a file; give another folder"),
        ({"output": str(Path(__file__).parent)}, "is not empty and not a SpecVocab checkpoint"),
    ],
)
def test_what_cannot_work_ends_in_one_line(changes, message, arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(arguments, **changes)
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("changes", [
    {"output": __file__}, {"prompts": "missing.jsonl"}, {"rank": "49"}, {"device": "cuda:99"}, {"target": "no/where/x"},
])
def test_the_target_is_not_loaded_for_what_cannot_work(changes, arguments, monkeypatch):
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(SystemExit) as stopped:
        run(arguments, **changes)
    assert stopped.value.code == 2


@pytest.mark.parametrize(("option", "value", "message"), [
    ("--device", "abacus", "argument --device: 'abacus' cannot be used"),
    ("--chat-template-kwargs", "{", "argument --chat-template-kwargs: '{' is not JSON"),
    ("--chat-template-kwargs", "[1]", "argument --chat-template-kwargs: '[1]' is no JSON object"),
    ("--chat-template-kwargs", '{"quiet": true}', "target.chat_template_kwargs sets 'quiet', which the target's"),
    ("--chat-template-kwargs", '{"messages": []}', "target.chat_template_kwargs holds messages"),
])
def test_options_that_cannot_be_meant(option, value, message, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run([*arguments, option, value])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("invented", [False, True])
def test_variables_reach_the_chat_template(invented, arguments, tmp_path, monkeypatch):
    target = tiny_target("qwen3", tmp_path)
    mark = "{% if quiet is defined %}{{ 'Be quiet: ' ~ quiet }}{% endif %}"
    target.tokenizer.chat_template = mark + target.tokenizer.chat_template
    target.tokenizer.save_pretrained(target.spec.name)
    written, seen = convert.generate, []

    def spy(engine, prompts, *more):
        seen.extend(target.tokenizer.decode(prompt) for prompt in prompts)
        return written(engine, prompts, *more)

    monkeypatch.setattr(convert, "generate", spy)
    kept = arguments[:-2] if invented else arguments
    run([*kept, "--chat-template-kwargs", '{"quiet": 7}'], target=target.spec.name, **{"num-prompts": "40"})
    assert len(seen) > 12 and all(text.startswith("Be quiet: 7<|im_start|>user") for text in seen)


@pytest.mark.parametrize("option", ["max-new-tokens", "num-prompts", "rank"])
def test_a_count_of_nothing_is_refused(option, arguments, capsys):
    """Without tokens to write, the engine would wait for an EOS for ever."""
    with pytest.raises(SystemExit) as stopped:
        run(arguments, **{option: "0"})
    assert stopped.value.code == 2
    assert f"argument --{option}: 0 must be at least 1" in capsys.readouterr().err


def test_a_draft_of_another_target_is_refused(arguments, tmp_path, capsys):
    other = tiny_target("llama", tmp_path, vocab_size=290)
    with pytest.raises(SystemExit):
        run(arguments, target=other.spec.name)
    assert "has vocab_size=277, but" in capsys.readouterr().err
