"""Samples say what decoding would have done, token for token, and show all of the text."""

from __future__ import annotations

import pytest
import torch

from specvocab_model.config import DraftConfig, HeadConfig
from specvocab_model.decode import autoregressive_generate, speculative_generate
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import build_head
from specvocab_model.losses import Objective
from specvocab_model.unroll import plan_unroll
from tests.tiny import tiny_target, tiny_tokenizer
from train.packing import Batch
from train.samples import NO_DRAFT, Sample, follow, make_samples

STEPS = 3
OBJECTIVE = Objective(loss="forward_kl", aux_weight=0.1, step_decay=0.8, max_bytes=2**20)


def batch_of(*documents: list[int], num_prompt: int) -> Batch:
    """One row; the first ``num_prompt`` tokens of each document are its prompt."""
    ids = torch.tensor([[token for document in documents for token in document]])
    lengths = [len(document) for document in documents]
    document_ids = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    loss_mask = torch.cat([(torch.arange(length) >= num_prompt).long() for length in lengths])[None]
    return Batch(
        input_ids=ids,
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        document_ids=document_ids,
        loss_mask=loss_mask,
        num_slots=ids.numel(),
        row_ids=tuple(f"row-{number}" for number in range(len(documents))),
        plan=plan_unroll(loss_mask, document_ids, STEPS),
    )


def drafts_of(model: SpecVocabDraft, target, batch: Batch):
    seen = target.forward(batch.input_ids, position_ids=batch.position_ids)
    with torch.no_grad():
        output = model(
            features=seen.features, final_hidden=seen.final_hidden, token_embeds=target.embed(batch.input_ids),
            lm_head_weight=target.lm_head_weight, position_ids=batch.position_ids, document_ids=batch.document_ids,
            loss_mask=batch.loss_mask, step_weights=torch.ones(STEPS), objective=OBJECTIVE, collect_drafts=True,
        )
    return output.drafts


@pytest.mark.parametrize("head", ["speculative", "full"])
def test_rounds_are_those_of_real_decoding(tmp_path, head):
    """A draft that is often right: the target's own last feature, so greedy loops are continued."""
    target = tiny_target("qwen3", tmp_path)
    torch.manual_seed(0)
    model = SpecVocabDraft.build(target.spec, DraftConfig(num_unroll_steps=STEPS),
                                 HeadConfig(type=head, rank=12, num_candidates=40)).eval()
    if model.speculator is not None:
        model.speculator.initialise("svd", target.lm_head_weight)
    decode = dict(max_new_tokens=60)
    documents, expected = [], []
    for seed in range(4):
        prompt = torch.randint(0, 200, (1, 6), generator=torch.Generator().manual_seed(seed))
        answer = autoregressive_generate(target, prompt, **decode).sequences
        output = speculative_generate(target, model, build_head(head, target, model), prompt,
                                      num_draft_tokens=STEPS, **decode)
        assert output.sequences == answer
        documents.append(prompt[0].tolist() + answer)
        expected.append(output.accepted_per_round)
    # Prefill emits the first answer token, from which on there are drafts: it counts as prompt here.
    batch = batch_of(*documents, num_prompt=7)
    drafts = drafts_of(model, target, batch)
    samples = make_samples(batch, drafts, target.tokenizer, count=4)
    assert [sample.id for sample in samples] == [f"row-{number}" for number in range(4)]
    assert sum(map(sum, expected)) > 5
    for sample, document, accepted in zip(samples, documents, expected, strict=True):
        assert sample.num_tokens == len(document) - 7
        assert sample.num_rounds == len(accepted)
        assert sample.num_tokens == sum(accepted) + len(accepted)


def test_follow_by_hand():
    ids = torch.tensor([1, 2, 3, 4, 5, 6, 7])
    drafted = torch.tensor([  # chain from t drafts t + 2, t + 3
        [NO_DRAFT, 4, 9, 6, 7, NO_DRAFT, NO_DRAFT],
        [NO_DRAFT, 8, 5, 7, NO_DRAFT, NO_DRAFT, NO_DRAFT],
    ])
    rounds = [(one.first, one.num_accepted, one.rejected) for one in follow(ids, drafted)]
    assert rounds == [(3, 1, 8), (5, 2, None)]  # from 1: 4 right, 8 is not 5; from 3: both right, the end
    assert follow(ids, torch.full((2, 7), NO_DRAFT)) == []


def test_pieces_are_the_whole_text_and_split_no_character():
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("Ask: käse, 日本 \U0001f9c0!", add_special_tokens=False)
    batch = batch_of(ids, num_prompt=5)
    rows = batch.plan.rows
    drafts = torch.where(torch.rand(rows.valid.shape) < 0.6, batch.input_ids[0, rows.teacher + 1], 33)
    (sample,) = make_samples(batch, drafts, tokenizer, count=3)
    assert "".join(text for kind, text in sample.pieces if kind != "rejected") == tokenizer.decode(ids)
    assert "�" not in "".join(text for kind, text in sample.pieces)
    assert sample.pieces[0] == ("prompt", "Ask: ")
    assert {"accepted", "target", "rejected"} <= {kind for kind, _ in sample.pieces}


def test_documents_without_a_draft_are_no_samples():
    batch = batch_of([1, 2, 3], [1, 2, 3, 4], num_prompt=3)
    rows = batch.plan.rows
    drafts = torch.zeros(rows.valid.shape, dtype=torch.int64)
    (sample,) = make_samples(batch, drafts, tiny_tokenizer(), count=2)
    assert sample.id == "row-1" and isinstance(sample, Sample)
