"""What is known of a target without its weights: where it is found, its facts, its fingerprint, what is refused."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForCausalLM

from specvocab_model.config import CONFIG_DIR, ConfigError, TargetConfig
from specvocab_model.target import Target, default_feature_layers, load_spec, resolve_model, target_cache_dir
from tests import tiny


def edit_json(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# ---- spec ----


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_spec_facts(kind: str, tmp_path: Path) -> None:
    target = tiny.tiny_target(kind, tmp_path, vocab_size=300)
    spec, config = target.spec, target.model.config
    assert spec == load_spec(tiny.tiny_target_config(tmp_path / f"target-{kind}", kind))
    assert (spec.hidden_size, spec.vocab_size, spec.num_hidden_layers) == (48, 300, 8)
    assert (spec.num_attention_heads, spec.num_key_value_heads, spec.head_dim) == (4, 2, 20)
    assert (spec.intermediate_size, spec.max_position_embeddings) == (96, 512)
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.eos_token_ids == tiny.EOS_IDS == tuple(target.model.generation_config.eos_token_id)
    assert spec.pad_token_id == tiny.PAD_ID
    assert spec.logit_softcap == (5.0 if kind == "gemma2" else None)
    assert isinstance(spec.rope_parameters["rope_theta"], float)
    assert target.feature_layers == default_feature_layers(8) == (2, 4, 5)


def test_rope_of_the_full_attention_layers_and_its_scaling_are_kept(tmp_path: Path) -> None:
    spec = load_spec(tiny.tiny_target_config(tiny.tiny_target_folder(tmp_path / "gemma", "gemma3"), "gemma3"))
    assert spec.rope_parameters["rope_theta"] == 1_000_000.0  # the sliding layers use 10 000
    folder = tiny.tiny_target_folder(tmp_path / "llama", "llama")
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128}
    edit_json(folder / "config.json", rope_parameters=rope)
    assert load_spec(TargetConfig(model=str(folder))).rope_parameters == rope


def test_eos_ids_come_from_where_generate_takes_them(tmp_path: Path) -> None:
    folder = tiny.tiny_target_folder(tmp_path / "target", "llama")
    config = TargetConfig(model=str(folder))
    edit_json(folder / "generation_config.json", eos_token_id=7)
    assert load_spec(config).eos_token_ids == (7,)
    (folder / "generation_config.json").unlink()
    assert load_spec(config).eos_token_ids == tiny.EOS_IDS
    edit_json(folder / "config.json", eos_token_id=None)
    assert load_spec(config).eos_token_ids == (tiny.IM_END_ID,)  # the tokenizer's


# ---- fingerprint ----


def test_fingerprint_is_the_weights_not_their_storage(tmp_path: Path) -> None:
    folder = tiny.tiny_target_folder(tmp_path / "original", "llama", num_hidden_layers=12)  # "10" < "2"
    config = TargetConfig(model=str(folder))
    fingerprint = load_spec(config).fingerprint
    for dtype in (torch.float32, torch.bfloat16):
        target = Target.load(config, device="cpu", dtype=dtype)
        assert target.spec.fingerprint == fingerprint
        for name, max_shard_size in (("whole", "1GB"), ("shards", "100KB")):
            copy = tiny.save_target(target.model, tmp_path / f"{name}-{dtype}", max_shard_size=max_shard_size)
            assert (copy / "model.safetensors.index.json").exists() == (name == "shards")
            assert load_spec(TargetConfig(model=str(copy))).fingerprint == fingerprint


def test_fingerprint_tells_a_fine_tuned_sibling(tmp_path: Path) -> None:
    """One projection of one layer changed by little: config, tokenizer and embeddings are all the same."""
    model = tiny.tiny_model("qwen3")
    before = load_spec(TargetConfig(model=str(tiny.save_target(model, tmp_path / "before")))).fingerprint
    with torch.no_grad():
        model.model.layers[5].self_attn.v_proj.weight.mul_(1.02)
    after = load_spec(TargetConfig(model=str(tiny.save_target(model, tmp_path / "after")))).fingerprint
    assert before != after


def test_fingerprint_tells_another_seed_and_another_softcap(tmp_path: Path) -> None:
    folder = tiny.tiny_target_folder(tmp_path / "seed0", "gemma2", seed=0)
    other = tiny.tiny_target_folder(tmp_path / "seed1", "gemma2", seed=1)
    specs = [load_spec(tiny.tiny_target_config(path, "gemma2")) for path in (folder, other)]
    edit_json(folder / "config.json", final_logit_softcapping=7.0)
    specs.append(load_spec(tiny.tiny_target_config(folder, "gemma2")))
    assert len({spec.fingerprint for spec in specs}) == 3


# ---- where a target is found, and what is refused ----


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing cached anywhere, and a hub that refuses connections. Returns the hub's empty cache."""
    monkeypatch.setenv("SPECVOCAB_CACHE", str(tmp_path / "specvocab"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path / "hub"


@pytest.mark.parametrize("offline", [True, False])
@pytest.mark.parametrize(("name", "fix"), [
    ("owner/name", "give its folder: target.model=FOLDER"),  # the hub would not give it to fetch_target.py either
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "python scripts/fetch_target.py HuggingFaceTB/SmolLM2-135M-Instruct"),
])
def test_a_target_that_is_nowhere_names_what_to_do(no_hub, monkeypatch, offline: bool, name: str, fix: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(ConfigError, match=f"{name}.*{fix}") as caught:
        resolve_model(TargetConfig(model=name))
    assert "\n" not in str(caught.value)
    assert ("fetch_target" in str(caught.value)) == (name != "owner/name")


@pytest.mark.parametrize("answer", [None, b"", b"what?\r\n\r\n"], ids=["reset", "closed", "no HTTP"])
def test_a_hub_that_breaks_off_is_a_hub_that_does_not_answer(no_hub, monkeypatch, answer: bytes | None) -> None:
    """Some proxies and captive portals do this instead of refusing the connection."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            if answer is None:  # no lingering: closing sends a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                connection.sendall(answer)

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConfigError, match=r"hub does not give it \(it does not answer\)"):
            resolve_model(TargetConfig(model="owner/name"))
        thread.join()


def test_a_missing_folder_is_not_taken_for_a_hub_id(no_hub) -> None:
    with pytest.raises(ConfigError, match=r"models/a/b' is neither a folder nor a hub id"):
        resolve_model(TargetConfig(model="./models/a/b"))


def test_a_fetched_target_answers_to_its_hub_id(no_hub) -> None:
    folder = tiny.tiny_target_folder(target_cache_dir() / "owner--name", "llama")
    assert resolve_model(TargetConfig(model="owner/name")) == folder
    assert load_spec(TargetConfig(model="owner/name")).name == "owner/name"


def test_the_hubs_own_cache_is_used_without_the_hub(no_hub, tmp_path: Path) -> None:
    repository = no_hub / "models--owner--name"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tiny.tiny_target_folder(repository / "snapshots" / commit, "llama")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert resolve_model(TargetConfig(model="owner/name")) == snapshot
    (snapshot / "model.safetensors").unlink()  # only the tokenizer had been downloaded
    with pytest.raises(ConfigError, match="the hub does not give it"):
        resolve_model(TargetConfig(model="owner/name"))


def test_incomplete_weights_are_refused(tmp_path: Path) -> None:
    folder = tiny.save_target(tiny.tiny_model("llama"), tmp_path / "target", max_shard_size="100KB")
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=rf"{shard.name} is damaged or not complete"):
        load_spec(TargetConfig(model=str(folder)))
    shard.unlink()
    with pytest.raises(ConfigError, match=shard.name):
        load_spec(TargetConfig(model=str(folder)))
    with pytest.raises(ConfigError, match=r"no absent\.gguf"):
        load_spec(TargetConfig(model=str(folder), gguf_file="absent.gguf"))


def test_an_unknown_model_type_is_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", n_embd=8, n_layer=2, n_head=2, vocab_size=300)
    folder = tiny.save_target(AutoModelForCausalLM.from_config(config), tmp_path / "target")
    with pytest.raises(ConfigError, match=r"type 'gpt2'; supported are .*llama.*LAYOUTS in (\S+\.py)\)") as caught:
        load_spec(TargetConfig(model=str(folder)))
    assert "\n" not in str(caught.value)
    named = Path(CONFIG_DIR).parent / re.search(r"LAYOUTS in (\S+\.py)", str(caught.value)).group(1)
    assert "LAYOUTS: " in named.read_text()
    edit_json(folder / "config.json", model_type="no_such_type")
    with pytest.raises(ConfigError, match="no_such_type"):
        load_spec(TargetConfig(model=str(folder)))


@pytest.mark.parametrize(("kind", "attention"), [("llama", "flash_attention_2"), ("gemma2", "sdpa")])
def test_attention_that_would_mix_documents_is_refused(kind: str, attention: str, tmp_path: Path) -> None:
    folder = tiny.tiny_target_folder(tmp_path / "target", kind)
    with pytest.raises(ConfigError, match=f"{attention}.* use .*eager"):
        load_spec(TargetConfig(model=str(folder), attn_implementation=attention))


def test_a_target_without_any_eos_is_refused(tmp_path: Path) -> None:
    folder = tiny.tiny_target_folder(tmp_path / "target", "llama")
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", eos_token_id=None)
    edit_json(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="no EOS"):
        load_spec(TargetConfig(model=str(folder)))
