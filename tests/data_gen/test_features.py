"""Features on disk: what the target says, bit for bit; whole or refused; made once however often a run is killed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState

from data_gen import features, verify_features
from data_gen.features import INDEX_FILE, FeatureStore
from data_gen.make_features import make_features, outputs_of
from data_gen.shards import document_lengths, load_rows, split_documents
from data_gen.verify_features import feature_problems
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import Target, load_spec
from tests.tiny import tiny_target
from tests.train.runs import SEQ_LEN, config_of, overrides, write_experiment

REPOSITORY = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'kernels'}"}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return write_experiment(tmp_path_factory.mktemp("features"))


@pytest.fixture(scope="module")
def made(root) -> Path:
    """The features of an unbroken run."""
    make_features(features_config(root, "made"), PartialState(cpu=True))
    return root / "made"


def features_config(root: Path, folder: str, *changes: str) -> Config:
    return config_of(arguments(root, folder, *changes))


def arguments(root: Path, folder: str, *changes: str) -> list[str]:
    return overrides(root, "run", f"data.features_path={root / folder}", "action=features", *changes)


def store_of(config: Config, *, training: bool = True) -> FeatureStore:
    rows = load_rows(config.data.train_path if training else config.data.validation_path)
    return FeatureStore.of(config, load_spec(config.target), rows, training=training)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_token_has_the_outputs_of_its_document_alone(root, dtype):
    config = features_config(root, f"outputs-{dtype}", f"target.dtype={dtype}")
    make_features(config, PartialState(cpu=True))
    target = Target.load(config.target, device="cpu")
    for training, path in ((True, config.data.train_path), (False, config.data.validation_path)):
        store, rows = store_of(config, training=training), load_rows(path)
        store.check()
        pieces = split_documents(document_lengths(rows), SEQ_LEN).tolist()
        assert training is (len(pieces) > len(rows))  # one document of the training data is cut
        for row, first, length in pieces:
            ids = torch.tensor([rows[row]["input_ids"][first : first + length]])
            expected, (stored, final_hidden) = target.forward(ids), store.zeros(1, length)
            store.read(row, first, length, stored[0], final_hidden[0])
            assert torch.equal(stored, expected.features) and torch.equal(final_hidden, expected.final_hidden)
    assert store.bytes_per_token == 4 * 48 * target.lm_head_weight.dtype.itemsize


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_documents_padded_together_have_the_outputs_of_each_alone(root, tmp_path, kind):
    target, rows = tiny_target(kind, tmp_path), load_rows(root / "train")
    pieces = split_documents(document_lengths(rows), SEQ_LEN)
    (index, *_) = features._batches(pieces[:, 2], alone=False)
    assert len(index) == len(pieces) and pieces[index[0], 2] == SEQ_LEN
    together = outputs_of(target, rows, pieces[index])
    for own, piece in zip(together, pieces[index], strict=True):
        alone = outputs_of(target, rows, piece[None])[0]
        torch.testing.assert_close(own[: len(alone)], alone, rtol=1e-4, atol=1e-4)


KILLED = """
import os, signal, sys
from pathlib import Path
from data_gen import features, main
folder, write = Path(os.environ["FOLDER"]), features._write_documents
def dying(*arguments):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments)
features._write_documents = dying
for left in (5, 21):
    if child := os.fork():  # a process for each kill, which need not import everything anew
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, len(list(folder.glob("shard-*.bin"))), flush=True)
    else:
        main.main()
        os._exit(0)
"""


@pytest.mark.usefixtures("forked")
def test_a_run_that_is_killed_goes_on_and_ends_as_an_unbroken_one(root, made):
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments(root, "killed")], cwd=REPOSITORY,
                            env=ENVIRONMENT | {"FOLDER": str(root / "killed" / "train")}, capture_output=True,
                            text=True, check=False)
    said = [line for line in killed.stdout.splitlines() if line.startswith("-")]
    assert said == [f"{-signal.SIGKILL} 0", f"{-signal.SIGKILL} 1"], killed.stderr
    with pytest.raises(ConfigError, match=r"of 3 feature files are not whole: .* is missing, of \d+; continue"):
        store_of(features_config(root, "killed")).check()
    make_features(features_config(root, "killed"), PartialState(cpu=True))
    assert contents(root / "killed") == contents(made)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_two_ranks_make_what_one_makes(root, made):
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                           "data_gen/main.py", *arguments(root, "ranks")], cwd=REPOSITORY, env=ENVIRONMENT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("GiB to write") == 1
    assert contents(root / "ranks") == contents(made)


def test_a_shard_that_another_process_writes_is_left_to_it(root, made):
    config = features_config(root, "shared")
    store = store_of(config)
    store.begin()
    with store._temporary(1).open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b"half")
        other.flush()
        with pytest.raises(ConfigError, match=r"1 of 3 feature files are not whole: .*shard-00001.bin is missing"):
            make_features(config, PartialState(cpu=True))
        assert store._temporary(1).read_bytes() == b"half"
    make_features(config, PartialState(cpu=True))
    assert contents(root / "shared") == contents(made)


def test_nothing_is_computed_twice(root, made, monkeypatch, capsys):
    monkeypatch.setattr(Target, "load", None)
    make_features(features_config(root, "made"), PartialState(cpu=True))
    assert "; 0.00 GiB to write" in capsys.readouterr().out


def test_the_size_is_said_first_and_must_fit(root, monkeypatch, capsys):
    num_tokens = sum(store_of(features_config(root, "large"), training=training).num_tokens for training in (0, 1))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, num_tokens * 4 * 48 * 4 - 1))
    monkeypatch.setattr(Target, "load", None)
    size = rf"need 0\.00 GiB for {num_tokens} tokens of 4 \* 48 \* 4 bytes"
    with pytest.raises(ConfigError, match=f"{size}; .* GiB free"):
        make_features(features_config(root, "large"), PartialState(cpu=True))
    assert f"for {num_tokens} tokens" in capsys.readouterr().out


def test_holes_of_a_file_that_was_begun_are_still_to_be_written(root):
    store = store_of(features_config(root, "holes"))
    store.begin()
    every = sum(map(store.shard_bytes, range(store.num_shards)))
    with store._temporary(0).open("wb") as file:
        file.truncate(store.shard_bytes(0))
    assert store.bytes_to_write() == every
    store._temporary(0).write_bytes(b"x" * store.shard_bytes(0))
    assert store.bytes_to_write() == every - store.shard_bytes(0)


def test_a_full_disk_is_one_line_and_the_run_goes_on_from_there(root, made, monkeypatch):
    fsync = os.fsync

    def full_at_the_second(descriptor):
        if "shard-00001" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full_at_the_second)
        with pytest.raises(ConfigError, match=r"cannot write .*shard-00001.bin: No space left.*GiB are still to be"):
            make_features(features_config(root, "full"), PartialState(cpu=True))
    assert [path.name for path in (root / "full" / "train").glob("shard-*")] == ["shard-00000.bin"]
    make_features(features_config(root, "full"), PartialState(cpu=True))
    assert contents(root / "full") == contents(made)


@pytest.mark.parametrize(("change", "named"), [
    ("draft.feature_layers=[1,4,5]", r"feature_layers was \[2, 4, 5\] and is now \[1, 4, 5\]"),
    ("target.dtype=bfloat16", "target.dtype was 'float32' and is now 'bfloat16'"),
    ("data.seq_len=40", "documents cut at was 48 and is now 40"),
    ("data.seq_len=400", "documents cut at was 48 and is now None"),
])
def test_features_of_other_settings_are_refused_by_name(root, made, change, named):
    config = features_config(root, "made", change)
    for use in (store_of(config).check, lambda: make_features(config, PartialState(cpu=True))):
        with pytest.raises(ConfigError, match=f"was made with other settings: {named}. Set them back"):
            use()


def test_features_of_other_data_or_another_target_are_refused(root, made, tmp_path):
    for name in ("train", "validation", "target", "made"):
        shutil.copytree(root / name, tmp_path / name)
    config = features_config(tmp_path, "made")
    store_of(config).check()
    manifest = tmp_path / "train" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"num_prompts": 27}))
    with pytest.raises(ConfigError, match=r"data manifest sha256 was '\w+' and is now '\w+'"):
        store_of(config).check()
    index = tmp_path / "made" / "validation" / INDEX_FILE
    index.write_text(index.read_text().replace('"fingerprint": "', '"fingerprint": "other '))
    with pytest.raises(ConfigError, match=r"target.fingerprint was 'other "):
        store_of(config, training=False).check()


def test_a_file_that_is_not_whole_is_refused_and_made_anew(root, made, tmp_path):
    shutil.copytree(made, tmp_path / "cut")
    config = features_config(root, "made", f"data.features_path={tmp_path / 'cut'}")
    path = tmp_path / "cut" / "train" / "shard-00002.bin"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(ConfigError, match=r"1 of 3 .*shard-00002.bin has \d+ bytes instead of \d+; continue with"):
        store_of(config).check()
    make_features(config, PartialState(cpu=True))
    assert contents(tmp_path / "cut") == contents(made)


def test_features_that_are_not_there_are_refused(root):
    with pytest.raises(ConfigError, match=r"nowhere/train has no features; make them with `python data_gen/main.py"):
        store_of(features_config(root, "nowhere")).check()
    with pytest.raises(ConfigError, match=r"data.features_path says where"):
        make_features(config_of(overrides(root, "run", "action=features")), PartialState(cpu=True))


# ---- verify ----


def verified(root: Path, folder: Path, capsys, *changes: str) -> list[str]:
    """What action=verify says is wrong with the features in ``folder``."""
    config = features_config(root, "unused", f"data.features_path={folder}", *changes)
    problems = feature_problems(config, load_spec(config.target))
    counted = re.findall(r"(\d) problems with target, data, sizes, numbers and doc", capsys.readouterr().out)
    assert len(counted) == 2 and sum(map(int, counted)) == len(problems)
    return problems


@pytest.fixture
def copied(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "copied")


def test_features_that_are_right_pass_verify(root, made, copied, capsys):
    assert verified(root, copied, capsys) == []
    assert contents(copied) == contents(made)


def test_verify_names_features_that_are_missing_cut_or_of_another_target(root, copied, capsys):
    os.truncate(copied / "train" / "shard-00001.bin", 8)
    index = copied / "validation" / INDEX_FILE
    index.write_text(index.read_text().replace('"fingerprint": "', '"fingerprint": "other '))
    cut, other = verified(root, copied, capsys)
    assert "1 of 3 feature files are not whole" in cut and "target.fingerprint was 'other " in other
    shutil.rmtree(copied / "validation")
    assert "validation has no features; make them with" in verified(root, copied, capsys)[1]


def test_an_index_that_is_damaged_is_one_line(root, copied):
    config = features_config(root, "unused", f"data.features_path={copied}")
    uses = (store_of(config).check, lambda: make_features(config, PartialState(cpu=True)))
    for content, use in product(["", "{", "[]", '"text"', "\x00"], uses):
        (copied / "train" / INDEX_FILE).write_text(content)
        with pytest.raises(ConfigError, match=r"train/features\.json is damaged \(.*; restore it, or delete") as error:
            use()
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(("dtype", "value"), [("float32", float("nan")), ("bfloat16", float("-inf"))])
def test_verify_finds_numbers_that_are_not_finite(root, tmp_path, capsys, monkeypatch, dtype, value):
    monkeypatch.setattr(verify_features, "READ_BYTES", 5000)  # several reads a file
    config = features_config(root, "unused", f"data.features_path={tmp_path}", f"target.dtype={dtype}")
    make_features(config, PartialState(cpu=True))
    store = store_of(config)
    token = int(store.first_token[15] - store.first_token[10]) + 3  # the fourth of the sixteenth row
    numbers = torch.from_file(str(store.path(1)), shared=True, size=store.shard_bytes(1) // store.dtype.itemsize,
                              dtype=store.dtype)
    numbers[token * 4 * 48 + 100] = value
    assert verified(root, tmp_path, capsys, f"target.dtype={dtype}") == [
        f"{store.path(1)}: 1 tokens have numbers that are not finite, the first in row 'row-15'"]


def test_verify_finds_documents_out_of_their_places(root, copied, capsys):
    """Two rows of one shard changed places, the layers of a token did, a target of other weights was asked."""
    path = copied / "train" / "shard-00002.bin"
    store = store_of(features_config(root, "unused", f"data.features_path={copied}"))
    content = path.read_bytes()
    first, last = (int(store.first_token[row + 1] - store.first_token[row]) * store.bytes_per_token for row in (20, 25))
    path.write_bytes(content[-last:] + content[first:-last] + content[:first])
    (moved,) = verified(root, copied, capsys)
    assert "train: row 'row-25': the states at its end are " in moved and "other tokens or to another target" in moved
    layers = np.frombuffer(content, np.float32).reshape(-1, 4, 48)
    path.write_bytes(layers[:, [1, 0, 2, 3]].tobytes())
    (swapped,) = verified(root, copied, capsys)
    assert "train: row 'row-25'" in swapped
    path.write_bytes((layers * 1.001).tobytes())  # as another device would round
    assert verified(root, copied, capsys) == []


def test_what_fails_while_features_are_computed_is_not_called_a_full_disk(root):
    config = features_config(root, "failing")
    store = store_of(config)
    store.begin()

    def fail(pieces):
        raise OSError(errno.EIO, "cannot read the data")

    with pytest.raises(OSError, match="cannot read the data"):
        store.fill(fail, PartialState(cpu=True), alone=True)


def test_a_disk_that_takes_no_new_file_or_knows_no_locks_is_one_line(root, monkeypatch):
    config = features_config(root, "no-file")
    store = store_of(config)
    store.begin()

    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    touch = Path.touch
    for where, name, instead, reason in (
            (Path, "touch", lambda path: touch(path.parent / "none" / path.name), "No such file or directory"),
            (fcntl, "flock", no_locks, "No locks available")):
        with monkeypatch.context() as patched:
            patched.setattr(where, name, instead)
            with pytest.raises(ConfigError, match=rf"cannot write .*shard-00000.bin: {reason}; .*GiB are"):
                store.fill(None, PartialState(cpu=True), alone=True)
