"""Files that were cut, lost or changed end a command in one line that names the file, never in a traceback.

The bytes of a target's own weights have no checksum anywhere: there, only what safetensors sees can be found.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from accelerate import Accelerator
from safetensors.torch import save_file

from scripts.export import export
from specvocab_model.config import Config, ConfigError, DataConfig, EvalConfig, HeadConfig, TargetConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import Provenance, load_checkpoint, save_checkpoint
from specvocab_model.files import sha256
from specvocab_model.target import Target, load_spec
from tests.tiny import tiny_gguf, tiny_target_folder
from tests.train.runs import config_of, overrides, write_experiment
from train.build import build_run
from train.checkpoint import Checkpoints
from train.loop import train


def flip(content: bytes) -> bytes:
    """Eight bytes changed, all over the file."""
    changed, rng = bytearray(content), random.Random(0)
    for _ in range(8):
        changed[rng.randrange(len(changed))] ^= 0xFF
    return bytes(changed)


DAMAGES: dict[str, Callable[[bytes], bytes] | None] = {
    "missing": None,
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "flipped": flip,
    "zeros": lambda content: bytes(len(content)),
    "another JSON": lambda content: b"[1]",
    "no fields": lambda content: b"{}",
}


def damage(path: Path, name: str) -> None:
    change = DAMAGES[name]
    if change is None:
        path.unlink()
    else:
        path.write_bytes(change(path.read_bytes()))


def cases(files: tuple[str, ...], *harmless: tuple[str, str]) -> list[tuple[str, str]]:
    """Every file with every damage, but for what leaves a usable file."""
    return [(file, name) for file in files for name in DAMAGES if (file, name) not in harmless]


def assert_refused(call: Callable[[], object], path: Path) -> None:
    """One line that names the file, or at least its folder."""
    with pytest.raises(ConfigError) as refused:
        call()
    message = str(refused.value)
    assert "\n" not in message and ("; " in message or ": " in message)
    assert str(path.parent) in message


# ---- the target ----

TARGET_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
                "chat_template.jinja")
OPTIONAL_FILES = ("generation_config.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target_folder(tmp_path_factory.mktemp("damaged") / "target", "qwen3")


@pytest.mark.parametrize(("file", "name"), cases(
    TARGET_FILES,
    ("model.safetensors", "flipped"),
    *[(file, name) for file in OPTIONAL_FILES for name in ("missing", "no fields")],
    *[("chat_template.jinja", name) for name in DAMAGES if name != "flipped"],
))
def test_a_damaged_target(file: str, name: str, target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(target, tmp_path / "target"))
    damage(folder / file, name)
    assert_refused(lambda: load_spec(TargetConfig(model=str(folder))), folder / file)


@pytest.mark.parametrize("name", ["empty", "half", "zeros"])
def test_a_damaged_gguf_file(name: str, tmp_path: Path) -> None:
    tiny_gguf(tmp_path / "tiny.gguf")
    damage(tmp_path / "tiny.gguf", name)
    assert_refused(lambda: load_spec(TargetConfig(model=str(tmp_path), gguf_file="tiny.gguf")), tmp_path / "tiny.gguf")


@pytest.mark.parametrize(("field", "value"), [
    ("num_hidden_layers", 9), ("intermediate_size", 95), ("tie_word_embeddings", False),
])
def test_weights_of_another_shape_than_the_config_says(field: str, value: int, tmp_path: Path) -> None:
    """transformers makes up what is missing, at random, and warns."""
    folder = tiny_target_folder(tmp_path / "target", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(ConfigError, match=r"config\.json describes another model than the weights are of"):
        Target.load(TargetConfig(model=str(folder)), device="cpu")


# ---- an export, and the run that it is made of ----

EXPORT_FILES = ("config.json", "model.safetensors", "specvocab.json", "vocabulary_speculator/config.json",
                "vocabulary_speculator/model.safetensors")


@pytest.fixture(scope="module")
def exported(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = load_spec(TargetConfig(model=str(target)))
    model = SpecVocabDraft.build(spec, config_in(target, target).draft, HeadConfig(num_candidates=20))
    return save_checkpoint(tmp_path_factory.mktemp("damaged") / "export", model, spec, Provenance())


def config_in(folder: Path, target: Path) -> Config:
    return Config(run_name="run", output_dir=str(folder), target=TargetConfig(model=str(target)),
                  data=DataConfig(train_path="t", validation_path="v"), eval=EvalConfig(prompts="p"))


@pytest.mark.parametrize(("file", "name"), cases(EXPORT_FILES))
def test_a_damaged_export(file: str, name: str, exported: Path, target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "export"))
    damage(folder / file, name)
    spec = load_spec(TargetConfig(model=str(target)))
    assert_refused(lambda: load_checkpoint(folder, spec), folder / file)


@pytest.mark.parametrize("file", [file for file in EXPORT_FILES if file.endswith(".json")])
def test_one_changed_bit_in_an_export_is_harmless_or_refused(file: str, exported: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported, tmp_path / "export"))
    content, rng, refused = (folder / file).read_bytes(), random.Random(0), 0
    for _ in range(150):
        changed = bytearray(content)
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(7)
        (folder / file).write_bytes(changed)
        try:
            load_checkpoint(folder)
        except ConfigError as error:
            refused += 1
            assert "\n" not in str(error)
    assert 0 < refused <= 150


@pytest.mark.parametrize(("file", "name"), cases(("training.json", "model.safetensors")))
def test_a_damaged_training_result(file: str, name: str, target: Path, tmp_path: Path) -> None:
    config = config_in(tmp_path, target)
    spec = load_spec(config.target)
    final = tmp_path / "final"
    final.mkdir()
    model = SpecVocabDraft.build(spec, config.draft, config.head).for_training()
    save_file(dict(model.state_dict()), final / "model.safetensors")
    record = {"step": 1, "metrics": {}, "config": asdict(config), "target_fingerprint": spec.fingerprint,
              "data_manifest_sha256": "d", "git_commit": None, "model_sha256": sha256(final / "model.safetensors")}
    (final / "training.json").write_text(json.dumps(record))
    damage(final / file, name)
    assert_refused(lambda: export(config), final / file)


# ---- checkpoints of training ----

CHECKPOINT_FILES = ("manifest.json", "state.json", "model.safetensors", "exp_avg.safetensors", "exp_avg_sq.safetensors",
                    "rng.pt")


@pytest.fixture(scope="module")
def checkpointed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of an experiment, and the settings of a run in it that stopped after a step."""
    root = write_experiment(tmp_path_factory.mktemp("damaged"))
    settings = overrides(root, "run", "trainer.max_steps=1")
    train(build_run(config_of(settings)))
    return root, settings


@pytest.mark.parametrize(("file", "name"), cases(
    tuple(f"step-1/{file}" for file in CHECKPOINT_FILES),
))
def test_a_damaged_checkpoint(file: str, name: str, checkpointed: tuple[Path, list[str]], tmp_path: Path) -> None:
    original = checkpointed[0] / "run/checkpoints"
    identity = json.loads((original / "step-1/state.json").read_text())["identity"]
    folder = Path(shutil.copytree(original, tmp_path / "checkpoints"))
    damage(folder / file, name)
    checkpoints = Checkpoints(tmp_path, Accelerator(cpu=True), keep=1, keep_best=False, identity=identity)
    assert_refused(checkpoints.find, folder / file)


def test_the_checkpoint_itself_is_whole(checkpointed: tuple[Path, list[str]]) -> None:
    root, settings = checkpointed
    assert build_run(config_of(settings)).state.step == 1
    names = {path.name for path in (root / "run/checkpoints/step-1").iterdir()}
    assert names == set(CHECKPOINT_FILES)
