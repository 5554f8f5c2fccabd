"""The target's outputs from memory are what the target says, and it is asked once."""

from __future__ import annotations

import numpy as np
import torch

from tests.train.runs import config_of, final_weights, largest_difference, logged, overrides
from train.build import build_run
from train.loop import train
from train.target_cache import documents


def run_of(root, name, *changes):
    return build_run(config_of(overrides(root, name, *changes)))


def test_outputs_are_those_of_the_packed_forward(root):
    run = run_of(root, "cached-outputs", "trainer.cache_target=true")
    for batch in next(iter(run.train_loader)):
        packed = run.target.forward(batch.input_ids, position_ids=batch.position_ids)
        cached = run.target_cache.forward(batch)
        inside = batch.document_ids >= 0
        assert sum(one.stop - one.start for one in documents(batch)) == int(inside.sum())
        for name in ("features", "final_hidden"):
            ours, theirs = getattr(cached, name), getattr(packed, name)
            torch.testing.assert_close(ours[inside], theirs[inside], rtol=1e-4, atol=1e-4)
            assert not ours[~inside].any()


def test_the_target_runs_in_one_epoch_and_the_numbers_stay(root):
    run = run_of(root, "cached", "trainer.cache_target=true")
    calls = []
    forward = run.target.forward
    run.target.forward = lambda input_ids, **options: calls.append(input_ids) or forward(input_ids, **options)
    train(run)
    pieces = {tuple(ids[0].tolist()) for ids in calls}
    assert len(calls) == len(pieces) == len(run.target_cache.outputs)
    train(run_of(root, "not-cached"))
    names = ("train/objective", "optim/grad_norm")
    np.testing.assert_allclose(logged(root, "cached", *names), logged(root, "not-cached", *names), rtol=1e-4)
    assert largest_difference(final_weights(root, "cached"), final_weights(root, "not-cached")) < 1e-3
