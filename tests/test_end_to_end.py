"""The real commands, one after the other, on a tiny target: prompts in, measured checkpoint out."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from data_gen.shards import read_manifest
from scripts.pipeline import CHANGED
from specvocab_model.config import TargetConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.target import Target, load_spec
from tests.tiny import TOKENIZER_LENGTH, tiny_target_folder, untied

REPOSITORY = Path(__file__).resolve().parent.parent
RESULT_KEYS = {
    "target": None,
    "num_train_tokens": None,
    "tau": {"untrained", "full", "speculative"},
    "candidate_recall": {"target_top1", "draft_top1"},
    "num_candidates": None,
    "rank": None,
    "lossless": None,
    "tokens_per_second": {"autoregressive", "speculative"},
    "seconds": {"generate", "train", "export", "evaluate"},
}


def overrides(tmp_path: Path, name: str) -> list[str]:
    """Settings of a run of a few optimizer steps in ``tmp_path``; its data and output folders carry ``name``."""
    return [
        "+experiment=quickstart", f"run_name={name}", f"output_dir={tmp_path / name}",
        f"target.model={tmp_path / 'target'}", "target.dtype=float32",
        f"data.train_path={tmp_path / name / 'data/train'}",
        f"data.validation_path={tmp_path / name / 'data/validation'}",
        "data.seq_len=256", f"generation.prompt_files=[{tmp_path / 'prompts.jsonl'}]", "generation.magpie_prompts=4",
        "generation.magpie_max_new_tokens=6", "generation.max_new_tokens=8", "generation.validation_fraction=0.2",
        "generation.max_prompt_tokens=200", "generation.rows_per_shard=4", "draft.num_unroll_steps=2",
        "head.num_candidates=32", "head.calibration_tokens=64", "trainer.max_steps=4", "trainer.micro_batch_size=1",
        "trainer.save_every=1", "trainer.validate_every=2", "trainer.log_every=1", "trainer.mixed_precision=no",
        "distributed.cpu=true", f"eval.prompts={tmp_path / 'held_out.jsonl'}", "eval.max_new_tokens=8",
        "eval.num_draft_tokens=2",
    ]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """A folder with a tiny target and its prompts."""
    folder = tmp_path_factory.mktemp("end-to-end")
    tiny_target_folder(folder / "target", "qwen3", vocab_size=TOKENIZER_LENGTH)  # real targets write no padded ids
    prompts = [{"messages": [{"role": "user", "content": f"What is {number} plus one?"}]} for number in range(12)]
    held_out = [{"question_id": number, "category": "maths" if number else "writing", "turns": [f"Count to {number}."]}
                for number in range(3)]
    for name, rows in (("prompts", prompts), ("held_out", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def pipeline(folder: Path, name: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(REPOSITORY / "scripts/pipeline.py"), *overrides(folder, name), *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            start_new_session=True)


def finish(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    return out


@pytest.fixture(scope="module")
def whole(workplace: Path) -> tuple[Path, str]:
    """An unbroken run: its output folder, and what it printed."""
    return workplace / "whole", finish(pipeline(workplace, "whole"))


def stages_finished_before(out: str) -> list[str]:
    lines = [line for line in out.splitlines() if line.endswith(": finished before")]
    return [line.split("] ")[1].removesuffix(": finished before") for line in lines]


def test_results(workplace, whole):
    output, out = whole
    results = json.loads((output / "results.json").read_text())
    assert {key: set(value) if isinstance(value, dict) else None for key, value in results.items()} == RESULT_KEYS
    assert results["target"] == str(workplace / "target")
    assert results["lossless"] is True
    assert results["num_candidates"] == 33 and results["rank"] == 48 // 8
    assert all(1 <= tau <= 3 for tau in results["tau"].values())
    assert all(0 <= share <= 1 for share in results["candidate_recall"].values())
    assert all(value > 0 for value in (*results["tokens_per_second"].values(), *results["seconds"].values()))
    assert results["num_train_tokens"] == read_manifest(output / "data/train").num_loss_tokens
    assert stages_finished_before(out) == []
    assert f"{results['tau']['speculative']:.2f}" in out and str(output / "results.json") in out


def test_checkpoint_holds_what_was_trained(workplace, whole):
    output, _ = whole
    spec = load_spec(TargetConfig(model=str(workplace / "target")))
    model = SpecVocabDraft.from_pretrained(output / "export", target_spec=spec)
    target = Target.load(TargetConfig(model=str(workplace / "target"), dtype="float32"), device="cpu")
    trained = untied(load_file(output / "final/model.safetensors"), target)
    exported = model.state_dict()
    assert exported.keys() == trained.keys()
    assert all(bool((exported[name].float() == trained[name]).all()) for name in trained)


@pytest.mark.usefixtures("forked")
def test_second_run_does_nothing_again(workplace, whole):
    output, _ = whole
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.safetensors")}
    results = (output / "results.json").read_text()
    out = finish(pipeline(workplace, "whole"))
    assert stages_finished_before(out) == ["generate", "train", "export", "evaluate"]
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*.safetensors")} == before
    assert (output / "results.json").read_text() == results


@pytest.mark.usefixtures("forked")
def test_a_replaced_checkpoint_is_exported_and_evaluated_anew(workplace, whole):
    """By other weights in the same place, as scripts/convert.py and another export.py write them."""
    output, _ = whole
    weights = output / "export/vocabulary_speculator/model.safetensors"
    exported = weights.read_bytes()
    tensors = load_file(weights)
    weights.unlink()  # load_file has it mapped
    save_file({name: tensor.flip(0).contiguous() for name, tensor in tensors.items()}, weights)
    out = finish(pipeline(workplace, "whole"))
    assert stages_finished_before(out) == ["generate", "train"] and f"export: {CHANGED}" in out
    assert weights.read_bytes() == exported
    record = json.loads((output / "export/specvocab.json").read_text())
    assert record["evaluation"] == json.loads((output / "evaluation.json").read_text())


@pytest.mark.usefixtures("forked")
def test_changed_evaluation_runs_only_the_evaluation(workplace, whole):
    out = finish(pipeline(workplace, "whole", "eval.num_draft_tokens=1"))
    assert stages_finished_before(out) == ["generate", "train", "export"]
    assert json.loads((workplace / "whole/results.json").read_text())["tau"]["speculative"] <= 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_killed_run_ends_with_the_same_weights(workplace, whole):
    """SIGKILL to everything, once in each long stage; the same command then ends with the unbroken run's bytes."""
    for moment in ("data/train/shard-00000.parquet", "checkpoints/step-2", "export"):
        process = pipeline(workplace, "killed")
        while not (workplace / "killed" / moment).exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        out, _ = process.communicate()
        assert (workplace / "killed/final").exists() == (moment == "export")
    assert stages_finished_before(out) == ["generate"]  # the third start needed no more to come to the weights
    for file in ("data/train/shard-00000.parquet", "data/validation/shard-00000.parquet", "final/model.safetensors"):
        assert digest(workplace / "killed" / file) == digest(workplace / "whole" / file)


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
