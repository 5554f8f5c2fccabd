"""scripts/compare_heads.py on a tiny target: every head on the same prompts, once."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from scripts import compare_heads
from specvocab_model.config import (
    CompareConfig,
    Config,
    ConfigError,
    DataConfig,
    DraftConfig,
    EvalConfig,
    HeadConfig,
    TargetConfig,
)
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import Provenance, save_checkpoint
from specvocab_model.files import exclusive
from specvocab_model.heads import ClusterRouter
from specvocab_model.target import Target
from specvocab_model.tuning.search import predicted_speed
from specvocab_model.vocab import VocabMap
from tests.scripts.data import write_data
from tests.tiny import tiny_target
from train.heads_page import text_table

QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["Compose a post.", "Rewrite it."]},
    {"question_id": 161, "category": "coding", "turns": ["Sort a list."]},
]
NAMES = ["full", "speculative r24 k60", "speculative r24 k30", "speculative r12 k60", "low_rank r24", "low_rank r12",
         "static 100", "static 100 corpus", "cluster 50", "in_context 50"]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return tiny_target("llama", tmp_path_factory.mktemp("compare"))


@pytest.fixture(scope="module")
def settings(target, tmp_path_factory) -> Config:
    """A draft that was exported, the data that it was trained on, and prompts."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in QUESTIONS))
    (folder / "corpus.txt").write_text("All sorts of text, 1 2 3.\n" * 9)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = HeadConfig(rank=24, selection="exact", num_candidates=60)
        model = SpecVocabDraft.build(target.spec, DraftConfig(num_unroll_steps=2), head)
    model.speculator.initialise("svd", target.lm_head_weight)
    save_checkpoint(folder / "export", model, target.spec, Provenance(), dtype=torch.float32)
    return Config(
        run_name="tiny", output_dir=str(folder),
        target=TargetConfig(model=target.spec.name, dtype="float32"),
        data=DataConfig(train_path=write_data(folder / "data", num_rows=20), validation_path="v"),
        eval=EvalConfig(prompts=str(folder / "prompts.jsonl"), max_new_tokens=8, num_draft_tokens=3),
        compare=CompareConfig(num_candidates=[30, 9999], static_sizes=[100, 5000], shortlist_sizes=[50],
                              corpus=str(folder / "corpus.txt"), num_clusters=9, num_states=200, context=16),
    )


@pytest.fixture(scope="module")
def result(settings) -> dict:
    return compare_heads.run(settings)


def test_every_head_is_measured_on_the_same_prompts(result):
    heads = result["heads"]
    assert list(heads) == NAMES
    lengths = {head["num_tokens"] for head in heads.values()}
    assert len(lengths) == 1 and all(head["differing_turns"] == 0 for head in heads.values())
    for head in heads.values():
        assert set(head["tau_per_category"]) == {"writing", "coding"} and 1 <= head["tau"] <= 4
        assert len(head["acceptance_per_position"]) == 3 and head["seconds"] > 0 and head["tokens_per_second"] > 0
        nu = head["seconds"] / heads["full"]["seconds"]
        assert head["tau_ratio"] == head["tau"] / heads["full"]["tau"]
        assert head["predicted_speed"] == pytest.approx(predicted_speed(head["tau_ratio"], nu, result["kappa"]))
    assert heads["full"]["predicted_speed"] == heads["full"]["predicted_speed_of_bytes"] == 1
    assert heads["full"]["candidate_recall"] is None and 0 < heads["static 100"]["candidate_recall"]["target_top1"] <= 1


def test_bytes_are_those_of_the_weights(result):
    row, heads = 48 * 4, result["heads"]
    expected = {"full": 277 * row, "static 100": 100 * row, "speculative r24 k30": 24 * (48 + 277) * 4 + 30 * row,
                "low_rank r12": 12 * (48 + 277) * 4, "cluster 50": 50 * row + 9 * (48 + 1) * 4,
                "in_context 50": 50 * row}
    assert {name: heads[name]["num_bytes"] for name in expected} == expected


def test_what_static_heads_cannot_say_is_counted_by_category(result, settings):
    head = result["heads"]["static 100"]
    comparison = compare_heads.Comparison(settings)
    (rival,) = [one for one in comparison.rivals if one.name == "static 100"]
    kept = set(comparison.vocabularies(rival).ids.tolist())
    keys = [prompt.digest[:16] for prompt in comparison.prompts]
    texts = {key: [token for one in comparison.records.of(comparison.digests["static 100"], [key])
                   for token in one.sequences] for key in keys}
    for category, key in zip(("writing", "coding"), keys, strict=True):
        share = sum(token not in kept for token in texts[key]) / len(texts[key])
        assert head["outside"][category]["outside"] == share
        assert head["outside"][category]["tau"] == head["tau_per_category"][category]
    assert head["coverage"] == 1 - head["outside"]["all"]["outside"] < 1
    assert 0 < head["outside"]["all"]["ended"] <= 1
    assert sum(one["share"] for one in head["kinds_outside"].values()) == pytest.approx(1)


def test_tables_and_page(result, settings):
    said = text_table(result)
    page = Path(settings.output_dir, "compare_heads/compare_heads.html").read_text()
    for words in (*NAMES, "writing", "coding", "static 100: what it cannot say"):
        assert words in said and words in page
    assert "token for token: none" in said
    assert page.count("<svg viewBox=\"0 0 520") >= 5 and "<script" not in page and "http" not in page


def test_only_what_is_missing_is_decoded(result, settings, monkeypatch, tmp_path):
    decoded: list[tuple[list[str], int]] = []
    evaluate = compare_heads.evaluate

    def counting(target, variants, prompts, **options):
        decoded.append((list(variants), len(prompts)))
        return evaluate(target, variants, prompts, **options)

    monkeypatch.setattr(compare_heads, "evaluate", counting)
    with monkeypatch.context() as without:
        without.delattr(compare_heads, "count_tokens")  # the corpus is not read again
        assert compare_heads.run(settings) == result and not decoded

    prompts = tmp_path / "relabelled.jsonl"
    prompts.write_text(Path(settings.eval.prompts).read_text().replace("writing", "prose"))
    relabelled = compare_heads.run(replace(settings, eval=replace(settings.eval, prompts=str(prompts))))
    assert not decoded and set(relabelled["heads"]["full"]["tau_per_category"]) == {"prose", "coding"}

    turns = Path(settings.output_dir, "compare_heads/turns.jsonl")
    lines = turns.read_text().splitlines(keepends=True)
    lost = next(number for number, line in enumerate(lines) if '"turn": 1' in line)
    turns.write_text("".join(lines[:lost] + lines[lost + 1:]) + '{"head": "half a li')  # killed while it wrote
    again = compare_heads.run(settings)
    assert decoded == [([NAMES[0]], 1)]
    assert {name: head["tau"] for name, head in again["heads"].items()} == {
        name: head["tau"] for name, head in result["heads"].items()}

    decoded.clear()
    more = replace(settings, compare=replace(settings.compare, static_sizes=[150], heads=["static"], corpus=None,
                                             shortlist_sizes=[]))
    with monkeypatch.context() as slow:
        slow.setattr(compare_heads, "head_seconds", lambda *_, **__: 7.0)  # a bad day: every head takes as long
        added = compare_heads.run(more)
    assert list(added["heads"]) == ["full", "static 150"] and decoded == [(["static 150"], 2)]
    late = added["heads"]["static 150"]
    assert late["seconds"] == 7.0 and late["predicted_speed"] == pytest.approx(late["tau_ratio"])
    other = replace(more, eval=replace(more.eval, num_draft_tokens=2, num_prompts=1))
    compare_heads.run(other)
    assert decoded[1:] == [(["full", "static 150"], 1)]


def test_kappa_of_an_engine_may_be_given(result, settings):
    given = compare_heads.run(replace(settings, compare=replace(settings.compare, kappa=0.0)))
    assert given["kappa"] == 0 and given["kappa_measured"] == result["kappa_measured"]
    for head in given["heads"].values():
        assert head["predicted_speed"] == head["tau_ratio"]


def test_a_static_head_with_a_draft_of_its_own_takes_part(settings, target, tmp_path):
    head = HeadConfig(type="static", draft_vocab_size=80)
    own = SpecVocabDraft.build(target.spec, DraftConfig(num_unroll_steps=2), head)
    save_checkpoint(tmp_path / "own", own, target.spec, Provenance(), dtype=torch.float32)
    config = replace(settings, output_dir=str(tmp_path), eval=replace(settings.eval, num_prompts=1, max_new_tokens=6),
                     compare=CompareConfig(heads=[], static_drafts=[str(tmp_path / "own")], shortlist_sizes=[]))
    (tmp_path / "export").symlink_to(Path(settings.output_dir, "export"))
    heads = compare_heads.run(config)["heads"]
    assert list(heads) == ["full", "static 80 trained"]
    assert heads["static 80 trained"]["size"] == 80 and heads["static 80 trained"]["differing_turns"] == 0
    (tmp_path / "same").symlink_to(tmp_path / "own")
    config.compare.static_drafts.append(str(tmp_path / "same"))
    with pytest.raises(ConfigError, match=r"own and .*same both have a head of 80 tokens"):
        compare_heads.run(config)
    other = SpecVocabDraft.build(target.spec, DraftConfig(feature_layers=[1, 2, 3]), head)
    save_checkpoint(tmp_path / "other", other, target.spec, Provenance(), dtype=torch.float32)
    config.compare.static_drafts[:] = [str(tmp_path / "other")]
    with pytest.raises(ConfigError, match=r"other reads the target's layers \[1, 2, 3\], and the draft it is compared"):
        compare_heads.run(config)
    (tmp_path / "export").unlink()
    (tmp_path / "export").symlink_to(tmp_path / "own")
    with pytest.raises(ConfigError, match=r"has 80 tokens, .* name this one in compare\.static_drafts"):
        compare_heads.run(config)


def test_a_draft_with_a_full_head_of_its_own_takes_part(settings, target, tmp_path, monkeypatch):
    model = SpecVocabDraft.build(target.spec, DraftConfig(num_unroll_steps=2),
                                 HeadConfig(type="static", draft_vocab_size=277))
    rows = target.lm_head_weight.flip(0).clone()
    model.own_head.initialise(VocabMap.from_ids(range(277), 277), rows)
    save_checkpoint(tmp_path / "export", model, target.spec, Provenance(), dtype=torch.float32)
    clustered: list[torch.Tensor] = []
    fit = ClusterRouter.fit

    def watched(lm_head, *arguments, **options):
        clustered.append(lm_head)
        return fit(lm_head, *arguments, **options)

    monkeypatch.setattr(ClusterRouter, "fit", watched)
    config = replace(settings, output_dir=str(tmp_path), eval=replace(settings.eval, num_prompts=1, max_new_tokens=6),
                     compare=replace(settings.compare, heads=["cluster", "in_context"]))
    assert list(compare_heads.run(config)["heads"]) == ["full", "cluster 50", "in_context 50"]
    torch.testing.assert_close(clustered, [rows], rtol=0, atol=0)


def test_an_export_that_selects_otherwise_is_another_draft(settings, tmp_path):
    before = compare_heads.Comparison(settings)
    shutil.copytree(Path(settings.output_dir, "export"), tmp_path / "export")
    path = tmp_path / "export/vocabulary_speculator/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_candidates": 61}))
    after = compare_heads.Comparison(replace(settings, output_dir=str(tmp_path)))
    assert after.rivals[1].options == before.rivals[1].options  # its own number is not among them
    assert after.rivals[1].name == "speculative r24 k61"
    assert not set(after.digests.values()) & set(before.digests.values())


@pytest.mark.parametrize("change, message", [
    ({"ranks": [48]}, "goes above the draft's trained rank 24; leave out 48"),
    ({"static_drafts": ["EXPORT"]}, "has no static head of its own"),
])
def test_what_cannot_be_compared_is_refused(change, message, settings):
    change = {key: [settings.output_dir + "/export"] if value == ["EXPORT"] else value for key, value in change.items()}
    with pytest.raises(ConfigError, match=message):
        compare_heads.run(replace(settings, compare=replace(settings.compare, **change)))


def test_a_second_comparison_in_the_folder_is_refused(settings):
    folder = Path(settings.output_dir, "compare_heads")
    with exclusive(folder / "compare_heads.lock", "busy"), \
            pytest.raises(ConfigError, match=r"another comparison writes to .*/compare_heads; wait for it"):
        compare_heads.run(settings)


@pytest.mark.parametrize("heads, message", [
    (["static"], "static heads are cut for the training data"),
    (["cluster"], "cluster is fitted on the training data"),
    (["speculative"], "rank 12 is fitted on the training data"),
])
def test_heads_that_need_training_data_say_so(heads, message, settings):
    compare = replace(settings.compare, heads=heads, corpus=None)
    with pytest.raises(ConfigError, match=message):
        compare_heads.run(replace(settings, compare=compare, data=DataConfig(train_path="t", validation_path="v")))


def test_what_is_missing_is_made_by_the_commands_that_a_user_would_type(settings, tmp_path, monkeypatch):
    commands, codes = [], [0, 0, 0, 3]

    @contextmanager
    def running(command):
        commands.append(command[1:])
        yield Mock(**{"wait.return_value": codes.pop(0)})

    monkeypatch.setattr(compare_heads, "running", running)
    monkeypatch.setattr(sys, "argv", ["compare_heads.py", "+experiment=quickstart"])
    config = replace(settings, output_dir=str(tmp_path), compare=CompareConfig(train_static=[64]))
    compare_heads.make_drafts(config)
    scripts = [Path(command[0]).name for command in commands]
    assert scripts == ["pipeline.py", "main.py", "export.py"]
    assert commands[0][1:] == ["+experiment=quickstart"]
    assert commands[1][1:] == commands[2][1:] == [
        "+experiment=quickstart", "head=static", "head.draft_vocab_size=64", "head.quantization=null",
        "run_name=tiny-static-64", f"output_dir={compare_heads.literal(str(tmp_path / 'compare_heads/static_64'))}"]
    assert config.compare.static_drafts == [str(tmp_path / "compare_heads/static_64/export")]

    with pytest.raises(SystemExit) as stopped:
        compare_heads.make_drafts(config)
    assert stopped.value.code == 3
