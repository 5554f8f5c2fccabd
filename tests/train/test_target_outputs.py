"""The target's outputs are what the target says, from wherever they come."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from accelerate import PartialState

from data_gen.make_features import make_features
from specvocab_model import packed_attention, target_graph
from specvocab_model.config import ConfigError
from specvocab_model.target_graph import TargetGraph
from tests.specvocab_model.test_target_graph import behave_as_captured
from tests.train.runs import SEQ_LEN, config_of, final_weights, largest_difference, logged, overrides, write_experiment
from train.build import Run, build_run
from train.loop import train
from train.target_outputs import documents

NUMBERS = ("train/objective", "optim/grad_norm", "train/loss", "train/simulated_tau/candidates")


def run_of(root, name, *changes) -> Run:
    return build_run(config_of(overrides(root, name, *changes)))


def test_outputs_are_those_of_the_packed_forward(root):
    run = run_of(root, "outputs")
    for batch in next(iter(run.train_loader)):
        packed = run.target.forward(batch.input_ids, position_ids=batch.position_ids)
        ours = run.target_outputs.of(batch, batch)
        inside = batch.document_ids >= 0
        assert sum(one.stop - one.start for one in documents(batch)) == int(inside.sum())
        for mine, theirs in ((ours.features, packed.features), (ours.final_hidden, packed.final_hidden)):
            torch.testing.assert_close(mine[inside], theirs[inside], rtol=1e-4, atol=1e-4)
            assert not mine[~inside].any()


def test_a_target_that_is_remembered_runs_in_one_epoch_and_the_numbers_stay(root, reference):
    run = run_of(root, "remembered", "trainer.cache_target=true")
    calls = []
    forward = run.target.forward
    run.target.forward = lambda input_ids, **options: calls.append(input_ids) or forward(input_ids, **options)
    known = len(run.target_outputs.kept)  # from the calibration
    train(run)
    pieces = {tuple(ids[0].tolist()) for ids in calls}
    assert known and len(calls) == len(pieces) == len(run.target_outputs.kept) - known
    assert_same_bits(root, "remembered", reference)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_from_features_on_disk_is_training_with_the_target_bit_for_bit(root, reference, num_workers):
    path = f"data.features_path={root / 'features'}"
    make_features(config_of(overrides(root, "features", path)), PartialState(cpu=True))
    run = run_of(root, f"from-disk-{num_workers}", path, f"data.num_workers={num_workers}")
    assert len(run.target.model.get_decoder().layers) == 0
    train(run)
    assert_same_bits(root, f"from-disk-{num_workers}", reference)


def assert_same_bits(root, name: str, reference: str) -> None:
    for names in (NUMBERS, ("validation/loss", "validation/simulated_tau/full")):
        assert logged(root, name, *names) == logged(root, reference, *names)
    assert largest_difference(final_weights(root, name), final_weights(root, reference)) == 0.0


@pytest.mark.parametrize("how", ["mask", "offsets", "graph"])
def test_packed_rows_as_on_a_gpu_train_alike(root, reference, monkeypatch, how):
    run = run_of(root, f"packed-{how}")
    outputs = run.target_outputs
    if how != "mask":
        outputs.by_offsets = True
        outputs.target.model.set_attn_implementation(packed_attention.NAME)
    if how == "graph":
        outputs.graph = TargetGraph(outputs.target, (1, SEQ_LEN))
        behave_as_captured(outputs.graph)
    monkeypatch.setattr(outputs, "_by_document", lambda batch: outputs._by_row(
        batch.input_ids, batch.position_ids, batch.plan.unrolled.spans.key_offsets))
    assert {"mask": "a mask", "offsets": "kernel by kernel", "graph": "in a CUDA graph of 48 tokens"}[
        how] in outputs.describe()
    train(run)
    assert (how == "graph") == (outputs.graph is not None and len(outputs.graph._outputs) > 0)
    np.testing.assert_allclose(logged(root, f"packed-{how}", *NUMBERS), logged(root, reference, *NUMBERS), rtol=1e-4)
    assert largest_difference(final_weights(root, f"packed-{how}"), final_weights(root, reference)) < 1e-3


@pytest.mark.gpu
@pytest.mark.usefixtures("on_a_card")
def test_gpu_trains_alike_with_the_target_in_a_graph(tmp_path, monkeypatch):
    """Two micro-batches a step, and validation; the same kernels run in the same order."""
    root = write_experiment(tmp_path, head_dim=24)
    changes = ("distributed.cpu=false", "target.dtype=bfloat16", "trainer.mixed_precision=bf16",
               "trainer.gradient_accumulation_steps=2", "trainer.micro_batch_size=2")
    for name, enabled in (("eager-gpu", False), ("graph-gpu", True)):
        monkeypatch.setattr(target_graph, "MOST_BYTES", 2**30 if enabled else 0)
        run = run_of(root, name, *changes)
        train(run)
        assert enabled == (run.target_outputs.graph is not None and bool(run.target_outputs.graph.graphs._graphs))
    for names in (("train/loss", "train/teacher_entropy"), ("validation/loss",)):
        np.testing.assert_allclose(logged(root, "graph-gpu", *names), logged(root, "eager-gpu", *names), rtol=1e-3)


def test_features_that_are_not_there_or_never_needed_are_refused(root):
    with pytest.raises(ConfigError, match="nowhere/train has no features"):
        run_of(root, "refused", f"data.features_path={root / 'nowhere'}")
    with pytest.raises(ConfigError, match=r"it is not asked; set trainer.cache_target=false"):
        run_of(root, "refused", "data.features_path=features", "trainer.cache_target=true")
