"""What is wrong with a checkpoint itself is said in one line, before an engine is looked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import serve_check
from specvocab_model.config import DraftConfig, HeadConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import Provenance, save_checkpoint
from specvocab_model.target import Target
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
])
def test_what_engines_would_serve_wrongly_is_refused(spoil, said, checkpoint, capsys):
    spoil(checkpoint)
    assert said in refusal([str(checkpoint)], capsys)


def test_another_target_is_refused(checkpoint, tmp_path, capsys):
    other = tiny_target_folder(tmp_path / "other", "llama", seed=1)
    assert "target" in refusal([str(checkpoint), "--target", str(other)], capsys)


@pytest.mark.parametrize(("arguments", "said"), [
    (["--max-new-tokens", "4096"], "do not fit into 512 positions"),
    pytest.param([], "needs vLLM in this environment", marks=pytest.mark.skipif(
        find_spec("vllm") is not None, reason="vLLM is installed")),
])
def test_what_cannot_be_asked_is_said(arguments, said, checkpoint, capsys):
    assert said in refusal([str(checkpoint), *arguments], capsys)


def refusal(arguments: list[str], capsys) -> str:
    """The one line that ends the command."""
    with pytest.raises(SystemExit) as stopped:
        serve_check.main([*arguments, "--engine", "vllm", "--max-new-tokens", "4", *arguments[1:]])
    (line,) = capsys.readouterr().err.splitlines()
    assert stopped.value.code == 2 and line.startswith("error: ")
    return line
