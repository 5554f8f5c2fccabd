"""Rows are prompt ids and response ids as the served model sees and writes them, turn by turn, for every template."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.answers import AnswerKeeper, AnswerWriter, Turn, rows_of, template_kwargs
from data_gen.chat import encode_prompt
from data_gen.engines import Completion, Rejected
from data_gen.prompts import Prompt, parse_prompt
from data_gen.rows import Row, ShardRows, validate_row
from specvocab_model.chat_template import render
from specvocab_model.config import Config
from tests.data_gen.runs import config_of
from tests.data_gen.templates import GEMMA, LLAMA3, QWEN3, TEMPLATES, real_tokenizer, tokenizer_with
from tests.tiny import CHAT_TEMPLATE, ENDOFTEXT_ID, IM_END_ID, TOKENIZER_LENGTH, tiny_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]}
RESULT = {"role": "tool", "content": "2", "tool_call_id": "1"}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}]


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict:
    return {"role": "assistant", "content": content}


@cache
def _quickstart() -> Config:
    return config_of(["+experiment=quickstart"])


def configured(**generation) -> Config:
    config = deepcopy(_quickstart())
    config.generation.max_prompt_tokens = config.generation.max_new_tokens = 10_000
    for name, value in generation.items():
        assert hasattr(config.generation, name)
        setattr(config.generation, name, value)
    return config


def stop_ids(tokenizer) -> tuple[int, ...]:
    return (tokenizer.eos_token_id,)


def keep(tokenizer, messages: list[dict], config: Config | None = None, **record) -> ShardRows:
    prompt = parse_prompt({"id": "p", "messages": messages, **record}, "s", keep=True)
    keeper = AnswerKeeper(config or configured(), tokenizer, stop_ids(tokenizer), [prompt], lambda: None)
    assert list(keeper.ask()) == []
    result = keeper.rows()
    for row in result.rows:
        validate_row(row, vocab_size=len(tokenizer), stop_token_ids=frozenset(stop_ids(tokenizer)))
    return result


class Script:
    """An engine that writes given texts, one a turn, ends them with EOS and notes what it was asked."""

    def __init__(self, tokenizer, *texts: str | Completion | Rejected) -> None:
        self.tokenizer = tokenizer
        self.texts = texts
        self.asked: list[list[int]] = []

    def __call__(self, prompts: list[list[int]], turn: int) -> Iterator[tuple[int, Completion | Rejected]]:
        self.asked += prompts
        for index in reversed(range(len(prompts))):  # an engine may finish them in any order
            text = self.texts[turn]
            yield index, served(self.tokenizer, text) if isinstance(text, str) else text


def served(tokenizer, text: str) -> Completion:
    return Completion([*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id], "stop")


def write(script: Script, *prompts: Prompt, config: Config | None = None) -> ShardRows:
    work = AnswerWriter(config or configured(), script.tokenizer, prompts, lambda: None)
    turn = 0
    while asked := [ids for part in work.ask() for ids in part]:
        for index, completion in script(asked, turn):
            work.take(index, completion)
        turn += 1
    result = work.rows()
    for row in result.rows:
        validate_row(row, vocab_size=len(script.tokenizer), stop_token_ids=frozenset(stop_ids(script.tokenizer)))
    return result


def chat(*messages: dict, **record) -> Prompt:
    return parse_prompt({"id": "p", "messages": list(messages), **record}, "s")


def supervised(row: Row) -> list[list[int]]:
    """The runs of marked ids."""
    runs: list[list[int]] = []
    before = 0
    for token, mark in zip(row.input_ids, row.loss_mask, strict=True):
        if mark and not before:
            runs.append([])
        if mark:
            runs[-1].append(token)
        before = mark
    return runs


# ---- rows of turns ----


def turn(prompt: list[int], response: list[int], reason: str = "stop") -> Turn:
    return Turn(prompt_ids=prompt, response_ids=response, finish_reason=reason, messages=[])


def test_turns_that_continue_each_other_are_one_row():
    row, = rows_of(chat(user("x")), [turn([1, 2], [3, 9]), turn([1, 2, 3, 9, 4], [5, 9]),
                                     turn([1, 2, 3, 9, 4, 5, 9, 6], [7], "length")])
    assert row.id == "p" and row.finish_reason == "length"
    assert row.input_ids == [1, 2, 3, 9, 4, 5, 9, 6, 7]
    assert row.loss_mask == [0, 0, 1, 1, 0, 1, 1, 0, 1]


def test_a_rewritten_turn_begins_a_row():
    rows = rows_of(chat(user("x")), [turn([1, 2], [3, 9]), turn([1, 2, 8, 9, 4], [5, 9]),
                                     turn([1, 2, 8, 9, 4, 5, 9, 6], [7, 9])])
    assert [row.id for row in rows] == ["p#1", "p#2"]
    assert [row.input_ids for row in rows] == [[1, 2, 3, 9], [1, 2, 8, 9, 4, 5, 9, 6, 7, 9]]
    assert [row.loss_mask for row in rows] == [[0, 0, 1, 1], [0, 0, 0, 0, 0, 1, 1, 0, 1, 1]]
    assert rows_of(chat(user("x")), []) == []


# ---- answers written anew ----


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma"])
def test_every_turn_is_written_on_top_of_the_targets_own_answers(name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    script = Script(tokenizer, "One.", "Two.", "Three.")
    row, = write(script, chat(user("a"), assistant("old"), user("b"), assistant("older"), user("c"))).rows
    assert supervised(row) == [served(tokenizer, text).token_ids for text in ("One.", "Two.", "Three.")]
    conversation = [user("a"), assistant("One."), user("b"), assistant("Two."), user("c")]
    assert script.asked == [encode_prompt(tokenizer, conversation[:length]) for length in (1, 3, 5)]
    assert row.input_ids == script.asked[-1] + served(tokenizer, "Three.").token_ids
    assert row.messages == [*conversation, assistant("Three.")]
    assert row.input_ids.count(ENDOFTEXT_ID) == (0 if name == "chatml" else 1), "BOS once"


def test_thoughts_that_the_template_drops_make_a_row_a_turn():
    tokenizer = tokenizer_with(QWEN3)
    script = Script(tokenizer, "<think>\nhm\n</think>\n\nOne.", "<think>\nso\n</think>\n\nTwo.")
    rows = write(script, chat(user("a"), assistant(""), user("b"))).rows
    assert [row.id for row in rows] == ["p#1", "p#2"]
    for row, asked, text in zip(rows, script.asked, script.texts, strict=True):
        assert row.input_ids == asked + served(tokenizer, text).token_ids, "what the served model saw and wrote"
        assert supervised(row) == [served(tokenizer, text).token_ids]
    assert "hm" not in tokenizer.decode(rows[1].input_ids) and "One." in tokenizer.decode(rows[1].input_ids)


def test_thinking_on_off_and_both():
    tokenizer = tokenizer_with(QWEN3)
    ids = [f"p-{number}" for number in range(400)]
    off = tokenizer("<think>\n\n</think>\n\n", add_special_tokens=False)["input_ids"]
    for share, low, high in ((None, 0, 0), (1.0, 400, 400), (0.0, 0, 0), (0.5, 160, 240)):
        config = configured(thinking_share=share)
        assert low <= sum(template_kwargs(config, each).get("enable_thinking", False) for each in ids) <= high
    config = configured(thinking_share=0.5)
    first = {template_kwargs(config, each)["enable_thinking"]: each for each in ids}
    for thinks, prompt_id in first.items():
        script = Script(tokenizer, "Yes.")
        row, = write(script, chat(user("a"), id=prompt_id), config=config).rows
        assert (script.asked[0][-len(off) :] == off) == (not thinks)
        assert supervised(row) == [served(tokenizer, "Yes.").token_ids]


def test_an_answer_that_is_cut_keeps_no_invented_end_and_ends_the_conversation():
    tokenizer = tiny_tokenizer()
    cut = Completion(tokenizer("Half")["input_ids"], "length")
    result = write(Script(tokenizer, "One.", cut), chat(user("a"), assistant(""), user("b"), assistant(""), user("c")))
    row, = result.rows
    assert row.finish_reason == "length" and row.input_ids[-4:] == cut.token_ids
    assert supervised(row) == [served(tokenizer, "One.").token_ids, cut.token_ids]
    assert [(each.turn, each.reason, each.by_choice) for each in result.skipped] == [(3, "answer cut", True)]


def test_what_ends_a_conversation_keeps_the_turns_before_it():
    tokenizer = tiny_tokenizer()
    beyond = Completion([5, TOKENIZER_LENGTH, IM_END_ID], "stop")
    loop = Completion([*[1, 2, 3, 4] * 30, IM_END_ID], "stop")
    cases = {
        "id beyond the tokenizer": (beyond, {}, False),
        "server refused the prompt": (Rejected("server refused the prompt", "400"), {}, False),
        "repetitive answer": (loop, {"max_repetition": 0.5}, True),
        "answer too short": ("x", {"min_response_tokens": 3}, True),
        "prompt too long": ("never asked", {"max_prompt_tokens": 60}, True),
    }
    conversation = chat(user("a"), assistant(""), user("b" * 30))
    for reason, (second, limits, by_choice) in cases.items():
        result = write(Script(tokenizer, "One.", second), conversation, config=configured(**limits))
        assert [supervised(row) for row in result.rows] == [[served(tokenizer, "One.").token_ids]]
        assert [(each.id, each.turn, each.reason, each.by_choice) for each in result.skipped] == [
            ("p", 2, reason, by_choice)]
    result = write(Script(tokenizer, beyond), conversation)
    assert result.rows == [] and result.skipped[0].turn == 1


def test_one_over_long_prompt_among_fifty():
    tokenizer = tiny_tokenizer()
    prompts = [chat(user("long " * 100 if number == 20 else "short"), id=f"p-{number}") for number in range(50)]
    result = write(Script(tokenizer, "Yes."), *prompts, config=configured(max_prompt_tokens=100))
    assert [row.id for row in result.rows] == [f"p-{number}" for number in range(50) if number != 20]
    assert [(each.id, each.reason) for each in result.skipped] == [("p-20", "prompt too long")]


def test_tool_calls_with_results_are_context_and_the_answer_is_written():
    tokenizer = tokenizer_with(LLAMA3)
    script = Script(tokenizer, "It is 2.", "Welcome.")
    prompt = chat(SYSTEM, user("1 + 1?"), CALL, RESULT, assistant("old"), user("Thanks."), tools=TOOLS)
    row, = write(script, prompt).rows
    assert supervised(row) == [served(tokenizer, "It is 2.").token_ids, served(tokenizer, "Welcome.").token_ids]
    text = tokenizer.decode(row.input_ids)
    assert 'add{"a": 1}' in text and "ipython\n\n2" in text and '"description": "adds"' in text and "old" not in text
    assert script.asked[0] == encode_prompt(tokenizer, prompt.messages, tools=TOOLS)


def test_awkward_conversations_written_anew():
    tokenizer = tiny_tokenizer()

    def asked(*messages: dict) -> list[str]:
        script = Script(tokenizer, "A.", "B.")
        assert len(write(script, chat(*messages)).rows) == 1
        return [tokenizer.decode(ids) for ids in script.asked]

    def shown(*messages: dict) -> str:
        return tokenizer.decode(encode_prompt(tokenizer, messages))

    assert asked(user("a")) == [shown(user("a"))], "no assistant in it: its answer is still to be written"
    assert asked(user("a"), user("b")) == [shown(user("a"), user("b"))]
    assert asked(user("a"), assistant("")) == [shown(user("a"))]
    assert asked(user("a"), {"role": "assistant"}) == [shown(user("a"))], "no content, no calls"
    twice = asked(user("a"), assistant("x"), assistant("y"), user("b"))
    assert twice[1] == shown(user("a"), assistant("A."), user("b"))
    assert asked(assistant("Hello!"), user("a")) == [shown(assistant("Hello!"), user("a"))]
    for hopeless in ([SYSTEM], [SYSTEM, assistant("x")], []):
        with pytest.raises(ValueError, match="messages has no user message"):
            chat(*hopeless)


def test_what_the_template_refuses_is_skipped():
    prompts = [chat(SYSTEM, user("a"), id="1"), chat(user("a"), user("b"), id="2"), chat(user("a"), id="3")]
    result = write(Script(tokenizer_with(GEMMA), "A."), *prompts)
    assert [row.id for row in result.rows] == ["3"]
    assert [(each.id, each.reason, each.by_choice) for each in result.skipped] == [
        ("1", "refused by the chat template", False), ("2", "refused by the chat template", False)]
    assert "roles must alternate" in result.skipped[0].detail


def test_pad_that_is_also_eos_is_trained_on():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    written, kept = write(Script(tokenizer, "A."), chat(user("a"))), keep(tokenizer, [user("a"), assistant("A.")])
    for row in (*written.rows, *kept.rows):
        assert row.input_ids[-1] == tokenizer.pad_token_id == IM_END_ID and row.loss_mask[-1] == 1


# ---- answers that are kept ----

words = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), min_size=1, max_size=12).filter(str.strip)


@st.composite
def conversations(draw, with_system: bool) -> list[dict]:
    messages = [SYSTEM] if with_system and draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [user(draw(words)), assistant(draw(words))]
    return messages


def check_kept(tokenizer, messages: list[dict], written: list[str], config: Config | None = None) -> None:
    """Every answer is supervised once, in front of it stands what a server sees, and after it its stop token.

    Args:
        written: the answers as the template writes them, tokenised here on their own.
    """
    result = keep(tokenizer, messages, config)
    kwargs = template_kwargs(config or configured(), "p")
    responses = [run for row in result.rows for run in supervised(row)]
    assert responses == [served(tokenizer, text).token_ids for text in written]
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    numbers = iter(zip(places, responses, strict=True))
    for row in result.rows:
        end = 0
        for _ in supervised(row):
            place, run = next(numbers)
            seen = render(tokenizer, messages[:place], kwargs)
            assert row.input_ids[: len(seen) + len(run)] == seen + run
            assert end <= len(seen)
            end = len(seen) + len(run)
        assert sum(row.loss_mask) > 0 and len(row.input_ids) == end


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(["chatml", "llama3", "gemma"]))
def test_kept_answers_of_templates_that_rewrite_nothing_are_one_row(data, name):
    tokenizer = tokenizer_with(TEMPLATES[name])
    messages = data.draw(conversations(with_system=name != "gemma"))
    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    check_kept(tokenizer, messages, answers if name == "chatml" else [answer.strip() for answer in answers])
    row, = keep(tokenizer, messages).rows
    assert row.id == "p" and row.finish_reason == "stop"


@settings(max_examples=25, deadline=None)
@given(messages=conversations(with_system=True), thinking=st.sampled_from([None, 0.0, 1.0]))
def test_kept_answers_of_a_thinking_template_are_a_row_each(messages, thinking):
    tokenizer = tokenizer_with(QWEN3)
    answers = [message["content"].lstrip("\n") for message in messages if message["role"] == "assistant"]
    block = "" if thinking == 0.0 else "<think>\n\n</think>\n\n"
    check_kept(tokenizer, messages, [block + answer for answer in answers], configured(thinking_share=thinking))
    rows = keep(tokenizer, messages, configured(thinking_share=thinking)).rows
    assert [row.id for row in rows] == (["p"] if len(answers) == 1 else [f"p#{n + 1}" for n in range(len(answers))])


def test_kept_tool_calls_are_supervised_with_the_final_answer():
    tokenizer = tokenizer_with(LLAMA3)
    row, = keep(tokenizer, [user("1 + 1?"), CALL, RESULT, assistant("It is 2.")], tools=TOOLS).rows
    assert [tokenizer.decode(run) for run in supervised(row)] == ['add{"a": 1}<|im_end|>', "It is 2.<|im_end|>"]
    assert '"description": "adds"' in tokenizer.decode(row.input_ids)


def test_awkward_conversations_kept():
    tokenizer = tiny_tokenizer()
    result = keep(tokenizer, [user("a"), assistant(""), user("b"), assistant("B"), user("c"), assistant(" ")])
    assert [supervised(row) for row in result.rows] == [[served(tokenizer, "B").token_ids]], "empty answers are context"
    assert [supervised(row) for row in keep(tokenizer, [user("a"), user("b"), assistant("B")]).rows] == [
        [served(tokenizer, "B").token_ids]]
    assert supervised(*keep(tokenizer, [assistant("Hi"), user("a"), assistant("B")]).rows) == [
        served(tokenizer, "B").token_ids], "a greeting that nobody asked for is context"
    for silent in ([user("a")], [user("a"), assistant("")], [user("a"), {"role": "assistant"}],
                   [user("a"), {"role": "assistant", "content": None, "tool_calls": []}]):
        with pytest.raises(ValueError, match="no message of the assistant says anything"):
            keep(tokenizer, silent)


@pytest.mark.parametrize(("template", "answer", "detail"), [
    (CHAT_TEMPLATE, "a<|im_end|>b", "2 stop tokens in and after the answer"),
    (CHAT_TEMPLATE.replace("'<|im_end|>' + ", "("[:0]), "a", "0 stop tokens"),
    (CHAT_TEMPLATE + "{% if not add_generation_prompt %}{{ '!' }}{% endif %}", "a", None),
    ("{{ messages | length }}" + CHAT_TEMPLATE, "a", "the ids in front of the answer change when the answer is there"),
    (GEMMA.replace("!=", "=="), "a", "the chat template refuses"),
])
def test_a_mask_that_is_not_certain_is_no_row(template, answer, detail):
    result = keep(tokenizer_with(template), [user("q"), assistant(answer)])
    if detail is None:
        assert len(result.rows) == 1 and result.rows[0].input_ids[-1] == IM_END_ID
        return
    assert result.rows == []
    assert [(each.reason, each.turn, each.by_choice) for each in result.skipped] == [("mask not exact", 1, False)]
    assert detail in result.skipped[0].detail


# ---- the real templates ----


@settings(max_examples=25, deadline=None)
@given(messages=conversations(with_system=True))
def test_smollm2(messages):
    tokenizer = real_tokenizer("smollm2")
    check_real(tokenizer, messages, [m["content"] for m in messages if m["role"] == "assistant"], configured())
    assert len(keep(tokenizer, messages).rows) <= 1


@settings(max_examples=25, deadline=None)
@given(messages=conversations(with_system=True), thinking=st.sampled_from([None, 0.0, 1.0]))
def test_qwen3(messages, thinking):
    tokenizer = real_tokenizer("qwen3")
    answers = [message["content"].lstrip("\n") for message in messages if message["role"] == "assistant"]
    block = "" if thinking == 0.0 else "<think>\n\n</think>\n\n"
    check_real(tokenizer, messages, [block + answer for answer in answers], configured(thinking_share=thinking))


def check_real(tokenizer, messages: list[dict], written: list[str], config: Config) -> None:
    """As ``check_kept``, unless an answer's first token merges with what stands in front of it: then it is refused."""
    kept = keep(tokenizer, messages, config)
    if kept.skipped:
        assert {each.detail for each in kept.skipped} == {
            "the ids in front of the answer change when the answer is there"}
        assert any(text[0].isspace() for text in written), "ordinary words always have their exact mask"
        return
    check_kept(tokenizer, messages, written, config)


@pytest.mark.parametrize("name", ["smollm2", "qwen3"])
def test_real_templates_written_anew(name):
    tokenizer = real_tokenizer(name)
    script = Script(tokenizer, "<think>\nhm\n</think>\n\nOne.", "Two words.", "Three.")
    rows = write(script, chat(SYSTEM, user("a"), assistant(""), user("b"), assistant(""), user("c"))).rows
    assert sum(len(run) for row in rows for run in supervised(row)) == sum(
        len(served(tokenizer, text).token_ids) for text in script.texts)
    for asked, text in zip(script.asked, script.texts, strict=True):
        whole = asked + served(tokenizer, text).token_ids
        assert any(row.input_ids[: len(whole)] == whole for row in rows)
    assert len(rows) == (1 if name == "smollm2" else 2), "Qwen3 drops the first turn's thoughts, and rewrites no more"


def test_real_qwen3_tools_and_thinking():
    tokenizer = real_tokenizer("qwen3")
    assert len(tokenizer) == 151669
    result = keep(tokenizer, [user("1 + 1?"), CALL, RESULT, assistant("It is 2.")], configured(thinking_share=0.0),
                  tools=TOOLS)
    texts = [tokenizer.decode(run) for row in result.rows for run in supervised(row)]
    assert texts == ['<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
                     "It is 2.<|im_end|>"]
    beyond = Script(tokenizer, Completion([151_669, tokenizer.eos_token_id], "stop"))
    assert [each.reason for each in write(beyond, chat(user("a"))).skipped] == ["id beyond the tokenizer"]
