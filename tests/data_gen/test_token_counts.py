"""Frequencies for static vocabularies: what counts, by domain, and with how little memory."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen import token_counts
from data_gen.shards import Row, ShardWriter
from data_gen.token_counts import count_tokens
from specvocab_model.config import ConfigError
from tests.tiny import tiny_tokenizer

V = 277


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def write_rows(folder: Path, rows: list[Row]) -> Path:
    writer = ShardWriter(folder, target="t", settings={"target": {"fingerprint": "f"}}, num_prompts=len(rows),
                         rows_per_shard=2, vocab_size=V, stop_token_ids=[])
    writer.open()
    for index in range(writer.num_shards):
        writer.write(index, rows[writer.prompt_range(index)])
    writer.finalise()
    return folder


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_rows(tmp_path / "data", [
        Row(id=str(i), source="code" if i % 2 else "chat", input_ids=[9, 8, i, i, 7], loss_mask=[0, 0, 1, 1, 0],
            finish_reason="length") for i in range(5)])


def occurrences(counts) -> dict[int, int]:
    return {i: int(n) for i, n in enumerate(counts) if n}


def test_only_what_the_target_wrote_counts(folder, tokenizer):
    assert occurrences(count_tokens("a", str(folder), tokenizer, V)["a"]) == dict.fromkeys(range(5), 2)


def test_a_domain_for_each_source(folder, tokenizer):
    found = count_tokens("a", str(folder), tokenizer, V, split_by="source")
    assert {name: occurrences(counts) for name, counts in found.items()} == {
        "a/chat": {0: 2, 2: 2, 4: 2}, "a/code": {1: 2, 3: 2}}
    with pytest.raises(ConfigError, match="have no column 'category'"):
        count_tokens("a", str(folder), tokenizer, V, split_by="category")


def test_a_column_that_tells_every_record_apart_makes_no_domains(folder, tokenizer, monkeypatch):
    monkeypatch.setattr(token_counts, "MAX_DOMAINS", 4)
    with pytest.raises(ConfigError, match=r"'id' of .* has more than 4 values"):
        count_tokens("a", str(folder), tokenizer, V, split_by="id")
    assert len(count_tokens("a", str(folder), tokenizer, V, split_by="source")) == 2


TEXTS = [("news", "Grüße, naïve <|im_end|>"), ("code", "x = 1\n"), ("news", "")]


def write_corpus(path: Path) -> str:
    records = [{"category": category, "text": text} for category, text in TEXTS]
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("batch", [1, 2**18])
def test_a_corpus_is_tokenised(suffix, batch, tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(token_counts, "BATCH_CHARACTERS", batch)
    path = write_corpus(tmp_path / f"corpus{suffix}")
    expected = {name: Counter(i for category, text in TEXTS if category == name
                              for i in tokenizer(text, add_special_tokens=False)["input_ids"])
                for name in ("news", "code")}
    found = count_tokens("c", path, tokenizer, V, split_by="category")
    assert {name: occurrences(counts) for name, counts in found.items()} == {
        f"c/{name}": dict(counts) for name, counts in expected.items()}
    (whole,) = count_tokens("c", path, tokenizer, V).values()
    assert occurrences(whole) == dict(expected["news"] + expected["code"])


def test_lines_of_text_and_answers_of_conversations(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (found,) = count_tokens("a", str(tmp_path / "a.txt"), tokenizer, V).values()
    assert int(found.sum()) == len("one\ntwo\n")
    turns = [{"role": "user", "content": "aaaa"}, {"role": "assistant", "content": "bb"},
             {"role": "user", "content": "aaaa"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    (found,) = count_tokens("b", str(tmp_path / "b.jsonl"), tokenizer, V).values()
    letter = {word: tokenizer(word)["input_ids"][0] for word in "ab"}
    assert found[letter["a"]] == 0 and found[letter["b"]] == 3


@pytest.mark.parametrize("name, content, split_by, message", [
    ("a.jsonl", "", None, "holds no token to count"),
    ("a.jsonl", '{"text": ""}\n', None, "holds no token to count"),
    ("a.jsonl", '{"text": "a"}\n{"words": "a"}\n', None, "line 2: expected one of the keys"),
    ("a.jsonl", '{"text": "a"}\n', "category", "line 1: has no 'category' to split the data by"),
    ("a.jsonl", "{\n", None, "line 1: "),
    ("a.txt", "a\n", "category", "leave out --split-by"),
])
def test_what_holds_no_text_is_refused(name, content, split_by, message, tmp_path, tokenizer):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        count_tokens("a", str(tmp_path / name), tokenizer, V, split_by=split_by)


def test_data_that_do_not_fit_or_are_not_there_are_refused(folder, tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="do not fit the target's vocabulary of 4"):
        count_tokens("a", str(folder), tokenizer, 4)
    (folder / "manifest.json").rename(folder / "manifest.unfinished.json")
    with pytest.raises(ConfigError, match="is not finished"):
        count_tokens("a", str(folder), tokenizer, V)
    with pytest.raises(ConfigError, match=r"there is no prompt file .*nowhere\.jsonl"):
        count_tokens("a", str(tmp_path / "nowhere.jsonl"), tokenizer, V)


def test_a_corpus_may_exceed_the_memory(tmp_path, tokenizer, monkeypatch):
    """What is held does not grow with the corpus."""
    monkeypatch.setattr(token_counts, "BATCH_CHARACTERS", 2**14)
    line = json.dumps({"text": "some words, " * 80}) + "\n"
    path = tmp_path / "large.jsonl"

    def peak(lines: int) -> int:
        path.write_text(line * lines)
        tracemalloc.start()
        (counts,) = count_tokens("a", str(path), tokenizer, V).values()
        assert int(counts.sum()) == 960 * lines
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    few, many = peak(100), peak(1500)  # the larger one has 1.4 million tokens, 11 MB as int64
    assert many < 1.5 * few < 4e6
