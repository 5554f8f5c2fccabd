"""What the benchmarks refuse, in one line and before they measure anything."""

from __future__ import annotations

import pytest
import torch

from scripts import bench_distributed, bench_features, bench_train

COMMANDS = {"train": bench_train, "distributed": bench_distributed, "features": bench_features}


@pytest.mark.parametrize(("command", "arguments", "message"), [
    ("train", ["--repeats", "0"], "argument --repeats: 0 must be at least 1"),
    ("train", ["--rank", "-1"], "argument --rank: -1 must be at least 0"),
    ("train", ["--valid", "nan"], "argument --valid: nan must lie between 0 and 1"),
    ("train", ["--json", "{file}/out.json"], "cannot make the folder {file}"),
    ("distributed", ["--cards", "0"], "argument --cards: 0 must be at least 1"),
    ("distributed", ["--valid", "1.5"], "argument --valid: 1.5 must lie between 0 and 1"),
    ("distributed", ["--json", "{file}/out.json", "--tiny"], "cannot make the folder {file}"),
    ("features", ["--folder", "{folder}", "--gib", "nan"], "argument --gib: nan must be above 0 and finite"),
    ("features", ["--folder", "{folder}", "--repeats", "0"], "argument --repeats: 0 must be at least 1"),
    ("features", ["--folder", "{folder}", "--hidden-size", "0"], "argument --hidden-size: 0 must be at least 1"),
    ("features", ["--folder", "{file}"], "cannot make the folder {file}/bench-features-"),
    ("features", ["--folder", "{folder}", "--json", "{file}/out.json"], "cannot make the folder {file}"),
])
def test_refused(command, arguments, message, tmp_path, monkeypatch, capsys):
    for name in ("measure", "measure_strategy", "run_all"):
        monkeypatch.setattr(COMMANDS[command], name, lambda *_: pytest.fail("it measures"), raising=False)
    (tmp_path / "file").touch()
    places = {"file": tmp_path / "file", "folder": tmp_path / "folder"}
    with pytest.raises(SystemExit) as stop:
        COMMANDS[command].main([argument.format(**places) for argument in arguments])
    assert stop.value.code == 2
    assert message.format(**places) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(("there_are", "arguments", "message"), [
    (0, [], "there is no GPU; --tiny runs a small shape on the CPU"),
    (2, ["--cards", "1", "4"], "--cards 4 is more than the 2 GPUs that there are"),
])
def test_more_cards_than_there_are(there_are, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there_are > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there_are)
    with pytest.raises(SystemExit) as stop:
        bench_distributed.main(arguments)
    assert stop.value.code == 2 and capsys.readouterr().err == f"error: {message}\n"


def test_a_disk_that_is_full_ends_in_one_line(tmp_path, monkeypatch, capsys):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench_features.os, "fsync", full)
    with pytest.raises(SystemExit) as stop:
        bench_features.main(["--folder", str(tmp_path), "--gib", "0.0001", "--hidden-size", "16", "--repeats", "1"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: cannot write {tmp_path}/bench-features-")
    assert not any(tmp_path.iterdir())
