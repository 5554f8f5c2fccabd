"""``model.generate(custom_generate=...)`` with a draft: what ``generate`` gives without one."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from specvocab_model.config import ConfigError, DraftConfig, HeadConfig, TargetConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import Provenance, save_checkpoint
from specvocab_model.heads import FullHead, SpeculativeHead, StaticHead
from specvocab_model.serving import hf_generate
from specvocab_model.serving.hf_generate import SpeculativeDecoding
from specvocab_model.target import load_spec
from tests.tiny import KINDS, save_target, tiny_model, tiny_target_config, tiny_target_folder

PROMPT = torch.tensor([[72, 101, 108, 108, 111]])
FEW = [65, 97, 101]  # an untrained draft is often right where only these are allowed


def load(folder: Path, kind: str = "llama") -> PreTrainedModel:
    config = tiny_target_config(folder, kind)
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=config.attn_implementation).eval()


def export(folder: Path, target: Path, kind: str = "llama", **head: Any) -> Path:
    spec = load_spec(tiny_target_config(target, kind))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        draft = SpecVocabDraft.build(spec, DraftConfig(), HeadConfig(**({"num_candidates": 200} | head)))
    return save_checkpoint(folder, draft, spec, Provenance(), dtype=torch.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return load(folder)


@pytest.fixture(scope="module")
def checkpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp("checkpoint") / "export", folder)


@pytest.fixture(scope="module")
def decode(checkpoint: Path, model: PreTrainedModel) -> SpeculativeDecoding:
    return SpeculativeDecoding.from_pretrained(checkpoint, model, num_draft_tokens=3)


def only_few(batch: int, input_ids: Tensor) -> list[int]:
    return FEW


@pytest.mark.parametrize("kind, head", [*itertools.product(KINDS, ["full", "speculative"]), ("llama", "static")])
def test_greedy_output_is_that_of_generate(kind: str, head: str, tmp_path: Path):
    target = tiny_target_folder(tmp_path / "target", kind)
    head_arguments = {} if head == "speculative" else {"type": head, "num_candidates": None, "draft_vocab_size": 40}
    checkpoint = export(tmp_path / "export", target, kind, **head_arguments)
    model = load(target, kind)
    decode = SpeculativeDecoding.from_pretrained(checkpoint, model)
    assert type(decode.head) is {"full": FullHead, "speculative": SpeculativeHead, "static": StaticHead}[head]
    for arguments in ({}, {"prefix_allowed_tokens_fn": only_few}):
        expected = model.generate(PROMPT, max_new_tokens=20, do_sample=False, **arguments)
        assert torch.equal(
            model.generate(PROMPT, max_new_tokens=20, do_sample=False, custom_generate=decode, **arguments), expected)


def test_drafts_are_accepted(model: PreTrainedModel, decode: SpeculativeDecoding, monkeypatch: pytest.MonkeyPatch):
    forwards = []
    forward = type(decode.target).forward
    monkeypatch.setattr(type(decode.target), "forward",
                        lambda self, inputs, **kw: forwards.append(inputs.shape[1]) or forward(self, inputs, **kw))
    output = model.generate(PROMPT, max_new_tokens=30, do_sample=False, custom_generate=decode,
                            prefix_allowed_tokens_fn=only_few)
    assert output.shape[1] == PROMPT.shape[1] + 30
    assert len(forwards) < 28 and max(forwards[1:]) == 4


@pytest.mark.parametrize("arguments", [
    {"max_length": 17},
    {"max_new_tokens": 1},
    {"max_new_tokens": 24, "repetition_penalty": 1.5},
    {"max_new_tokens": 24, "no_repeat_ngram_size": 2, "prefix_allowed_tokens_fn": lambda *_: [*range(30)]},
    {"max_new_tokens": 24, "min_new_tokens": 9, "eos_token_id": FEW[:2], "prefix_allowed_tokens_fn": only_few},
    {"max_new_tokens": 24, "forced_eos_token_id": 258},
], ids=lambda arguments: "-".join(arguments))
def test_generation_config_is_followed(
    model: PreTrainedModel, decode: SpeculativeDecoding, arguments: dict[str, Any]
):
    expected = model.generate(PROMPT, do_sample=False, **arguments)
    assert torch.equal(model.generate(PROMPT, do_sample=False, custom_generate=decode, **arguments), expected)


def test_every_eos_ends_the_text(model: PreTrainedModel, decode: SpeculativeDecoding):
    """Whatever its place in a run of accepted drafts, and also where only the model's own config names it."""
    free = {"do_sample": False, "prefix_allowed_tokens_fn": only_few, "max_new_tokens": 16}
    text = model.generate(PROMPT, **free)[0, PROMPT.shape[1] :].tolist()
    for token in set(text):
        output = model.generate(PROMPT, custom_generate=decode, eos_token_id=token, **free)
        assert output[0, PROMPT.shape[1] :].tolist() == text[: text.index(token) + 1]


def test_sampled_output_has_the_distribution_of_generate(model: PreTrainedModel, decode: SpeculativeDecoding):
    """Against probabilities from plain forwards; top-k and temperature, and drafts that are accepted and rejected."""
    length, draws, temperature = 3, 150, 2.0
    exact = {}
    for tokens in itertools.product(FEW, repeat=length):
        text = torch.cat([PROMPT, torch.tensor([tokens])], dim=1)
        with torch.no_grad():
            logits = model(text).logits[0, PROMPT.shape[1] - 1 : -1].double()
        allowed = torch.full_like(logits, -torch.inf)
        allowed[:, FEW] = logits[:, FEW]
        best = allowed.topk(2).values[:, -1:]
        p = (allowed.masked_fill(allowed < best, -torch.inf) / temperature).softmax(-1)
        exact[tokens] = p[range(length), list(tokens)].prod().item()
    assert sum(exact.values()) == pytest.approx(1)
    torch.manual_seed(1)
    counts = Counter(
        tuple(model.generate(PROMPT, max_new_tokens=length, do_sample=True, temperature=temperature, top_k=2,
                             custom_generate=decode, prefix_allowed_tokens_fn=only_few)[0, -length:].tolist())
        for _ in range(draws)
    )
    assert set(counts) <= {tokens for tokens, p in exact.items() if p > 0}
    chi_square = sum((counts[tokens] - draws * p) ** 2 / (draws * p) for tokens, p in exact.items() if p > 0)
    assert chi_square < 24.3  # 7 degrees of freedom, one run in a thousand


def test_processor_that_leaves_no_candidate(model: PreTrainedModel, checkpoint: Path, decode: SpeculativeDecoding):
    """Whatever the draft's candidates are, none of them may be allowed."""
    head = decode.head
    restricted = dataclasses.replace(decode, head=lambda hidden: dataclasses.replace(
        head(hidden), ids=head(hidden).ids.clamp(max=60)))
    for do_sample in (False, True):
        output = model.generate(PROMPT, max_new_tokens=8, do_sample=do_sample, custom_generate=restricted,
                                prefix_allowed_tokens_fn=only_few)
        assert set(output[0, PROMPT.shape[1] :].tolist()) <= set(FEW)


def test_exported_folder_is_a_custom_generate(
    model: PreTrainedModel, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    streamer = Recorder()
    expected = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    for arguments in ({}, {"num_draft_tokens": 2, "return_dict_in_generate": True, "streamer": streamer}):
        output = model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=12, do_sample=False,
                                custom_generate=str(checkpoint), draft=str(checkpoint), trust_remote_code=True,
                                **arguments)
        assert torch.equal(output["sequences"] if arguments else output, expected)
    assert torch.equal(torch.cat(streamer.seen), expected[0]) and streamer.ended


def test_a_checkpoint_that_was_read_keeps_no_target_alive(folder: Path, checkpoint: Path):
    model = load(folder)
    before = len(hf_generate._READ)
    hf_generate.generate(model, inputs=PROMPT, draft=checkpoint, max_new_tokens=2, do_sample=False)
    assert len(hf_generate._READ) == before + 1
    del model
    gc.collect()
    assert len(hf_generate._READ) == before


class Recorder:
    """A streamer."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.ended = False

    def put(self, token_ids: Tensor) -> None:
        self.seen.append(token_ids.flatten())

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize(("arguments", "said"), [
    ({"num_beams": 2}, "beam_search"),
    ({"num_return_sequences": 2, "do_sample": True}, r"shape \(2, 5\)"),
    ({"attention_mask": torch.tensor([[0, 1, 1, 1, 1]])}, "attention_mask"),
    ({"guidance_scale": 1.5}, "guidance_scale=1.5"),
    ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
], ids=str)
def test_refused(model: PreTrainedModel, decode: SpeculativeDecoding, arguments: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        model.generate(PROMPT, max_new_tokens=4, custom_generate=decode, **arguments)


def test_a_cache_with_content_is_refused(model: PreTrainedModel, decode: SpeculativeDecoding):
    cache = DynamicCache()
    with torch.no_grad():
        model(PROMPT[:, :3], past_key_values=cache, use_cache=True)
    with pytest.raises(ConfigError, match="3 positions"):
        model.generate(PROMPT, max_new_tokens=4, past_key_values=cache, custom_generate=decode)


def test_another_target_is_refused(folder: Path, checkpoint: Path, decode: SpeculativeDecoding, tmp_path: Path):
    sibling = save_target(tiny_model("llama", seed=1), tmp_path)
    with pytest.raises(ConfigError, match="fingerprint"):
        SpeculativeDecoding.from_pretrained(checkpoint, load(sibling))
    with pytest.raises(ConfigError, match="another model object"):
        load(folder).generate(PROMPT, max_new_tokens=4, custom_generate=decode)


def test_a_model_made_in_memory_needs_to_be_told_where_it_is_from(folder: Path, checkpoint: Path):
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="target=TargetConfig"):
        SpeculativeDecoding.from_pretrained(checkpoint, model)
    decode = SpeculativeDecoding.from_pretrained(checkpoint, model, target=TargetConfig(model=str(folder)))
    assert model.generate(PROMPT, max_new_tokens=4, do_sample=False, custom_generate=decode).shape == (1, 9)
