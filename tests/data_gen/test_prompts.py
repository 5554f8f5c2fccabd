"""Prompt files: every form is read, everything else is refused with its line, and the split is stable."""

import json

import pytest

from data_gen.prompts import (
    Prompt,
    is_validation,
    load_prompts,
    prompts_digest,
    question,
)
from specvocab_model.config import ConfigError

USER = {"role": "user", "content": "Hello?"}


def write(path, *records, encoding="utf-8", newline="\n"):
    lines = [record if isinstance(record, str) else json.dumps(record, ensure_ascii=False) for record in records]
    path.write_bytes(newline.join(lines).encode(encoding))
    return path


def prompt(text: str, prompt_id: str) -> Prompt:
    return Prompt(id=prompt_id, source="s", category="s", messages=({"role": "user", "content": text},))


def test_every_form_is_read(tmp_path):
    path = write(
        tmp_path / "mixed.jsonl",
        {"id": 5, "source": "seed", "messages": [{"role": "system", "content": "Be brief."}, USER]},
        {"prompt": "Why?"},
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Shorter.", "In rhyme."]},
    )
    chat, plain, turns = load_prompts(path)
    assert (chat.id, chat.source, chat.category) == ("5", "seed", "seed")
    assert chat.conversation() == [{"role": "system", "content": "Be brief."}, USER]
    assert (plain.source, plain.conversation()) == ("mixed", [{"role": "user", "content": "Why?"}])
    assert (turns.id, turns.category, turns.num_turns) == ("81", "writing", 3)
    assert turns.conversation() == [{"role": "user", "content": "Write."}]
    assert [message["content"] for message in turns.conversation(["A", "B"])] == [
        "Write.", "A", "Shorter.", "B", "In rhyme."]
    assert [message["role"] for message in turns.conversation(["A"])] == ["user", "assistant", "user"]


def test_every_answer_of_a_conversation_is_left_to_the_target(tmp_path):
    answer, more = {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More."}
    path = write(tmp_path / "chat.jsonl", {"messages": [USER, answer, more, answer]}, {"messages": [USER, answer]})
    long, short = load_prompts(path)
    assert (long.num_turns, long.conversation()) == (2, [USER])
    assert long.conversation(["Own."]) == [USER, {"role": "assistant", "content": "Own."}, more]
    assert (short.num_turns, short.conversation()) == (1, [USER])


def test_byte_order_mark_crlf_and_empty_lines(tmp_path):
    path = write(tmp_path / "a.jsonl", "\ufeff" + json.dumps({"prompt": "é?"}), "", {"prompt": "b"}, "", newline="\r\n")
    assert [p.messages[0]["content"] for p in load_prompts(path)] == ["é?", "b"]


def test_limit(tmp_path):
    path = write(tmp_path / "a.jsonl", {"prompt": "a"}, {"prompt": "b"}, "not read")
    assert len(load_prompts(path, limit=2)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected an object, got list"),
        ({"text": "x"}, r"one of the keys messages, conversations, turns, instruction, prompt, got \['text'\]"),
        ({"prompt": None}, r"got \['prompt'\]"),
        ({"prompt": " "}, "prompt, or .* must hold non-empty text"),
        ({"instruction": "x", "output": 3}, "prompt, or .* must hold non-empty text"),
        ({"turns": []}, "turns must hold non-empty text"),
        ({"turns": ["a", 2]}, "turns must hold non-empty text"),
        ({"messages": "hi"}, "Expecting value"),
        ({"messages": "[1]"}, "messages must be a list of objects"),
        ({"messages": []}, "messages has no user message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages has no user message"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, r"messages\[1\] has role 'robot'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, r"messages\[0\] has role \['user'\]"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": 5}]}, r"messages\[1\] has tool calls that are no li"),
        pytest.param("[" * 100_000, "nested too deeply", id="deep"),
        pytest.param({"messages": "[" * 100_000}, "nested too deeply", id="deep-cell"),
        pytest.param({"prompt": "x", "tools": "[" * 100_000}, "nested too deeply", id="deep-tools"),
        pytest.param('{"prompt": "x", "tools": [' + '{"a":' * 900 + "1" + "}" * 900 + "]}", "nested too deeply",
                     id="deep-but-json"),
        pytest.param({"messages": [USER, {"role": "assistant", "tool_calls": [
            {"name": "f", "arguments": "[" * 100_000}]}]}, "nested too deeply", id="deep-arguments"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\] has no text"),
        ({"messages": [USER, {"role": "user", "content": " "}]}, r"messages\[1\] is an empty user message"),
        ('{"prompt": "half a pair: \\ud83d"}', "surrogates not allowed"),
        ('{"prompt": "x", "id": "\\ud83d"}', "surrogates not allowed"),
    ],
)
def test_a_bad_line_is_refused_with_file_and_line(tmp_path, line, reason):
    path = write(tmp_path / "bad.jsonl", {"prompt": "fine"}, "", line)
    with pytest.raises(ConfigError, match=rf"bad\.jsonl, line 3: .*{reason}"):
        load_prompts(path)


def test_bytes_that_are_not_utf8_are_refused_with_their_line(tmp_path):
    path = write(tmp_path / "latin.jsonl", {"prompt": "ok"}, {"prompt": "é"}, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"latin\.jsonl, line 2: 'utf-8' codec"):
        load_prompts(path)


def test_missing_and_empty_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no prompt file"):
        load_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_prompts(write(tmp_path / "empty.jsonl", "", ""))


def test_an_id_is_made_of_what_is_asked(tmp_path):
    first = load_prompts(write(tmp_path / "a.jsonl", {"prompt": "x"}, {"prompt": "y"}))
    again = load_prompts(write(tmp_path / "b.jsonl", {"prompt": "y"}, {"category": "c", "turns": ["x"]}))
    assert [p.id for p in first] == [p.id for p in reversed(again)]
    assert first[0].id != first[1].id
    assert first[0].id == "3cf608ca1dd8539e", "ids of data that exists must not change"


def test_a_question_is_what_the_user_says():
    assistant = {"role": "assistant", "content": "Yes."}
    system, more = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sure?"}
    asked = question([system, USER, more, assistant, USER])
    assert asked == question([{"role": "user", "content": " HELLO? "}, {"role": "user", "content": "sure?\n"}])
    assert question([USER]) != asked
    assert question([assistant, USER, assistant, more]) == question([USER]), "what is said before the first answer"


def test_the_split_depends_on_the_id_alone():
    ids = [f"id-{number}" for number in range(2000)]
    assert 150 < sum(is_validation(each, 0.1) for each in ids) < 250
    assert all(is_validation(each, 0.2) for each in ids if is_validation(each, 0.1))
    assert not any(is_validation(each, 0.0) for each in ids) and all(is_validation(each, 1.0) for each in ids)
    held_back = [number for number in range(100) if is_validation(f"id-{number}", 0.1)]
    assert held_back == [18, 30, 45, 46, 53, 54, 72, 92], "no prompt may change sides from version to version"


def test_the_digest_sees_text_id_and_order():
    a, b = prompt("a", "1"), prompt("b", "2")
    lists = ([a, b], [b, a], [a], [prompt("a", "2"), b], [prompt("A", "1"), b])
    assert len({prompts_digest((each.id, each.digest) for each in prompts) for prompts in lists}) == 5
