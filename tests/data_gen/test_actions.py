"""inspect, verify and stats: what they say about rows made by hand."""

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from data_gen.main import look
from data_gen.rows import Row, Skipped
from data_gen.shards import MANIFEST_FILE, ShardWriter, damaged_shards, read_manifest
from data_gen.show import find_row, painted, spans
from data_gen.token_stats import coverage, token_stats
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import load_spec
from tests.data_gen.runs import config_of, overrides
from tests.tiny import EOS_IDS, IM_END_ID, IM_START_ID, TOKENIZER_LENGTH, tiny_target_folder, tiny_tokenizer

IDS = tiny_tokenizer()("Hi", add_special_tokens=False)["input_ids"]
ROWS = [
    Row(id="a/b c=d", source="x", input_ids=[IM_START_ID, *IDS, *IDS, IM_END_ID], loss_mask=[0, 0, 0, 1, 1, 1],
        finish_reason="stop"),
    Row(id="two", source="x", input_ids=[5, 6, IM_END_ID, 7, 8, 9], loss_mask=[0, 1, 1, 0, 1, 1],
        finish_reason="length"),
    Row(id="7", source="y", input_ids=[5, 6, 6, 6], loss_mask=[0, 1, 1, 1], finish_reason="length"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("actions")
    tiny_target_folder(folder / "target", "llama")  # its embedding is longer than the tokenizer
    return folder


def make(root, name: str, rows: list[Row], *changes: str, action: str, skipped: Sequence[Skipped] = ()) -> Config:
    """Training data of ``rows``, two a shard, with ``skipped`` in each; and validation data of one other row."""
    config = config_of([*overrides(root, name, *changes), f"action={action}"])
    spec = load_spec(config.target)
    other = replace(ROWS[2], id="other", input_ids=[4, 6, 6, 6])
    for path, its in ((config.data.train_path, rows), (config.data.validation_path, [other])):
        writer = ShardWriter(path, target="t", settings={"target": {"fingerprint": spec.fingerprint}},
                             num_prompts=len(its), rows_per_shard=2, vocab_size=spec.vocab_size,
                             stop_token_ids=EOS_IDS)
        writer.open()
        for index in range(writer.num_shards):
            writer.write(index, its[writer.prompt_range(index)], skipped)
        writer.finalise()
    return config


def test_verify_finds_nothing_in_good_data(root, capsys):
    look(make(root, "good", ROWS, action="verify"))
    assert capsys.readouterr().out.count("0 problems") == 2


def test_verify_looks_at_features_where_they_are_configured(root, capsys):
    config = make(root, "with-features", ROWS, f"data.features_path={root}/none", "trainer.cache_target=false",
                  action="verify")
    with pytest.raises(ConfigError, match=r"2 problems, the first: .*none/train has no features; make them with"):
        look(config)


def test_samples_of_one_prompt_may_agree(root, capsys):
    def rows(*ids: str) -> list[Row]:
        return [replace(ROWS[2], id=row_id) for row_id in ids]

    several = "generation.samples_per_prompt=2"
    look(make(root, "samples", rows("a~0", "a~1", "a~2#1"), several, action="verify"))
    assert capsys.readouterr().out.count("0 problems") == 2
    with pytest.raises(ConfigError, match=r"1 problems, the first: .*'b~1' repeats row 'a~0'"):
        look(make(root, "others", rows("a~0", "b~1"), several, action="verify"))
    with pytest.raises(ConfigError, match=r"1 problems, the first: .*'a~1' repeats row 'a~0'"):  # the user's own ids
        look(make(root, "single", rows("a~0", "a~1"), action="verify"))


def test_what_two_conversations_begin_with_may_agree(root, capsys):
    a, b, c = (replace(ROWS[2], id=row_id) for row_id in ("a", "b#1", "c"))
    cut = Skipped(id="a", turn=2, reason="answer cut", by_choice=True)
    look(make(root, "parts", [a, b], action="verify"))
    look(make(root, "ended", [c, a], action="verify", skipped=[cut]))
    assert capsys.readouterr().out.count("0 problems") == 4
    with pytest.raises(ConfigError, match=r"1 problems, the first: .*'c' repeats row 'a'"):
        look(make(root, "alike", [a, c], action="verify", skipped=[replace(cut, id="other")]))


def test_verify_finds_doubles_padded_ids_and_what_is_in_both(root, capsys):
    rows = [*ROWS, replace(ROWS[2], id="again"), replace(ROWS[2], id="padded", input_ids=[5, 6, TOKENIZER_LENGTH, 6]),
            replace(ROWS[1], id="other")]
    with pytest.raises(ConfigError, match="4 problems, the first: "):
        look(make(root, "bad", rows, action="verify"))
    out = capsys.readouterr().out
    assert "row 'again' repeats row '7'" in out and "row 'other' repeats row 'two'" in out
    assert f"row 'padded': id {TOKENIZER_LENGTH} is no token" in out
    assert "row 'other' is in both" in out


def test_verify_finds_damage_and_edited_counts(root, capsys):
    config = make(root, "damaged", ROWS, action="verify")
    folder = root / "damaged" / "data"
    manifest = read_manifest(folder)
    (folder / MANIFEST_FILE).write_text(json.dumps(
        json.loads((folder / MANIFEST_FILE).read_text()) | {"num_tokens": 1, "finish_reasons": {"stop": 3}}))
    with pytest.raises(ConfigError, match=r"2 problems, the first: .*num_tokens is 16, 1 in the manifest"):
        look(config)
    shard = folder / "shard-00001.parquet"
    content = bytearray(shard.read_bytes())
    content[40] ^= 1
    shard.write_bytes(content)
    assert damaged_shards(folder, manifest) == [shard.name]
    with pytest.raises(ConfigError, match=r"1 problems, the first: .*shard-00001\.parquet is not what was written"):
        look(config)
    shard.unlink()
    with pytest.raises(ConfigError, match=r"1 problems, the first: .*shard-00001\.parquet is missing"):
        look(config)


def test_verify_reads_masks(root):
    """A shard that was made by another program, with a right hash."""
    config = make(root, "masks", ROWS, action="verify")
    folder = root / "masks" / "data"
    writer = ShardWriter(folder, target="t", settings=read_manifest(folder).settings, num_prompts=3, rows_per_shard=2,
                         vocab_size=10**6, stop_token_ids=())
    (folder / MANIFEST_FILE).rename(folder / "manifest.unfinished.json")
    (folder / "shard-00001.parquet").unlink()
    writer.open()
    writer.write(1, [replace(ROWS[0], id="inside", loss_mask=[0, 1, 1, 1, 1, 1], finish_reason="length",
                             input_ids=[1, 2, IM_END_ID, 3, 4, 5])])
    writer.finalise()
    with pytest.raises(ConfigError, match=rf"row 'inside': stop tokens \[{IM_END_ID}\] lie inside a response"):
        look(config)


def test_stats_are_counted_by_hand(root, capsys):
    padded = replace(ROWS[2], id="padded", input_ids=[5, 6, TOKENIZER_LENGTH, 6])
    config = make(root, "stats", [*ROWS, padded], action="stats")
    look(config)
    folder = root / "stats" / "data"
    stats = json.loads((folder / "token_stats.json").read_text())
    counts = {token: count for token, count in enumerate(stats["token_counts"]) if count}
    assert counts == {IDS[0]: 1, IDS[1]: 1, IM_END_ID: 2, 6: 6, 8: 1, 9: 1}
    assert len(stats["token_counts"]) == stats["tokenizer_length"] == TOKENIZER_LENGTH
    assert (stats["num_response_tokens"], stats["num_distinct_tokens"]) == (12, 6), "the padded id counts nowhere"
    assert stats["turns_per_row"] == {"1": 3, "2": 1}
    assert stats["sources"] == {"x": 2, "y": 2} and stats["finish_reasons"] == {"stop": 1, "length": 3}
    assert (stats["tokens_per_row"]["0%"], stats["tokens_per_row"]["mean"]) == (4, 5)
    reached = {point["share"]: point["top_k"] for point in stats["coverage"]}
    assert reached[0.5] == 1 and reached[0.9] == 5 and reached[1.0] == 256  # 6 are enough, and 256 no worse
    assert {"share": 1.0, "top_k": 6} in stats["coverage"]
    assert sum(rows for *_, rows in stats["response_histogram"]) == 4
    picture = ElementTree.parse(folder / "token_stats.svg").getroot()
    assert picture.tag.endswith("svg") and len(list(picture.iter("{http://www.w3.org/2000/svg}polyline"))) == 1
    out = capsys.readouterr().out
    assert "12 response tokens, 6 distinct" in out
    assert "tokens for a coverage of 50.0%: 1, 90.0%: 5, 95.0%: 6, 99.0%: 6, 99.9%: 6, 100.0%: 6\n" in out
    assert f"{'turns_per_row':24} 1: 3, 2: 1\n" in out and f"{'skipped':24} none\n" in out


def test_coverage_against_a_slow_count():
    counts = np.minimum(np.random.default_rng(0).zipf(1.3, 3000), 10**6)
    for point in coverage(counts):
        largest = sorted(counts.tolist(), reverse=True)[: point["top_k"]]
        assert sum(largest) >= point["share"] * counts.sum() - 1e-6
        assert sum(largest[:-1]) < point["share"] * counts.sum()
    assert coverage(np.zeros(4, dtype=np.int64)) == []


def test_stats_of_shards_without_rows(root):
    make(root, "empty", [], action="stats")
    stats = token_stats(root / "empty" / "data", TOKENIZER_LENGTH)
    assert stats["num_response_tokens"] == 0 and stats["coverage"] == []


def test_spans_say_what_is_trained_on():
    tokenizer = tiny_tokenizer()
    é = tokenizer("é", add_special_tokens=False)["input_ids"]
    assert len(é) == 2, "a letter of two tokens, which must be decoded together"
    ids = [IM_START_ID, *IDS, *é, *IDS, IM_END_ID, TOKENIZER_LENGTH]
    mask = [0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert spans(tokenizer, ids, mask) == [
        ("special", "<|im_start|>"), ("context", "Hi"), ("supervised", "éHi"), ("supervised special", "<|im_end|>"),
        ("special", f"<id {TOKENIZER_LENGTH}>")]
    assert painted(tokenizer, ids, mask, colours=False) == f"<|im_start|>Hi▁éHi<|im_end|>▁<id {TOKENIZER_LENGTH}>"
    assert "\x1b[32méHi\x1b[0m" in painted(tokenizer, ids, mask, colours=True)


def test_inspect_finds_rows_by_id_and_by_number(root, capsys):
    config = make(root, "inspect", ROWS, action="inspect")
    assert [find_row(config, name)[1:] and find_row(config, name)[2]["id"] for name in ("a/b c=d", "1", "7", "other")
            ] == ["a/b c=d", "two", "7", "other"]
    config.inspect = ["a/b c=d", "1"]
    look(config)
    out = capsys.readouterr().out
    assert "data row 0: id 'a/b c=d', source 'x', 6 tokens, 3 supervised, finish_reason stop" in out
    assert "<|im_start|>Hi▁Hi<|im_end|>▁" in out and "id 'two'" in out
    with pytest.raises(ConfigError, match=r"inspect='3' is neither the id of a row in .* nor a number below 3"):
        find_row(config, "3")
