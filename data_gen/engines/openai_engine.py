"""The target behind OpenAI-compatible servers, which somebody else has started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass

import httpx
from transformers import PreTrainedTokenizerBase

from data_gen.engines.base import (
    BadCompletionError,
    Batch,
    Completion,
    Engine,
    Finished,
    Rejected,
    SamplingParams,
    Source,
)
from data_gen.engines.servers import (
    PromptRefusedError,
    Query,
    Server,
    ServerPool,
    ServerUnavailableError,
)
from specvocab_model.config import ConfigError
from specvocab_model.target_spec import TargetSpec

PROBE_TEXT = "The capital of France is"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How hard the engine tries."""

    concurrency: int  # requests under way at one time, for each server
    timeout_s: float  # of one request
    attempts: int  # for each prompt; a server that is away, or has too much to do, uses up none
    patience_s: float  # how long no server may be of use
    headers: dict[str, str]


class OpenAIEngine(Engine):
    """Sends prompts as token ids and takes token ids back; text is only looked at to recognise another tokenizer."""

    def __init__(
        self,
        base_urls: Sequence[str],
        *,
        model: str,
        spec: TargetSpec,
        tokenizer: PreTrainedTokenizerBase,
        min_context: int,
        reach: Reach,
    ) -> None:
        """Waits until one of the servers has shown that it can do the work.

        Args:
            model: the name that the servers know the target by.
            min_context: tokens that a prompt and its completion may have together.

        Raises:
            ConfigError: a server serves something else, or gives no token ids; or none answers.
        """
        self.spec = spec
        self.tokenizer = tokenizer
        self.reach = reach
        servers = [Server(url, model=model, vocab_size=spec.vocab_size, min_context=min_context) for url in base_urls]
        self.pool = ServerPool(servers, concurrency=reach.concurrency, patience_s=reach.patience_s)
        asyncio.run(self._probe_all())

    def stream(self, source: Source, params: SamplingParams) -> Generator[Finished, None, None]:
        """See ``Engine.stream``. Sampled requests carry a seed each; how far a server keeps to it is its own affair."""
        with asyncio.Runner() as runner:  # the loop only turns while the caller waits for the next completion
            answers = self._answers(source, params)

            async def following() -> Finished | None:
                return await anext(answers, None)

            while (answer := runner.run(following())) is not None:
                yield answer

    async def _answers(self, source: Source, params: SamplingParams) -> AsyncGenerator[Finished, None]:
        most = self.reach.concurrency * len(self.pool.servers)
        room = asyncio.Semaphore(most)
        finished: asyncio.Queue[asyncio.Task[Finished]] = asyncio.Queue()
        tasks: set[asyncio.Task[Finished]] = set()

        async def answer(client: httpx.AsyncClient, batch: Batch, index: int) -> Finished:
            async with room:
                query = Query(batch.prompts[index], params, (batch.seed + index) % 2**63)
                return batch, index, await self._answer(client, query)

        async with self._client() as client:
            try:
                while True:
                    while len(tasks) < most and (batch := source()) is not None:
                        for index in range(len(batch.prompts)):
                            task = asyncio.create_task(answer(client, batch, index))
                            task.add_done_callback(finished.put_nowait)
                            tasks.add(task)
                    if not tasks:
                        return
                    task = await finished.get()
                    tasks.remove(task)
                    yield await task
            finally:
                for unfinished in tasks:
                    unfinished.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, client: httpx.AsyncClient, query: Query) -> Completion | Rejected:
        """Try one prompt on whichever servers there are, until it succeeds or has failed ``attempts`` times.

        A server that calls itself too busy when it has nothing of ours to do is asked for something short first. If it
        answers that and still turns away this prompt, the prompt has failed: some crash the worker behind a proxy, or
        exceed a limit that the proxy has, and would be tried for ever.
        """
        failures: list[str] = []
        while len(failures) < self.reach.attempts:
            async with self.pool.server() as server:
                answered_probe = False
                try:
                    if server.seems_idle or not server.probed:
                        await self._probe(client, server)
                        answered_probe = True
                    completion = await server.complete(client, query, timeout_s=self.reach.timeout_s)
                except ServerUnavailableError as error:
                    server.failed(error, retry_after_s=error.retry_after_s)
                    if answered_probe and server.seems_idle:
                        failures.append(str(error))
                except BadCompletionError as error:
                    server.failed(error)
                    failures.append(str(error))
                except PromptRefusedError as error:
                    return Rejected("server refused the prompt", str(error))
                else:
                    server.succeeded()
                    return completion
        return Rejected("no valid completion", f"{len(failures)} attempts, the last: {failures[-1]}")

    async def _probe_all(self) -> None:
        """Look at every server once; whoever is not there yet is looked at again when there is work for it."""
        async with self._client() as client:
            await asyncio.gather(*(self._first_look(client, server) for server in self.pool.servers))
            while not any(server.probed for server in self.pool.servers):
                async with self.pool.server() as server:
                    await self._first_look(client, server)

    async def _first_look(self, client: httpx.AsyncClient, server: Server) -> None:
        try:
            await self._probe(client, server)
        except ServerUnavailableError as error:
            server.failed(error, retry_after_s=error.retry_after_s)

    async def _probe(self, client: httpx.AsyncClient, server: Server) -> None:
        """As ``Server.probe``, and the text that comes back must be that of our tokenizer.

        Raises:
            ServerUnavailableError: see there.
            ConfigError: see there; or another tokenizer.
        """
        ids = self.tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"]
        completion, text = await server.probe(client, ids, self.spec.eos_token_ids)
        ours = str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        if isinstance(text, str) and _letters(text) != _letters(ours):
            raise ConfigError(f"{server.url} writes ids {completion.token_ids} as {text!r}, the target's tokenizer as "
                              f"{ours!r}: it serves another model under the name {server.model!r}")
        server.passed_probe()

    def _client(self) -> httpx.AsyncClient:
        # The pool limits the connections, _request the time of a whole request.
        return httpx.AsyncClient(headers=self.reach.headers, timeout=httpx.Timeout(None, connect=10.0),
                                 limits=httpx.Limits(max_connections=None, max_keepalive_connections=None))


def _letters(text: str) -> str:
    """Text without what servers and tokenizers treat differently: spaces, and bytes that are no character yet."""
    return "".join(text.replace("\ufffd", "").split())
