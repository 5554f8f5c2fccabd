"""The target itself, in this process, on a GPU: continuous batching with CUDA graphs."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from data_gen.engines.base import Batch, Completion, Engine, Finished, SamplingParams, Source
from data_gen.engines.grouped_attention import use_grouped_attention
from data_gen.engines.slots import Look, Slots
from specvocab_model.config import ConfigError
from specvocab_model.target import Target

MOST_SLOTS = 1024
CAPACITY_STEP = 256  # prompts of different lists need the same cache more often if its size is rounded up
CHECK_EVERY = 8  # steps between two looks at what is finished: each costs the host a millisecond or two
# Looks whose steps are given to the GPU before the oldest is waited for. With one it has work while this process reads
# what is finished, launches the next prompts, and writes rows; a finished slot stands still for so many steps more.
LOOKS_AHEAD = 1
REFILL_SHARE = 1 / 16  # of the slots that must be free before prompts are read, which holds up all others


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One prompt of a batch."""

    batch: Batch
    index: int
    uniforms: Tensor  # fp64 [max_new_tokens], what its tokens are drawn with; [0] for greedy

    @property
    def prompt(self) -> list[int]:
        return self.batch.prompts[self.index]


class Queue:
    """The prompts of a source that were not yielded yet: those that wait, and those that are begun.

    No prompt is overtaken by one of a later batch: short ones would be by all, and no batch would ever be done.
    """

    def __init__(self, source: Source, params: SamplingParams) -> None:
        self._source = source
        self._num_draws = params.max_new_tokens if params.temperature > 0 else 0
        self._waiting: deque[Job] = deque()  # in the order of the batches, of each the longest first
        self._begun: dict[Job, None] = {}  # a set in order

    def fill(self, count: int) -> int:
        """Have ``count`` prompts wait, if the source has so many; returns how many do."""
        while len(self._waiting) < count and (batch := self._source()) is not None:
            generator = torch.Generator().manual_seed(batch.seed)
            uniforms = torch.rand(len(batch.prompts), self._num_draws, dtype=torch.float64, generator=generator)
            jobs = [Job(batch, index, own) for index, own in enumerate(uniforms)]
            self._waiting += sorted(jobs, key=lambda job: -len(job.prompt))  # what does not fit fails soon
        return len(self._waiting)

    def longest(self) -> int:
        """Tokens of the longest prompt that waits."""
        return max(len(job.prompt) for job in self._waiting)

    def begin(self, count: int, *, longest: int) -> list[Job]:
        """At most ``count`` prompts; none behind one of more than ``longest`` tokens, which needs other slots."""
        jobs: list[Job] = []
        while len(jobs) < count and self._waiting and len(self._waiting[0].prompt) <= longest:
            jobs.append(self._waiting.popleft())
        self._begun |= dict.fromkeys(jobs)
        return jobs

    def end(self, job: Job) -> None:
        del self._begun[job]

    def begin_anew(self) -> None:
        """What was begun waits again. It will be written as if nothing had happened: a job brings its own draws."""
        self._waiting.extendleft(reversed(self._begun))
        self._begun.clear()


class ContinuousEngine(Engine):
    """Keeps all slots busy: where a completion ends, the next prompt begins."""

    def __init__(self, target: Target, *, batch_tokens: int) -> None:
        """
        Args:
            batch_tokens: bound on slots * (longest prompt + max_new_tokens), which bounds the KV cache.
        """
        self.target = target
        self.batch_tokens = batch_tokens
        self.own_columns = use_grouped_attention(target)  # see ``Slots``
        self._slots: Slots | None = None
        self._tried = self._num_tokens = 0  # slots that there were at the last call, tokens that each should hold

    def stream(self, source: Source, params: SamplingParams) -> Generator[Finished, None, None]:
        """See ``Engine.stream``. What is drawn for a prompt depends on its batch's seed and its place there alone.

        Raises:
            ConfigError: there is not even memory for one prompt at a time.
        """
        queue = Queue(source, params)
        while queue.fill(1):  # nothing is begun here
            out_of_memory = False
            try:
                yield from self._decode(queue, params)
            except torch.OutOfMemoryError:
                out_of_memory = True  # dealt with outside, where no traceback keeps the slots alive
            if out_of_memory:
                queue.begin_anew()
                self._shrink()

    def _decode(self, queue: Queue, params: SamplingParams) -> Generator[Finished, None, None]:
        """Until nothing is left, or what is left needs larger slots."""
        slots = self._slots_for(queue, params)
        free = list(range(slots.num_slots))
        slots.release(free)  # what an error left running
        refill = max(1, int(REFILL_SHARE * slots.num_slots))
        running: dict[int, Job] = {}  # by slot
        looks: deque[tuple[Look, dict[int, Job]]] = deque()  # the oldest first, with what ran then
        done: list[tuple[Job, Completion]] = []
        while True:
            if len(free) >= refill and (jobs := queue.begin(len(free), longest=slots.capacity - params.max_new_tokens)):
                taken, free = free[: len(jobs)], free[len(jobs) :]
                slots.admit(taken, [job.prompt for job in jobs], torch.stack([job.uniforms for job in jobs]))
                running |= zip(taken, jobs, strict=True)
            if running:
                looks.append((slots.steps(CHECK_EVERY), dict(running)))
            # A GPU is at work now, while this process reads and writes prompts and rows.
            for job, completion in done:
                queue.end(job)
                yield job.batch, job.index, completion
                if running and len(looks) > LOOKS_AHEAD and looks[-1 - LOOKS_AHEAD][0].has_arrived():  # that took long
                    looks.append((slots.steps(CHECK_EVERY), dict(running)))
            queue.fill(max(refill, len(free)))
            if not running:
                return
            done = []
            while len(looks) > LOOKS_AHEAD:
                look, ran = looks.popleft()
                unknown = [slot for slot, job in ran.items() if running.get(slot) is job]  # an older look showed others
                for slot, token_ids in look.completions(unknown).items():
                    done.append((running.pop(slot), Completion(
                        token_ids, "stop" if token_ids[-1] in params.stop_token_ids else "length")))
                    free.append(slot)
            slots.release(free)

    def _slots_for(self, queue: Queue, params: SamplingParams) -> Slots:
        """The slots of the call before, with their graphs, if they fit what waits."""
        num_waiting = queue.fill(self._room(queue.longest() + params.max_new_tokens))
        num_tokens = queue.longest() + params.max_new_tokens
        wanted = min(num_waiting, self._room(num_tokens))
        capacity = -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP
        self._num_tokens = num_tokens
        kept = self._slots
        if kept is None or kept.params != params or kept.capacity < num_tokens or kept.num_slots < wanted:
            self._slots = kept = None  # before the new ones take memory
            self._tried = wanted
            self._slots = kept = self._new_slots(params, wanted, capacity)
        return kept

    def _new_slots(self, params: SamplingParams, num_slots: int, capacity: int) -> Slots:
        return Slots(self.target, params, num_slots=num_slots, capacity=capacity, own_columns=self.own_columns)

    def _room(self, num_tokens: int) -> int:
        """Slots that there may be if each holds ``num_tokens``."""
        return min(MOST_SLOTS, max(1, self.batch_tokens // num_tokens))

    def drop_slots(self) -> None:
        """Give the memory of caches and graphs back; the next call makes new ones."""
        self._slots = None
        torch.cuda.empty_cache()

    def _shrink(self) -> None:
        """Make room for half as many prompts as there was room for; raises ConfigError if that was one."""
        self.drop_slots()
        if self._tried == 1:
            raise ConfigError(f"out of memory with one prompt at a time, of {self._num_tokens} tokens with its answer; "
                              "lower generation.max_prompt_tokens or max_new_tokens, end what else is on the GPU, or "
                              "take a larger one")
        fewer = self._tried // 2
        self.batch_tokens = fewer * self._num_tokens
        print(f"out of memory with room for {self._tried} prompts at a time; going on with {fewer}, nothing is lost. "
              f"generation.batch_tokens={self.batch_tokens} starts like that", file=sys.stderr, flush=True)
