"""The openai engine gives the target's own ids or says why not, whatever servers do to it.

The servers run in processes of their own: ours around a real tiny model and, where they are installed, `vllm serve`
(``SPECVOCAB_TEST_VLLM`` may name the program) and `transformers serve`.
"""

import asyncio
import threading
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import chain, repeat

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_gen.engines import (
    Batch,
    Completion,
    OpenAIEngine,
    Reach,
    Rejected,
    SamplingParams,
    TransformersEngine,
    build_engine,
)
from data_gen.engines import servers as servers_module
from data_gen.engines.servers import Server, ServerUnavailableError
from specvocab_model.config import ConfigError
from specvocab_model.target import Target
from tests.data_gen.runs import config_of
from tests.data_gen.servers.completions import MAX_MODEL_LEN, MODEL_NAME, completion_server
from tests.data_gen.servers.faulty_proxy import ANSWERS, BREAKAGES, STRIPPED, FaultyProxy
from tests.tiny import EOS_IDS, tiny_target_config, tiny_target_folder

GREEDY = SamplingParams(max_new_tokens=12, stop_token_ids=EOS_IDS)
PROMPTS = [[1 + number, 50, 7 * number % 256, 99] for number in range(12)]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tiny_target_folder(tmp_path_factory.mktemp("openai") / "target", "llama")
    return Target.load(tiny_target_config(folder, "llama"), device="cpu")


@pytest.fixture(scope="module")
def server(target):
    with completion_server(target.spec.name) as url:
        yield url


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(servers_module, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(servers_module, "LONGEST_PAUSE_S", 0.2)
    monkeypatch.setattr(servers_module, "POLL_S", 0.005)


def engine_of(target, *urls, model=MODEL_NAME, min_context=64, concurrency=4, timeout_s=20.0, attempts=6,
              patience_s=20.0) -> OpenAIEngine:
    reach = Reach(concurrency=concurrency, timeout_s=timeout_s, attempts=attempts, patience_s=patience_s, headers={})
    return OpenAIEngine(urls, model=model, spec=target.spec, tokenizer=target.tokenizer, min_context=min_context,
                        reach=reach)


def run(engine, prompts=PROMPTS, params=GREEDY, seed=0) -> list[Completion | Rejected]:
    finished = list(engine.generate(prompts, params, seed=seed))
    assert sorted(index for index, _ in finished) == list(range(len(prompts)))
    return [completion for _, completion in sorted(finished, key=lambda pair: pair[0])]


@pytest.fixture(scope="module")
def expected(target):
    completions = run(TransformersEngine(target, batch_tokens=1))
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}, "the tests should see both"
    return completions


def test_greedy_ids_are_those_of_the_target(target, server, expected):
    assert run(engine_of(target, server)) == expected
    assert run(engine_of(target, server + "/v1/")) == expected
    assert run(engine_of(target, server), []) == []


def test_without_stop_tokens_every_completion_has_all_its_tokens(target, server):
    params = SamplingParams(max_new_tokens=30, stop_token_ids=())
    assert run(engine_of(target, server), params=params) == run(TransformersEngine(target, batch_tokens=1),
                                                                params=params)


def test_a_seed_decides_what_is_sampled(target, server):
    engine, params = engine_of(target, server), SamplingParams(max_new_tokens=16, stop_token_ids=(), temperature=1.0)
    first = run(engine, [PROMPTS[0]] * 6, params, seed=1)
    assert run(engine, [PROMPTS[0]] * 6, params, seed=1) == first
    assert run(engine, [PROMPTS[0]] * 6, params, seed=2**63 - 1) != first
    assert len({tuple(completion.token_ids) for completion in first}) == 6, "each prompt has a seed of its own"


@pytest.mark.parametrize("fault", [*ANSWERS, *BREAKAGES])
def test_every_fault_is_noticed_and_the_prompt_asked_again(target, server, expected, fault):
    with FaultyProxy(server, [None, None, fault, None, fault]) as proxy:  # the first request is the engine's probe
        assert run(engine_of(target, proxy.url, timeout_s=1.0 if fault == "hang" else 20.0)) == expected
        assert proxy.num_asked >= 1 + len(PROMPTS) + 2


def test_a_stripped_stop_token_is_put_back(target, server, expected):
    with FaultyProxy(server, repeat(STRIPPED)) as proxy:
        assert run(engine_of(target, proxy.url)) == expected


@pytest.mark.parametrize(("fault", "then"), [("fewer ids", []), ("500", []), ("close", [None])])  # None: a probe
def test_a_prompt_that_fails_for_good_is_rejected_and_the_others_are_not(target, server, expected, fault, then):
    with FaultyProxy(server, [None, *[fault, *then] * 3]) as proxy:
        first, *others = run(engine_of(target, proxy.url, concurrency=1, attempts=3))
    assert isinstance(first, Rejected)
    assert first.reason == "no valid completion" and first.detail.startswith("3 attempts, the last: ")
    assert others == expected[1:]


def test_being_overloaded_uses_up_no_attempt(target, server, expected):
    with FaultyProxy(server, chain([None], ["429", "503", "502"] * 5)) as proxy:
        assert run(engine_of(target, proxy.url, concurrency=1, attempts=1)) == expected


@pytest.mark.parametrize("fault", ["429", "502", "503"])
def test_prompts_that_are_always_turned_away_are_rejected_and_the_others_are_not(target, server, expected, fault):
    """Two that crash the worker behind a proxy, say; between others, and when nothing else is left to do."""
    poisoned = {3: PROMPTS[3], 8: PROMPTS[8]}
    with FaultyProxy(server, poison=lambda prompt: fault if prompt in poisoned.values() else None) as proxy:
        completions = run(engine_of(target, proxy.url, attempts=3, patience_s=5.0))
    for index, completion in enumerate(completions):
        if index in poisoned:
            assert completion == Rejected("no valid completion", f"3 attempts, the last: HTTP {fault}: spoilt")
        else:
            assert completion == expected[index]


def test_a_server_that_others_keep_busy_rejects_nothing(target, server, expected):
    """It has no time for the probe either, or has some for what is asked after it."""
    with FaultyProxy(server, chain([None], ["503"] * 3, ([None, "503"] * 2 + [None, None]) * 12)) as proxy:
        assert run(engine_of(target, proxy.url, concurrency=1, attempts=3)) == expected


def test_a_prompt_that_the_server_refuses_is_rejected_at_once(target, server, expected):
    with FaultyProxy(server) as proxy:
        too_long = [1] * MAX_MODEL_LEN
        completions = run(engine_of(target, proxy.url), [too_long, *PROMPTS])
        assert proxy.num_asked == 1 + 1 + len(PROMPTS)
    assert completions[0].reason == "server refused the prompt" and "maximum context length" in completions[0].detail
    assert completions[1:] == expected


def test_no_more_requests_are_under_way_than_allowed(target, server, expected):
    with FaultyProxy(server) as proxy:
        assert run(engine_of(target, proxy.url, concurrency=3)) == expected
        assert 1 < proxy.most_in_flight <= 3


def test_the_next_batch_is_asked_while_the_last_answers_of_the_first_are_awaited(target, server, expected):
    batches = [Batch(PROMPTS, 0), Batch(PROMPTS[::-1], 0), Batch(PROMPTS[:3], 0)]
    coming, events, finished = iter(batches), [], {batch: {} for batch in batches}

    def source() -> Batch | None:
        events.append("next")
        return next(coming, None)

    with FaultyProxy(server) as proxy:
        for batch, index, completion in engine_of(target, proxy.url, concurrency=4).stream(source, GREEDY):
            finished[batch][index] = completion
            if len(finished[batch]) == len(batch.prompts):
                events.append("done")
        assert proxy.most_in_flight <= 4
    assert [[own[index] for index in sorted(own)] for own in finished.values()] == [
        expected, expected[::-1], expected[:3]]
    assert events.index("done") > events.index("next", 1), "the second was asked for before the first was done"


def test_servers_share_the_work_and_one_that_is_away_does_not_hold_it(target, server, expected):
    with FaultyProxy(server) as first, FaultyProxy(server) as second:
        assert run(engine_of(target, first.url, second.url, concurrency=2)) == expected
        assert min(first.num_asked, second.num_asked) > 2
    absent = FaultyProxy(server)  # never started
    assert run(engine_of(target, absent.url, server)) == expected


def test_a_server_that_dies_and_comes_back_loses_nothing(target, server, expected):
    with FaultyProxy(server) as proxy:
        engine = engine_of(target, proxy.url, concurrency=2)
        proxy.die_and_come_back(after=5, away_s=0.5)
        assert run(engine) == expected


def test_a_server_that_starts_later_is_waited_for(target, server, expected, capfd):
    proxy = FaultyProxy(server)
    threading.Timer(0.5, proxy.start).start()
    assert run(engine_of(target, proxy.url)) == expected
    proxy.stop()
    assert capfd.readouterr().err.count(f"waiting for a server: {proxy.url}/v1: cannot connect") == 1


def test_without_any_server_the_command_ends_with_one_line(target, server):
    absent = FaultyProxy(server)
    with pytest.raises(ConfigError, match=rf"no server was of use for .*=0.3 s \({absent.url}/v1: cannot connect"):
        engine_of(target, absent.url, patience_s=0.3)
    with FaultyProxy(server) as proxy:
        engine = engine_of(target, proxy.url, patience_s=0.3)
        proxy.stop()
        with pytest.raises(ConfigError, match="repeat the command, which goes on where it was"):
            run(engine)
        proxy.start()


def test_what_cannot_do_the_work_is_refused_with_the_reason(target, server):
    with pytest.raises(ConfigError, match=r"serves tiny and not 'Qwen'; .* generation\.served_model"):
        engine_of(target, server, model="Qwen")
    with pytest.raises(ConfigError, match=rf"takes {MAX_MODEL_LEN} tokens, fewer than .* = {MAX_MODEL_LEN + 1}"):
        engine_of(target, server, min_context=MAX_MODEL_LEN + 1)
    with FaultyProxy(server, repeat("no ids")) as proxy, pytest.raises(
            ConfigError, match=r"answers without token_ids: .*`vllm serve` \(0\.10\.2 or later\)"):
        engine_of(target, proxy.url)


@pytest.mark.parametrize("models", [
    b"", b"null", b"[]", b'{"data": null}', b'{"data": [1]}', b'{"data": [{"id": ["tiny"]}]}', b"[" * 10**5,
    b'{"data": [{"id": 3}]}', b'{"data": [{"id": "tiny", "max_model_len": "long"}]}', b"\xff",
])
def test_a_list_of_models_that_is_none_is_no_traceback(target, models):
    async def probe() -> None:
        transport = httpx.MockTransport(lambda request: httpx.Response(200, content=models))
        async with httpx.AsyncClient(transport=transport) as client:
            await Server("http://x", model=MODEL_NAME, vocab_size=9, min_context=64).probe(client, [1], EOS_IDS)

    with pytest.raises((ServerUnavailableError, ConfigError)):
        asyncio.run(probe())


def test_a_url_and_a_key_that_cannot_be_are_one_line(target, server, monkeypatch):
    with pytest.raises(ConfigError, match=r"generation.base_urls: http://\[::1/v1 is no URL"):
        engine_of(target, "http://[::1")
    config = config_of(["+experiment=quickstart", f"target.model={target.spec.name}", "generation.engine=openai",
                        f"generation.base_urls=[{server}]"])
    config.generation.server_api_key_env = "A_KEY"
    for key in ("a\nb", "schlüssel"):
        monkeypatch.setenv("A_KEY", key)
        with pytest.raises(ConfigError, match=r"the key in \$A_KEY holds a line break or"):
            build_engine(config, torch.device("cpu"))


def test_a_server_that_stops_giving_ids_ends_the_command(target, server):
    with FaultyProxy(server, [None, None, None, "no ids"]) as proxy:
        engine = engine_of(target, proxy.url)
        with pytest.raises(ConfigError, match="answers without token_ids"):
            run(engine)


def test_another_tokenizer_behind_the_same_name_is_refused(target, server):
    class Other:
        def __call__(self, text, **kwargs):
            return target.tokenizer(text, **kwargs)

        def decode(self, ids, **kwargs):
            return "other words"

    with pytest.raises(ConfigError, match="it serves another model under the name 'tiny'"):
        OpenAIEngine([server], model=MODEL_NAME, spec=target.spec, tokenizer=Other(), min_context=64,
                     reach=engine_of(target, server).reach)


def test_a_caller_that_stops_early_leaves_no_request_behind(target, server):
    with FaultyProxy(server, chain([None, None], repeat("hang"))) as proxy:
        answers = engine_of(target, proxy.url).generate(PROMPTS, GREEDY, seed=0)
        next(answers)
        answers.close()  # would wait for the hanging requests if it left them


@pytest.mark.parametrize(("header", "seconds"), [
    (None, None), ("7", 7.0), (" 0 ", 0.0), ("soon", None), ("²", None), ("٣", None), ("-1", None), ("", None),
    ("Sun, 06 Nov 1994 08:49:37 GMT", 0.0), ("Sun, 06 Nov 1994 08:49:37", None),
    ("Sun, 06 Nov 99999 08:49:37 GMT", None), (f"Sun, 06 Nov {10**20} 08:49:37 GMT", None),
])
def test_retry_after(header, seconds):
    assert servers_module._seconds(header) == seconds


@given(st.text(st.characters(codec="latin-1")) | st.from_regex(r"\w{3}, \d{1,3} \w{3} \d{1,20} \d+:\d+:\d+ ?.{0,6}"))
def test_no_retry_after_is_an_error(header):
    seconds = servers_module._seconds(header)
    assert seconds is None or seconds >= 0


def test_retry_after_as_a_date():
    header = format_datetime(datetime.now(UTC) + timedelta(seconds=100), usegmt=True)
    assert 90 < servers_module._seconds(header) <= 100
