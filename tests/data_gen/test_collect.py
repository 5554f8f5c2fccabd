"""Sources of every kind, what is left out and why, mixtures, and the store that all ranks read."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_gen.collect
import data_gen.prompts
from data_gen.collect import TRAIN_FILE, VALIDATION_FILE, collect, mixture, read_counts
from data_gen.filters import NearDuplicates, jaccard, repetition, shingles
from data_gen.prompt_store import PromptStore, prompt_writer
from data_gen.prompts import Prompt, parse_prompt, prompts_digest
from data_gen.rows import Skipped
from data_gen.sources import check_sources, read_source
from specvocab_model.config import ConfigError, GenerationConfig, SourceConfig
from tests.data_gen.runs import ENVIRONMENT, config_of

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}
CHAT = {"messages": [USER, ANSWER]}


def read(path: Path | str, *, keep: bool = False, **source) -> list[Prompt | Skipped]:
    return list(read_source(SourceConfig(path=str(path), **source), keep=keep))


def asked(prompts: list[Prompt | Skipped]) -> list[str]:
    return [prompt.messages[-1]["content"] for prompt in prompts if isinstance(prompt, Prompt)]


def jsonl(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# ---- forms and files ----


@pytest.mark.parametrize(("record", "conversation"), [
    (CHAT, [USER, ANSWER]),
    ({"messages": json.dumps(CHAT["messages"])}, [USER, ANSWER]),  # a cell of a CSV file
    ({"conversations": [{"from": "system", "value": "S"}, {"from": "human", "value": "Why?"},
                        {"from": "gpt", "value": "So."}]}, [{"role": "system", "content": "S"}, USER, ANSWER]),
    ({"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."},
                        {"from": "observation", "value": "3"}, {"from": "chatgpt", "value": "Ah."}]},
     [USER, ANSWER, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "Ah."}]),
    ({"instruction": "Why?", "input": "", "output": "So."}, [USER, ANSWER]),
    ({"instruction": "Add.", "input": "1 2", "output": "3"},
     [{"role": "user", "content": "Add.\n\n1 2"}, {"role": "assistant", "content": "3"}]),
    ({"prompt": "Why?", "response": "So."}, [USER, ANSWER]),
    ({"prompt": [USER], "completion": "unused", "messages": None}, None),
    ({"prompt": "ignored", "prompt_id": "x", "messages": [USER, ANSWER], "input": None}, [USER, ANSWER]),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}], "name": None}, ANSWER]},
     [USER, ANSWER]),
])
def test_forms_of_a_record(record, conversation):
    if conversation is None:
        assert parse_prompt(record, "s").conversation() == [USER]
        return
    assert list(parse_prompt(record, "s", keep=True).messages) == conversation
    regenerated = parse_prompt(record, "s")
    assert list(regenerated.messages) == conversation[:-1] and not regenerated.follow_ups


def test_a_tool_call_comes_as_servers_hand_it_to_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    record = {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
                           {"role": "tool", "content": "2", "tool_call_id": "1"}],
              "tools": '[{"type": "function", "function": {"name": "add"}}]'}
    prompt = parse_prompt(record, "s")
    assert prompt.messages[1] == {"role": "assistant", "content": "", "tool_calls": [
        call | {"function": {"name": "add", "arguments": {"a": 1}}}]}
    assert prompt.tools == ({"type": "function", "function": {"name": "add"}},) and prompt.num_turns == 1
    assert prompt.digest != parse_prompt(record | {"tools": None}, "s").digest
    for broken in ({"name": None}, "add", {"function": {"arguments": "{}"}}, {"name": "add", "arguments": "{"}):
        with pytest.raises(ValueError, match=r"tool call without|Expecting property name"):
            parse_prompt({"messages": [USER, ANSWER | {"tool_calls": [broken]}]}, "s")


def test_the_same_prompts_from_every_kind_of_file(tmp_path):
    texts = ["a", "é\n\"b\", c", "d"]
    records = [{"prompt": text} for text in texts]
    jsonl(tmp_path / "p.jsonl", *records)
    (tmp_path / "p.json").write_text(json.dumps(records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "p.parquet")
    with (tmp_path / "p.csv").open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["prompt"])
        writer.writeheader()
        writer.writerows(records)
    data = datasets.Dataset.from_list(records)
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=data.select([0]), other=data).save_to_disk(str(tmp_path / "saved-dict"))
    (tmp_path / "folder").mkdir()
    data.to_parquet(str(tmp_path / "folder" / "train.parquet"))
    for name in ("p.jsonl", "p.json", "p.csv"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
        assert asked(read(tmp_path / f"{name}.gz")) == texts, name
    for name in ("p.jsonl", "p.json", "p.parquet", "p.csv", "saved", "folder"):
        assert asked(read(tmp_path / name)) == texts, name
    assert asked(read(tmp_path / "saved-dict", split="other")) == texts
    assert asked(read(tmp_path / "p.parquet", num_records=2)) == texts[:2]
    assert {prompt.source for name in ("p.csv", "p.csv.gz") for prompt in read(tmp_path / name)} == {"p"}


def test_what_arrow_fills_up_with_nulls_is_no_argument_and_no_definition(tmp_path):
    records = [{"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [
        {"function": {"name": name, "arguments": arguments}}]}, {"role": "tool", "content": "2"}],
        "tools": [{"name": name, "properties": {key: {"type": "integer"} for key in arguments}}]}
        for name, arguments in (("add", {"a": 1}), ("multiply", {"b": [{"c": 2}]}))]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    datasets.Dataset(pa.Table.from_pylist(records)).save_to_disk(str(tmp_path / "saved"))
    expected = [parse_prompt(record, "s") for record in records]
    for name in ("a.parquet", "saved"):
        found = read(tmp_path / name)
        assert [(each.messages, each.tools) for each in found] == [(each.messages, each.tools) for each in expected]


def test_a_system_column_is_a_system_message(tmp_path):
    system = {"role": "system", "content": "Be brief."}
    for form in ({"conversations": [{"from": "human", "value": "Why?"}]}, {"instruction": "Why?"}, {"prompt": "Why?"},
                 {"messages": [system, USER]}):
        assert parse_prompt(form | {"system": "Be brief."}, "s").conversation() == [system, USER]
        assert parse_prompt(form | {"system": " "}, "s").conversation()[-1] == USER
    with pytest.raises(ValueError, match="system must be text"):
        parse_prompt(CHAT | {"system": ["x"]}, "s")


def test_a_messy_file(tmp_path):
    """BOM, CRLF, empty lines, differing keys, 5 MB in a line, half a surrogate pair, odd ids, a half last line."""
    long = "x" * 5_000_000
    lines = [
        b"\xef\xbb\xbf" + json.dumps({"prompt": "bom"}).encode(),
        b"",
        json.dumps({"id": "a/b c=d", "messages": [USER], "extra": 1}).encode(),
        json.dumps({"instruction": long, "input": ""}).encode(),
        b'{"prompt": "half a pair \\ud83d"}',
        b'{"prompt": "latin \xe9"}',
        b"[1, 2]",
        json.dumps({"messages": [{"role": "system", "content": "alone"}]}).encode(),
        json.dumps({"turns": ["one", "two"], "category": "c"}).encode(),
        b'{"prompt": "cut of',
    ]
    (tmp_path / "messy.jsonl").write_bytes(b"\r\n".join(lines))
    found = read(tmp_path / "messy.jsonl")
    assert asked(found) == ["bom", "Why?", long, "one"]
    assert found[1].id == "a/b c=d"
    skipped = [(each.id.split(", ")[1], each.reason, each.by_choice) for each in found if isinstance(each, Skipped)]
    assert skipped == [("line 5", "malformed", False), ("line 6", "unreadable", False), ("line 7", "malformed", False),
                       ("line 8", "malformed", False), ("line 10", "unreadable", False)]


def test_a_csv_row_with_commas_outside_quotes_is_no_shorter_prompt(tmp_path):
    (tmp_path / "a.csv").write_text('prompt\nOf cats, dogs and mice.\n"Of cats, and dogs."\n')
    skipped, kept = read(tmp_path / "a.csv")
    assert isinstance(skipped, Skipped) and "more cells than columns: [' dogs and mice.']" in skipped.detail
    assert asked([kept]) == ["Of cats, and dogs."]


def test_a_parquet_file_with_two_columns_of_a_name_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt", "prompt"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet has 2 columns 'prompt'"):
        read(tmp_path / "a.parquet")


def test_a_parquet_file_with_text_that_is_not_utf8_is_one_line(tmp_path):
    cells = pa.array([b"good", b"bad \xff"])
    text = pa.Array.from_buffers(pa.string(), len(cells), cells.buffers())
    pq.write_table(pa.table({"prompt": text}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet cannot be read after 0 rows: 'utf-8' codec"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(("name", "content", "reason"), [
    ("a.parquet", b"PAR1 no", r"a\.parquet cannot be read after 0 rows"),
    ("a.json", b"{", r"a\.json is no JSON \(.*called \.jsonl"),
    ("a.json", b"{}", r"a\.json holds dict, not a list of records"),
    ("a.csv", b"prompt\n\xff\xfe", r"a\.csv cannot be read as UTF-8 CSV"),
    ("a.jsonl", b"\n\n", r"a\.jsonl holds no prompts"),
    ("a.csv", b"prompt\n", r"a\.csv holds no prompts"),
    ("a.csv", b'prompt\none\n"never closed\ntwo\n', r"a\.csv cannot be read .*, after 1 rows: unexpected end"),
    ("a.csv", b"prompt,x,prompt\na,b,c\n", r"a\.csv has 2 columns 'prompt'; give them different names"),
    ("a.json", b"[" * 10**5, r"a\.json is no JSON \(maximum recursion"),
    ("a.jsonl.gz", b"{}", r"a\.jsonl\.gz cannot be read after 0 lines: Not a gzipped file"),
    ("a.jsonl.gz", gzip.compress(b"{}\n" * 9, mtime=0)[:-9], r"a\.jsonl\.gz cannot be read after \d lines: Compressed"),
    ("a.csv.gz", gzip.compress(b"prompt\nx\n", mtime=0)[:-9], r"a\.csv\.gz cannot be read as UTF-8 CSV .*: Compressed"),
    ("a.json.gz", gzip.compress(b"[]", mtime=0)[:12] + b"\xff" * 9, r"a\.json\.gz cannot be read: .*"),
])
def test_a_source_that_cannot_be_read_is_one_line(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_data_set_that_is_nowhere_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"path='no/where', subset=None, split=train cannot be read") as error:
        read("no/where")
    assert "\n" not in str(error.value)
    datasets.Dataset.from_list([CHAT]).to_parquet(str(tmp_path / "train.parquet"))
    with pytest.raises(ConfigError, match=r"split=tset cannot be read after 0 rows: Unknown split"):
        read(tmp_path, split="tset")
    with pytest.raises(ConfigError, match=r"there is no prompt file '.*absent\.csv'"):
        check_sources(GenerationConfig(sources=[SourceConfig(path=str(tmp_path / "absent.csv"))]))


@pytest.mark.parametrize("name", ["p.jsonl", "p.csv", "p.json"])
def test_a_disk_that_fails_while_a_file_is_read_is_one_line(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"x" * 9)
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *args, **kwargs: opened(
        Path("/proc/self/mem") if path.name == name else path, *args, **kwargs))  # reading it from its start is EIO
    with pytest.raises(ConfigError, match=rf"{name} cannot be read.*Input/output error") as error:
        read(tmp_path / name)
    assert "\n" not in str(error.value)


def test_a_data_set_that_is_damaged_is_one_line(tmp_path, monkeypatch):
    """Damage that loading it shows, damage that only reading its rows shows, columns of no use."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    data = datasets.Dataset.from_list([{"prompt": f"{n} " + "x" * 500} for n in range(3000)])
    for name in ("json.gz", "parquet"):
        (tmp_path / name).mkdir()
    data.to_json(str(tmp_path / "json.gz" / "a.jsonl.gz"), compression="gzip")
    data.to_parquet(str(tmp_path / "parquet" / "a.parquet"))
    for name, reason in (("json.gz", "Compressed file ended"), ("parquet", "")):
        (file,) = (tmp_path / name).iterdir()
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
        with pytest.raises(ConfigError, match=rf"path='.*{name}', .* cannot be read after 0 rows: .*{reason}") as error:
            read(tmp_path / name)
        assert "\n" not in str(error.value)
    data.save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] = 0xFF
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"saved', .* cannot be read after 1\d\d\d rows: 'utf-8' codec"):
        read(tmp_path / "saved")
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").touch()
    with pytest.raises(ConfigError, match=r"script', .* cannot be read after 0 rows: Dataset scripts are no longer"):
        read(tmp_path / "script")
    data.rename_column("prompt", "text").save_to_disk(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match=r"other has the columns text; expected one of messages, conversations"):
        read(tmp_path / "other")


def test_pictures_beside_the_prompts_are_not_decoded(tmp_path):
    data = datasets.Dataset.from_dict({"prompt": ["a", "b"], "image": [{"bytes": b"no picture", "path": None}] * 2})
    data.cast_column("image", datasets.Image()).save_to_disk(str(tmp_path / "saved"))
    assert asked(read(tmp_path / "saved")) == ["a", "b"]


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(data_gen.prompts, "LONGEST_LINE", 1000)
    lines = [json.dumps({"prompt": text}).encode() for text in ("a", "b" * 985, "c" * 987, "d" * 5000, "e")]
    assert [len(line) for line in lines[1:3]] == [999, 1001]  # without the line's end
    for end in (b"\n", b""):
        (tmp_path / "p.jsonl").write_bytes(b"\n".join(lines) + end)
        found = read(tmp_path / "p.jsonl")
        assert [text[0] for text in asked(found)] == ["a", "b", "e"]
        assert [(each.reason, each.detail, each.id.split(", ")[1]) for each in found if isinstance(each, Skipped)] == [
            ("unreadable", "longer than 1000 bytes", f"line {number}") for number in (3, 4)]


LARGE = """
import resource, sys
from data_gen.sources import read_source
from specvocab_model.config import SourceConfig
import datasets, pyarrow.parquet, numpy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sys.argv[1:]:
    count = sum(len(prompt.messages[0]["content"]) for prompt in read_source(SourceConfig(path=path), keep=False))
    print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_file_is_never_in_memory_as_a_whole(tmp_path):
    records = [{"prompt": f"{number} " + "x" * 200_000} for number in range(400)]  # 80 MB
    paths = [tmp_path / name for name in ("large.jsonl", "large.csv", "large.jsonl.gz", "large.parquet")]
    paths[0].write_text("".join(json.dumps(record) + "\n" for record in records))
    paths[1].write_text("prompt\n" + "".join(record["prompt"] + "\n" for record in records))
    paths[2].write_bytes(gzip.compress(paths[0].read_bytes(), compresslevel=1))
    pq.write_table(pa.Table.from_pylist(records), paths[3], row_group_size=20)
    result = subprocess.run([sys.executable, "-c", LARGE, *map(str, paths)], env=ENVIRONMENT, capture_output=True,
                            text=True, check=True)
    counts = [list(map(int, line.split())) for line in result.stdout.splitlines()]
    assert len(counts) == 4 and all(count > 80_000_000 and megabytes < 60 for count, megabytes in counts), counts


# ---- the choice ----


def configured(root: Path, *changes: str):
    jsonl(root / "eval.jsonl", {"prompt": "Held out?"})
    return config_of(["+experiment=quickstart", "generation.prompt_files=[]", f"eval.prompts={root}/eval.jsonl",
                      "generation.magpie_prompts=0", "generation.validation_fraction=0",
                      f"data.train_path={root}/train", f"data.validation_path={root}/validation", *changes])


@cache
def configured_once():
    return config_of(["+experiment=quickstart"])


def collected(root: Path, *changes: str) -> tuple[list[Prompt], dict[str, int]]:
    config = configured(root, *changes)
    evaluation = read(root / "eval.jsonl")
    assert collect(config, [], {}, evaluation) == read_counts(config)
    return list(PromptStore(root / "train-prompts" / TRAIN_FILE)), read_counts(config)


def test_each_prompt_is_taken_once_and_what_is_not_is_listed(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x", "id": 1}, {"prompt": "x", "id": 2}, {"prompt": "held OUT?"},
                 {"prompt": "la " * 60}, {"prompt": "y", "id": 1}, {"oops": 1},
                 *({"prompt": str(n)} for n in range(40)))
    other = jsonl(tmp_path / "b.jsonl", {"prompt": "z", "id": 1})
    prompts, counts = collected(tmp_path, f"generation.prompt_files=[{path},{other}]", "generation.max_repetition=0.5",
                                "generation.max_rejected_share=0.1")
    assert [prompt.id for prompt in prompts if len(prompt.id) < 10] == ["1", "b:1"]
    assert counts == {"read": 47, "duplicate": 1, "held out for evaluation": 1, "repetitive question": 1, "id taken": 1,
                      "malformed": 1}
    listed = [json.loads(line) for line in (tmp_path / "train-prompts" / "rejected.jsonl").read_text().splitlines()]
    assert [each["reason"] for each in listed] == list(counts)[1:]
    assert listed[-1]["id"].endswith("a.jsonl, line 6") and "expected one of the keys" in listed[-1]["detail"]


def test_prompts_that_templates_may_show_alike_are_asked_once(tmp_path):
    def calling(number: str) -> list[dict]:
        return [USER, {"role": "assistant", "tool_calls": [{"id": number, "function": {"name": "f", "arguments": {}}}]},
                {"role": "tool", "content": "2", "tool_call_id": number}]

    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x", "id": "x"}, {"prompt": " x\n", "id": "trimmed"},
                 {"messages": calling("1"), "id": "f"}, {"messages": calling("2"), "id": "other call"},
                 {"turns": ["x", "x"], "id": "more"}, {"prompt": "no id", "id": ""}, {"prompt": "nor here", "id": ""})
    prompts, counts = collected(tmp_path, f"generation.prompt_files=[{path}]")
    assert [prompt.id for prompt in prompts][:3] == ["x", "f", "more"] and len(prompts) == 5
    assert counts == {"read": 7, "duplicate": 2}


def test_parts_of_one_data_set_may_all_count_from_0(tmp_path):
    paths = [tmp_path / name / "train.jsonl" for name in "abc"]
    for path in paths:
        path.parent.mkdir()
        jsonl(path, {"id": 0, "prompt": str(path)})
    prompts, counts = collected(tmp_path, f"generation.prompt_files=[{','.join(map(str, paths))}]")
    assert [prompt.id for prompt in prompts] == ["0", "train:0", "train:2:0"] and counts == {"read": 3}
    twice = jsonl(tmp_path / "t.jsonl", {"id": 0, "prompt": "y"}, {"id": 0, "prompt": "z"})
    _, counts = collected(tmp_path, f"generation.prompt_files=[{paths[0]},{twice}]", "generation.max_rejected_share=1")
    assert counts == {"read": 3, "id taken": 1}


def test_parts_of_one_data_set_are_counted_apart_in_a_mixture(tmp_path):
    datasets.DatasetDict({split: datasets.Dataset.from_list([{"prompt": f"{split} {n}"} for n in range(9)])
                          for split in ("train", "other")}).save_to_disk(str(tmp_path / "saved"))
    _, counts = collected(tmp_path, f"generation.sources=[{{path: {tmp_path}/saved, weight: 3}},"
                                    f"{{path: {tmp_path}/saved, split: other, weight: 1}}]")
    assert counts == {"read": 18, f"of {tmp_path}/saved in the mixture": 9,
                      f"of {tmp_path}/saved other in the mixture": 3}


def test_too_many_malformed_records_stop_the_run(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "x"}, {"oops": 1}, *({"prompt": str(n)} for n in range(8)))
    share = f"generation.prompt_files=[{path}]", "generation.max_rejected_share=0.1"
    assert len(collected(tmp_path, *share)[0]) == 9
    with pytest.raises(ConfigError, match=r"1 of 10 prompts were rejected, more than generation.max_rejected_share="
                                          r"0.05; all are listed in .*rejected\.jsonl, the first is .*, line 2: exp"):
        collected(tmp_path, share[0])


def test_no_id_is_one_that_a_row_of_another_prompt_may_get(tmp_path):
    """A template that rewrites turns makes rows a#1 and a#2 of a; samples are called a~0 and a~1."""
    ids = ["a", "a#1", "b~0#2", "b", "c#1", "c#2", "d\n~1", "d\n", "e#x", "e", "a~", "g#1#2", "g#1"]
    path = jsonl(tmp_path / "f.jsonl", *({"prompt": str(n), "id": name} for n, name in enumerate(ids)))
    other = jsonl(tmp_path / "o.jsonl", {"prompt": "x", "id": "a~3"})
    prompts, counts = collected(tmp_path, f"generation.prompt_files=[{path},{other}]")
    assert [prompt.id for prompt in prompts] == [
        "a", "f:a#1", "b~0#2", "f:b", "c#1", "c#2", "d\n~1", "f:d\n", "e#x", "e", "a~", "g#1#2", "f:g#1", "o:a~3"]
    assert counts == {"read": 14}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.sampled_from(["a", "b", "~0", "#1", "#2", "a:"]), min_size=1, max_size=4).map(
    "".join), st.sampled_from("ab")), max_size=12))
def test_ids_of_samples_and_rows_never_meet(named):
    config = configured_once()
    chooser = data_gen.collect._Chooser(config, [])
    chosen = []
    for number, (name, source) in enumerate(named):
        each = Prompt(id=name, source=source, category="c", messages=({"role": "user", "content": str(number)},))
        if taken := chooser.choose(each, 0):
            chosen.append(taken.id)
    rows = [f"{name}{sample}{row}" for name in chosen for sample in ("", "~0", "~1") for row in ("", "#1", "#2")]
    assert len(set(rows)) == len(rows)


def test_samples_stay_on_their_side_of_the_split(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": str(n)} for n in range(60)))
    changes = (f"generation.prompt_files=[{path}]", "generation.validation_fraction=0.3")
    once = {prompt.id for prompt in collected(tmp_path, *changes)[0]}
    train, _ = collected(tmp_path, *changes, "generation.samples_per_prompt=3", "generation.temperature=1")
    validation = list(PromptStore(tmp_path / "train-prompts" / VALIDATION_FILE))
    assert Counter(prompt.id.split("~")[0] for prompt in train) == dict.fromkeys(once, 3)
    assert len({prompt.id for prompt in train + validation}) == 180
    with pytest.raises(ConfigError, match="would give the same answer so many times"):
        configured(tmp_path, "generation.samples_per_prompt=3")


def test_processes_that_choose_at_the_same_time_do_not_take_each_others_files(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": str(n)} for n in range(9)))
    changes = f"generation.prompt_files=[{path}]",
    split = data_gen.collect._split

    def another_first(*arguments):
        monkeypatch.setattr(data_gen.collect, "_split", split)
        collected(tmp_path, *changes)
        split(*arguments)

    monkeypatch.setattr(data_gen.collect, "_split", another_first)
    assert len(collected(tmp_path, *changes)[0]) == 9
    files = list((tmp_path / "train-prompts").iterdir())
    assert {file.name for file in files} == {TRAIN_FILE, VALIDATION_FILE, "counts.json", "rejected.jsonl"}
    before = [file.stat().st_ino for file in files]
    (tmp_path / "train-prompts" / ".chosen.arrow.tmp").touch()  # of a killed process
    os.utime(tmp_path / "train-prompts" / ".chosen.arrow.tmp", (0, 0))
    collected(tmp_path, *changes)
    assert [file.stat().st_ino for file in files] == before, "whoever has it mapped keeps it"
    assert {*(tmp_path / "train-prompts").iterdir()} == {*files}


def test_a_mixture_has_the_weights_shares(tmp_path):
    paths = [jsonl(tmp_path / f"{name}.jsonl", *({"prompt": f"{name} {n}", "source": name} for n in range(size)))
             for name, size in (("a", 300), ("b", 60), ("c", 100))]
    sources = ",".join(f"{{path: {path}, weight: {weight}}}" for path, weight in zip(paths, (3, 1, 1), strict=True))
    prompts, counts = collected(tmp_path, f"generation.sources=[{sources}]")
    assert Counter(prompt.source for prompt in prompts) == {"a": 180, "b": 60, "c": 60}, "b is used up"
    assert counts[f"of {paths[0]} in the mixture"] == 180
    head = Counter(prompt.source for prompt in prompts[:50])
    assert abs(head["a"] - 30) <= 2, "evenly interleaved"
    again, _ = collected(tmp_path, f"generation.sources=[{sources}]")
    other, _ = collected(tmp_path, f"generation.sources=[{sources}]", "seed=1")
    assert again == prompts and other != prompts
    fewer, _ = collected(tmp_path, f"generation.sources=[{sources}]", "generation.num_prompts=50")
    assert Counter(prompt.source for prompt in fewer) == {"a": 30, "b": 10, "c": 10}
    with pytest.raises(ConfigError, match="a weight to every source, or to none"):
        configured(tmp_path, f"generation.sources=[{{path: {paths[0]}, weight: 1}}, {{path: {paths[1]}}}]")
    with pytest.raises(ConfigError, match="cannot be mixed by weight"):
        mixture([np.arange(3), np.arange(0)], [1, 1], None, 0)


def test_near_duplicates_go_and_the_first_stays(tmp_path):
    words = [f"w{n}" for n in range(200)]
    near = [*words[:199], "other"]
    path = jsonl(tmp_path / "a.jsonl", {"prompt": " ".join(words), "id": "first"}, {"prompt": "short one", "id": "s"},
                 {"prompt": " ".join(near), "id": "near"}, {"prompt": " ".join(words[:100]), "id": "half"})
    changes = (f"generation.prompt_files=[{path}]", "generation.near_duplicate_threshold=0.8")
    prompts, counts = collected(tmp_path, *changes)
    assert [prompt.id for prompt in prompts] == ["first", "s", "half"] and counts["near-duplicate"] == 1
    line = json.loads((tmp_path / "train-prompts" / "rejected.jsonl").read_text())
    assert (line["id"], line["detail"], line["by_choice"]) == ("near", "of first", True)


# ---- filters ----


def jaccard_by_hand(first: str, second: str) -> float:
    a, b = ({tuple(words[at : at + 5]) for at in range(max(1, len(words) - 4))}
            for words in (first.split(), second.split()))
    return len(a & b) / len(a | b)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=30), st.lists(st.sampled_from("abcd"), min_size=1,
                                                                           max_size=30))
def test_similarity_is_that_of_word_runs(first, second):
    first_text, second_text = " ".join(first), " ".join(second)
    assert jaccard(shingles(first_text), shingles(second_text)) == jaccard_by_hand(first_text, second_text)


def test_minhash_finds_what_the_slow_comparison_finds():
    random = np.random.default_rng(1)
    texts: list[list[str]] = []
    for _ in range(60):
        base = [f"w{n}" for n in random.integers(0, 5000, size=80)]
        for num_changes in (0, 1, 2, 4, 8, 40):
            changed = list(base)
            for place in random.choice(80, num_changes, replace=False):
                changed[place] = "changed"
            texts.append(changed)
    joined = [" ".join(words) for words in texts]
    finder = NearDuplicates(0.8)
    for text in joined:
        finder.add(text)
    found = finder.found(joined.__getitem__)
    kept: list[int] = []
    slow = {}
    for index, text in enumerate(joined):
        group = [at for at in kept if at // 6 == index // 6]  # the others share nothing
        original = next((at for at in group if jaccard_by_hand(text, joined[at]) >= 0.8), None)
        if original is None:
            kept.append(index)
        else:
            slow[index] = original
    assert 60 <= len(slow) < 300
    assert found.keys() <= slow.keys(), "nothing is dropped by mistake"
    assert len(found) >= 0.98 * len(slow)
    again = NearDuplicates(0.8)
    for text in joined:
        again.add(text)
    assert again.found(joined.__getitem__) == found
    assert NearDuplicates(0.5).found(joined.__getitem__) == {}


def test_repetition():
    assert repetition([]) == repetition(list(range(7))) == repetition(list(range(100))) == 0
    assert repetition([1, 2, 3] * 100) == 1 - 3 / 293
    assert repetition(list("abcdefghi" * 2)) == 1 - 9 / 11


# ---- the store ----


def test_a_store_gives_back_what_was_written(tmp_path):
    prompts = [parse_prompt({"id": f"a/b c={n}", "turns": [f"é {n}", "more"], "tools": [{"n": n}]}, "s")
               for n in range(2500)]
    with prompt_writer(tmp_path / "p.arrow") as add:
        for prompt in prompts:
            add(prompt)
    store = PromptStore(tmp_path / "p.arrow")
    assert len(store) == 2500 and list(store) == prompts
    assert store[1020:1030] == prompts[1020:1030] and store[7] == prompts[7] and store[2499:] == prompts[2499:]
    assert store.digest == prompts_digest((prompt.id, prompt.digest) for prompt in prompts)
    with pytest.raises(RuntimeError), prompt_writer(tmp_path / "q.arrow") as add:
        add(prompts[0])
        raise RuntimeError
    assert [path.name for path in tmp_path.iterdir()] == ["p.arrow"]
