"""Tiny generation runs: what both the command line and this process can start."""

from __future__ import annotations

import json
import os
from pathlib import Path

from accelerate import PartialState

from data_gen.main import generate
from data_gen.stage import StageRunner
from specvocab_model.config import CONFIG_DIR
from tests.composing import config_of
from tests.tiny import TOKENIZER_LENGTH, tiny_target_folder

REPOSITORY = Path(CONFIG_DIR).parent
MAIN = REPOSITORY / "data_gen" / "main.py"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
NUM_PROMPTS = 24
FOLDERS = ("data-magpie", "data", "data-validation")
TOO_LONG = "too-long"


def write_inputs(root: Path) -> Path:
    """A target in ``root/target`` and prompts, one of them too long, in ``root/prompts.jsonl``; returns ``root``.

    The target has no padded ids: a random one would write them, and a real one does not.
    """
    tiny_target_folder(root / "target", "llama", vocab_size=TOKENIZER_LENGTH)
    records = [{"id": f"p-{number}", "prompt": "Count to " + "one more than " * (number % 5) + f"{number}."}
               for number in range(NUM_PROMPTS)]
    records[7] = {"id": TOO_LONG, "prompt": "and " * 100}
    (root / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return root


def overrides(root: Path, name: str, *changes: str) -> list[str]:
    """Hydra overrides of a sampled run into the folders ``root/name/...``; ``changes`` replace or add values."""
    settings = {
        "+experiment": "quickstart",
        "run_name": name,
        "output_dir": root / name,
        "target.model": root / "target",
        "target.dtype": "float32",  # rounding must not decide a token
        "distributed.cpu": True,
        "data.train_path": root / name / FOLDERS[1],
        "data.validation_path": root / name / FOLDERS[2],
        "generation.prompt_files": f"[{root / 'prompts.jsonl'}]",
        "eval.prompts": REPOSITORY / "data_gen" / "quickstart_eval_prompts.jsonl",
        "generation.magpie_prompts": 12,
        "generation.magpie_max_new_tokens": 40,
        "generation.max_prompt_tokens": 200,
        "generation.max_new_tokens": 24,
        "generation.temperature": 0.8,
        "generation.batch_tokens": 700,
        "generation.validation_fraction": 0.25,
        "generation.rows_per_shard": 4,
    }
    settings |= dict(change.split("=", maxsplit=1) for change in changes)
    return [f"{key}={value}" for key, value in settings.items()]


def talk(root: Path, name: str, *changes: str) -> list[str]:
    """Overrides of a run over conversations of three questions each, long enough for some answers to be whole."""
    records = [{"id": f"talk {number}", "messages": [
        {"role": role, "content": f"{words} {number}"} for role, words in (
            ("user", "Count to"), ("assistant", "old"), ("user", "And to"), ("assistant", "older"), ("user", "And"))]}
        for number in range(16)]
    (root / "talk.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return overrides(root, name, f"generation.prompt_files=[{root}/talk.jsonl]", "generation.magpie_prompts=0",
                     "generation.max_new_tokens=64", "generation.max_prompt_tokens=400", "generation.batch_tokens=9000",
                     *changes)


def run_here(arguments: list[str]) -> StageRunner:
    """What ``data_gen/main.py`` does with these overrides, in this process."""
    runner = StageRunner(config_of(arguments), PartialState(cpu=True))
    generate(runner)
    return runner


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of the three folders of a run."""
    return {str(file.relative_to(folder)): file.read_bytes() for name in FOLDERS for file in (folder / name).iterdir()}
