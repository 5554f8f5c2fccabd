"""What is wrong with a checkpoint itself is said in one line, before an engine is looked for."""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import serve_check
from specvocab_model.config import DraftConfig, HeadConfig, TargetConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import Provenance, load_checkpoint, save_checkpoint
from specvocab_model.target import Target
from tests.our_engine import OurEngine
from tests.tiny import tiny_target, tiny_target_folder


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return tiny_target("llama", tmp_path_factory.mktemp("serve-check"))


@pytest.fixture
def checkpoint(target, tmp_path) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(num_candidates=40))
    return save_checkpoint(tmp_path / "draft", model, target.spec, Provenance(), dtype=torch.float32)


def edit(checkpoint: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    change(config)
    (checkpoint / "config.json").write_text(json.dumps(config))


def rewrite(checkpoint: Path, change: Callable[[dict], object]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})


def missing_tensor(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda tensors: tensors.pop("midlayer.hidden_norm.weight"))


def d2t_with_the_full_vocabulary(checkpoint: Path) -> None:
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    rewrite(checkpoint, lambda tensors: tensors.update(d2t=torch.zeros(vocab_size, dtype=torch.int64)))


def reduced_head_without_d2t(checkpoint: Path) -> None:
    edit(checkpoint, lambda config: config.update(draft_vocab_size=100))
    rewrite(checkpoint, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(100, 48)}))


def tied(checkpoint: Path) -> None:
    edit(checkpoint, lambda config: config.update(tie_word_embeddings=True))


def no_draft_vocab_size(checkpoint: Path) -> None:
    edit(checkpoint, lambda config: config.pop("draft_vocab_size"))


def short_context(checkpoint: Path) -> None:
    edit(checkpoint, lambda config: config.update(max_position_embeddings=64))


def no_type(checkpoint: Path) -> None:
    edit(checkpoint, lambda config: config.pop("torch_dtype"))


def nameless_target(checkpoint: Path) -> None:
    record = json.loads((checkpoint / "specvocab.json").read_text())
    record["target"].pop("name")
    (checkpoint / "specvocab.json").write_text(json.dumps(record))


def swapped_layers(checkpoint: Path) -> None:
    edit(checkpoint, lambda config: config.update(eagle_aux_hidden_state_layer_ids=[1, 3, 4]))


@pytest.mark.parametrize(("spoil", "said"), [
    (missing_tensor, "midlayer.hidden_norm.weight is missing"),
    (d2t_with_the_full_vocabulary, "d2t is unknown"),
    (reduced_head_without_d2t, "d2t is missing"),
    (tied, "tie_word_embeddings"),
    (no_draft_vocab_size, "draft_vocab_size"),
    (short_context, "max_position_embeddings=64"),
    (swapped_layers, "contradicts itself"),
    (no_type, "it has no torch_dtype"),
    (nameless_target, "it has no name"),
])
def test_what_engines_would_serve_wrongly_is_refused(spoil, said, checkpoint, capsys):
    spoil(checkpoint)
    assert said in refusal([str(checkpoint)], capsys)


def test_what_is_no_checkpoint_is_refused(checkpoint, tmp_path, capsys):
    for path in (tmp_path / "nowhere", tmp_path, checkpoint / "config.json"):
        assert f"{path} has no specvocab.json, so it is no folder that" in refusal([str(path)], capsys)


def test_another_target_is_refused(checkpoint, tmp_path, capsys):
    other = tiny_target_folder(tmp_path / "other", "llama", seed=1)
    assert "was made for" in refusal([str(checkpoint), "--target", str(other)], capsys)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--max-new-tokens", "4096"], "do not fit into 512 positions"),
    pytest.param([], "needs vLLM in this environment: make another one", marks=pytest.mark.skipif(
        find_spec("vllm") is not None, reason="vLLM is installed")),
])
def test_what_cannot_be_asked_is_said(arguments, said, checkpoint, capsys):
    assert said in refusal([str(checkpoint), *arguments], capsys)


def test_the_evaluation_that_is_recalled_is_of_the_same_head_and_length():
    def measured(*kept: float) -> dict:
        return {"acceptance_per_position": list(kept)}

    evaluation = {"tau": {"full": 3.1, "speculative": 2.7},
                  "details": {"autoregressive": measured(), "full": measured(0.9, 0.7, 0.5),
                              "speculative": measured(0.8, 0.5, 0.4)}}
    assert serve_check.recorded_tau(evaluation, "speculative", 3) == pytest.approx(2.7)
    assert serve_check.recorded_tau(evaluation, "speculative", 2) == pytest.approx(2.3)
    assert serve_check.recorded_tau(evaluation, "static", 3) is None
    assert serve_check.recorded_tau(None, "speculative", 3) is None


@pytest.mark.parametrize("option", ["--max-new-tokens", "--num-draft-tokens", "--max-model-len"])
def test_a_count_of_nothing_is_refused(option, checkpoint, capsys):
    with pytest.raises(SystemExit):
        serve_check.main([str(checkpoint), "--engine", "vllm", option, "0"])
    assert "0 must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(("head", "found"), [
    ("speculative", ["our own decoder accepts"]),  # the draft is random
    ("full", ["serves the full vocabulary, not the speculated one", "our own decoder accepts"]),
])
def test_an_engine_that_answers(head, found, target, tmp_path, capsys, monkeypatch):
    """A converted checkpoint, whose record has no training, in an engine that needs the memory of our own target."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(num_candidates=40))
    checkpoint = save_checkpoint(tmp_path / "converted", model, target.spec, Provenance(config={"convert": {}}),
                                 dtype=torch.float32)
    models: list[weakref.ref] = []
    load = Target.load

    def remembered(*arguments, **options) -> Target:
        loaded = load(*arguments, **options)
        models.append(weakref.ref(loaded.model))
        return loaded

    monkeypatch.setattr(Target, "load", remembered)

    class Greedy(OurEngine):
        def serve(self, prompts, max_new_tokens):
            assert models[0]() is None  # ours, loaded before the engine's
            return super().serve(prompts, max_new_tokens)

    def start(options: argparse.Namespace, name: str) -> OurEngine:
        draft = load_checkpoint(options.checkpoint)
        other = load(TargetConfig(model=name, dtype=options.dtype), device="cpu",
                     feature_layers=draft.architecture.feature_layers)
        return Greedy(other, place_draft(draft, other), head)

    monkeypatch.setitem(serve_check.ENGINES, "vllm", start)
    with pytest.raises(SystemExit) as stopped:
        serve_check.main([str(checkpoint), "--engine", "vllm", "--max-new-tokens", "6", "--num-draft-tokens", "3"])
    printed = capsys.readouterr()
    assert stopped.value.code == 1
    lines = [line for line in printed.err.splitlines() if line.startswith("! ")]
    assert len(lines) == len(found) and all(part in line for part, line in zip(found, lines, strict=True))
    assert "logits      equal within rounding" in printed.out
    assert "4 of 4 are our own decoder's, token for token" in printed.out


def refusal(arguments: list[str], capsys) -> str:
    """The one line that ends the command."""
    with pytest.raises(SystemExit) as stopped:
        serve_check.main([*arguments, "--engine", "vllm", "--max-new-tokens", "4", *arguments[1:]])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith("error: ")
    return line


def test_an_interruption_ends_in_one_line(checkpoint, monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_check, "check", interrupted)
    with pytest.raises(SystemExit) as stopped:
        serve_check.main([str(checkpoint), "--engine", "vllm"])
    assert stopped.value.code == 130 and capsys.readouterr().err == "interrupted\n"
