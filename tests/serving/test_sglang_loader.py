"""Gate B: SGLang's loader and model classes on a CPU give the logits of the trainer's draft. Run by test_serving.sh."""

from __future__ import annotations

import copy
import json
import multiprocessing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specvocab_model.attention import DraftCache
from specvocab_model.config import ConfigError, DraftConfig, HeadConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.eagle3 import ARCHITECTURE
from specvocab_model.export import Provenance, load_checkpoint, save_checkpoint
from specvocab_model.heads import build_head
from specvocab_model.heads.static import OwnHead
from specvocab_model.target import TORCH_DTYPES, Target, load_spec
from tests.tiny import random_model, save_target, tile_candidates, tiny_config, tiny_target_config

pytest.importorskip("sglang", reason="needs the environment of scripts/serving_env.sh sglang")
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.models.registry import ModelRegistry
from sglang.srt.plugins import GENERAL_PLUGINS_GROUP, load_plugins_by_group
from sglang.srt.utils.network import get_free_port

from specvocab_model.serving.check import Served
from specvocab_model.serving.sglang_check import SGLangDraft, count_drafts
from specvocab_model.serving.sglang_draft import SpecVocabLlamaForCausalLMEagle3
from specvocab_model.serving.sharded_head import ShardedHead

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
TEXT = torch.randint(0, 256, (1, 90), generator=torch.Generator().manual_seed(0))  # longer than LLAMA3's original
DRAFTS = [17, 101, 250]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A target and a draft for it."""

    kind: str = "llama"
    target: dict[str, Any] | None = None  # of the target's configuration
    draft: dict[str, Any] | None = None
    head: dict[str, Any] | None = None
    own_head: bool = False  # over the whole vocabulary, beside the speculator
    dtype: str = "float32"


SPECULATIVE = {"num_candidates": 40}
FULL = {"type": "full"}
CASES = {
    "tied": Case(),
    "untied": Case(kind="qwen3"),
    "full": Case(head=FULL),
    "feature layers": Case(draft={"feature_layers": [1, 3, 7]}),
    "llama3": Case(target={"rope_parameters": LLAMA3}),
    "yarn": Case(target={"rope_parameters": YARN}, head=FULL),
    "other heads than the target": Case(draft={"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10}),
    "exact selection": Case(head={"selection": "exact", "num_candidates": 30}),
    "int8": Case(head={**SPECULATIVE, "quantization": "int8"}),
    "own full head": Case(head={"type": "static", "draft_vocab_size": 277}),
    "own full head with a speculator": Case(own_head=True),
    "static": Case(kind="qwen3", head={"type": "static", "draft_vocab_size": 90}),
    "bfloat16": Case(kind="qwen3", dtype="bfloat16"),
    "bfloat16 full": Case(kind="qwen3", dtype="bfloat16", head=FULL),
    "bfloat16 static": Case(dtype="bfloat16", head={"type": "static", "draft_vocab_size": 90}),
}


def write(case: Case, folder: Path) -> tuple[tuple[Path, Path], SpecVocabDraft]:
    """Folders of the target and of a checkpoint whose every weight matters, and the draft as it was before export."""
    config = tiny_config(case.kind)
    for name, value in (case.target or {}).items():
        setattr(config, name, value)
    target = save_target(random_model(config).to(TORCH_DTYPES[case.dtype]), folder / "target")
    head = dict(SPECULATIVE if case.head is None else case.head)
    quantization = head.pop("quantization", None)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        spec = load_spec(tiny_target_config(target, case.kind))
        model = SpecVocabDraft.build(spec, DraftConfig(**(case.draft or {})), HeadConfig(**head))
        if case.own_head:
            model.own_head = OwnHead.of_size(spec.hidden_size, spec.vocab_size, spec.vocab_size)
        for parameter in model.parameters():
            parameter.data.normal_(mean=float(parameter.ndim == 1), std=0.2)
        if model.own_head is not None:
            model.own_head.ids.copy_(torch.randperm(spec.vocab_size)[: len(model.own_head.ids)].sort().values)
    if quantization is not None:
        model.speculator.quantize(quantization)
    checkpoint = save_checkpoint(folder / "export", model, spec, Provenance(), dtype=TORCH_DTYPES[case.dtype])
    return (target, checkpoint), model


def load_trainers(case: Case, target_folder: Path, model: SpecVocabDraft, dtype: str | None = None) -> Trainers:
    """The target and the draft, not read from its export, rounded to the case's type and run in ``dtype`` or that."""
    config = tiny_target_config(target_folder, case.kind)
    target = Target.load(config, device="cpu", dtype=TORCH_DTYPES[dtype or case.dtype],
                         feature_layers=model.architecture.feature_layers)
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(TORCH_DTYPES[case.dtype])
    return Trainers(target, place_draft(rounded, target))


@dataclass(frozen=True)
class Trainers:
    """The trainer's target and draft."""

    target: Target
    model: SpecVocabDraft

    @torch.no_grad()
    def chain(self, features: Tensor, next_ids: Tensor, head: str | None = None) -> list[Tensor]:
        """What ``SGLangDraft.chain`` gives for ``DRAFTS``, by another head than the checkpoint's if one is named."""
        draft, cache, logits = self.model.draft, DraftCache(), []
        build = build_head(head or self.model.head_config.type, self.target, self.model)
        hidden, tokens, position = draft.fuse(features.to(draft.fc.weight)[None]), next_ids, 0
        for step in range(len(DRAFTS) + 1):
            positions = torch.arange(position, position + len(tokens))[None]
            output = draft.forward_cached(hidden, self.target.embed(tokens)[None], positions, cache)
            logits.append(build(draft.norm(output)[0]).dense_logits(self.target.spec.vocab_size))
            hidden, position = output[:, -1:], position + len(tokens)
            tokens = torch.tensor(DRAFTS[step : step + 1])
        return logits


def in_sglang(case: Case, target: Path, checkpoint: Path, **ranks: Any) -> SGLangDraft:
    return SGLangDraft(checkpoint, str(target), dtype=case.dtype, num_draft_tokens=3, max_model_len=512, **ranks)


def assert_same(actual: Tensor, expected: Tensor, wide: Tensor | None = None) -> None:
    """Equal to rounding in fp32; in bfloat16 as near to the fp32 result as the trainer's, candidates at the edge apart.

    Args:
        wide: the trainer's in fp32, where ``expected`` is not.
    """
    assert actual.shape == expected.shape
    if wide is None:
        assert torch.equal(actual.isfinite(), expected.isfinite())
        assert error(actual, expected) < 1e-5
    else:
        kept = wide.isfinite()
        assert (actual.isfinite() & kept).sum() >= 0.95 * kept.sum()
        assert error(actual, wide) < 1.5 * error(expected, wide) < 0.1


def error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square over common candidates, relative."""
    common = actual.isfinite() & expected.isfinite()
    actual, expected = actual[common].float(), expected[common].float()
    return float((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.parametrize("name", CASES)
def test_logits_are_the_trainers(name: str, tmp_path: Path):
    case = CASES[name]
    folders, written = write(case, tmp_path)
    trainers = load_trainers(case, folders[0], written)
    wide = None if case.dtype == "float32" else load_trainers(case, folders[0], written, dtype="float32")
    target, model = trainers.target, trainers.model
    output = target.forward(TEXT)
    features = output.features[0, :-1]
    parts = features.float().split(target.spec.hidden_size, dim=-1)
    assert all((a - b).abs().mean() > 0.1 for a, b in pairwise(parts))  # or wrong layers would not be seen
    with in_sglang(case, *folders) as served:
        assert served.feature_layers == model.architecture.feature_layers
        served_features, served_logits = served.target_output(TEXT[0])
        chain = served.chain(features, TEXT[0, 1:], DRAFTS)
    of_target = None if wide is None else wide.target.forward(TEXT)
    assert_same(served_features, output.features[0], of_target and of_target.features[0])
    assert_same(served_logits, target.logits(output.final_hidden[0]),
                wide and of_target and wide.target.logits(of_target.final_hidden[0]))
    expected = trainers.chain(features, TEXT[0, 1:])
    in_wide = [None] * len(expected) if wide is None else wide.chain(features, TEXT[0, 1:])
    for logits in zip(chain, expected, in_wide, strict=True):
        assert_same(*logits)
    if model.speculator is not None:
        assert all((logits.isfinite().sum(-1) == model.speculator.num_candidates).all() for logits in chain)


def test_without_the_plugin_the_checkpoint_has_the_full_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    case = Case()
    folders, written = write(case, tmp_path)
    trainers = load_trainers(case, folders[0], written)
    features = trainers.target.forward(TEXT).features[0, :-1]
    with in_sglang(case, *folders) as served:
        assert type(served.draft) is SpecVocabLlamaForCausalLMEagle3
    monkeypatch.setitem(ModelRegistry.models, ARCHITECTURE, LlamaForCausalLMEagle3)
    with in_sglang(case, *folders) as served:
        chain = served.chain(features, TEXT[0, 1:], DRAFTS)
    for actual, expected in zip(chain, trainers.chain(features, TEXT[0, 1:], head="full"), strict=True):
        assert_same(actual, expected)


def test_the_plugin_is_found_and_can_be_left_out(monkeypatch: pytest.MonkeyPatch):
    assert "specvocab" in load_plugins_by_group(GENERAL_PLUGINS_GROUP)
    monkeypatch.setenv("SGLANG_PLUGINS", "none")
    assert load_plugins_by_group(GENERAL_PLUGINS_GROUP) == {}


def test_no_more_rows_are_asked_for_than_get_candidates_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The plugin takes the full head for many rows, which the check would take for the plugin's absence."""
    case, rows, candidates = Case(), [], ShardedHead.candidates
    monkeypatch.setattr(ShardedHead, "candidates", lambda self, hidden, lm_head: (
        rows.append(len(hidden)), candidates(self, hidden, lm_head))[1])
    folders, written = write(case, tmp_path)
    features = load_trainers(case, folders[0], written).target.forward(TEXT).features[0, :-1]
    with in_sglang(case, *folders) as served:
        served.logits(features, TEXT[0, 1:])
    assert max(rows) <= 8 and sum(rows) == 89


def test_rounds_are_counted_also_of_answers_without_one():
    """As its tokenizer manager reports them: of an answer that is an end token alone, nothing."""
    served = count_drafts([
        {"output_ids": [5, 6, 7, 8, 2], "meta_info": {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 1, 1]}},
        {"output_ids": [2], "meta_info": {}},
    ], 3)
    assert served == Served(answers=[[5, 6, 7, 8, 2], [2]], num_rounds=3, accepted_per_position=[2, 1, 0])


def test_layers_counted_the_wrong_way_are_seen(tmp_path: Path):
    case = Case()
    (target, checkpoint), written = write(case, tmp_path)
    trainers = load_trainers(case, target, written)
    config = json.loads((checkpoint / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="contradicts itself"):
        load_checkpoint(checkpoint)
    for ours in ("vocabulary_speculator", "specvocab.json"):  # which the plugin would refuse
        (checkpoint / ours).rename(tmp_path / f"other {ours}")
    with in_sglang(case, target, checkpoint) as served:
        assert served.feature_layers == tuple(layer + 1 for layer in trainers.target.feature_layers)
        features = served.target_output(TEXT[0])[0]
    assert (features - trainers.target.forward(TEXT).features[0]).abs().mean() > 0.1


def test_two_ranks_choose_candidates_each_and_gather_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # the processors of each rank
    monkeypatch.setenv("SGLANG_NCCL_SO_PATH", "none")  # which needs GPUs; then SGLang takes gloo
    case = Case(kind="qwen3", head={"selection": "tile", "tile": 16, "keep": 2})
    folders, written = write(case, tmp_path)
    trainers = load_trainers(case, folders[0], written)
    target, model = trainers.target, trainers.model
    features = target.forward(TEXT).features[0, :-1]
    context, port = multiprocessing.get_context("spawn"), get_free_port()
    processes = [context.Process(target=_rank, args=(rank, port, case, *folders, features)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    of_first, of_second = (torch.load(folders[1] / f"{rank}.pt") for rank in range(2))
    assert torch.equal(of_first, of_second)
    full = trainers.chain(features, TEXT[0, 1:], head="full")[0]
    finite = of_first.isfinite()
    torch.testing.assert_close(of_first[finite], full[finite], atol=1e-4, rtol=1e-4)

    hidden = model.draft.forward_cached(
        model.draft.fuse(features[None]), target.embed(TEXT[:, 1:]), torch.arange(len(features))[None], DraftCache())
    scores = model.speculator(model.draft.norm(hidden)[0])
    ranges = [range(160), range(160, 277)]  # SGLang pads 277 rows to 320
    for row in (0, 40, 88):
        expected = {ids[0] + i for ids in ranges
                    for i in tile_candidates(scores[row, ids[0] : ids[-1] + 1].tolist(), -(-len(ids) // 16), 2)}
        assert set(finite[row].nonzero().flatten().tolist()) == expected


def _rank(rank: int, port: int, case: Case, target: Path, checkpoint: Path, features: Tensor) -> None:
    with in_sglang(case, target, checkpoint, rank=rank, num_ranks=2, dist_port=port) as served:
        torch.save(served.logits(features, TEXT[0, 1:]), checkpoint / f"{rank}.pt")
