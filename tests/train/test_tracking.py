"""Metrics reach their files, once each, and never wait for a network."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from specvocab_model.config import ConfigError, TrackingConfig
from tests.train.wandb_server import WandbServer
from train import tracking
from train.samples import Sample
from train.tracking import Tracker, TrackingError, samples_html

SAMPLE = Sample("row-1", [("prompt", "1 < 2"), ("rejected", "no"), ("accepted", "yes & no")], 1, 3)


def tracker(
    folder, backend: str = "none", *, first_step: int = 1, run_id: str | None = None, is_main=True, **config
) -> Tracker:
    return Tracker(TrackingConfig(backend=backend, **config), name="run", output_dir=folder, run_id=run_id,
                   first_step=first_step, settings={"seed": 0}, provenance={"git_commit": "abc"}, is_main=is_main)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged_records(content: bytes) -> Iterator[bytes]:
    """Records of a LevelDB log as W&B writes it: blocks of 32 KiB; crc, length and type before each fragment."""
    at, record = 7, b""  # after W&B's own header
    while at < len(content):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last fragment
            yield record
            record = b""


def offline_history(folder) -> dict[int, dict]:
    """The last value of everything that is in the newest offline W&B run, by step."""
    wandb.teardown()  # as at the end of the process: W&B's own writes the last of its buffer
    newest = max((folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)
    (file,) = newest.glob("*.wandb")
    history: dict[int, dict] = {}
    for data in logged_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            key = item.key or "/".join(item.nested_key)
            history.setdefault(record.history.step.num, {})[key] = json.loads(item.value_json)
    return {step: {key: value for key, value in row.items() if not key.startswith("_")}
            for step, row in history.items()}


def test_a_resumed_run_replaces_the_steps_after_its_checkpoint(tmp_path):
    first = tracker(tmp_path)
    for step in (1, 2, 3):
        first.log({"loss": float(step)}, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    second = tracker(tmp_path, first_step=3)
    second.log({"loss": 30.0}, 3)
    second.finish()
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 3, "loss": 30.0}]


def test_samples_and_provenance_are_files_too(tmp_path):
    for first_step in (1, 3):
        run = tracker(tmp_path, first_step=first_step)
        for step in range(first_step, 5):
            run.log_samples([SAMPLE] if step != 2 else [], step)
        run.finish()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [sample["step"] for sample in samples] == [1, 3, 4]
    assert samples[0]["pieces"][2] == ["accepted", "yes & no"] and samples[0]["tokens_per_round"] == 3.0
    assert json.loads((tmp_path / "run.json").read_text()) == {"git_commit": "abc"}


def test_samples_in_a_browser_are_marked_and_escaped():
    page = samples_html([SAMPLE])
    assert "1 &lt; 2" in page and ">yes &amp; no</span>" in page and page.count("<span") == 2
    assert "line-through" in page[: page.index(">no<")] and "3.00 tokens a round" in page


def test_lines_are_on_the_disk_at_once(tmp_path):
    tracker(tmp_path).log({"loss": 1.0}, 1)  # not finished: the process may be killed
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_a_full_disk_is_named_with_the_step(tmp_path):
    run = tracker(tmp_path)
    with open("/dev/full", "a", buffering=1) as full:
        run.backends[0].files["metrics.jsonl"] = full
        with pytest.raises(TrackingError, match=r"step 7 could not be written to .*No space left.*make room"):
            run.log({"loss": 1.0}, 7)
        with contextlib.suppress(OSError):
            full.close()  # tries once more to write what it holds


def test_other_ranks_write_nothing(tmp_path):
    other = tracker(tmp_path, "tensorboard", is_main=False)
    other.log({"loss": 1.0}, 1)
    other.finish()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_back(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tracker(tmp_path, "tensorboard")
    run.log({"train/loss": 2.5}, 7)
    run.log_samples([SAMPLE], 7)
    run.finish()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(7, 2.5)]
    (text,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("drafted text/text_summary"))
    assert text == samples_html([SAMPLE])
    (settings,) = (event.tensor_proto.string_val[0].decode() for event in events.Tensors("settings/text_summary"))
    assert "seed: 0" in settings and "git_commit: abc" in settings


def test_an_offline_wandb_run_that_is_resumed_has_all_steps(tmp_path, monkeypatch):
    """A killed process loses what it had queued, an offline run starts a new folder: metrics.jsonl fills the gap."""
    monkeypatch.setenv("HOME", str(tmp_path))
    first = tracker(tmp_path, "wandb", offline=True)
    for step in (1, 2, 3):
        first.log({"train/loss": float(step)}, step)
    first.log_samples([SAMPLE], 3)
    run_id = first.run_id
    first.finish()
    time.sleep(1.1)  # the folder's name has seconds in it
    second = tracker(tmp_path, "wandb", offline=True, run_id=run_id, first_step=3)
    second.log({"train/loss": 30.0}, 3)
    second.log({"validation/loss": 5.0}, 3)
    second.log({"train/loss": 4.0}, 4)
    assert second.run_id == run_id
    second.finish(exit_code=1)
    assert offline_history(tmp_path) == {
        1: {"train/loss": 1.0}, 2: {"train/loss": 2.0}, 3: {"train/loss": 30.0, "validation/loss": 5.0},
        4: {"train/loss": 4.0},
    }
    assert list((tmp_path / "wandb").glob("offline-run-*/files/media/html/*.html"))


@pytest.fixture(params=["no key", "nobody listens", "nobody answers"])
def unreachable(request, tmp_path, monkeypatch):
    """A W&B server that cannot be had; the case's name."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if request.param != "no key":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setattr(tracking, "WANDB_INIT_TIMEOUT_S", 1.0)
    monkeypatch.setenv("WANDB_X_DISABLE_VIEWER", "true")  # else W&B asks whose key this is, for 5 s at a time
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "nobody answers":
            server.listen()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield request.param


def test_wandb_without_key_or_server_goes_on_offline(tmp_path, caplog, unreachable):
    with caplog.at_level(logging.WARNING):
        run = tracker(tmp_path, "wandb", run_id="given-id")
    run.log({"train/loss": 2.5}, 1)
    assert run.run_id == "given-id"
    run.finish()
    assert "offline" in caplog.text
    assert ("no W&B key" if unreachable == "no key" else "cannot be reached") in caplog.text
    assert offline_history(tmp_path) == {1: {"train/loss": 2.5}}


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[WandbServer]:
    server = WandbServer()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    for name, value in {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": server.url, "HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    yield server
    server.close()
    wandb.teardown()


def test_an_online_run_that_is_resumed_gets_the_steps_that_the_server_lacks_and_no_other(tmp_path, server):
    first = tracker(tmp_path, "wandb")
    run_id = first.run_id
    for step in (1, 2, 3, 4):
        first.log({"train/loss": float(step)}, step)
    first.finish(exit_code=1)
    assert set(server.history) == {1, 2, 3, 4}
    server.forget_after(2)
    second = tracker(tmp_path, "wandb", run_id=run_id, first_step=4)  # its checkpoint is of step 3
    assert second.run_id == run_id
    second.log({"train/loss": 40.0}, 4)
    second.log({"validation/loss": 5.0}, 4)
    second.finish()
    assert server.history == {1: {"train/loss": 1}, 2: {"train/loss": 2}, 3: {"train/loss": 3},
                              4: {"train/loss": 40, "validation/loss": 5}}
    assert set(server.rows.values()) == {1}


@pytest.fixture
def final(tmp_path) -> Path:
    """A folder of results."""
    folder = tmp_path / "final"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_the_final_weights_become_an_artifact_and_the_settings_are_the_runs(tmp_path, server, final):
    run = tracker(tmp_path, "wandb")
    run.log_artifact(final)
    assert server.artifacts == [f"run-{run.run_id}-final"] and server.uploads["model.safetensors"] == b"weights"
    run.finish()
    shown = {key: entry["value"] for key, entry in server.config.items() if key != "_wandb"}
    assert shown == {"seed": 0, "provenance": {"git_commit": "abc"}}


def test_a_server_that_takes_no_artifact_costs_a_warning_with_the_command_for_later(
    tmp_path, server, final, monkeypatch, caplog
):
    run = tracker(tmp_path, "wandb")
    answer = server.graphql  # to all but one question: whose key this is
    monkeypatch.setattr(server, "graphql", lambda request: {} if "Viewer" in request["query"] else answer(request))
    with caplog.at_level(logging.WARNING):
        run.log_artifact(final)
    later = f"`wandb artifact put --type model --name specvocab/run-{run.run_id}-final {final}` uploads it"
    assert "invalid credentials" in caplog.text and later in caplog.text
    run.finish()


def test_a_server_that_falls_silent_holds_up_neither_training_nor_its_end(tmp_path, server, monkeypatch):
    monkeypatch.setattr(tracking, "WANDB_FINISH_TIMEOUT_S", 3.0)
    run = tracker(tmp_path, "wandb")
    server.answers.clear()
    for step in range(1, 2001):
        run.log({"train/loss": float(step)}, step)
    run.finish()
    assert server.history == {} and len(lines(tmp_path)) == 2000


def test_artifacts_need_wandb():
    with pytest.raises(ConfigError, match=r"log_artifact=true needs tracking=wandb, but tracking.backend=tensorboard"):
        TrackingConfig(backend="tensorboard", log_artifact=True)
