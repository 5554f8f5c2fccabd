"""What an engine is: token ids in, token ids and a finish reason out. Text never passes through here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How every prompt of a call is continued."""

    max_new_tokens: int
    stop_token_ids: tuple[int, ...]  # a response ends with the first of them, which it keeps
    temperature: float = 0.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off


@dataclass(frozen=True, slots=True)
class Completion:
    """The continuation of one prompt."""

    token_ids: list[int]  # the new tokens alone, at least one
    finish_reason: Literal["stop", "length"]  # a stop token (the last id), or max_new_tokens


@dataclass(frozen=True, slots=True)
class Rejected:
    """A prompt that has no completion, however often the engine tried."""

    reason: str  # few and fixed, to count by: "server refused"
    detail: str  # what happened to this one


class BadCompletionError(ValueError):
    """What an engine was given back cannot be what the target wrote; the message says why."""


def check_completion(completion: Completion, params: SamplingParams, vocab_size: int) -> Completion:
    """``completion`` itself, if it can be the continuation that ``params`` asks for.

    Raises:
        BadCompletionError: an id outside the vocabulary, a finish reason that the ids contradict, or ids after a stop
            token.
    """
    ids, reason = completion.token_ids, completion.finish_reason
    if not ids:
        raise BadCompletionError("no token at all")
    if bad := [token for token in ids if not 0 <= token < vocab_size]:
        raise BadCompletionError(f"id {bad[0]} lies outside the vocabulary of {vocab_size}")
    if inside := [token for token in ids[:-1] if token in params.stop_token_ids]:
        raise BadCompletionError(f"went on after stop token {inside[0]}")
    if reason not in ("stop", "length"):
        raise BadCompletionError(f"finish reason {reason!r} is neither 'stop' nor 'length'")
    if (ids[-1] in params.stop_token_ids) != (reason == "stop"):
        raise BadCompletionError(f"finish reason {reason!r}, but the last id is {ids[-1]} and the stop tokens are "
                                 f"{list(params.stop_token_ids)}")
    if len(ids) > params.max_new_tokens or (reason == "length" and len(ids) < params.max_new_tokens):
        raise BadCompletionError(f"{len(ids)} tokens, cut by 'length' at max_new_tokens={params.max_new_tokens}")
    return completion


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Prompts that share a seed. A batch equals only itself."""

    prompts: Sequence[list[int]]
    seed: int


Source = Callable[[], Batch | None]  # the next prompts, or None where there are none for now
Finished = tuple[Batch, int, Completion | Rejected]  # of the prompt at this index of the batch


class Engine(ABC):
    """Continues prompts with the target."""

    @abstractmethod
    def stream(self, source: Source, params: SamplingParams) -> Generator[Finished, None, None]:
        """Continue what ``source`` gives; ask it for more whenever there is room, so that nothing idles while the last
        prompts of a batch are finished.

        Yields once for every prompt, in the order in which they finish, until all are done and ``source`` has no more.
        The same batch and parameters give the same completions, whatever else is under way, where the engine can
        promise that at all.
        """

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, *, seed: int
    ) -> Iterator[tuple[int, Completion | Rejected]]:
        """As ``stream``, for one batch: ``(index into prompts, completion)``."""
        batches = iter([Batch(prompts, seed)])
        with closing(self.stream(lambda: next(batches, None), params)) as finished:
            for _, index, completion in finished:
                yield index, completion
