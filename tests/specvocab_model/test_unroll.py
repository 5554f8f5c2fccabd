"""The unroll's indices: against the cached decode path, on a hand-made example, and under packing and padding."""

from __future__ import annotations

import pytest
import torch
from specvocab_kernels.distill.reference import distill_reference
from specvocab_kernels.vocab_head import vocab_head

from specvocab_model.attention import DraftCache
from specvocab_model.config import DraftConfig, HeadConfig
from specvocab_model.draft import DraftArchitecture, SpecVocabDraft
from specvocab_model.losses import Objective, judged_rows, step_weights, valid_counts
from specvocab_model.target import load_spec
from specvocab_model.unroll import plan_unroll
from tests.tiny import tiny_target_config, tiny_target_folder

HIDDEN, VOCAB, STEPS = 48, 61, 4
OBJECTIVE = Objective(loss="forward_kl", aux_weight=0.1, step_decay=0.8, max_bytes=10_000)


def architecture(**changes) -> DraftArchitecture:
    fields = {
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "vocab_size": VOCAB,
        "feature_layers": (2, 4, 5),
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "max_position_embeddings": 128,
        "num_unroll_steps": STEPS,
    }
    return DraftArchitecture(**{**fields, **changes})


def random_model(seed: int = 0, head: HeadConfig | None = None, **changes) -> SpecVocabDraft:
    torch.manual_seed(seed)
    model = SpecVocabDraft(architecture(**changes), head or HeadConfig(rank=6, num_candidates=9))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.15)
    return model


def document(length: int, seed: int) -> dict[str, torch.Tensor]:
    """One document's tensors [1, length, ...]; the last two thirds are the response."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "features": torch.randn(1, length, 3 * HIDDEN, generator=generator),
        "final_hidden": torch.randn(1, length, HIDDEN, generator=generator),
        "token_embeds": torch.randn(1, length, HIDDEN, generator=generator),
        "position_ids": torch.arange(length)[None],
        "document_ids": torch.full((1, length), seed),
        "loss_mask": (torch.arange(length)[None] >= length // 3).long(),
    }


def pack(*documents: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([one[name] for one in documents], dim=1) for name in documents[0]}


def train(model: SpecVocabDraft, batch: dict[str, torch.Tensor], counts: torch.Tensor | None = None, **options):
    """Loss and gradients of one batch."""
    model.zero_grad()
    if counts is None:
        counts = valid_counts(batch["loss_mask"], batch["document_ids"], STEPS)
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(99)) * 0.3
    lm_head, counts = lm_head.to(batch["features"].device), counts.to(batch["features"].device)
    output = model(
        **batch, lm_head_weight=lm_head, step_weights=step_weights(OBJECTIVE, counts), objective=OBJECTIVE, **options
    )
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1},
                                     {"norm_before_residual": True},
                                     {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                                                          "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                                          "original_max_position_embeddings": 64}}])
def test_every_step_equals_the_cached_decode_path(changes):
    model, doc, length = random_model(**changes), document(13, seed=1), 13
    lm_head = torch.randn(VOCAB, HIDDEN)
    with torch.no_grad():
        unrolled = model.draft.unroll(
            doc["features"], doc["token_embeds"], doc["position_ids"], doc["document_ids"], STEPS
        )
        for start in range(length - STEPS):
            # A fresh decode: prefill everything up to `start`, then draft one token after another.
            cache = DraftCache()
            hidden = model.draft.fuse(doc["features"][:, : start + 1])
            hidden = model.draft.forward_cached(
                hidden, doc["token_embeds"][:, 1 : start + 2], doc["position_ids"][:, : start + 1], cache
            )[:, -1:]
            for step in range(STEPS):
                if step:
                    hidden = model.draft.forward_cached(
                        hidden, doc["token_embeds"][:, start + 1 + step, None], torch.tensor([[start + step]]), cache
                    )
                decoded = model.draft.norm(hidden)[0, 0] @ lm_head.T
                torch.testing.assert_close(unrolled[step, 0, start] @ lm_head.T, decoded, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_what_the_layer_adds_its_output_to(norm_before_residual):
    """With attention and MLP silenced, the layer is its residual stream."""
    model = random_model(norm_before_residual=norm_before_residual)
    layer = model.draft.midlayer
    layer.self_attn.o_proj.weight.data.zero_()
    layer.mlp.down_proj.weight.data.zero_()
    hidden, embeds = torch.randn(2, 1, 1, HIDDEN)
    output = model.draft.forward_cached(hidden, embeds, torch.zeros(1, 1, dtype=torch.long), DraftCache())
    torch.testing.assert_close(output, layer.hidden_norm(hidden) if norm_before_residual else hidden)


def test_the_cache_forgets_rejected_tokens():
    model, doc = random_model(), document(8, seed=2)
    arguments = (doc["features"], doc["token_embeds"], doc["position_ids"])

    def extend(cache, begin, end):
        features, embeds, positions = (tensor[:, begin:end] for tensor in arguments)
        return model.draft.forward_cached(model.draft.fuse(features), embeds, positions, cache)

    with torch.no_grad():
        straight = extend(DraftCache(), 0, 8)
        cache = DraftCache()
        extend(cache, 0, 5)
        extend(cache, 6, 8)  # drafted, then rejected
        cache.truncate(5)
        torch.testing.assert_close(extend(cache, 5, 8), straight[:, 5:])
    with pytest.raises(ValueError, match="cannot truncate"):
        cache.truncate(9)


def test_alignment_on_a_hand_made_row():
    # index:                     0  1  2  3  4  5  6  7 |  8  9 10 11 | padding
    # token:                     p  p  p  A  B  C  .  E |  q  D  F  E |
    loss_mask = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1, 1, 0]])
    document_ids = torch.tensor([[5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6, -1]])
    rows = judged_rows(loss_mask, document_ids, 3)
    pairs = {
        (step, int(rows.student[step, n]), int(rows.teacher[n]))
        for step in range(3)
        for n in range(len(rows.teacher))
        if rows.valid[step, n]
    }
    lines = [f"step {i}: start x[{t}], judged by p[{row}], predicts x[{row + 1}]" for i, t, row in sorted(pairs)]
    print("\n".join(lines))
    assert pairs == {
        (0, 1, 2), (0, 2, 3), (0, 3, 4), (0, 5, 6), (0, 8, 9), (0, 9, 10),
        (1, 0, 2), (1, 1, 3), (1, 2, 4), (1, 4, 6), (1, 8, 10),
        (2, 0, 3), (2, 1, 4), (2, 3, 6),
    }
    assert valid_counts(loss_mask, document_ids, 3).tolist() == [6, 5, 3]


def test_weights_are_decayed_means_over_each_steps_own_positions():
    weights = step_weights(OBJECTIVE, torch.tensor([10, 5, 0]))
    torch.testing.assert_close(weights, torch.tensor([1 / 10, 0.8 / 5, 0.64]))


def test_packing_and_padding_change_neither_loss_nor_gradient():
    model = random_model()
    docs = [document(length, seed) for seed, length in enumerate((9, 14, 4))]
    counts = sum(valid_counts(doc["loss_mask"], doc["document_ids"], STEPS) for doc in docs)
    losses, gradients, sums = [], [], []
    for doc in docs:
        output, gradient = train(model, doc, counts, collect=True)
        losses.append(output.loss)
        sums.append(output.sums)
        gradients.append(gradient)
    padding = {name: tensor * 0 + 7 for name, tensor in document(6, seed=9).items()}
    padding["loss_mask"] *= 0
    padding["document_ids"] = torch.full((1, 6), -1)
    packed, together = train(model, pack(docs[2], docs[0], docs[1], padding), counts, collect=True)
    torch.testing.assert_close(packed.loss, sum(losses))
    torch.testing.assert_close(packed.sums.stack(), (sums[0] + sums[1] + sums[2]).stack(), rtol=1e-5, atol=1e-5)
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, sum(one[name] for one in gradients), rtol=1e-4, atol=1e-6, msg=name)


def test_invalid_positions_have_no_influence():
    model, doc = random_model(), document(12, seed=3)
    output, gradient = train(model, doc)
    valid_rows = judged_rows(doc["loss_mask"], doc["document_ids"], STEPS).teacher
    others = torch.ones(12, dtype=torch.bool).index_fill(0, valid_rows, False)
    assert others.any()
    doc["final_hidden"] = torch.where(others[None, :, None], torch.tensor(float("nan")), doc["final_hidden"])
    perturbed, perturbed_gradient = train(model, doc)
    assert torch.equal(output.loss, perturbed.loss)
    assert all(torch.equal(gradient[name], perturbed_gradient[name]) for name in gradient)


def test_a_batch_without_a_valid_position_gives_exact_zeros():
    model, doc = random_model(), document(10, seed=4)
    doc["loss_mask"] = torch.zeros_like(doc["loss_mask"])
    output, gradient = train(model, doc, collect=True)
    assert output.loss == 0
    assert all(not grad.any() for grad in gradient.values())
    assert not output.sums.stack().any()


def test_bf16_autocast_trains_fp32_parameters():
    model, doc = random_model(), document(20, seed=5)
    full, _ = train(model, doc)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, gradient = train(model, doc)
    torch.testing.assert_close(half.loss, full.loss, rtol=0.03, atol=0.03)
    assert all(grad.dtype == torch.float32 for grad in gradient.values())


def test_the_architecture_follows_the_target(tmp_path):
    folder = tiny_target_folder(tmp_path / "target", "qwen3")
    spec = load_spec(tiny_target_config(folder, "qwen3"))
    built = SpecVocabDraft.build(spec, DraftConfig(intermediate_size=32), HeadConfig(type="full"))
    assert built.speculator is None
    assert built.draft.midlayer.self_attn.q_proj.weight.shape == (4 * 20, 2 * 48)
    assert built.draft.midlayer.mlp.up_proj.weight.shape == (32, 48)
    assert built.architecture.feature_layers == (2, 4, 5)
    with pytest.raises(ValueError, match="below the target's 8 layers"):
        SpecVocabDraft.build(spec, DraftConfig(feature_layers=[1, 2, 8]), HeadConfig())


def three_documents() -> dict[str, torch.Tensor]:
    """A prompt without a response between two ordinary documents, in two rows."""
    prompt = document(5, seed=7)
    prompt["loss_mask"] = torch.zeros_like(prompt["loss_mask"])
    row = pack(document(17, seed=5), prompt, document(9, seed=6))
    other = pack(document(20, seed=8), document(11, seed=9))
    return {name: torch.cat([row[name], other[name]]) for name in row}


def test_leaving_out_positions_that_are_not_judged_changes_nothing():
    model, batch = random_model(), three_documents()
    counts = valid_counts(batch["loss_mask"], batch["document_ids"], STEPS)
    output, gradient = train(model, batch)
    plan = plan_unroll(batch["loss_mask"], batch["document_ids"], STEPS)
    assert len(plan.unrolled.index) == 17 + 0 + 9 + 19 + 11  # from 2 + 3 positions before the first supervised token

    model.zero_grad()
    unrolled = model.draft.unroll(*(batch[name] for name in ("features", "token_embeds", "position_ids",
                                                             "document_ids")), STEPS)
    everywhere = unrolled.flatten(1, 2)
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(99)) * 0.3
    student = everywhere.gather(1, plan.rows.student[..., None].expand(-1, -1, HIDDEN))
    weight = torch.where(plan.rows.valid, step_weights(OBJECTIVE, counts)[:, None], 0.0)
    speculator = model.speculator
    loss, _ = distill_reference(
        student, batch["final_hidden"].flatten(0, 1)[plan.rows.teacher], lm_head, speculator.down_proj.weight,
        speculator.vocab_proj.weight, weight, aux_weight=OBJECTIVE.aux_weight,
    )
    loss.backward()
    torch.testing.assert_close(output.loss, loss.detach().float(), rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("head", [{"num_candidates": 9}, {"tile": 8, "keep": 2},
                                  {"selection": "exact", "num_candidates": 9}])
def test_metrics_are_those_of_the_inference_heads_candidates(head):
    """Chains followed one by one, with the candidates that ``vocab_head`` selects from the same hidden states."""
    model, batch = random_model(head=HeadConfig(rank=6, **head)), three_documents()
    lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(99)) * 0.3
    model.speculator.initialise("svd", lm_head)
    with torch.no_grad():
        steps = model.draft.unroll(*(batch[name] for name in ("features", "token_embeds", "position_ids",
                                                              "document_ids")), STEPS)
        # A teacher that agrees with the draft in many places, or no chain would live.
        noise = torch.randn(2, 31, HIDDEN, generator=torch.Generator().manual_seed(3))
        batch["final_hidden"] = steps[0].roll(1, dims=1) + 0.3 * noise
        output = model(**batch, lm_head_weight=lm_head, step_weights=torch.ones(STEPS), objective=OBJECTIVE,
                       collect=True)
    weights = model.speculator.head_weights(lm_head)
    target_recall, draft_recall, survived = [0] * STEPS, [0] * STEPS, [0] * STEPS
    for row in range(2):
        documents, mask = batch["document_ids"][row].tolist(), batch["loss_mask"][row].tolist()
        for start in range(31):
            alive = True
            for step in range(STEPS):
                predicted = start + 2 + step
                inside = predicted < 31 and documents[predicted] == documents[start] and mask[predicted] == 1
                if not inside:
                    alive = False
                    continue
                hidden = steps[step, row, start]
                candidates = set(vocab_head(hidden[None], weights)[0][0].tolist())
                wanted = int((lm_head @ batch["final_hidden"][row, start + 1 + step]).argmax())
                drafted = int((lm_head @ hidden).argmax())
                target_recall[step] += wanted in candidates
                draft_recall[step] += drafted in candidates
                alive = alive and drafted == wanted and wanted in candidates
                survived[step] += alive
    assert output.sums.target_recall.tolist() == target_recall
    assert output.sums.draft_recall.tolist() == draft_recall
    assert output.sums.survived_candidates.tolist() == survived
    assert 0 < survived[0] < output.sums.survived[0] and survived[1] > 0


@pytest.mark.gpu
def test_the_gpu_path_in_bf16_follows_the_cpu_path_in_fp32():
    model, batch = random_model(head_dim=24), three_documents()
    output, gradient = train(model, batch, collect=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        half, half_gradient = train(model.cuda(), {name: tensor.cuda() for name, tensor in batch.items()}, collect=True)
    torch.testing.assert_close(half.loss.cpu(), output.loss, rtol=0.02, atol=0.02)
    torch.testing.assert_close(half.sums.stack().cpu(), output.sums.stack(), rtol=0.1, atol=2.0)
    for name, wanted in gradient.items():
        error = (half_gradient[name].cpu() - wanted).norm() / wanted.norm()
        assert error < 0.05, f"{name}: {error:.3f}"


@pytest.mark.gpu
def test_a_training_pass_with_a_plan_from_the_cpu_never_waits_for_the_gpu():
    model, batch = random_model(head_dim=24).cuda(), three_documents()
    counts = valid_counts(batch["loss_mask"], batch["document_ids"], STEPS)
    lm_head = (torch.randn(VOCAB, HIDDEN) * 0.3).cuda()
    on_gpu = {name: tensor.cuda() for name, tensor in batch.items()}
    weights = step_weights(OBJECTIVE, counts).cuda()

    def step():
        plan = plan_unroll(batch["loss_mask"], batch["document_ids"], STEPS).to(lm_head.device)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output = model(**on_gpu, lm_head_weight=lm_head, step_weights=weights, objective=OBJECTIVE, collect=True,
                           plan=plan)
        output.loss.backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
