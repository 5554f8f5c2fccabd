"""Compiled layers of the target against the plain ones: same numbers, few codes, and nothing left behind."""

from __future__ import annotations

import copy
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import DynamicCache

from data_gen.engines import ContinuousEngine, SamplingParams
from specvocab_model import compiled_layers
from specvocab_model.engine import DraftShape
from specvocab_model.engine import engine as engine_module
from specvocab_model.target import Target
from tests.specvocab_model.test_engine_decode import CHUNK, SHAPES, make_engine, prompts_of, tokens
from tests.tiny import tiny_target

FEATURES = (1, 4, 7)
MOST_GRAPHS = 32  # of a plain engine, one of chains and one of trees: see ``engine``'s uses of ``fuse``
NUM_MODULES = {"llama": 3, "gemma3_text": 4}  # a layer, the norm, and rotary embeddings, of which gemma3 has two


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def target(request: pytest.FixtureRequest) -> Target:
    """One whose weights differ from layer to layer, as all do: a code that held one layer's would be noticed."""
    with tempfile.TemporaryDirectory() as folder:
        return tiny_target(request.param, folder)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPUs compile as GPUs do, short of generating code."""
    monkeypatch.setitem(compiled_layers.BACKENDS, "cpu", "eager")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def packed(length: int, rows: int = 2, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Rows of two documents: ids and positions [rows, length]."""
    ids = torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(length))
    positions = torch.cat([torch.arange(length // 3), torch.arange(length - length // 3)]).expand(rows, -1)
    return ids.to(device), positions.to(device)


@contextmanager
def no_new_code() -> Iterator[None]:
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def test_packed_rows_of_any_length_share_one_code(backend: None, target: Target) -> None:
    for length in (21, 31, 7):  # a length that is another size, such as head_dim's 20, has a code of its own
        ids, positions = packed(length, rows=3)
        ours, theirs = (each.forward(ids, position_ids=positions) for each in (target.with_compiled_layers(), target))
        torch.testing.assert_close(ours.features, theirs.features, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.final_hidden, theirs.final_hidden, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == NUM_MODULES[target.spec.model_type] and not counters["graph_break"]


def test_an_engine_writes_the_same_and_needs_few_codes(backend: None, target: Target) -> None:
    """Also where the mask is as wide as the cache, as the first shape's is; other sizes bring no more."""
    prompts = prompts_of((1, 13, 30))
    for number, shape in list(enumerate(SHAPES))[slice(3) if target.spec.model_type == "llama" else slice(1, 2)]:
        wanted = make_engine(target, shape, batch_size=3, compile=False).generate(prompts, max_new_tokens=12)
        engine = make_engine(target, shape, batch_size=3, capacity=128 + 128 * number, prefill_chunk=CHUNK + number)
        assert tokens(engine.generate(prompts, max_new_tokens=12)) == tokens(wanted)
    assert counters["stats"]["unique_graphs"] <= MOST_GRAPHS and not counters["graph_break"]
    with no_new_code():
        make_engine(target, SHAPES[1], batch_size=2, capacity=900).generate(prompts_of((300, 5)), max_new_tokens=5)


def test_generation_writes_the_same(backend: None, tmp_path: Path) -> None:
    """As scripts/bench_generate.py can time it."""
    target = tiny_target("llama", tmp_path)
    prompts = prompts_of((3, 1, 20, 11, 7, 9))
    params = SamplingParams(max_new_tokens=9, stop_token_ids=())
    ours, theirs = ([completion for _, completion in ContinuousEngine(each, batch_tokens=120).generate(
        prompts, params, seed=0)] for each in (target.with_compiled_layers(), target))
    assert ours == theirs
    assert 0 < counters["stats"]["unique_graphs"] <= 10 and not counters["graph_break"]


def test_a_mask_is_made_once() -> None:
    visible = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril()
    masks = compiled_layers.Masks(torch.bfloat16)
    made = masks.additive(visible)
    assert masks.additive(visible) is made and masks.additive(made) is made and masks.additive(None) is None
    assert made.dtype == torch.bfloat16 and made.shape == visible.shape and made.stride()[2:] == (16, 1)
    assert torch.equal(made == 0, visible) and bool(made[~visible].isneginf().all())


def test_features_are_those_of_the_layers_that_were_asked_for(backend: None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = tiny_target("llama", folder)
    target = Target(made.spec, made.model, made.tokenizer, FEATURES).with_compiled_layers()
    ids, _ = packed(12)
    ours = target.forward(ids).features
    assert counters["stats"]["unique_graphs"] == 3
    states = target.model(ids, output_hidden_states=True).hidden_states  # leaves hooks that no code can hold
    torch.testing.assert_close(ours, torch.cat([states[layer] for layer in FEATURES], dim=-1), rtol=1e-5, atol=1e-5)


def test_a_model_is_left_as_it_was(backend: None, target: Target) -> None:
    plain, target = target, target.with_compiled_layers()
    ids, positions = packed(9)
    target.forward(ids, position_ids=positions)
    with pytest.raises(IndexError):
        target.forward(ids + 10**6)
    assert not any("forward" in vars(module) for module in target.model.get_decoder().modules())
    with no_new_code():  # transformers' own cache grows by new tensors: it takes the plain layers
        output = target.forward(ids, past_key_values=DynamicCache(config=target.model.config))
    torch.testing.assert_close(output.final_hidden, plain.forward(ids).final_hidden)


def test_a_cpu_compiles_nothing(target: Target) -> None:
    torch._dynamo.reset()
    counters.clear()
    target.with_compiled_layers().forward(packed(9)[0])
    assert not counters["stats"]


def error(output: Tensor, truth: Tensor) -> float:
    return float((output.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())


def test_inductors_code_is_nearer_to_the_truth_than_the_plain_layers(
    backend: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A norm or a rotation in one kernel rounds to bf16 once, not after every step. (Slow: a C++ compiler runs.)"""
    monkeypatch.setitem(compiled_layers.BACKENDS, "cpu", "inductor")
    with tempfile.TemporaryDirectory() as folder:
        target = tiny_target("qwen3", folder, dtype=torch.bfloat16)
    ids, positions = packed(40)
    ours, theirs = (each.forward(ids, position_ids=positions).final_hidden
                    for each in (target.with_compiled_layers(), target))
    target.model.double()
    truth = target.forward(ids, position_ids=positions).final_hidden
    assert error(ours, truth) < 1.05 * error(theirs, truth) < 0.05


def tensors_of(value: Any) -> list[Tensor]:
    """All that a function was given or gave, or may have changed, but for weights."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    return [tensor for each in value for tensor in tensors_of(each)] if isinstance(value, list | tuple) else []


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_inductors_code_changes_what_the_plain_code_changes(shape: DraftShape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every compiled function of a round, on every call: no text shows what a draft reads wrongly. (Slow, as above.)"""
    monkeypatch.setitem(compiled_layers.BACKENDS, "cpu", "inductor")
    called = Counter[str]()

    def both(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        run = compiled_layers.compiled(function, device)

        def compare(*given: Any) -> Any:
            copies = copy.deepcopy(given)
            wanted, got = function(*copies), run(*given)
            for ours, theirs in zip(tensors_of([got, given]), tensors_of([wanted, copies]), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=lambda text: f"{function}: {text}")
            called[function.__name__] += 1
            return got

        return compare

    monkeypatch.setattr(engine_module, "compiled", both)
    monkeypatch.setattr(Target, "with_compiled_layers", lambda self: self)
    with tempfile.TemporaryDirectory() as folder:
        target = tiny_target("llama", folder)
    torch._dynamo.reset()
    make_engine(target, shape, batch_size=3).generate(prompts_of((1, 13, 30)), max_new_tokens=9)
    assert len(called) >= 6 and called["accept"] >= 2


# ---- on the card ----


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.06)])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_gpu_compiles_packed_rows(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = tiny_target(kind, folder, dtype=dtype)
    target.model.to("cuda")
    for length in (64, 100, 37):
        ids, positions = packed(length, rows=3, device="cuda")
        ours, theirs = (each.forward(ids, position_ids=positions) for each in (target.with_compiled_layers(), target))
        assert error(ours.features, theirs.features.double()) < tolerance
        assert error(ours.final_hidden, theirs.final_hidden.double()) < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_gpu_graphs_of_compiled_layers_write_the_same(kind: str, shape) -> None:
    with tempfile.TemporaryDirectory() as folder:
        target = tiny_target(kind, folder)
    target.model.to("cuda")
    prompts = prompts_of((1, 13, 300))
    wanted, got, ungraphed = (  # texts, and how many drafts each round accepted
        make_engine(target, shape, capacity=400, batch_size=3, compile=compile, graphs=graphs).generate(
            prompts, max_new_tokens=40)
        for compile, graphs in ((False, True), (True, True), (True, False)))
    assert got == wanted
    assert ungraphed == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("part, shape", [("verify", SHAPES[0]), ("draft", SHAPES[1]), ("draft", SHAPES[2])])
def test_gpu_launches_a_fraction_of_the_kernels(part: str, shape: DraftShape) -> None:
    counts = []
    with tempfile.TemporaryDirectory() as folder:
        target = tiny_target("llama", folder, dtype=torch.bfloat16)
    target.model.to("cuda")
    for compile in (False, True):
        engine = make_engine(target, shape, capacity=256, compile=compile)
        engine.generate([[1, 2, 3]], max_new_tokens=4)
        run = engine.parts(100)[part]
        run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        counts.append(sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events()))
    assert counts[1] < counts[0] / (2 if shape == SHAPES[2] else 2.5), counts  # heads, and a tree's sorting, stay
