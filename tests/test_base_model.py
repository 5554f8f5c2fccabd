"""The road of a base model, from a tiny Gemma 3 in a GGUF file to its measured draft; prompts are plain text."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_gen.shards import load_rows
from scripts import bench_decode, fetch_target, trim_vocab
from specvocab_model.config import TargetConfig
from specvocab_model.target_spec import load_spec_and_tokenizer
from tests import tiny_gemma
from tests.forking import forking

REPOSITORY = Path(__file__).resolve().parent.parent


def overrides(root: Path) -> list[str]:
    return [
        "+experiment=gemma3_270m", f"output_dir={root / 'out'}", f"target.model={root / 'target'}",
        "target.dtype=float32", f"data.train_path={root / 'data/train'}",
        f"data.validation_path={root / 'data/validation'}", "data.seq_len=128", "data.num_workers=0",
        f"generation.prompt_files=[{root / 'prompts.jsonl'}]", "generation.magpie_prompts=12",
        "generation.samples_per_prompt=1", "generation.max_prompt_tokens=200", "generation.max_new_tokens=16",
        "generation.validation_fraction=0.2", "draft.num_unroll_steps=2", "head.num_candidates=32",
        "head.calibration_tokens=64", "trainer.max_steps=2", "trainer.micro_batch_size=1",
        "trainer.mixed_precision=no", "distributed.cpu=true", f"eval.prompts={root / 'questions.jsonl'}",
        "eval.max_new_tokens=12", "eval.num_draft_tokens=2",
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Everything up to the evaluation, done by the pipeline."""
    root = tmp_path_factory.mktemp("base-model")
    tiny_gemma.tiny_gemma_gguf(root / "tiny.gguf")
    gemma = fetch_target.WHEELS["google/gemma-3-270m"]
    fetch_target._convert(root / "tiny.gguf", gemma, root / "target")
    prompts = [{"id": f"p-{number}", "prompt": f"the cat and {number} more"} for number in range(8)]
    questions = [{"question_id": 1, "category": "a", "turns": ["the house", "the end"]},
                 {"question_id": 2, "category": "b", "turns": ["a very long story of the cat"]}]
    for name, records in (("prompts", prompts), ("questions", questions)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, str(REPOSITORY / "scripts/pipeline.py"), *overrides(root)]
    with forking():
        ended = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return root


def test_rows_are_a_text_and_its_continuation(root: Path) -> None:
    _, tokenizer = load_spec_and_tokenizer(TargetConfig(model=str(root / "target")))
    rows = [row for side in ("train", "validation") for row in load_rows(root / "data" / side)]
    assert {row["source"] for row in rows} == {"prompts", "magpie"}
    for row in rows:
        asked, answer = json.loads(row["messages"])
        prompt_ids = tokenizer(asked["content"])["input_ids"]
        assert prompt_ids.count(tiny_gemma.BOS_ID) == 1 and "\n" not in asked["content"]
        assert row["input_ids"][: len(prompt_ids)] == prompt_ids
        continuation = row["input_ids"][len(prompt_ids) :]
        assert row["loss_mask"] == [0] * len(prompt_ids) + [1] * len(continuation)
        assert tokenizer.decode(continuation, skip_special_tokens=True) == answer["content"]


def test_both_turns_are_evaluated_without_loss(root: Path) -> None:
    evaluation = json.loads((root / "out/evaluation.json").read_text())
    assert evaluation["lossless"] is True and set(evaluation["tau"]) == {"untrained", "full", "speculative"}
    assert 3 * 12 >= evaluation["details"]["autoregressive"]["num_tokens"] > 2 * 12


def test_the_bench_decodes_the_draft_and_its_pruned_head_without_loss(root: Path) -> None:
    target = str(root / "target")
    trim_vocab.main([str(root / "out/export"), "--target", target, "--data", str(root / "data/train"), "--size", "60",
                     "--output", str(root / "pruned60"), "--dtype", "float32", "--min-size", "20", "--step", "20"])
    bench_decode.main(["--target", target, "--prompts", str(root / "questions.jsonl"), "--cpu", "--dtype", "float32",
                       "--draft", str(root / "out/export"), str(root / "pruned60/pruned"), "--max-new-tokens", "8",
                       "--shapes", "2", "2x3x5", "--json", str(root / "bench.json")])
    results = json.loads((root / "bench.json").read_text())["results"]
    assert set(results) == {"autoregressive"} | {
        f"{head} {shape}" for head in ("out full", "out speculative", "pruned60 static")
        for shape in ("chain 2", "tree 2x3x5")
    }
    assert all(not result["differences"] for result in results.values())
