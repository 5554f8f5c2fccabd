"""The hand-written prompts: evaluation shares nothing with training."""

import difflib
import json
from collections import Counter
from pathlib import Path

from specvocab_model.config import CONFIG_DIR

DATA_GEN = Path(CONFIG_DIR).parent / "data_gen"
NEAR_DUPLICATE = 0.75  # difflib ratio; the closest pair that is meant has 0.72


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (DATA_GEN / name).read_text().splitlines()]


TRAIN = [row["messages"][0]["content"] for row in rows("quickstart_prompts.jsonl")]
EVALUATION = [row["turns"][0] for row in rows("quickstart_eval_prompts.jsonl")]
RARE_TOKENS = [row["turns"][0] for row in rows("rare_token_prompts.jsonl")]


def similarity(left: str, right: str) -> float:
    return difflib.SequenceMatcher(None, left.lower(), right.lower()).ratio()


def test_prompts_are_distinct_and_enough():
    prompts = [prompt.lower() for prompt in TRAIN + EVALUATION]
    assert len(set(prompts)) == len(prompts) == 176
    assert 0.1 <= len(EVALUATION) / len(prompts) <= 0.15


def test_no_evaluation_prompt_is_close_to_a_training_prompt():
    near = [(new, old) for new in EVALUATION + RARE_TOKENS for old in TRAIN if similarity(new, old) >= NEAR_DUPLICATE]
    assert near == []
    assert similarity("Why do cats purr?", "Why do cats purr at night?") >= NEAR_DUPLICATE  # the measure notices


def test_every_category_is_trained_and_held_out():
    held_out = Counter(row["category"] for row in rows("quickstart_eval_prompts.jsonl"))
    trained = Counter(row["id"].rpartition("-")[0] for row in rows("quickstart_prompts.jsonl"))
    assert held_out == dict.fromkeys(trained, 3)
    assert trained == dict.fromkeys(held_out, 19)
