"""The loss of a static head against plain torch in fp64: teacher on the subset, positions filtered, metrics."""

from __future__ import annotations

import torch
from torch import Tensor

from specvocab_model.acceptance import summarise
from specvocab_model.config import HeadConfig
from specvocab_model.losses import Objective, valid_counts
from specvocab_model.unroll import plan_unroll
from specvocab_model.vocab import VocabMap
from tests.specvocab_model.test_unroll import STEPS, VOCAB, document, pack, random_model

KEPT = VocabMap.from_ids([0, 3, 4, *range(10, 50, 2)], VOCAB)
OBJECTIVE = Objective(loss="forward_kl", aux_weight=0.1, step_decay=0.8, max_bytes=3 * 28 * VOCAB, logit_scale=0.5,
                      logit_softcap=4.0, temperature=2.0)  # three rows at one time


def static_model(lm_head: Tensor):
    model = random_model(head=HeadConfig(type="static", draft_vocab_size=len(KEPT)))
    model.own_head.initialise(KEPT, lm_head + 0.1)
    return model


def lm_head() -> Tensor:
    return torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(99)) * 0.3


def run(model, batch: dict[str, Tensor], **options):
    weights = torch.arange(1.0, STEPS + 1)
    return model(**batch, lm_head_weight=lm_head(), step_weights=weights, objective=OBJECTIVE, **options), weights


def final(raw: Tensor) -> Tensor:
    return 4.0 * torch.tanh(0.5 * raw / 4.0) / 2.0


def test_loss_gradient_and_metrics_are_those_of_the_definition():
    batch, model = pack(document(20, seed=1), document(14, seed=2)), static_model(lm_head())
    output, weights = run(model, batch, collect=True, collect_drafts=True)
    output.loss.backward()

    own = model.own_head.weight.detach().double().requires_grad_()
    plan = plan_unroll(batch["loss_mask"], batch["document_ids"], STEPS)
    unrolled = model.draft.unroll(*(batch[name] for name in ("features", "token_embeds", "position_ids",
                                                             "document_ids")), STEPS).flatten(1, 2).detach()
    teacher = final(batch["final_hidden"][0].double() @ lm_head().double().T)
    total, filtered, right, acceptance = torch.zeros(()).double(), 0, {}, []
    for step in range(STEPS):
        for n, row in enumerate(plan.rows.teacher.tolist()):
            if not plan.rows.valid[step, n]:
                continue
            start = int(plan.rows.student[step, n])
            logits = final(unrolled[step, start].double() @ own.T)
            drafted = int(KEPT.ids[logits.argmax()])
            assert int(output.drafts[step, n]) == drafted
            right[step, start] = drafted == int(teacher[row].argmax())
            if step == 0:
                acceptance.append(float(torch.minimum(teacher[row].softmax(-1)[KEPT.ids], logits.softmax(-1)).sum()))
            if int(teacher[row].argmax()) not in KEPT.ids.tolist():
                filtered += 1
                continue
            p = teacher[row, KEPT.ids].softmax(-1)
            total = total + weights[step] * (p * (p.log() - logits.log_softmax(-1))).sum()
    total.backward()
    assert 0.2 < filtered / len(right) < 0.9
    torch.testing.assert_close(output.loss.double(), total, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.own_head.weight.grad.double(), own.grad, rtol=1e-3, atol=1e-5)
    assert model.draft.fc.weight.grad.abs().max() > 0

    starts = [start for step, start in right if step == 0]
    survived = sum(all(right.get((before, start), False) for before in range(step + 1))
                   for start in starts for step in range(STEPS))
    metrics = summarise(output.sums)
    assert metrics["simulated_tau/full"] == metrics["simulated_tau/candidates"] == 1 + survived / len(starts)
    torch.testing.assert_close(metrics["acceptance_probability"], sum(acceptance) / len(acceptance), rtol=1e-4, atol=0)
    torch.testing.assert_close(metrics["candidate_recall/target_top1"], 1 - filtered / len(right))
    assert output.sums.count.tolist() == valid_counts(batch["loss_mask"], batch["document_ids"], STEPS).tolist()


def test_where_every_favourite_is_outside_there_is_no_loss_and_no_gradient():
    batch, model = document(12, seed=3), static_model(lm_head())
    outside = next(token for token in range(VOCAB) if token not in KEPT.ids.tolist())
    batch["final_hidden"] = 50 * lm_head()[outside].expand(1, 12, -1)
    output, _ = run(model, batch, collect=True)
    output.loss.backward()
    assert output.loss == 0 and summarise(output.sums)["simulated_tau/full"] == 1.0
    assert all(not parameter.grad.any() for parameter in model.parameters())


def test_with_the_whole_vocabulary_it_is_the_full_heads_loss():
    everything = VocabMap.from_ids(range(VOCAB), VOCAB)
    batch = document(16, seed=4)
    static = random_model(head=HeadConfig(type="static", draft_vocab_size=VOCAB + 5))
    static.own_head.initialise(everything, lm_head())
    full = random_model(head=HeadConfig(type="full"))
    full.draft.load_state_dict(static.draft.state_dict())
    outputs = [run(model, batch, collect=True, collect_drafts=True)[0] for model in (static, full)]
    torch.testing.assert_close(outputs[0].loss, outputs[1].loss)
    torch.testing.assert_close(outputs[0].sums.stack(), outputs[1].sums.stack(), rtol=1e-5, atol=1e-5)
    assert torch.equal(outputs[0].drafts, outputs[1].drafts)
