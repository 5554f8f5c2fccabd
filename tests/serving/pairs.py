"""Targets with drafts in sizes that engines serve on a CPU (heads of 64 dimensions), random or trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config

from specvocab_model.config import DraftConfig, HeadConfig
from specvocab_model.decode import autoregressive_generate, place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import Provenance, save_checkpoint
from specvocab_model.heads.static import OwnHead
from specvocab_model.losses import Objective, step_weights, valid_counts
from specvocab_model.serving.check import LOST_ACCEPTANCE, Served
from specvocab_model.target import Target
from specvocab_model.vocab import VocabMap
from tests.tiny import EOS_IDS, PAD_ID, TOKENIZER_LENGTH, random_model, save_target, tiny_target_config

CONFIGS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
NUM_KEYS, NUM_SYMBOLS, FIRST_KEY = 4, 24, 200
NEW_TOKENS, DRAFT_TOKENS = 40, 3  # where an engine answers
KEYS = torch.arange(FIRST_KEY, FIRST_KEY + NUM_KEYS)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target and a checkpoint for it, both also on disk."""

    target: Target
    model: SpecVocabDraft
    target_folder: Path
    checkpoint: Path


def target_config(kind: str = "llama", **changes) -> PreTrainedConfig:
    """As small as vLLM's attention on a CPU permits."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": True,
             "vocab_size": TOKENIZER_LENGTH + 17, "pad_token_id": PAD_ID, "bos_token_id": None,
             "eos_token_id": list(EOS_IDS)}
    return CONFIGS[kind](**shape | changes)


def load_target(model: PreTrainedModel, folder: Path, dtype: torch.dtype, draft: DraftConfig) -> Target:
    """Write ``model`` in ``dtype`` and read it back."""
    save_target(model.to(dtype), folder)
    return Target.load(tiny_target_config(folder, model.config.model_type), device="cpu", dtype=dtype,
                       feature_layers=draft.feature_layers)


def random_pair(
    folder: Path, *, dtype: torch.dtype = torch.float32, draft: DraftConfig | None = None,
    head: HeadConfig | None = None, own_head: bool = False, layout: str = "eagle3", **target
) -> Pair:
    """A random target and draft: every tensor matters, none is learned.

    Args:
        own_head: an output embedding of its own over the whole vocabulary, beside the speculator.
    """
    draft = draft or DraftConfig()
    loaded = load_target(random_model(target_config(**target)), folder / "target", dtype, draft)
    model = SpecVocabDraft.build(loaded.spec, draft, head or HeadConfig(rank=24, num_candidates=64))
    vocab_size, generator = loaded.spec.vocab_size, torch.Generator().manual_seed(1)
    if own_head or model.own_head is not None:
        size = vocab_size if own_head else len(model.own_head.ids)
        ids = torch.randperm(vocab_size, generator=generator)[:size].sort().values
        model.own_head = OwnHead(loaded.spec.hidden_size, VocabMap.from_ids(ids, vocab_size))
        torch.nn.init.normal_(model.own_head.weight, generator=generator)
    if model.speculator is not None:
        model.speculator.initialise("svd", model.lm_head_weight(loaded).float())
        if model.head_config.quantization is not None:
            model.speculator.quantize(model.head_config.quantization)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in model.draft.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
            else:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return exported(model, loaded, folder, layout)


def exported(model: SpecVocabDraft, target: Target, folder: Path, layout: str = "eagle3") -> Pair:
    checkpoint = save_checkpoint(folder / "draft", model, target.spec, Provenance(), dtype=target.lm_head_weight.dtype,
                                 layout=layout)
    # As it was before export, but for the rounding, so that an export that loses something is seen.
    return Pair(target=target, model=place_draft(model, target), target_folder=folder / "target", checkpoint=checkpoint)


def orbits(num_rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Texts [num_rows, length] whose first token is a key and says which permutation leads from symbol to symbol.

    The last token alone does not tell the next one, so a target must carry the key through its layers, and a draft can
    have it from the target's features.
    """
    permutations = torch.stack([torch.randperm(NUM_SYMBOLS, generator=torch.Generator().manual_seed(int(key)))
                                for key in KEYS])
    which = torch.randint(NUM_KEYS, (num_rows,), generator=generator)
    texts = [KEYS[which], torch.randint(NUM_SYMBOLS, (num_rows,), generator=generator)]
    for _ in range(length - 2):
        texts.append(permutations[which, texts[-1]])
    return torch.stack(texts, dim=1)


def trained_target(folder: Path, draft: DraftConfig, *, num_steps: int = 200) -> Target:
    """Knows the permutations of ``orbits``."""
    model = random_model(target_config())
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    model.requires_grad_(True).train()
    for _ in range(num_steps):
        batch = orbits(16, 24, generator)
        logits = model(input_ids=batch).logits[:, 1:-1]
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 2:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return load_target(model.eval(), folder / "target", torch.float32, draft)


def trained_pair(folder: Path, *, head: HeadConfig, num_steps: int = 120, num_unroll_steps: int = 3) -> Pair:
    """A draft that was trained, as training does it, on the features of a trained target."""
    draft = DraftConfig(num_unroll_steps=num_unroll_steps)
    target = trained_target(folder, draft)
    torch.manual_seed(0)
    model = SpecVocabDraft.build(target.spec, draft, head)
    if model.speculator is not None:
        model.speculator.initialise("svd", target.lm_head_weight)
    objective = Objective(loss="forward_kl", aux_weight=0.1, step_decay=0.8, max_bytes=1 << 28)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(num_steps):
        batch = orbits(16, 24, generator)
        mask, documents = (torch.arange(24) >= 2).long().expand(16, -1), torch.zeros_like(batch)
        output = target.forward(batch)
        loss = model(
            features=output.features, final_hidden=output.final_hidden, token_embeds=target.embed(batch).detach(),
            lm_head_weight=target.lm_head_weight, position_ids=torch.arange(24).expand(16, -1), document_ids=documents,
            loss_mask=mask, objective=objective,
            step_weights=step_weights(objective, valid_counts(mask, documents, num_unroll_steps)),
        ).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return exported(model, target, folder)


def greedy_answers(target: Target, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    return [autoregressive_generate(target, torch.tensor([prompt]), max_new_tokens=max_new_tokens).sequences
            for prompt in prompts]


def shifted_features(checkpoint: Path, folder: Path) -> Path:
    """A copy whose engines take features one layer too deep."""
    wrong = shutil.copytree(checkpoint, folder)
    config = json.loads((wrong / "config.json").read_text())
    for part in (config, config["eagle_config"]):
        part["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in part["eagle_aux_hidden_state_layer_ids"]]
    (wrong / "config.json").write_text(json.dumps(config))
    return wrong


def assert_same(served: Served, own: Served, greedy: list[list[int]]) -> None:
    """The target's own text, with as many drafts accepted as our decoder does."""
    print(served.num_rounds, served.accepted_per_position, own.num_rounds, own.accepted_per_position)
    assert served.answers == greedy == own.answers
    assert own.accepted > 1 and served.accepted == pytest.approx(own.accepted, rel=LOST_ACCEPTANCE)


def assert_features_matter(served: Served, speculated: Served, greedy: list[list[int]]) -> None:
    """``served``, with features of wrong layers, accepts less: or any features would pass for the right ones."""
    print(served.num_rounds, served.accepted_per_position)
    assert served.answers == greedy
    assert served.accepted < (1 - 2 * LOST_ACCEPTANCE) * speculated.accepted


def prompts(number: int) -> list[list[int]]:
    """The beginnings of texts that are in nobody's batches."""
    return orbits(number, 6, torch.Generator().manual_seed(99)).tolist()
