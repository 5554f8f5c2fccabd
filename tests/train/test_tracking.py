"""Metrics reach their files, once each, and never wait for a network."""

from __future__ import annotations

import json
import logging

import pytest

from specvocab_model.config import TrackingConfig
from train import tracking
from train.tracking import Tracker


def tracker(folder, backend: str = "none", *, first_step: int = 1, run_id: str | None = None, is_main=True) -> Tracker:
    return Tracker(TrackingConfig(backend=backend), name="run", output_dir=folder, run_id=run_id,
                   first_step=first_step, settings={"seed": 0}, is_main=is_main)


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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


def test_lines_are_on_the_disk_at_once(tmp_path):
    tracker(tmp_path).log({"loss": 1.0}, 1)  # not finished: the process may be killed
    assert lines(tmp_path) == [{"step": 1, "loss": 1.0}]


def test_other_ranks_write_nothing(tmp_path):
    other = tracker(tmp_path, "tensorboard", is_main=False)
    other.log({"loss": 1.0}, 1)
    other.finish()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_reads_back(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tracker(tmp_path, "tensorboard")
    run.log({"train/loss": 2.5}, 7)
    run.finish()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(7, 2.5)]


@pytest.mark.parametrize("key", [None, "0" * 40])
def test_wandb_without_key_or_network_goes_on_offline(tmp_path, monkeypatch, caplog, key):
    for name, value in {"WANDB_API_KEY": key, "WANDB_MODE": None}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(tracking, "WANDB_INIT_TIMEOUT_S", 3.0)
    with caplog.at_level(logging.WARNING):
        run = tracker(tmp_path, "wandb", run_id="given-id")
    run.log({"train/loss": 2.5}, 1)
    run.finish()
    assert run.run_id == "given-id"
    assert "offline" in caplog.text and ("no W&B key" if key is None else "cannot be reached") in caplog.text
    assert list((tmp_path / "wandb").glob("offline-run-*-given-id"))
