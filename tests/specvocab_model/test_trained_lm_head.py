"""A draft with an lm_head of its own over all tokens and a tied speculator, against plain torch in fp64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specvocab_model.config import ConfigError, DraftConfig, HeadConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads.static import OwnHead
from specvocab_model.losses import Objective
from specvocab_model.unroll import plan_unroll
from tests.specvocab_model.test_unroll import HIDDEN, STEPS, VOCAB, document, pack, random_model
from tests.tiny import tiny_target

OBJECTIVE = Objective(loss="forward_kl", aux_weight=0.3, step_decay=0.8, max_bytes=3 * 28 * VOCAB)


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_moves_the_own_rows_and_the_speculator_as_defined(tied: bool):
    generator = torch.Generator().manual_seed(99)
    theirs = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.3
    model = with_own_head(random_model(head=HeadConfig(rank=6, num_candidates=9)), theirs, tied=tied)
    batch = pack(document(17, seed=1), document(9, seed=2))
    weights = torch.arange(1.0, STEPS + 1)
    output = model(**batch, lm_head_weight=theirs, step_weights=weights, objective=OBJECTIVE, collect=True,
                   collect_drafts=True)
    output.loss.backward()

    own = model.own_head.weight.detach().double().requires_grad_()
    down_proj = model.speculator.down_proj.weight.detach().double().requires_grad_()
    parameter = model.speculator.vocab_proj.up_proj.weight if tied else model.speculator.vocab_proj.weight
    trained = parameter.detach().double().requires_grad_()
    vocab_proj = own.detach() @ trained if tied else trained
    plan = plan_unroll(batch["loss_mask"], batch["document_ids"], STEPS)
    unrolled = model.draft.unroll(*(batch[name] for name in ("features", "token_embeds", "position_ids",
                                                             "document_ids")), STEPS).flatten(1, 2).detach().double()
    student = unrolled.gather(1, plan.rows.student[..., None].expand(-1, -1, HIDDEN))
    teacher = batch["final_hidden"].flatten(0, 1)[plan.rows.teacher].double() @ theirs.double().T
    p, logits = teacher.softmax(-1), student @ own.T
    approximate = student @ down_proj.T @ vocab_proj.T

    def kl(other: torch.Tensor) -> torch.Tensor:
        return (p * (p.log() - other.log_softmax(-1))).sum(-1)

    weight = torch.where(plan.rows.valid, weights[:, None].double(), 0.0)
    total = (weight * (kl(logits) + OBJECTIVE.aux_weight * kl(approximate))).sum()
    total.backward()
    torch.testing.assert_close(output.loss.double(), total, rtol=1e-4, atol=1e-5)
    for got, expected in ((model.own_head.weight, own), (model.speculator.down_proj.weight, down_proj),
                          (parameter, trained)):
        torch.testing.assert_close(got.grad.double(), expected.grad, rtol=1e-3, atol=1e-5)
    valid, right = plan.rows.valid, logits.argmax(-1) == teacher.argmax(-1)
    assert output.sums.count.tolist() == valid.sum(1).tolist()
    assert output.sums.acceptance.tolist() == pytest.approx(
        torch.where(valid, torch.minimum(p, logits.softmax(-1)).sum(-1), 0.0).sum(1).tolist(), rel=1e-3)
    candidates = model.speculator.selection.select(approximate[valid].float()).long()
    best = logits[valid].gather(-1, candidates).argmax(-1, keepdim=True)
    assert torch.equal(output.drafts[valid], candidates.gather(-1, best)[:, 0])
    assert right[valid].any()


def with_own_head(model: SpecVocabDraft, theirs: torch.Tensor, *, tied: bool) -> SpecVocabDraft:
    """``model`` with what ``build_for_training`` gives it, its own rows a little beside the target's."""
    generator = torch.Generator().manual_seed(3)
    model.own_head = OwnHead.of_size(HIDDEN, VOCAB, VOCAB)
    model.own_head.initialise(model.own_head.vocab, theirs + 0.05 * torch.randn(theirs.shape, generator=generator))
    if tied:
        model.speculator.tie()
    model.speculator.initialise("svd", theirs)
    return model


@pytest.mark.parametrize("head", ["full", "speculative"])
def test_it_is_built_for_training_with_all_tokens_and_measured_with_its_own_rows(head: str, tmp_path: Path):
    target = tiny_target("llama", tmp_path)
    model = SpecVocabDraft.build_for_training(target.spec, DraftConfig(), HeadConfig(type=head, train_lm_head=True))
    assert model.own_head.is_full and model.lm_head_weight(target) is model.own_head.weight
    plain = SpecVocabDraft.build_for_training(target.spec, DraftConfig(), HeadConfig(type=head))
    assert plain.own_head is None and plain.lm_head_weight(target) is target.lm_head_weight


def test_a_static_head_is_trained_anyway():
    with pytest.raises(ConfigError, match=r"over head\.draft_vocab_size of them; drop it"):
        HeadConfig(type="static", train_lm_head=True)
