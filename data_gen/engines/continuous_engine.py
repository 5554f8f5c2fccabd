"""The target itself, in this process, on a GPU: continuous batching with CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from data_gen.engines.base import Completion, SamplingParams
from data_gen.engines.grouped_attention import use_grouped_attention
from data_gen.engines.slots import Slots
from specvocab_model.config import ConfigError
from specvocab_model.target import Target

MOST_SLOTS = 1024
CAPACITY_STEP = 256  # prompts of different lists need the same cache more often if its size is rounded up
CHECK_EVERY = 8  # steps between two looks at what is finished: each look waits for the GPU
REFILL_SHARE = 1 / 16  # of the slots that must be free before prompts are read, which holds up all others


class ContinuousEngine:
    """Keeps all slots busy: where a completion ends, the next prompt begins."""

    def __init__(self, target: Target, *, batch_tokens: int) -> None:
        """
        Args:
            batch_tokens: bound on slots * (longest prompt + max_new_tokens), which bounds the KV cache.
        """
        use_grouped_attention(target)
        self.target = target
        self.batch_tokens = batch_tokens
        self._slots: Slots | None = None
        self._tried = self._num_tokens = 0  # slots that there were at the last call, tokens that each should hold

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        """See ``Engine.generate``. What is drawn for a prompt depends on the seed and its place in ``prompts`` alone.

        Raises:
            ConfigError: there is not even memory for one prompt at a time.
        """
        generator = torch.Generator().manual_seed(seed)
        num_draws = params.max_new_tokens if params.temperature > 0 else 0
        uniforms = torch.rand(len(prompts), num_draws, dtype=torch.float64, generator=generator)
        left = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))  # what does not fit fails at once
        while left:
            finished = set()
            out_of_memory = False
            try:
                for index, completion in self._decode(left, prompts, params, uniforms):
                    finished.add(index)
                    yield index, completion
            except torch.OutOfMemoryError:
                out_of_memory = True  # dealt with outside, where no traceback keeps the slots alive
            if out_of_memory:
                self._shrink()
            left = [index for index in left if index not in finished]

    def _decode(
        self, order: Sequence[int], prompts: Sequence[list[int]], params: SamplingParams, uniforms: Tensor
    ) -> Iterator[tuple[int, Completion]]:
        slots = self._slots_for(len(order), len(prompts[order[0]]) + params.max_new_tokens, params)
        waiting = list(reversed(order))
        running: dict[int, int] = {}  # slot: prompt
        free = list(range(slots.num_slots))
        while waiting or running:
            if waiting and (not running or len(free) >= REFILL_SHARE * slots.num_slots):
                admitted = [waiting.pop() for _ in range(min(len(free), len(waiting)))]
                taken, free = free[: len(admitted)], free[len(admitted) :]
                slots.admit(taken, [prompts[index] for index in admitted], uniforms[admitted])
                running |= zip(taken, admitted, strict=True)
            slots.steps(CHECK_EVERY)
            for slot, token_ids in _finished(slots, list(running)):
                yield running.pop(slot), Completion(
                    token_ids, "stop" if token_ids[-1] in params.stop_token_ids else "length")
                free.append(slot)

    def _slots_for(self, num_prompts: int, num_tokens: int, params: SamplingParams) -> Slots:
        """The slots of the call before, with their graphs, if they fit this one."""
        capacity = -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP
        wanted = min(num_prompts, MOST_SLOTS, max(1, self.batch_tokens // num_tokens))
        self._num_tokens = num_tokens
        kept = self._slots
        if kept is None or kept.params != params or kept.capacity < num_tokens or kept.num_slots < wanted:
            self._slots = kept = None  # before the new ones take memory
            self._tried = wanted
            self._slots = kept = Slots(self.target, params, num_slots=wanted, capacity=capacity)
        return kept

    def _shrink(self) -> None:
        """Make room for half as many prompts as there was room for; raises ConfigError if that was one."""
        self._slots = None
        torch.cuda.empty_cache()
        if self._tried == 1:
            raise ConfigError(f"out of memory with one prompt at a time, of {self._num_tokens} tokens with its answer; "
                              "lower generation.max_prompt_tokens or max_new_tokens, end what else is on the GPU, or "
                              "take a larger one")
        fewer = self._tried // 2
        self.batch_tokens = fewer * self._num_tokens
        print(f"out of memory with room for {self._tried} prompts at a time; going on with {fewer}, nothing is lost. "
              f"generation.batch_tokens={self.batch_tokens} starts like that", file=sys.stderr, flush=True)


def _finished(slots: Slots, running: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """The slots of ``running`` that are finished, and what they wrote."""
    is_finished = slots.finished.tolist()
    done = [slot for slot in running if is_finished[slot]]
    if done:
        chosen = torch.tensor(done, device=slots.written.device)
        counts, written = slots.counts[chosen].tolist(), slots.written[chosen].tolist()
        for slot, count, token_ids in zip(done, counts, written, strict=True):
            yield slot, token_ids[:count]
