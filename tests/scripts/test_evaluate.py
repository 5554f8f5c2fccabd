"""scripts/evaluate.py on a tiny target: from an exported checkpoint to evaluation.json, table and model card."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from data_gen.chat import encode_prompt
from data_gen.prompts import load_prompts
from data_gen.shards import Row, ShardWriter
from scripts import evaluate
from specvocab_model.config import Config, ConfigError, DataConfig, EvalConfig, HeadConfig, TargetConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import Provenance, save_checkpoint
from specvocab_model.target import Target, load_spec
from tests.tiny import tiny_target, tiny_target_folder
from tests.train.runs import largest_difference

SPEC_BENCH = [
    {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
    {"question_id": 161, "category": "coding", "turns": ["Sort a list."]},
]
CHAT = [{"messages": [{"role": "user", "content": "Hello"}]}]


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("target"), "qwen3")


@pytest.fixture
def config(tmp_path: Path, target_folder: Path) -> Config:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in SPEC_BENCH))
    return Config(
        run_name="tiny",
        output_dir=str(tmp_path / "run"),
        target=TargetConfig(model=str(target_folder), dtype="bfloat16"),
        head=HeadConfig(num_candidates=50),
        data=DataConfig(train_path="t", validation_path="v"),
        eval=EvalConfig(prompts=str(prompts), max_new_tokens=10, num_draft_tokens=2),
    )


def export(config: Config, recorded: dict | None = None) -> SpecVocabDraft:
    """A draft that was trained for no step; ``recorded``: what its provenance has in the place of a training's."""
    spec = load_spec(config.target)
    torch.manual_seed(config.seed)
    model = SpecVocabDraft.build(spec, config.draft, config.head)
    provenance = Provenance(config=asdict(config) if recorded is None else recorded)
    save_checkpoint(Path(config.output_dir, "export"), model, spec, provenance)
    return model


def test_spec_bench_from_checkpoint_to_table(config: Config, capsys: pytest.CaptureFixture[str]):
    export(config)
    result = evaluate.run(config)
    progress = capsys.readouterr().err
    assert "tau full=" in progress and "tau speculative=" in progress and "tau untrained=" not in progress
    assert json.loads(Path(config.output_dir, "evaluation.json").read_text()) == result
    assert list(result["tau"]) == ["untrained", "full", "speculative"]
    assert set(result["details"]["full"]["tau_per_category"]) == {"writing", "coding"}
    assert result["lossless"] is True
    assert result["num_prompts"] == 2
    assert 0 <= result["candidate_recall"]["target_top1"] <= 1

    table = evaluate.table(result)
    for row in ("autoregressive", "untrained", "full", "speculative", "writing", "coding"):
        assert row in table
    assert "token for token: yes" in table
    card = Path(config.output_dir, "export", "README.md").read_text()
    assert f"| speculative | {result['tau']['speculative']:.3f} |" in card


def test_chat_prompts_and_a_draft_without_speculator(config: Config):
    Path(config.eval.prompts).write_text(json.dumps(CHAT[0]))
    config.head.type = "full"
    export(config)
    result = evaluate.run(config)
    assert list(result["tau"]) == ["untrained", "full"]
    assert result["candidate_recall"] is None
    assert evaluate.table(result)


def test_a_draft_with_a_static_head(config: Config):
    config.head = HeadConfig(type="static", draft_vocab_size=60)
    export(config)
    result = evaluate.run(config)
    assert list(result["tau"]) == ["untrained", "static"] and result["lossless"] is True
    assert 0 <= result["candidate_recall"]["target_top1"] <= 1
    assert "static" in evaluate.table(result)


def test_the_untrained_draft_is_what_training_began_with(config: Config, target_folder: Path):
    config.seed = 5
    model = export(config)
    target = Target.load(config.target, device="cpu", feature_layers=model.architecture.feature_layers)
    loaded = SpecVocabDraft.from_pretrained(Path(config.output_dir, "export"), target_spec=target.spec)
    untrained = evaluate.make_variants(target, loaded, asdict(config))["untrained"].model
    trained_for_no_step = {name: weight.to(torch.bfloat16) for name, weight in model.draft.state_dict().items()}
    assert largest_difference(untrained.draft.state_dict(), trained_for_no_step) == 0.0


def test_a_converted_draft_is_not_compared_with_an_untrained_one(config: Config):
    export(config, recorded={"convert": {"draft": "somebody/else"}})
    result = evaluate.run(config)
    assert list(result["tau"]) == ["full", "speculative"]
    assert evaluate.table(result)


def test_a_killed_evaluation_goes_on_unless_something_else_is_asked(
    config: Config, target_folder: Path, monkeypatch, capsys
):
    config.eval = replace(config.eval, max_new_tokens=4)
    export(config)
    begun: list[int] = []
    decode = evaluate.evaluate

    def spied(*arguments, finished, on_prompt, **options):
        begun.append(0 if finished is None else finished["num_prompts"])

        def killed_after_one(state):
            on_prompt(state)
            if len(begun) == 1:
                raise KeyboardInterrupt

        return decode(*arguments, finished=finished, on_prompt=killed_after_one, **options)

    monkeypatch.setattr(evaluate, "evaluate", spied)
    with pytest.raises(KeyboardInterrupt):
        evaluate.run(config)
    left = Path(config.output_dir, "evaluation.unfinished")
    content = left.read_text()
    result = evaluate.run(config)
    assert "going on after 1 of the prompts" in capsys.readouterr().out and not left.exists()
    assert set(result["details"]["full"]["tau_per_category"]) == {"writing", "coding"}
    prompts, template = Path(config.eval.prompts), target_folder / "chat_template.jinja"
    asked, rendered = prompts.read_text(), template.read_text()
    for change in (
        lambda: setattr(config, "eval", replace(config.eval, max_new_tokens=3)),
        lambda: setattr(config, "target", replace(config.target, attn_implementation="eager")),
        lambda: prompts.write_text(asked.replace("writing", "poetry")),
        lambda: template.write_text(rendered + "!"),
    ):
        before = config.eval, config.target
        left.write_text(content)
        change()
        evaluate.run(config)
        assert f"{left} is of another draft, other prompts or other settings" in capsys.readouterr().out
        config.eval, config.target = before
        prompts.write_text(asked)
        template.write_text(rendered)
    left.write_text(content)
    config.seed = 1
    export(config)
    config.seed = 0  # other weights is all that has changed
    evaluate.run(config)
    assert begun == [0, 1, *[0] * 5]
    left.write_text("{}")
    with pytest.raises(ConfigError, match=r"evaluation\.unfinished is damaged: it has no digest; remove it"):
        evaluate.run(config)


def test_while_a_checkpoint_is_measured_nobody_else_measures_or_writes_it(config: Config, monkeypatch):
    export(config)
    refused = []

    def meanwhile(state):
        for other in (evaluate.run, export):
            with pytest.raises(ConfigError, match=r"another command writes .*run/export or measures it; wait for it"):
                other(config)
            refused.append(other)

    decode = evaluate.evaluate
    monkeypatch.setattr(evaluate, "evaluate", lambda *given, on_prompt, **options: decode(
        *given, on_prompt=meanwhile, **options))
    evaluate.run(config)
    assert len(refused) == 2 * len(SPEC_BENCH)
    assert {path.name for path in Path(config.output_dir).iterdir()} == {"export", "evaluation.json"}


def test_only_the_first_prompts_are_asked(config: Config):
    export(config)
    config.eval = replace(config.eval, num_prompts=1)
    assert evaluate.run(config)["num_prompts"] == 1


def test_differences_are_shown(config: Config):
    export(config)
    result = evaluate.run(config)
    found = {"id": "81", "turn": 1, "position": 4, "top2_gap": 1.5e-6}
    result["details"]["full"]["differences"], result["lossless"] = [found], False
    table = evaluate.table(result)
    assert "token for token: NO" in table
    assert "full: prompt 81, turn 1, new token 4: the target's two best logits are 1.5e-06 apart" in table


def test_missing_prompts_are_named(config: Config):
    export(config)
    Path(config.eval.prompts).unlink()
    with pytest.raises(ConfigError, match=r"no prompt file .*prompts\.jsonl"):
        evaluate.run(config)


def test_a_draft_of_another_target_is_refused(config: Config, tmp_path: Path):
    export(config)
    config.target.model = str(tiny_target_folder(tmp_path / "other", "qwen3", seed=1))
    with pytest.raises(ConfigError, match="fingerprint"):
        evaluate.run(config)


def test_a_missing_checkpoint_names_the_command_that_makes_it(config: Config, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["scripts/evaluate.py", "+experiment=qwen3_8b", "run_name=a b"])
    expected = "make it with: python scripts/export.py +experiment=qwen3_8b 'run_name=a b'"
    with pytest.raises(ConfigError, match=re.escape(expected)):
        evaluate.run(config)


def test_an_export_without_provenance_is_refused_before_anything_is_loaded(config: Config):
    export(config)
    Path(config.output_dir, "export", "specvocab.json").unlink()
    config.eval.prompts = "nowhere.jsonl"
    with pytest.raises(ConfigError, match=r"export has no specvocab\.json, in which the measurement is recorded"):
        evaluate.run(config)


@pytest.mark.parametrize("asked", ["Sort  a LIST.", "Sort a vector."])
def test_prompts_that_were_trained_on_are_refused(config: Config, tmp_path: Path, asked: str):
    row = Row(id="r", source="s", input_ids=[1, 2], loss_mask=[0, 1], finish_reason="length", messages=[
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": asked},
        {"role": "assistant", "content": "Rewrite it."}])
    writer = ShardWriter(tmp_path / "train", target="t", settings={"target": {"fingerprint": "f"}}, num_prompts=1,
                         rows_per_shard=1, vocab_size=9, stop_token_ids=[])
    writer.open()
    writer.write(0, [row])
    writer.finalise()
    config.data.train_path = str(tmp_path / "train")
    prompts = load_prompts(config.eval.prompts)
    if asked == "Sort a vector.":
        evaluate.check_held_out(prompts, config)
    else:
        with pytest.raises(ConfigError, match=r"1 of 2 prompts .* are in the training data .* \(first: '161'\)"):
            evaluate.check_held_out(prompts, config)


def test_it_is_said_that_absent_data_are_not_compared(config: Config, capsys):
    evaluate.check_held_out(load_prompts(config.eval.prompts), config)
    assert capsys.readouterr().out.startswith("data.train_path=t is not here: not checked")


def test_prompts_are_put_as_the_template_variables_say(config: Config, tmp_path: Path):
    target = tiny_target("qwen3", tmp_path)
    target.tokenizer.chat_template += "{% if quiet %}{{ 'psst' }}{% endif %}"
    prompt = load_prompts(config.eval.prompts)[0]
    plain = evaluate.as_tokens(target, prompt, config, 512).encode_turn([])
    config.target.chat_template_kwargs = {"quiet": True}
    quiet = evaluate.as_tokens(target, prompt, config, 512).encode_turn([])
    assert quiet == [*plain, *target.tokenizer("psst")["input_ids"]]


def test_tools_of_a_prompt_are_described_to_the_target(config: Config, tmp_path: Path):
    target = tiny_target("qwen3", tmp_path)
    target.tokenizer.chat_template = "{{ tools[0].name }}" + target.tokenizer.chat_template
    record = {"prompt": "What time is it?", "tools": [{"name": "clock"}]}
    Path(config.eval.prompts).write_text(json.dumps(record))
    ids = evaluate.as_tokens(target, load_prompts(config.eval.prompts)[0], config, 512).encode_turn([])
    assert target.tokenizer.decode(ids).startswith("clock")


def test_a_conversation_that_may_outgrow_the_positions_is_refused(config: Config, tmp_path: Path):
    target = tiny_target("qwen3", tmp_path)
    prompt = load_prompts(config.eval.prompts)[0]  # two turns
    longest = len(encode_prompt(target.tokenizer, prompt.conversation([""]))) + 2 * config.eval.max_new_tokens
    evaluate.as_tokens(target, prompt, config, longest)
    with pytest.raises(ConfigError, match=rf"prompt '81' .* need {longest} positions; there are {longest - 1}:"):
        evaluate.as_tokens(target, prompt, config, longest - 1)
