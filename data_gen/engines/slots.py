"""A fixed number of slots that decode in step, each with its own prompt, length and place in the KV cache.

The shapes of a step never change, so a GPU can replay it as one CUDA graph: plain decoding of a small model is bound by
the launches of its hundreds of kernels. A slot that is finished stands still until it is given another prompt
(continuous batching, Yu et al. 2022, "Orca").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from data_gen.engines.base import SamplingParams
from data_gen.engines.transformers_engine import choose
from specvocab_model.compiled_layers import InPlaceCache
from specvocab_model.sampling import Sampling
from specvocab_model.target import Target

SMALLEST_WIDTH = 256  # columns of the cache that attention looks at
PREFILL_TOKENS = 32768  # of one forward over prompts
WARM_UP_STEPS = 2


@dataclass(slots=True)
class Cursor:
    """Where the next forward writes, for all layers."""

    positions: Tensor  # int64 [slots]: decoding, the column of each slot's next key
    slots: Tensor  # int64 [slots]: 0, 1, 2, ...
    width: int = 0  # decoding: columns in use
    filling: Tensor | None = None  # int64 [n]: the slots whose prompts this forward reads; None: decoding


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, ``[slots, heads, capacity, head_dim]``; column ``t`` is the token at ``t``."""

    def __init__(self, cursor: Cursor, keys: Tensor, values: Tensor, *, is_sliding: bool) -> None:
        super().__init__()
        self.cursor, self.keys, self.values = cursor, keys, values
        self.is_initialized, self.is_sliding = True, is_sliding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to be done."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple:
        assert self.keys is not None and self.values is not None
        cursor = self.cursor
        if cursor.filling is not None:  # whole prompts, which see nothing but themselves
            self.keys[cursor.filling, :, : key_states.shape[2]] = key_states
            self.values[cursor.filling, :, : key_states.shape[2]] = value_states
            return key_states, value_states
        self.keys[cursor.slots, :, cursor.positions] = key_states[:, :, 0]
        self.values[cursor.slots, :, cursor.positions] = value_states[:, :, 0]
        return self.keys[:, :, : cursor.width], self.values[:, :, : cursor.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0  # of prompts; decoding brings its own masks

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]


@dataclass(frozen=True, slots=True)
class Look:
    """What the slots held after some steps, on its way to the host while a GPU goes on."""

    finished: Tensor  # bool [slots]
    counts: Tensor  # int64 [slots]: tokens written
    written: Tensor  # int64 [slots, max_new_tokens]
    copied: torch.cuda.Event | None  # None: on a CPU, where nothing is on its way

    def has_arrived(self) -> bool:
        """Whether a GPU is done with it."""
        return self.copied is not None and self.copied.query()

    def completions(self, slots: Sequence[int]) -> dict[int, list[int]]:
        """What those of ``slots`` that are finished wrote, by slot. Waits for the GPU."""
        if self.copied is not None:
            self.copied.synchronize()
        done = [slot for slot, finished in zip(slots, self.finished[slots].tolist(), strict=True) if finished]
        pairs = zip(self.counts[done].tolist(), self.written[done].tolist(), strict=True)
        return {slot: token_ids[:count] for slot, (count, token_ids) in zip(done, pairs, strict=True)}


class Slots:
    """Decodes up to ``num_slots`` prompts at a time. Which of them share a step moves nothing but rounding."""

    def __init__(
        self, target: Target, params: SamplingParams, *, num_slots: int, capacity: int, own_columns: bool
    ) -> None:
        """
        Args:
            capacity: tokens that a prompt and its completion may have together.
            own_columns: attention is told each slot's columns and reads no others, see ``grouped_attention``; else it
                reads as many of every slot as the longest has, under masks.
        """
        device, limit = target.device, params.max_new_tokens
        config = target.model.config.to_dict()
        self.target = target
        self.params = params
        self.capacity = capacity
        self.own_columns = own_columns
        self.num_slots = num_slots
        self.sampling = Sampling(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
        self.tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)  # the newest of each slot, not yet read
        self.counts = torch.zeros_like(self.tokens)  # tokens written
        self.finished = torch.ones(num_slots, dtype=torch.bool, device=device)
        self.written = torch.zeros(num_slots, limit, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(num_slots, 0 if self.sampling.greedy else limit, dtype=torch.float64, device=device)
        self.cursor = Cursor(positions=torch.zeros_like(self.tokens), slots=torch.arange(num_slots, device=device))
        # What the host knows of the positions without asking the GPU: they are no larger, nor beyond the last.
        self._positions, self._last_positions = np.zeros((2, num_slots), dtype=np.int64)
        self.sliding_window: int | None = config.get("sliding_window")
        self.layer_types: list[str] | None = config.get("layer_types")
        types = self.layer_types or ["full_attention"] * target.spec.num_hidden_layers
        size = (num_slots, target.spec.num_key_value_heads, capacity, target.spec.head_dim)
        weight = target.lm_head_weight
        self.cache = InPlaceCache([SlotLayer(
            self.cursor, weight.new_zeros(size), weight.new_zeros(size), is_sliding=kind == "sliding_attention",
        ) for kind in types])
        self._stops = torch.tensor(params.stop_token_ids, dtype=torch.int64, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @torch.inference_mode()
    def admit(self, slots: Sequence[int], prompts: Sequence[list[int]], uniforms: Tensor) -> None:
        """Read prompts into free slots and write the first token of each.

        Args:
            uniforms: fp64 [n, max_new_tokens] in [0, 1), what the tokens are drawn with; ``[n, 0]`` for greedy.
        """
        start = 0
        while start < len(slots):
            size = max(1, PREFILL_TOKENS // max(map(len, prompts[start:])))
            self._read(slots[start : start + size], prompts[start : start + size], uniforms[start : start + size])
            start += size

    def hold(self, positions: Tensor) -> None:
        """For measuring: all slots decode, the next token of each at its place of ``positions``, int64 [slots]."""
        self.cursor.positions.copy_(positions)
        self._positions[:] = positions
        self._last_positions[:] = self.capacity
        self.counts.fill_(1)
        self.finished.fill_(False)

    def release(self, slots: Sequence[int]) -> None:
        """These are not looked at any more; they need not be finished."""
        self._positions[slots] = self._last_positions[slots] = 0

    def _read(self, places: Sequence[int], prompts: Sequence[list[int]], uniforms: Tensor) -> None:
        device = self.target.device
        lens = np.array(list(map(len, prompts)))
        width = int(lens.max())
        self._positions[places], self._last_positions[places] = lens, lens + self.params.max_new_tokens
        # Padding on the right: no token looks ahead, and what lies behind a prompt is written over before it is read.
        padded = torch.tensor([prompt + [self.target.spec.pad_token_id] * (width - len(prompt)) for prompt in prompts])
        slots, lengths, padded, uniforms = (
            self._sent(each) for each in (torch.tensor(places), torch.from_numpy(lens), padded, uniforms))
        self.cursor.filling = slots
        output = self.target.forward(
            padded, position_ids=torch.arange(width, device=device).expand(len(prompts), -1),
            past_key_values=self.cache,
        )
        self.cursor.filling = None
        last = output.final_hidden[torch.arange(len(prompts), device=device), lengths - 1]
        first = choose(self.target.logits(last), self.sampling, uniforms[:, :1])
        self.uniforms[slots] = uniforms
        self.tokens[slots] = first
        self.written[slots, 0] = first
        self.counts[slots] = 1
        self.cursor.positions[slots] = lengths
        self.finished[slots] = torch.isin(first, self._stops) | (self.params.max_new_tokens == 1)

    @torch.inference_mode()
    def steps(self, count: int) -> Look:
        """Have ``count`` tokens a slot decoded. Does not wait for a GPU."""
        self._positions = np.minimum(self._positions + count, self._last_positions)
        self.cursor.width = self.capacity if self.own_columns else self._width()
        if self._pool is not None and self.cursor.width not in self._graphs:
            self._graphs[self.cursor.width] = self._captured()
        step = self._step if self._pool is None else self._graphs[self.cursor.width].replay
        for _ in range(count):
            step()
        copied = None if self._pool is None else torch.cuda.Event()
        look = Look(self._fetched(self.finished), self._fetched(self.counts), self._fetched(self.written), copied)
        if copied is not None:
            copied.record()
        return look

    def _width(self) -> int:
        """Columns that all slots have in use, rounded up, so that there are few graphs."""
        width = SMALLEST_WIDTH
        while width < self._positions.max():  # 256, 384, 512, 768, 1024, ...
            width = width * 3 // 2 if width & (width - 1) == 0 else width * 4 // 3
        return min(width, self.capacity)

    def _sent(self, values: Tensor) -> Tensor:
        """Host memory that is not pinned would be copied only when the GPU has done all that it was given."""
        if self._pool is None or not values.numel():
            return values.to(self.target.device)
        return values.pin_memory().to(self.target.device, non_blocking=True)

    def _fetched(self, values: Tensor) -> Tensor:
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=self._pool is not None).copy_(
            values, non_blocking=True)

    def _captured(self) -> torch.cuda.CUDAGraph:
        unfinished = self.finished.clone()
        self.finished.fill_(True)  # a step in which all stand still changes nothing
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._step()
        self.finished.copy_(unfinished)
        return graph

    def _step(self) -> None:
        """One token for every slot that is not finished. In place throughout: a graph remembers addresses."""
        positions = self.cursor.positions
        output = self.target.forward(
            self.tokens[:, None], position_ids=positions[:, None], past_key_values=self.cache,
            attention_mask=self._columns() if self.own_columns else self._masks(),
        )
        column = self.counts.clamp_max(self.params.max_new_tokens - 1)[:, None]
        uniform = self.uniforms if self.sampling.greedy else self.uniforms.gather(1, column)
        following = choose(self.target.logits(output.final_hidden[:, -1]), self.sampling, uniform)
        moving = ~self.finished
        self.tokens.copy_(torch.where(moving, following, self.tokens))
        kept = torch.where(moving[:, None], self.tokens[:, None], self.written.gather(1, column))
        self.written.scatter_(1, column, kept)
        self.counts += moving
        positions += moving
        over = torch.isin(self.tokens, self._stops) | (self.counts == self.params.max_new_tokens)
        self.finished |= over

    def _columns(self) -> Tensor | dict[str, Tensor]:
        """The first and the last column that each slot's next token looks at: int64 ``[2, slots, 1, 1]``."""
        last = self.cursor.positions
        first = last * self.finished  # one that stands still reads one column, and nobody reads what it makes of it
        full = torch.stack([first, last])[..., None, None]
        if self.sliding_window is None:
            return full
        sliding = torch.stack([torch.maximum(first, last - self.sliding_window + 1), last])[..., None, None]
        if self.layer_types is None:
            return sliding
        return {"full_attention": full, "sliding_attention": sliding}

    def _masks(self) -> Tensor | dict[str, Tensor]:
        """What each slot's next token may look at, added to the scores: ``[slots, 1, 1, width]``."""
        columns = torch.arange(self.cursor.width, device=self.target.device)
        positions = self.cursor.positions[:, None]
        full = columns <= positions
        if self.sliding_window is None:
            return self._additive(full)
        sliding = full & (columns > positions - self.sliding_window)
        if self.layer_types is None:
            return self._additive(sliding)
        return {"full_attention": self._additive(full), "sliding_attention": self._additive(sliding)}

    def _additive(self, visible: Tensor) -> Tensor:
        dtype = self.target.lm_head_weight.dtype
        return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
            ~visible, torch.finfo(dtype).min)[:, None, None]
