"""Prompts that are made of others: nothing else is in them, all have names of their own, and every kind is there."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from data_gen.prompts import is_validation, load_prompts
from scripts import mix_prompts


def written(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_every_kind_is_made_of_the_given_questions_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions = [f"Question number {number}: " + "word " * (number % 40) for number in range(200)]
    source = written(tmp_path / "in.jsonl", *({"id": f"q{number}", "source": "given", "messages": [
        {"role": "user", "content": question}]} for number, question in enumerate(questions)))
    outputs = []
    for name in ("one.jsonl", "two.jsonl"):
        mix_prompts.main([str(source), str(tmp_path / "new" / name), "--validation-fraction", "0.1"])
        outputs.append((tmp_path / "new" / name).read_text())
    assert outputs[0] == outputs[1] and "288 prompts in" in capsys.readouterr().out
    prompts = load_prompts(tmp_path / "new/one.jsonl")
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 200 + 35 + 35 + 18
    assert Counter(prompt.source for prompt in prompts) == {
        "given": 200, "summary": 35, "passages": 35, "translation": 18}
    given = [prompt for prompt in prompts if prompt.source == "given"]
    assert {prompt.messages[0]["content"] for prompt in given} == set(questions)
    assert 50 < sum(prompt.num_turns == 2 for prompt in given) < 110
    held_back = {prompt.messages[0]["content"].split(":")[0] for prompt in given if is_validation(prompt.id, 0.1)}
    assert 5 < len(held_back) < 40
    for prompt in prompts:
        quoted = {f"Question number {number}" for number in re.findall(r"Question number (\d+)", str(prompt.messages))}
        assert quoted and (quoted <= held_back if is_validation(prompt.id, 0.1) else not quoted & held_back)
        if prompt.source == "summary":
            assert 500 <= len(prompt.messages[0]["content"]) < 3600
        if prompt.source == "passages":
            text = prompt.messages[0]["content"]
            assert text.startswith("[1] Question number") and text.rsplit("to answer. ", 1)[1] in questions


@pytest.mark.parametrize("record, message", [
    ({"id": "two", "turns": ["a", "b"]}, "two is more than one question of a user"),
    ({"id": "told", "system": "s", "prompt": "u"}, "told is more"),
    ({"id": "armed", "prompt": "u", "tools": [{"type": "function", "function": {"name": "f"}}]}, "armed is more"),
    ({"id": "long", "prompt": "x" * 900}, "no question of less than 900 characters"),
])
def test_what_cannot_be_put_together_is_refused(
    record: dict, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        mix_prompts.main([str(written(tmp_path / "in.jsonl", record)), str(tmp_path / "out.jsonl")])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and message in error and not (tmp_path / "out.jsonl").exists()
