"""Training a static head: its tokens come from the data, and with them it is resumed and exported."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from data_gen.shards import load_rows
from specvocab_model.config import ConfigError
from tests.tiny import EOS_IDS, IM_START_ID, PAD_ID
from tests.train.launching import fork_ranks
from tests.train.runs import final_weights, largest_difference, logged, overrides, run_of
from train.loop import train, train_steps

SIZE = 60
STATIC = ("head=static", f"head.draft_vocab_size={SIZE}", "trainer.max_steps=6", "trainer.save_every=3")
SPECIAL = {*EOS_IDS, IM_START_ID, PAD_ID}
NUMBERS = ("train/objective", "train/loss", "train/simulated_tau/candidates", "optim/grad_norm")


def test_a_run_is_resumed_with_the_same_tokens_bit_for_bit(root, capsys):
    run = run_of(root, "static", *STATIC)
    counts = Counter(token for row in load_rows(root / "train")
                     for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True) if mask)
    ranked = sorted(set(range(run.target.spec.vocab_size)) - SPECIAL, key=lambda token: (-counts[token], token))
    kept = sorted(SPECIAL | set(ranked[: SIZE - len(SPECIAL)]))
    before = run.model.own_head.weight.detach().clone()
    assert run.model.own_head.ids.tolist() == kept
    assert torch.equal(before, run.target.lm_head_weight[kept])
    share = sum(counts[token] for token in kept) / sum(counts.values())
    assert f"static head: 60 of 277 tokens, which are {share:.2%} of the answers' tokens" in capsys.readouterr().out

    train(run)
    weights = final_weights(root, "static")
    assert weights["own_head.ids"].dtype == torch.int64 and weights["own_head.ids"].tolist() == kept
    assert (weights["own_head.weight"] - before).abs().max() > 1e-3
    (checkpoint,) = (root / "static" / "checkpoints").glob("step-6")
    assert "own_head.weight" in load_file(checkpoint / "exp_avg.safetensors")
    measured = logged(root, "static", "train/simulated_tau/full", "train/simulated_tau/candidates",
                      "train/candidate_recall/target_top1")
    assert all(full == candidates >= 1 and 0 < recall < 1 for _, full, candidates, recall in measured)

    broken = run_of(root, "static-broken", *STATIC)
    broken.train_loader.sampler.num_steps = 3
    train_steps(broken)
    resumed = run_of(root, "static-broken", *STATIC)
    assert resumed.state.step == 3 and resumed.model.own_head.ids.tolist() == kept
    train(resumed)
    assert logged(root, "static-broken", *NUMBERS) == logged(root, "static", *NUMBERS)
    assert largest_difference(final_weights(root, "static-broken"), weights) == 0.0


@pytest.mark.slow
def test_two_ranks_train_it_as_one(root):
    """Under ZeRO-3, which takes the most apart."""
    train(run_of(root, "static-one", *STATIC))
    arguments = overrides(root, "static-zero3", *STATIC, "trainer.gradient_accumulation_steps=2", "distributed=zero3")
    job = fork_ranks(root / "logs", arguments, 2)
    assert job.codes == [0, 0], job.output[-3000:]
    assert job.output.count("static head: 60 of 277") == 1  # one voice
    np.testing.assert_allclose(logged(root, "static-zero3", *NUMBERS), logged(root, "static-one", *NUMBERS), rtol=5e-5)
    assert largest_difference(final_weights(root, "static-zero3"), final_weights(root, "static-one")) < 3e-4


def test_a_vocabulary_without_room_for_the_special_tokens_is_refused(root):
    with pytest.raises(ConfigError, match="vocabulary of 3 has no room for the 4 special tokens"):
        run_of(root, "static-small", "head=static", "head.draft_vocab_size=3")
