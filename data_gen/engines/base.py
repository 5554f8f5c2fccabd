"""What an engine is: token ids in, token ids and a finish reason out. Text never passes through here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


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


class Engine(Protocol):
    """Continues prompts with the target."""

    def generate(
        self, prompts: Sequence[list[int]], params: SamplingParams, *, seed: int
    ) -> Iterator[tuple[int, Completion]]:
        """Yield ``(index into prompts, completion)`` once for every prompt, in the order in which they finish.

        The same prompts, parameters and seed give the same completions, where the engine can promise that at all.
        """
        ...
