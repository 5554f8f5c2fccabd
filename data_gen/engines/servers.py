"""Servers that write completions: which one gets the next request, and what to do about those that do not answer.

All speak one protocol: ``POST /v1/completions`` with the prompt as token ids and ``return_token_ids``, which vLLM
(0.10.2 and later) and SGLang answer with ``choices[0].token_ids`` and ``choices[0].prompt_token_ids``.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from data_gen.engines.base import BadCompletionError, Completion, SamplingParams, check_completion
from specvocab_model.config import ConfigError

OVERLOADED = (429, 502, 503)  # says the server, or the proxy in front of it, of itself and seldom of this prompt
RETRIED = (408,)  # beside 500 and more: a proxy lost patience
REFUSED = (400, 413, 422)  # says the server of this prompt, and will say it again
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
LONGEST_RETRY_AFTER_S = 300.0
POLL_S = 0.05
PROBE_TIMEOUT_S = 30.0

NEEDS_TOKEN_IDS = ("training data is made of the ids that the engine saw and wrote, which text cannot give back; use "
                   "`vllm serve` (0.10.2 or later) or SGLang, which answer `return_token_ids` on /v1/completions")


class ServerUnavailableError(Exception):
    """The server cannot answer now; as a rule nothing is wrong with the request."""

    def __init__(self, reason: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


class TurnedAwayError(ServerUnavailableError):
    """There is a server, and it says that it is too busy (``OVERLOADED``)."""


class PromptRefusedError(Exception):
    """The server will not continue this prompt, whoever asks how often."""


@dataclass(frozen=True, slots=True)
class Query:
    """One prompt and how it is continued."""

    prompt: list[int]
    params: SamplingParams
    seed: int

    def body(self, model: str) -> dict[str, Any]:
        """The JSON of the request.

        Every field that bends the distribution is named: servers take the missing ones from the model's
        ``generation_config.json``, and the draft would be trained on another distribution than it is judged by.
        ``ignore_eos`` stays off where there are stop tokens, because SGLang then ignores those as well.
        """
        params = self.params
        body = {
            "model": model, "prompt": self.prompt, "max_tokens": params.max_new_tokens, "n": 1, "stream": False,
            "temperature": params.temperature, "top_k": params.top_k or -1, "top_p": params.top_p, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop_token_ids": list(params.stop_token_ids), "ignore_eos": not params.stop_token_ids,
            "return_token_ids": True,
        }
        return body if params.temperature == 0 else {**body, "seed": self.seed}


class Server:
    """One base URL and what is known of it."""

    def __init__(self, base_url: str, *, model: str, vocab_size: int, min_context: int) -> None:
        self.url = base_url.rstrip("/") if base_url.rstrip("/").endswith("/v1") else base_url.rstrip("/") + "/v1"
        self.model = model
        self.vocab_size = vocab_size
        self.min_context = min_context
        self.in_flight = 0
        self.failures = 0  # in a row
        self.failing_since = 0.0  # monotonic seconds; of the first of them
        self.paused_until = 0.0  # monotonic seconds
        self.last_failure = ""
        self.says_busy = False  # in its last failure
        self.probed = False  # false again after a broken connection: another server may stand behind the URL

    async def complete(self, client: httpx.AsyncClient, query: Query, *, timeout_s: float) -> Completion:
        """Ask for one completion and check it.

        Raises:
            ServerUnavailableError: no server behind the URL; ``TurnedAwayError``: one that is too busy.
            PromptRefusedError: HTTP 400 and the like.
            BadCompletionError: an answer that cannot be right, HTTP 500, or none within ``timeout_s``.
            ConfigError: the server does not give token ids, or is no such server.
        """
        answer = await self._request(client, "POST", "/completions", timeout_s, json=query.body(self.model))
        return self._completion(answer, query)

    async def probe(
        self, client: httpx.AsyncClient, prompt: list[int], stop_token_ids: tuple[int, ...]
    ) -> tuple[Completion, Any]:
        """Check with two requests that this server can do the work; returns a short completion and what should be its
        text.

        Raises:
            ServerUnavailableError: it does not answer, or not now.
            ConfigError: it serves another model, too short a context, or gives no token ids.
        """
        await self._check_model(client)
        query = Query(prompt, SamplingParams(max_new_tokens=8, stop_token_ids=stop_token_ids), seed=0)
        try:
            answer = await self._request(client, "POST", "/completions", PROBE_TIMEOUT_S, json=query.body(self.model))
            return self._completion(answer, query), answer["choices"][0].get("text")
        except PromptRefusedError as error:
            raise ConfigError(f"{self.url} cannot continue token ids ({error}): {NEEDS_TOKEN_IDS}") from error
        except BadCompletionError as error:
            raise ServerUnavailableError(str(error)) from error

    def succeeded(self) -> None:
        self.failures = 0

    @property
    def seems_idle(self) -> bool:
        """Whether the server calls itself too busy, and all that we ask it for is one request."""
        return self.failures > 0 and self.says_busy and self.in_flight == 1

    def passed_probe(self) -> None:
        """It can do the work; but where it failed before, it still gets one request at a time until one succeeds."""
        self.probed = True
        self.failures = min(self.failures, 1)
        self.failing_since = time.monotonic()

    def failed(self, error: Exception, *, retry_after_s: float | None = None) -> None:
        """Leave the server alone for a while; the requests that were under way together count as one failure."""
        self.last_failure = str(error)
        self.says_busy = isinstance(error, TurnedAwayError)
        now = time.monotonic()
        if now < self.paused_until:
            return
        if not self.failures:
            self.failing_since = now
        self.failures += 1
        pause = min(FIRST_PAUSE_S * 2 ** min(self.failures - 1, 16), LONGEST_PAUSE_S)
        wanted = pause if retry_after_s is None else min(retry_after_s, LONGEST_RETRY_AFTER_S)
        self.paused_until = now + wanted + random.uniform(0, pause / 2)  # not all clients at one moment

    async def _check_model(self, client: httpx.AsyncClient) -> None:
        try:
            served = (await self._request(client, "GET", "/models", PROBE_TIMEOUT_S))["data"]
            contexts = {str(entry["id"]): entry.get("max_model_len") for entry in served}
        except (BadCompletionError, KeyError, TypeError, AttributeError) as error:
            raise ServerUnavailableError(f"/v1/models: {error}") from error
        except PromptRefusedError as error:
            raise ConfigError(f"{self.url}/models: {error}; is there an OpenAI-compatible server?") from error
        if self.model not in contexts:
            raise ConfigError(f"{self.url} serves {', '.join(contexts) or 'no model'} and not {self.model!r}; start it "
                              f"with the target, or name the model in generation.served_model")
        context = contexts[self.model]
        if isinstance(context, int) and context < self.min_context:
            raise ConfigError(f"{self.url} takes {context} tokens, fewer than generation.max_prompt_tokens + "
                              f"max_new_tokens = {self.min_context}; lower these or start it with a longer context")

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, timeout_s: float, **content: Any
    ) -> Any:
        """The JSON that the server answers with."""
        try:
            async with asyncio.timeout(timeout_s):  # of all: httpx only limits the time between two packets
                response = await client.request(method, self.url + path, **content)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self.probed = False
            raise ServerUnavailableError(f"cannot connect: {error or type(error).__name__}") from error
        except TimeoutError as error:
            self.probed = False
            raise BadCompletionError(f"no answer within {timeout_s:g} s") from error
        except httpx.InvalidURL as error:
            raise ConfigError(f"generation.base_urls: {self.url} is no URL ({error})") from error
        except httpx.HTTPError as error:
            self.probed = False
            raise BadCompletionError(f"broken connection: {error or type(error).__name__}") from error
        return self._content(response)

    def _content(self, response: httpx.Response) -> Any:
        said = f"HTTP {response.status_code}" if response.is_success else (
            f"HTTP {response.status_code}: {' '.join(response.text.split())[:300]}")
        if response.status_code in OVERLOADED:
            raise TurnedAwayError(said, retry_after_s=_seconds(response.headers.get("Retry-After")))
        if response.status_code in REFUSED:
            raise PromptRefusedError(said)
        if response.status_code in RETRIED or response.status_code >= 500 or response.is_success:
            try:
                return response.raise_for_status().json()
            except (httpx.HTTPStatusError, ValueError, RecursionError) as error:
                raise BadCompletionError(said if response.is_error else "the answer is no JSON") from error
        raise ConfigError(f"{response.request.url}: {said}; check generation.base_urls, served_model and "
                          "server_api_key_env")

    def _completion(self, answer: Any, query: Query) -> Completion:
        """Raises as ``complete``."""
        try:
            choice, num_tokens = answer["choices"][0], answer["usage"]["completion_tokens"]
            finish_reason, prompt_ids = choice["finish_reason"], choice.get("prompt_token_ids")
            token_ids = choice.get("token_ids")
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise BadCompletionError(f"the answer lacks a field: {error}") from error
        if token_ids is None:
            raise ConfigError(f"{self.url} answers without token_ids: {NEEDS_TOKEN_IDS}")
        if not isinstance(token_ids, list) or not all(type(token) is int for token in token_ids):  # not True
            raise BadCompletionError("token_ids is no list of ids")
        if len(token_ids) != num_tokens:
            raise BadCompletionError(f"{len(token_ids)} ids, but usage.completion_tokens is {num_tokens}")
        if prompt_ids is not None and prompt_ids != query.prompt:
            raise BadCompletionError("it saw another prompt")
        stop = choice.get("stop_reason", choice.get("matched_stop"))  # vLLM's name, SGLang's name
        if finish_reason == "stop" and stop in query.params.stop_token_ids and token_ids[-1:] != [stop]:
            token_ids = [*token_ids, stop]  # a server that strips the stop token; a row keeps it
        return check_completion(Completion(token_ids, finish_reason), query.params, self.vocab_size)


class ServerPool:
    """Gives every request to the server with the fewest under way."""

    def __init__(self, servers: Sequence[Server], *, concurrency: int, patience_s: float) -> None:
        """
        Args:
            concurrency: requests under way at one time, for each server.
            patience_s: how long no server may be of use.
        """
        self.servers = servers
        self.concurrency = concurrency
        self.patience_s = patience_s
        self._said_to_wait = False

    @asynccontextmanager
    async def server(self) -> AsyncIterator[Server]:
        """A server to send one request to; waits for one to have room.

        A server that has failed gets one request at a time until it succeeds.

        Raises:
            ConfigError: for ``patience_s`` no server was of use.
        """
        while not (ready := [server for server in self.servers if self._has_room(server)]):
            self._check_patience()
            await asyncio.sleep(POLL_S)
        server = min(ready, key=lambda server: server.in_flight)
        server.in_flight += 1
        try:
            yield server
        finally:
            server.in_flight -= 1

    def _has_room(self, server: Server) -> bool:
        limit = self.concurrency if server.probed and not server.failures else 1
        return server.in_flight < limit and time.monotonic() >= server.paused_until

    def _check_patience(self) -> None:
        """Say once that there is no server to be had, and give up after ``patience_s`` without one."""
        if not all(server.failures for server in self.servers):
            self._said_to_wait = False
            return
        if not self._said_to_wait:
            print(f"waiting for a server: {self._failures()}", file=sys.stderr, flush=True)
            self._said_to_wait = True
        if time.monotonic() - max(server.failing_since for server in self.servers) >= self.patience_s:
            raise ConfigError(f"no server was of use for generation.server_patience={self.patience_s:g} s "
                              f"({self._failures()}); start one and repeat the command, which goes on where it was")

    def _failures(self) -> str:
        return "; ".join(f"{server.url}: {server.last_failure}" for server in self.servers)


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header, which holds seconds or a date (RFC 9110, 10.2.3); None if there is none to be read."""
    if retry_after is None:
        return None
    if retry_after.isascii() and retry_after.strip().isdigit():  # "²" is a digit as well, and no number
        return float(retry_after)
    try:
        return max((parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):  # no date, one without a time zone, or in no year of this calendar
        return None
