"""Shards: rows come back as written, bad rows and other settings are refused, and a killed writer loses nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import data_gen.shards
from data_gen.files import appearing_whole
from data_gen.rows import Skipped, validate_row, validate_rows
from data_gen.shards import (
    MANIFEST_FILE,
    UNFINISHED_FILE,
    Row,
    ShardWriter,
    damaged_shards,
    load_rows,
    read_manifest,
    read_shard,
    supervised_ids,
)
from specvocab_model.config import ConfigError

ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
VOCAB_SIZE, STOP = 50, (7, 9)
SETTINGS = {"target": {"fingerprint": "f"}, "sampling": {"temperature": 0.5, "stop_token_ids": STOP}}
GOOD = Row(id="r", source="s", input_ids=[1, 2, 3, 7], loss_mask=[0, 0, 1, 1], finish_reason="stop")


def writer(folder, num_prompts=10, rows_per_shard=4, **changes) -> ShardWriter:
    return ShardWriter(folder, target="t", settings=SETTINGS | changes, num_prompts=num_prompts,
                       rows_per_shard=rows_per_shard, vocab_size=VOCAB_SIZE, stop_token_ids=STOP)


def rows_for(count: int) -> list[Row]:
    return [replace(GOOD, id=f"a/b c={number}", messages=[{"role": "user", "content": f"é {number}"}])
            for number in range(count)]


def finish(shard_writer: ShardWriter, rows: list[Row]):
    if manifest := shard_writer.open():
        return manifest
    for index in shard_writer.missing_shards():
        shard_writer.write(index, rows[shard_writer.prompt_range(index)])
    return shard_writer.finalise()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def test_importing_it_loads_neither_torch_nor_transformers():
    heavy = {"torch", "transformers", "datasets"}
    code = f"import sys, data_gen.shards, data_gen.prompts; print({heavy} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert result.stdout.strip() == "set()"


prompt_ids = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8)
response_ids = st.lists(st.integers(0, VOCAB_SIZE - 1).filter(lambda token: token not in STOP), min_size=1, max_size=8)
messages = st.none() | st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]),
                                                       "content": st.text(st.characters(codec="utf-8"))}), max_size=2)
texts = st.text(st.characters(codec="utf-8"), max_size=6)


@st.composite
def row_lists(draw) -> list[Row]:
    ids = draw(st.lists(texts, unique=True, max_size=9))
    rows = []
    for row_id in ids:
        prompt, response, stop = draw(prompt_ids), draw(response_ids), draw(st.sampled_from([None, *STOP]))
        response = response if stop is None else [*response, stop]
        rows.append(Row(id=row_id, source=draw(texts), input_ids=prompt + response,
                        loss_mask=[0] * len(prompt) + [1] * len(response),
                        finish_reason="length" if stop is None else "stop", messages=draw(messages)))
    return rows


@settings(max_examples=15, deadline=None)
@given(rows=row_lists(), rows_per_shard=st.integers(1, 4), data=st.data())
def test_rows_come_back_whichever_shards_were_there_before(rows, rows_per_shard, data):
    with tempfile.TemporaryDirectory() as root:
        begun = writer(Path(root, "a"), len(rows), rows_per_shard)
        begun.open()
        for index in data.draw(st.permutations(range(begun.num_shards)).flatmap(
                lambda order: st.integers(0, len(order)).map(lambda count: order[:count]))):
            begun.write(index, rows[begun.prompt_range(index)])
        manifest = finish(writer(Path(root, "a"), len(rows), rows_per_shard), rows)
        assert finish(writer(Path(root, "b"), len(rows), rows_per_shard), rows) == manifest
        assert files(Path(root, "a")) == files(Path(root, "b"))

        loaded = load_rows(Path(root, "a")).to_list()
        assert [{**row, "messages": row["messages"] and json.loads(row["messages"])} for row in loaded] == [
            {"id": row.id, "source": row.source, "input_ids": row.input_ids, "loss_mask": row.loss_mask,
             "num_loss_tokens": sum(row.loss_mask), "finish_reason": row.finish_reason,
             "messages": None if row.messages is None else row.messages} for row in rows]
        assert (manifest.num_rows, manifest.num_tokens, manifest.num_loss_tokens) == (
            len(rows), sum(len(row.input_ids) for row in rows), sum(sum(row.loss_mask) for row in rows))
        assert sum(manifest.finish_reasons.values()) == len(rows)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss_mask": [0, 0, 1]}, "3 entries for 4 ids"),
        ({"loss_mask": [0, 0, 2, 1]}, "something else than 0 and 1"),
        ({"loss_mask": [0, 0, 0, 0]}, "no token is marked"),
        ({"loss_mask": [1, 1, 1, 1]}, "nothing predicts it"),
        ({"input_ids": [1, 2, 50, 7]}, r"outside \[0, 50\)"),
        ({"input_ids": [1, -1, 3, 7]}, r"outside \[0, 50\)"),
        ({"finish_reason": "abort"}, "'abort' is none of"),
        ({"finish_reason": "length"}, r"finish_reason is 'length', but the last response token is \[7\]"),
        ({"input_ids": [1, 2, 3, 4]}, r"finish_reason is 'stop', but the last response token is \[4\]"),
        ({"input_ids": [1, 2, 9, 7]}, r"stop tokens \[9\] lie inside"),
        ({"input_ids": [], "loss_mask": []}, "no token is marked"),
    ],
)
def test_a_row_that_contradicts_itself_is_refused_and_leaves_no_file(tmp_path, changes, reason):
    shard_writer = writer(tmp_path)
    shard_writer.open()
    with pytest.raises(ValueError, match=f"row 'r': .*{reason}"):
        shard_writer.write(0, [replace(GOOD, **changes)])
    assert list(tmp_path.glob("*shard*")) == []


numbers = st.lists(st.sampled_from([-1, 0, 1, 2, 7, 9, VOCAB_SIZE - 1, VOCAB_SIZE]), max_size=5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(numbers, st.lists(st.sampled_from([0, 0, 1, 1, 1, 2, -1]), max_size=5),
                          st.sampled_from(["stop", "length", "abort"])), max_size=4), st.data())
def test_rows_are_refused_together_as_they_are_one_by_one(parts, data):
    rows = [Row(id=f"{number}", source="", input_ids=ids, loss_mask=mask, finish_reason=reason)
            for number, (ids, mask, reason) in enumerate(parts)]
    rows.insert(data.draw(st.integers(0, len(rows))), GOOD)

    def refusal(validate) -> str:
        try:
            validate()
        except ValueError as error:
            return str(error)
        return ""

    rules = {"vocab_size": VOCAB_SIZE, "stop_token_ids": frozenset(STOP)}
    one_by_one = refusal(lambda: [validate_row(row, **rules) for row in rows])
    assert refusal(lambda: validate_rows(rows, **rules)) == one_by_one
    validate_rows([GOOD, GOOD], **rules)
    validate_rows([], **rules)


def test_shards_of_many_rows_are_what_they_would_be_in_one_piece(tmp_path, monkeypatch):
    rows = rows_for(10)
    for name, at_once in (("parts", 3), ("whole", 100)):
        monkeypatch.setattr(data_gen.shards, "ROWS_AT_ONCE", at_once)
        shard_writer = writer(tmp_path / name, 10, 10)
        shard_writer.open()
        skipped = [Skipped(id="s", reason="r")]
        parts = sum(1 for _ in shard_writer.write_in_parts(0, rows, skipped))
        assert parts == (3 if name == "parts" else 0)
        assert shard_writer.skipped() == skipped
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


def test_of_two_workers_that_made_a_shard_the_first_is_kept(tmp_path):
    first, second = writer(tmp_path), writer(tmp_path)
    for each in (first, second):
        each.open()
    finish(first, rows_for(10))
    before = files(tmp_path)
    second.write(1, [replace(row, input_ids=[5, 2, 3, 7]) for row in rows_for(8)[4:]])
    assert files(tmp_path) == before and len(load_rows(tmp_path)) == 10


def test_stop_tokens_in_the_prompt_are_ordinary(tmp_path):
    shard_writer = writer(tmp_path, num_prompts=1)
    shard_writer.open()
    shard_writer.write(0, [replace(GOOD, input_ids=[7, 9, 3, 7])])
    assert shard_writer.missing_shards() == []


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_by_name(tmp_path, finished):
    shard_writer, rows = writer(tmp_path), rows_for(10)
    shard_writer.open()
    shard_writer.write(0, rows[:4])
    if finished:
        finish(shard_writer, rows)
    before = files(tmp_path)
    with pytest.raises(ConfigError) as error:
        writer(tmp_path, sampling={"temperature": 0.0, "stop_token_ids": STOP}, extra=1).open()
    message = str(error.value)
    assert "extra was None and is now 1, sampling.temperature was 0.5 and is now 0.0." in message
    assert f"rm -r {tmp_path}" in message and "\n" not in message
    assert "stop_token_ids" not in message
    assert files(tmp_path) == before
    assert (writer(tmp_path).open() is not None) == finished


def test_shards_of_unknown_origin_are_refused(tmp_path):
    finish(writer(tmp_path), rows_for(10))
    (tmp_path / MANIFEST_FILE).unlink()
    with pytest.raises(ConfigError, match=r"shard-00000\.parquet but no manifest"):
        writer(tmp_path).open()


def test_doubled_ids_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="1 row ids appear more than once, first 'a/b c=3'"):
        finish(writer(tmp_path), [*rows_for(9), rows_for(4)[3]])
    assert not (tmp_path / MANIFEST_FILE).exists()


def test_reading_what_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"absent has no data; make it with `python data_gen/main\.py seed=1`"):
        load_rows(tmp_path / "absent", command="python data_gen/main.py seed=1")
    writer(tmp_path).open()
    with pytest.raises(ConfigError, match=r"is not finished; continue it with `python data_gen/main\.py "):
        read_manifest(tmp_path)


@pytest.mark.parametrize("below", ["", "data/train"])
def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path, below):
    (tmp_path / "file").touch()
    for use in (read_manifest, load_rows, lambda folder: writer(folder).open()):
        with pytest.raises(ConfigError, match=r"/file is a file; name a folder"):
            use(tmp_path / "file" / below)


def test_a_shard_that_is_not_as_described_is_refused(tmp_path):
    finish(writer(tmp_path), rows_for(10))
    shard = tmp_path / "shard-00001.parquet"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    for read in (lambda: load_rows(tmp_path), lambda: writer(tmp_path).open()):
        with pytest.raises(ConfigError, match=rf"has {len(content) - 1} bytes instead of {len(content)}; delete"):
            read()
    shard.unlink()  # what the message says
    with pytest.raises(ConfigError, match=r"00001\.parquet is missing; make it again with `python data_gen"):
        load_rows(tmp_path)
    before = files(tmp_path)[MANIFEST_FILE]
    assert writer(tmp_path).open() is None, "it is not finished, whatever the manifest says"
    assert writer(tmp_path).missing_shards() == [1]
    finish(writer(tmp_path), rows_for(10))
    assert shard.read_bytes() == content and len(load_rows(tmp_path)) == 10
    assert files(tmp_path)[MANIFEST_FILE] == before


def test_flipped_bytes_end_in_one_line_that_names_the_shard(tmp_path):
    """Wherever they are: reading never gives another row, nor a traceback."""
    finish(writer(tmp_path), rows_for(10))
    shard = tmp_path / "shard-00001.parquet"
    content = shard.read_bytes()
    manifest = read_manifest(tmp_path)
    whole = read_shard(shard)
    refused = 0
    for place in range(0, len(content), 23):
        shard.write_bytes(content[:place] + bytes([content[place] ^ 0x5A]) + content[place + 1 :])
        assert damaged_shards(tmp_path, manifest) == [shard.name]
        try:
            assert read_shard(shard).num_rows == whole.num_rows
        except ConfigError as error:
            refused += 1
            assert f"{shard} is damaged (" in str(error) and "\n" not in str(error)
    assert refused > len(content) // 46
    shard.write_bytes(b"x" * len(content))
    with pytest.raises(ConfigError, match=r"cannot be read; damaged: shard-00001\.parquet\. Delete these, and make"):
        load_rows(tmp_path)


def test_a_damaged_shard_stops_the_run_that_would_finish_the_folder(tmp_path):
    shard_writer, rows = writer(tmp_path), rows_for(10)
    shard_writer.open()
    (tmp_path / "shard-00001.parquet").write_bytes(b"not parquet")
    with pytest.raises(ConfigError, match=r"shard-00001\.parquet is damaged .*; delete it, and make it again"):
        finish(shard_writer, rows)
    assert not (tmp_path / MANIFEST_FILE).exists()


def edited(content: dict, **changes) -> str:
    return json.dumps({**content, **changes})


@pytest.mark.parametrize(("edit", "reason"), [
    (lambda content: "", r"manifest\.json is damaged \(Expecting value"),
    (lambda content: edited(content)[:-20], r"manifest\.json is damaged \("),
    (lambda content: "[]", r"manifest\.json is damaged \(it holds no settings\)"),
    (lambda content: edited(content, settings=None), r"manifest\.json is damaged \(it holds no settings\)"),
    (lambda content: edited(content, settings={}), r"manifest\.json is damaged \(KeyError: 'target'\)"),
    (lambda content: edited(content, shards=None), r"manifest\.json is damaged \(TypeError"),
    (lambda content: edited(content, shards=[{"file": "x"}]), r"manifest\.json is damaged \(TypeError"),
    (lambda content: edited(content, extra=1), r"manifest\.json is damaged \(TypeError"),
    (lambda content: edited(content, num_rows=11), r"damaged \(num_rows is 11, and there are 10\)"),
    (lambda content: edited(content, schema_version=None), "has schema version None"),
    (lambda content: "\ud800".encode("utf-8", "surrogatepass"), r"manifest\.json is damaged \(.*utf-8"),
])
def test_an_edited_manifest_is_one_line(tmp_path, edit, reason):
    finish(writer(tmp_path), rows_for(10))
    path = tmp_path / MANIFEST_FILE
    changed = edit(json.loads(path.read_text()))
    path.write_bytes(changed.encode() if isinstance(changed, str) else changed)
    with pytest.raises(ConfigError, match=reason) as error:
        load_rows(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "{", '"text"', "{}"])
def test_an_unfinished_manifest_that_is_damaged_is_one_line(tmp_path, content):
    writer(tmp_path).open()
    (tmp_path / UNFINISHED_FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"unfinished\.json is damaged \(.*restore it, or delete the folder"):
        writer(tmp_path).open()


FULL_DISK = """
import resource, signal, sys
from tests.data_gen.test_shards import finish, rows_for, writer
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write past the limit fails as it does on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
finish(writer(sys.argv[1], num_prompts=200, rows_per_shard=200), rows_for(200))
"""


def test_a_disk_that_takes_no_more_is_one_line(tmp_path):
    result = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True,
                            env=ENVIRONMENT)
    last = result.stderr.splitlines()[-1]
    assert "ConfigError: cannot write " in last and "shard-00000.parquet: " in last and "start again" in last
    assert [path.name for path in tmp_path.iterdir()] == [UNFINISHED_FILE], "no half a shard"
    shard_writer = writer(tmp_path, num_prompts=200, rows_per_shard=200)
    assert finish(shard_writer, rows_for(200)).num_rows == 200


def test_what_fails_while_content_is_made_is_not_called_a_full_disk(tmp_path):
    with pytest.raises(OSError, match="cannot read the data"), appearing_whole(tmp_path / "file") as file:
        file.write(b"x")
        raise OSError(errno.EIO, "cannot read the data")
    with pytest.raises(ConfigError, match=r"cannot write /proc/none/file: No such file"), appearing_whole(
            Path("/proc/none/file")):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot make the folder /proc/none: .*; name another"):
        writer("/proc/none").open()


def test_what_was_skipped_travels_with_its_shard(tmp_path):
    shard_writer = writer(tmp_path)
    shard_writer.open()
    skipped = [Skipped(id="half \ud83d", reason="unreadable", detail="é"), Skipped(id="b", reason="prompt too long",
                                                                                by_choice=True, turn=2)]
    rows = rows_for(10)
    shard_writer.write(0, rows[:4], skipped)
    shard_writer.write(1, [], [replace(skipped[1], id="c")])
    shard_writer.write(2, rows[8:])
    manifest = shard_writer.finalise()
    assert manifest.skipped == {"prompt too long": 2, "unreadable": 1} and manifest.num_rows == 6
    listed = [json.loads(line) for line in (tmp_path / "rejected.jsonl").read_text().splitlines()]
    assert [(each["id"], each["turn"]) for each in listed] == [("half \ud83d", 0), ("b", 2), ("c", 2)]
    assert load_rows(tmp_path)["id"][:] == [row.id for row in rows[:4] + rows[8:]]


def test_another_schema_version_is_refused(tmp_path):
    finish(writer(tmp_path), rows_for(10))
    content = json.loads((tmp_path / MANIFEST_FILE).read_text())
    (tmp_path / MANIFEST_FILE).write_text(json.dumps(content | {"schema_version": 0}))
    with pytest.raises(ConfigError, match="has schema version 0, this code reads 1"):
        read_manifest(tmp_path)


WRITE_FOR_EVER = """
import sys
from tests.data_gen.test_shards import finish, rows_for, writer
shard_writer = writer(sys.argv[1], num_prompts=1000, rows_per_shard=10)
print("ready", flush=True)
finish(shard_writer, rows_for(1000))
"""


@pytest.mark.parametrize("seconds", [0.01, 0.1])
def test_a_killed_writer_leaves_whole_shards_only(tmp_path, seconds):
    with subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE,
                          env=ENVIRONMENT) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    shard_writer, rows = writer(tmp_path, num_prompts=1000, rows_per_shard=10), rows_for(1000)
    assert len(shard_writer.missing_shards()) > 0, "killed too late to test anything"
    for name, age in (("dead", 7200), ("alive", 0)):
        half_written = tmp_path / f".shard-00099.parquet.{name}.tmp"
        half_written.write_bytes(b"half a sha")
        os.utime(half_written, (time.time() - age,) * 2)
    finish(shard_writer, rows)
    assert load_rows(tmp_path)["id"][:] == [row.id for row in rows]
    (tmp_path / ".shard-00099.parquet.alive.tmp").unlink()  # of a process that may still write it: not taken away
    of_the_killed = {name for name in files(tmp_path) if name.endswith(".tmp")}
    assert len(of_the_killed) <= 1 and ".shard-00099.parquet.dead.tmp" not in of_the_killed
    assert sorted(files(tmp_path).keys() - of_the_killed) == [
        MANIFEST_FILE, *(f"shard-{index:05d}.parquet" for index in range(100))]


def test_supervised_ids_are_those_under_the_mask_shard_by_shard(tmp_path):
    first = replace(GOOD, id="a", input_ids=[1, 2, 3, 8, 3, 7], loss_mask=[0, 0, 1, 1, 1, 1])
    others = [replace(GOOD, id="b"), replace(GOOD, id="c", input_ids=[5, 5, 5, 9])]
    manifest = finish(writer(tmp_path, 3, 2), [first, *others])
    assert [ids.tolist() for ids in supervised_ids(tmp_path)] == [[3, 8, 3, 7, 3, 7], [5, 9]]
    (tmp_path / manifest.shards[1].file).unlink()
    with pytest.raises(ConfigError, match=r"shard-00001\.parquet is missing"):
        list(supervised_ids(tmp_path))
