"""What plugins do with the draft that an engine names, whatever it is."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specvocab_model.config import ConfigError, DraftConfig, HeadConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import Provenance, save_checkpoint
from specvocab_model.serving.checkpoint import checkpoint_folder, read_draft
from specvocab_model.target import TargetShape, load_spec
from tests.tiny import tiny_target_config, tiny_target_folder


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    folder = tiny_target_folder(tmp_path_factory.mktemp("target"), "llama")
    return load_spec(tiny_target_config(folder, "llama"))


@pytest.fixture
def served(spec) -> TargetShape:
    return TargetShape(name="served", hidden_size=spec.hidden_size, vocab_size=spec.vocab_size,
                       num_hidden_layers=spec.num_hidden_layers, max_position_embeddings=200)


def write(spec, folder: Path, **head) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SpecVocabDraft.build(spec, DraftConfig(), HeadConfig(**head))
    return save_checkpoint(folder, model, spec, Provenance())


@pytest.mark.parametrize("head", [{"num_candidates": 40}, {"type": "full"}])
def test_a_draft_must_fit_the_target_that_is_served(head, spec, served, tmp_path):
    """Its weights need not be those of training, as a quantised copy of the target is a good target too."""
    folder = write(spec, tmp_path / "draft", **head)
    draft = read_draft(folder, served)
    assert draft is not None and (draft.speculator is None) == (head == {"type": "full"})
    longest = spec.max_position_embeddings
    for change, said in (
        ({"hidden_size": 99}, "served has 99; use the target"),
        ({"vocab_size": 99}, "served has 99; use the target"),
        ({"num_hidden_layers": 4}, "lie below the number of the target's layers, 4"),
        ({"max_position_embeddings": longest + 1}, f"set it to {longest + 1}, or serve texts of up to {longest}"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_draft(folder, replace(served, **change))


def test_a_draft_that_ranks_cannot_share_is_refused(spec, served, tmp_path):
    folder = write(spec, tmp_path / "draft", num_candidates=40)  # 4 heads, 2 of them for keys and values
    assert read_draft(folder, served, 4) is not None
    with pytest.raises(ConfigError, match="num_attention_heads=4, which 3 ranks cannot share evenly"):
        read_draft(folder, served, 3)


def test_a_draft_of_somebody_else_is_left_to_the_engine(spec, served, tmp_path):
    folder = write(spec, tmp_path / "draft", type="full")
    (folder / "specvocab.json").unlink()
    (folder / "config.json").write_text("{}")
    assert read_draft(folder, served) is None


@pytest.mark.parametrize("name", ["s3://bucket/draft", "owner/draft", "/nowhere/draft", "a b"])
def test_a_draft_that_is_in_another_store_is_left_to_the_engine(name, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with caplog.at_level(logging.WARNING):
        assert checkpoint_folder(name, None, str(tmp_path)) is None
    (record,) = caplog.records
    assert f"The draft {name} is neither a folder nor on the hub" in record.getMessage()


def test_a_folder_is_where_it_is(tmp_path):
    assert checkpoint_folder(str(tmp_path), None) == tmp_path
