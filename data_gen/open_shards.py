"""The shards that one rank is making at a time: so many that the engine always has prompts.

While the last answers of a shard are being written, the first ones of the next are begun. Each shard is written when it
is whole, and holds what it would if it were made alone.

The thread that does all this also launches what a GPU does. So the prompts of the next shard are rendered and tokenised
a few at a time, between the answers of those under way, and not at once when the engine asks for them. A second thread
would stand in the first one's way: it would take the interpreter at every launch.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tqdm import tqdm

from data_gen.claims import Claims
from data_gen.engines import Batch, Completion, Rejected
from data_gen.prompts import Prompt
from data_gen.rows import ShardRows, Skipped, table_of
from data_gen.shards import ShardWriter
from specvocab_model.config import Config, ConfigError

POLL_S = 1.0  # until a rank that could claim no shard tries again
ANSWERS_A_PART = 8  # after so many answers some prompts are encoded: more than were answered, so that none are missed
Progress = Callable[[], object]  # called once for every prompt that is done


class ShardWork(ABC):
    """The rows of one shard in the making."""

    def ask(self) -> Iterator[list[list[int]]]:
        """The prompts of the next round, as token ids, some at a time; none if all that was to be asked is answered."""
        return iter(())

    def take(self, index: int, completion: Completion | Rejected) -> None:
        """What became of one prompt of this round."""
        raise NotImplementedError(f"{type(self).__name__} asked nothing")

    @abstractmethod
    def rows(self) -> ShardRows:
        """Called once, when ``ask`` has nothing more."""


RowWriter = Callable[[Sequence[Prompt], Progress], ShardWork]  # begins a shard
_OVER = object()


@dataclass(slots=True, kw_only=True)
class _OpenShard:
    index: int
    work: ShardWork
    num_prompts: int
    num_done: int = 0
    num_rounds: int = 0
    num_unanswered: int = 0  # in this round
    given_up: list[Rejected] = field(default_factory=list)


class OpenShards:
    """Claims shards, asks their prompts, and writes those that are whole."""

    def __init__(
        self, config: Config, *, stage: str, prompts: Sequence[Prompt], write: RowWriter, writer: ShardWriter,
        claims: Claims, progress: tqdm, rank: int = 0, num_ranks: int = 1,
    ) -> None:
        """
        Args:
            stage: its name, which the seeds depend on.
            rank: where among the missing shards this rank looks first.
            num_ranks: how many will share the missing shards.
        """
        self.config = config
        self.stage = stage
        self.prompts = prompts
        self.write = write
        self.writer = writer
        self.claims = claims
        self.progress = progress
        self.rank = rank
        self.num_ranks = num_ranks
        self._open: dict[int, _OpenShard] = {}
        self._asked: dict[Batch, _OpenShard] = {}
        self._ready: deque[Batch] = deque()  # asked, but not yet of the engine
        self._encoding: deque[Iterator[None]] = deque()  # what will be asked, or written if there is nothing to ask
        self._num_taken = 0
        self._look_again = 0.0  # monotonic seconds
        table_of([])  # imports what arrow needs for it: half a second, in which nothing waits yet

    def begin(self) -> bool:
        """Begin further shards until there are prompts for the engine, or no shard may be had now.

        Returns:
            Whether there are prompts.

        Raises:
            ConfigError: as ``take``, of shards that ask nothing.
        """
        while not self._ready and (self._encoding or self._begin_another()):
            self._go_on()
        return bool(self._ready)

    def next_batch(self) -> Batch | None:
        """The source of ``Engine.stream``; later rounds of what is begun come before other shards."""
        return self._ready.popleft() if self.begin() else None

    def take(self, batch: Batch, index: int, completion: Completion | Rejected) -> None:
        """What became of one prompt; writes the shard if it was the last.

        Raises:
            ConfigError: more prompts were rejected than ``generation.max_rejected_share`` allows.
        """
        shard = self._asked[batch]
        if isinstance(completion, Rejected):
            shard.given_up.append(completion)
        shard.work.take(index, completion)
        shard.num_unanswered -= 1
        if not shard.num_unanswered:
            del self._asked[batch]
            self._encoding.appendleft(self._ask(shard))
            self._go_on()
        self._num_taken += 1
        if self._num_taken % ANSWERS_A_PART == 0 and (self._encoding or (not self._ready and self._begin_another())):
            self._go_on()

    def check_answered(self) -> None:
        """
        Raises:
            RuntimeError: an engine that has ended left prompts unanswered; their shards would be waited for for ever.
        """
        if self._asked:
            raise RuntimeError(f"the engine ended and left {sum(each.num_unanswered for each in self._asked.values())} "
                               f"prompts of {len(self._asked)} shards unanswered")

    def _claim(self) -> int | None:
        """A shard to begin, or None if this rank has its share of those that are missing, or others have the rest."""
        if time.monotonic() < self._look_again:
            return None
        fair_share = max(1, len(self.writer.missing_shards()) // self.num_ranks)
        if len(self._open) < fair_share:
            index = self.claims.take(self.writer.missing_shards, first=self.rank)
            if index is not None:
                return index
        self._look_again = time.monotonic() + POLL_S
        return None

    def _begin_another(self) -> bool:
        index = self._claim()
        if index is None:
            return False
        prompts = self.prompts[self.writer.prompt_range(index)]
        shard = _OpenShard(index=index, work=self.write(prompts, partial(self._count, index)), num_prompts=len(prompts))
        self._open[index] = shard
        self._encoding.append(self._ask(shard))
        return True

    def _go_on(self) -> None:
        """Encode some of the prompts that come next."""
        part = self._encoding[0]
        if next(part, _OVER) is _OVER:
            self._encoding.remove(part)

    def _ask(self, shard: _OpenShard) -> Iterator[None]:
        """Have the engine asked the next round of a shard, or write it; yields wherever that may wait."""
        prompts: list[list[int]] = []
        for part in shard.work.ask():
            prompts += part
            yield
        if not prompts:
            yield from self._finish(shard)
            return
        batch = Batch(prompts, _seed(self.config.seed, self.stage, shard.index, shard.num_rounds))
        shard.num_rounds += 1
        shard.num_unanswered = len(prompts)
        self._asked[batch] = shard
        self._ready.append(batch)

    def _finish(self, shard: _OpenShard) -> Iterator[None]:
        rows = shard.work.rows()
        self._check_given_up(shard)
        check_rejected_share([*self.writer.skipped(), *rows.skipped], len(self.prompts), self.config)
        yield from self.writer.write_in_parts(shard.index, rows.rows, rows.skipped)
        del self._open[shard.index]
        self.claims.release(shard.index)
        self._look_again = 0.0
        # With what the others have made.
        self.progress.n = self.progress.total - num_missing_prompts(self.writer) + sum(
            each.num_done for each in self._open.values())
        self.progress.refresh()

    def _check_given_up(self, shard: _OpenShard) -> None:
        """Nothing of a shard is written whose prompts the engine gave up: a later start may have better luck."""
        share, given_up = self.config.generation.max_rejected_share, shard.given_up
        if len(given_up) > share * shard.num_prompts:
            raise ConfigError(f"the engine gave up {len(given_up)} of {shard.num_prompts} prompts, more than "
                              f"generation.max_rejected_share={share}; the last: {given_up[-1].reason} "
                              f"({given_up[-1].detail}). See to it and start again: what is finished is kept")

    def _count(self, index: int) -> None:
        self._open[index].num_done += 1
        self.progress.update()


def num_missing_prompts(writer: ShardWriter) -> int:
    """Prompts of the missing shards."""
    ranges = map(writer.prompt_range, writer.missing_shards())
    return sum(prompts.stop - prompts.start for prompts in ranges)


def check_rejected_share(skipped: Sequence[Skipped], num_prompts: int, config: Config) -> None:
    """
    Args:
        skipped: all of a stage so far, whichever process skipped them; those by choice do not count.

    Raises:
        ConfigError: more than ``generation.max_rejected_share`` of all prompts were rejected.
    """
    share = config.generation.max_rejected_share
    rejected = [each for each in skipped if not each.by_choice]
    num_rejected = len({each.id for each in rejected})  # prompts, of which several turns may be rejected
    if num_rejected > share * num_prompts:
        last = rejected[-1]
        raise ConfigError(f"{num_rejected} of {num_prompts} prompts were rejected, more than "
                          f"generation.max_rejected_share={share}; the last is {last.id!r}: {last.reason} "
                          f"({last.detail}). Mend them, or raise the share")


def _seed(seed: int, stage: str, shard: int, turn: int) -> int:
    """A seed for each shard and turn, so that it does not matter which rank makes it, or after which other."""
    name = f"{seed}/{stage}/{shard}" + (f"/{turn}" if turn else "")
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 1  # fits int64
