"""The target in a graph: what it returns is the eager forward's, and stays so."""

from __future__ import annotations

import tempfile
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specvocab_model import packed_attention
from specvocab_model.packed_attention import as_mask
from specvocab_model.target import Target, TargetOutput
from specvocab_model.target_graph import MOST_BYTES, TargetGraph, activation_bytes, can_capture
from tests.tiny import tiny_target

LENGTH = 40
PACKINGS = [([40], [40]), ([1, 30, 9], [20, 20]), ([4] * 10, [39, 1]), ([1] * 40, [1] * 40), ([7, 33], [40])]


def rows_of(number: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Ids and positions [2, LENGTH], and offsets."""
    rows = PACKINGS[number]
    ids = torch.randint(0, 256, (2, LENGTH), generator=torch.Generator().manual_seed(number))
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    offsets = torch.tensor([0, *(length for lengths in rows for length in lengths)]).cumsum(0).int()
    return ids.to(device), positions.to(device), offsets.to(device)


def behave_as_captured(graph: TargetGraph) -> None:
    """On the CPU, let a key's first run say where all later ones write, as those of a CUDA graph do."""

    def run(key, function, harmless) -> None:
        written = graph._outputs.get(key[0])
        function()
        if written is not None:
            made, graph._outputs[key[0]] = graph._outputs[key[0]], written
            written.features.copy_(made.features)
            written.final_hidden.copy_(made.final_hidden)

    graph.graphs.run = run  # type: ignore[method-assign]


def switched(kind: str, dtype: torch.dtype = torch.float32, **model_kwargs) -> Target:
    with tempfile.TemporaryDirectory() as folder:
        target = tiny_target(kind, folder, dtype=dtype, **model_kwargs)
    target.model.set_attn_implementation(packed_attention.NAME)
    return target


def eager(target: Target, ids: Tensor, positions: Tensor, offsets: Tensor) -> TargetOutput:
    return target.forward(ids, position_ids=positions, attention_mask=as_mask(offsets))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_outputs_are_those_of_the_eager_forward_and_stay_when_others_follow(kind):
    target = switched(kind)
    graph = TargetGraph(target, (2, LENGTH))
    behave_as_captured(graph)
    batches = [rows_of(number) for number in range(len(PACKINGS))]
    outputs = [graph.forward(*batch) for batch in batches]
    for batch, output in zip(batches, outputs, strict=True):
        wanted = eager(target, *batch)
        torch.testing.assert_close(output.features, wanted.features)
        torch.testing.assert_close(output.final_hidden, wanted.final_hidden)
    assert sorted(graph._outputs) == [8, 16, 128]  # documents: 2, 5, 12, 80, 3


def test_what_waits_or_takes_much_memory_is_not_captured():
    target = switched("llama")
    assert can_capture(target, 2 * LENGTH)
    assert not can_capture(target, MOST_BYTES // activation_bytes(target, 1) + 1)
    for change in ({"model_type": "qwen3_moe"}, {"rope_parameters": {"rope_type": "dynamic"}}):
        target.spec, spec = replace(target.spec, **change), target.spec
        assert not can_capture(target, 2 * LENGTH)
        target.spec = spec


# ---- on the card ----


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_gpu_graph_says_what_the_eager_forward_says(kind):
    target = switched(kind, torch.bfloat16, head_dim=24)
    target.model.to("cuda")
    graph = TargetGraph(target, (2, LENGTH))
    batches = [rows_of(number, "cuda") for number in range(len(PACKINGS))]
    for _ in range(2):  # captured, then replayed
        outputs = [graph.forward(*batch) for batch in batches]
    for batch, output in zip(batches, outputs, strict=True):
        wanted = eager(target, *batch)
        torch.testing.assert_close(output.features, wanted.features)
        torch.testing.assert_close(output.final_hidden, wanted.final_hidden)
    assert len(graph.graphs._graphs) == 3


@pytest.mark.gpu
def test_gpu_forward_by_offsets_never_waits():
    target = switched("qwen3", torch.bfloat16, head_dim=24)
    target.model.to("cuda")
    graph, batch = TargetGraph(target, (2, LENGTH)), rows_of(1, "cuda")
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            eager(target, *batch)
            graph.forward(*batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
