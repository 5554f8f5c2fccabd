"""Prompt files: every form is read, everything else is refused with its line, and the split is stable."""

import json

import pytest

from data_gen.prompts import (
    Prompt,
    hold_out,
    load_prompts,
    prompts_digest,
    question,
    split_prompts,
    unique_prompts,
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


def test_the_last_answer_of_a_conversation_is_left_to_the_target(tmp_path):
    answer, more = {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "More."}
    path = write(tmp_path / "chat.jsonl", {"messages": [USER, answer, more, answer]}, {"messages": [USER, answer]})
    long, short = load_prompts(path)
    assert long.conversation() == [USER, answer, more]
    assert short.conversation() == [USER]


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
        ({"text": "x"}, r"exactly one of the keys messages, prompt and turns, got \['text'\]"),
        ({"prompt": "x", "turns": ["y"]}, "exactly one of"),
        ({"prompt": None}, "prompt must hold non-empty text"),
        ({"prompt": " "}, "prompt must hold non-empty text"),
        ({"turns": []}, "turns must hold non-empty text"),
        ({"turns": ["a", 2]}, "turns must hold non-empty text"),
        ({"messages": "hi"}, "messages must be a list of objects"),
        ({"messages": []}, "messages has no user message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages has no user message"),
        ({"messages": [USER, {"role": "robot", "content": "x"}]}, r"messages\[1\] has role 'robot'"),
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


def test_duplicates_are_dropped_and_counted():
    prompts = [prompt("a", "1"), prompt("b", "2"), prompt("a", "3"), prompt("a", "1")]
    kept, num_dropped = unique_prompts(prompts)
    assert ([p.id for p in kept], num_dropped) == (["1", "2"], 2)


def test_a_question_is_what_the_user_says():
    assistant = {"role": "assistant", "content": "Yes."}
    system, more = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sure?"}
    asked = question([system, USER, assistant, more])
    assert asked == question([{"role": "user", "content": " HELLO? "}, {"role": "user", "content": "sure?\n"}])
    assert question([USER]) != asked


def test_held_out_prompts_are_dropped_and_counted():
    prompts = [prompt("a", "1"), prompt("b", "2"), prompt("A ", "3")]
    kept, num_dropped = hold_out(prompts, [prompt("a", "x"), prompt("c", "y")])
    assert ([p.id for p in kept], num_dropped) == (["2"], 2)


def test_one_id_for_two_prompts_is_refused():
    with pytest.raises(ConfigError, match="two different prompts have the id '1'"):
        unique_prompts([prompt("a", "1"), prompt("b", "1")])


def test_the_split_depends_on_the_id_alone():
    prompts = [prompt(f"text {number}", f"id-{number}") for number in range(2000)]
    train, validation = split_prompts(prompts, 0.1)
    assert 150 < len(validation) < 250
    assert len(train) + len(validation) == 2000
    fewer_train, fewer_validation = split_prompts(prompts[::-3], 0.1)
    assert {p.id for p in fewer_train} < {p.id for p in train}
    assert {p.id for p in fewer_validation} < {p.id for p in validation}
    assert {p.id for p in validation} < {p.id for p in split_prompts(prompts, 0.2)[1]}
    assert split_prompts(prompts, 0.0)[1] == [] and split_prompts(prompts, 1.0)[0] == []


def test_the_digest_sees_text_id_and_order():
    a, b = prompt("a", "1"), prompt("b", "2")
    digests = {prompts_digest(list_) for list_ in ([a, b], [b, a], [a], [prompt("a", "2"), b], [prompt("A", "1"), b])}
    assert len(digests) == 5
