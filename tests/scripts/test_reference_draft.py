"""The trained draft that comes with the repository: a real model, beside the tiny ones of the other tests."""

from __future__ import annotations

import json

import pytest
import torch

from scripts import demo
from specvocab_model.config import TargetConfig
from specvocab_model.decode import autoregressive_generate, place_draft, speculative_generate
from specvocab_model.export import load_checkpoint
from specvocab_model.heads import build_head
from specvocab_model.target import Target, load_spec
from specvocab_model.target_files import SMOLLM2, cached_folder

FOLDER = demo.REFERENCE_DRAFT
LIMIT_MB = 20


def test_it_is_small_whole_and_what_its_files_say():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < LIMIT_MB * 1e6
    model = load_checkpoint(FOLDER)  # compares the weights with the hashes in specvocab.json
    assert all(parameter.isfinite().all() for parameter in model.draft.parameters())
    record = json.loads((FOLDER / "specvocab.json").read_text())
    assert model.head_config.quantization == "fp8" and record["target"]["name"] == SMOLLM2
    selection = model.speculator.selection
    assert (selection.vocab_size, selection.num_candidates) == (49152, record["speculator"]["num_candidates"])


@pytest.fixture(scope="module")
def target() -> Target:
    if not (cached_folder(SMOLLM2) / "model.safetensors").is_file():
        pytest.skip("the target is not on this machine; python scripts/fetch_target.py brings it")
    model = load_checkpoint(FOLDER)
    config = TargetConfig(model=SMOLLM2, dtype="float32")
    return Target.load(config, device="cpu", feature_layers=model.architecture.feature_layers)


def test_it_drafts_what_the_target_writes(target: Target):
    """The target's own tokens, in fewer forwards than an untrained draft would need."""
    model = place_draft(load_checkpoint(FOLDER, load_spec(TargetConfig(model=SMOLLM2))), target)
    ids = target.tokenizer.apply_chat_template([{"role": "user", "content": "Count from one to thirty in words."}],
                                               add_generation_prompt=True, return_tensors="pt", return_dict=False)
    with torch.inference_mode():
        plain = autoregressive_generate(target, ids, max_new_tokens=48, temperature=0.0)
        drafted = speculative_generate(target, model, build_head("speculative", target, model), ids,
                                       num_draft_tokens=7, max_new_tokens=48, temperature=0.0)
    assert drafted.sequences == plain.sequences
    assert len(drafted.sequences) / drafted.num_target_forwards > 1.3
