"""Seconds of heads and of the rest of a round, on the present device."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from specvocab_kernels.vocab_head import HeadWeights, vocab_head_top_n
from torch import Tensor
from torch.nn.functional import linear
from transformers import DynamicCache

from specvocab_model.attention import DraftCache
from specvocab_model.config import ConfigError
from specvocab_model.draft import Draft, DraftArchitecture, SpecVocabDraft
from specvocab_model.target import Target
from specvocab_model.tuning.choices import Choice, SpeculativeChoice, StaticChoice

RULES = ((64, 1), (128, 1), (128, 2), (256, 1), (256, 2), (512, 1), (512, 4))  # tile, keep
WARM_UP = 3
MIN_SECONDS = 0.03  # measured at least, of one thing
REPEATS = 9  # of which the median counts
BATCHES_OF_REPLAYS = 20  # a graph replay is shorter than a clock's tick is sharp


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds of ``call``: of CUDA graph replays on a GPU, of plain calls on a CPU."""
    for _ in range(WARM_UP):
        call()
    return _graph_seconds(call, device) if device.type == "cuda" else _plain_seconds(call)


def _plain_seconds(call: Callable[[], object]) -> float:
    seconds: list[float] = []
    while len(seconds) < REPEATS or sum(seconds) < MIN_SECONDS:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _graph_seconds(call: Callable[[], object], device: torch.device) -> float:
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    seconds = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(BATCHES_OF_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize(device)
        seconds.append(start.elapsed_time(end) / 1e3 / BATCHES_OF_REPLAYS)
    return statistics.median(seconds)


@torch.no_grad()
def speculative_seconds(weights: HeadWeights, hidden: Tensor) -> float:
    """One greedy step of a speculated vocabulary for ``hidden`` [B, d]."""
    return seconds_of(lambda: vocab_head_top_n(hidden, weights, 1), hidden.device)


@torch.no_grad()
def dense_seconds(rows: Tensor, hidden: Tensor) -> float:
    """One greedy step over all of ``rows``: the full head with ``lm_head`` [V, d], a static one with [D, d]."""
    return seconds_of(lambda: linear(hidden, rows).argmax(-1), hidden.device)


@torch.no_grad()
def rest_of_round_seconds(
    target: Target, model: SpecVocabDraft, *, num_draft_tokens: int, context: int
) -> float:
    """A round of chain decoding without its ``num_draft_tokens`` draft heads, batch 1.

    That is the target over ``num_draft_tokens + 1`` tokens with its own logits, and as many passes of the draft's
    layer as tokens are drafted, behind ``context`` cached tokens. As the Hugging Face target runs here, without CUDA
    graphs: an engine's rest is shorter, so that its heads weigh more.
    """
    device, num_tokens = target.device, num_draft_tokens + 1
    ids = torch.arange(context + num_tokens, device=device)[None] % target.spec.vocab_size
    cache, draft_cache = DynamicCache(), DraftCache()
    output = target.forward(ids[:, :context], past_key_values=cache)
    positions = torch.arange(context + num_tokens, device=device)[None]
    draft, before = model.draft, slice(0, context)
    draft.forward_cached(
        draft.fuse(output.features), target.embed(ids[:, before]), positions[:, before], draft_cache
    )

    def one_round() -> None:
        verified = target.forward(ids[:, context:], past_key_values=cache)
        target.logits(verified.final_hidden[0]).argmax(-1)
        cache.crop(-num_tokens)
        hidden = draft.fuse(verified.features[:, :1])
        for step in range(num_draft_tokens):
            at = slice(context + step, context + step + 1)
            hidden = draft.forward_cached(hidden, target.embed(ids[:, at]), positions[:, at], draft_cache)
            draft.norm(hidden)
        draft_cache.truncate(context)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(WARM_UP):
        one_round()
    return _plain_seconds(one_round)


@torch.no_grad()
def draft_seconds(
    architecture: DraftArchitecture, sizes: Sequence[int], *, batch: int, context: int, dtype: torch.dtype,
    device: torch.device,
) -> tuple[float, list[float]]:
    """One draft step of random weights: seconds of everything but the head, and of greedy heads of ``sizes`` rows.

    What is timed is what ``flops.DraftFlops`` counts, ``fc`` included, behind ``context`` cached positions.
    """
    draft = Draft(architecture)
    for parameter in draft.parameters():
        parameter.data = parameter.data.to(dtype)
    draft.to(device)
    cache = DraftCache()

    def step(num_tokens: int) -> Tensor:
        positions = torch.arange(num_tokens, device=device).expand(batch, -1)
        features = torch.zeros(batch, num_tokens, draft.fc.in_features, dtype=dtype, device=device)
        embeds = torch.zeros(batch, num_tokens, architecture.hidden_size, dtype=dtype, device=device)
        return draft.norm(draft.forward_cached(draft.fuse(features), embeds, positions, cache))

    def body() -> None:
        step(1)
        cache.truncate(context)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step(context)
    hidden = torch.randn(batch, architecture.hidden_size, dtype=dtype, device=device)
    rows = torch.randn(max(sizes), architecture.hidden_size, dtype=dtype, device=device)
    for _ in range(WARM_UP):
        body()
    return _plain_seconds(body), [dense_seconds(rows[:size], hidden) for size in sizes]


def grid(vocab_size: int, ranks: Sequence[int]) -> list[Choice]:
    """What ``scripts/tune_head.py --latency-only`` measures: few, because every one is compiled."""
    speculative = [SpeculativeChoice(rank=rank, tile=tile, keep=keep, quantization=precision)
                   for rank in ranks for tile, keep in RULES for precision in (None, "fp8")]
    return [*speculative, *(StaticChoice(size=vocab_size // part) for part in (16, 8, 4))]


def measure_shape(
    vocab_size: int, hidden_size: int, choices: Sequence[Choice], *, batch: int, dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Any]:
    """Times of heads of random weights, as ``read`` takes them; what a head costs does not depend on its weights."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=dtype, device=device) * shape[-1] ** -0.5

    lm_head, hidden = random(vocab_size, hidden_size), random(batch, hidden_size) * hidden_size**0.5
    heads = []
    for choice in choices:
        if isinstance(choice, StaticChoice):
            seconds = dense_seconds(lm_head[: choice.size], hidden)
        else:
            factors = random(choice.rank, hidden_size), random(vocab_size, choice.rank)
            weights = HeadWeights.build(lm_head, *factors, choice.selection(vocab_size), choice.quantization)
            seconds = speculative_seconds(weights, hidden)
        heads.append({"head": str(choice), "choice": asdict(choice), "seconds": seconds})
    return {"vocab_size": vocab_size, "hidden_size": hidden_size, "batch": batch,
            "full": dense_seconds(lm_head, hidden), "heads": heads}


def read(path: Path, shape: tuple[int, ...], batch: int) -> tuple[float, dict[Choice, float]]:
    """Seconds of the full head and of every other head of a file of ``scripts/tune_head.py --latency-only``.

    Raises:
        ConfigError: the file is not there, or has no such shape.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; make it with scripts/tune_head.py --latency-only")
    for measured in json.loads(path.read_text())["shapes"]:
        if (measured["vocab_size"], measured["hidden_size"], measured["batch"]) == (*shape, batch):
            kinds = ((StaticChoice if "size" in entry["choice"] else SpeculativeChoice, entry)
                     for entry in measured["heads"])
            return measured["full"], {kind(**entry["choice"]): entry["seconds"] for kind, entry in kinds}
    raise ConfigError(f"{path} has no shape {'x'.join(map(str, shape))} with batch {batch}; measure it with --shapes")
