"""Prompts of more kinds and lengths out of short ones: follow-ups, summaries, questions about passages, translations.

    python scripts/mix_prompts.py prompts.jsonl mixed.jsonl

A draft that has read short conversations alone has never looked far back. Two of five prompts get a second turn about
the target's answer, and others are put together into texts of some 200 to 1000 tokens, or are to be translated. Every
record of the input is one question; the same input gives the same output. What is held back for validation, by its id
as in data generation, is made of held-back questions alone.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_gen.files import writing
from data_gen.prompts import Prompt, is_validation, load_prompts
from specvocab_model.config import ConfigError, GenerationConfig
from specvocab_model.options import run_command

FOLLOW_UPS = (
    "Summarize your answer in two sentences.", "Can you explain the second point in more detail?",
    "Rewrite your answer as a list of bullet points.", "Now make it shorter.", "Give an example.",
    "Rewrite that for a child of ten.", "Are you sure? Check every step again.", "What are the drawbacks of this?",
    "Translate your answer into French.", "Write the same as a formal letter.", "Why is that so?",
    "Add a table that compares the options.", "Continue.", "Turn this into a short poem.",
    "What would change if the numbers were doubled?", "Correct any mistakes in your answer.",
)
SUMMARIES = (
    "Summarize: {}", "Summarize the following text in a few sentences.\n\n{}",
    "{}\n\nWrite a summary of the text above.", "Give me the main points of this:\n\n{}", "TL;DR of the following:\n{}",
)
LANGUAGES = ("French", "German", "Spanish", "Italian")
FOLLOWED_UP = 0.4  # share of the prompts
LONGEST_PART = 900  # characters of a text that is put together with others


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--validation-fraction", type=float, default=GenerationConfig().validation_fraction,
                        help="generation.validation_fraction of the runs that will use them")
    run_command(parser, write, argv)


def write(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: a line is no prompt or more than a question, or none of them is short enough to be put together
            with others.
    """
    prompts = load_prompts(args.prompts)
    for prompt in prompts:
        if prompt.num_turns > 1 or prompt.tools or [message["role"] for message in prompt.messages] != ["user"]:
            raise ConfigError(f"{args.prompts}: {prompt.id} is more than one question of a user, which cannot be put "
                              "together with others; leave it out, and add it to the output")
    rows = mixed(prompts, args.validation_fraction)
    if len(rows) == len(prompts):
        raise ConfigError(f"{args.prompts} has no question of less than {LONGEST_PART} characters; give shorter ones")
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with writing(args.output), args.output.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{len(rows)} prompts in {args.output}")


def mixed(prompts: Sequence[Prompt], validation_fraction: float) -> list[dict[str, Any]]:
    """Records of single questions, shuffled with those made of them: 0.44 more."""
    draw, rows = random.Random(0), list[dict[str, Any]]()
    short: dict[bool, list[str]] = {True: [], False: []}  # questions that are held back, and others
    for prompt in prompts:
        text = prompt.messages[0]["content"]
        follow_ups = [draw.choice(FOLLOW_UPS)] if draw.random() < FOLLOWED_UP else []
        rows.append({"id": prompt.id, "source": prompt.source, "category": prompt.category,
                     "turns": [text, *follow_ups]})
        if len(text) < LONGEST_PART:
            short[is_validation(prompt.id, validation_fraction)].append(text)

    def some(texts: Sequence[str], least: int, most: int) -> list[str]:
        wanted, parts = draw.randint(least, most), list[str]()
        while sum(map(len, parts)) < wanted:
            parts.append(draw.choice(texts))
        return parts

    def summary(texts: Sequence[str]) -> str:
        return draw.choice(SUMMARIES).format(" ".join(some(texts, 500, 2600)))

    def passages(texts: Sequence[str]) -> str:
        parts = some(texts, 800, 2600)
        lines = "\n".join(f"[{number}] {text}" for number, text in enumerate(parts, start=1))
        return f"{lines}\n\nUse the passages above to answer. {draw.choice(parts)}"

    def translation(texts: Sequence[str]) -> str:
        return f"Translate to {draw.choice(LANGUAGES)}: {draw.choice(texts)[:600]}"

    for make, share in ((summary, 0.176), (passages, 0.176), (translation, 0.088)):
        for number in range(round(share * len(prompts))):
            name = f"{make.__name__}-{number}"
            if texts := short[is_validation(name, validation_fraction)]:
                rows.append({"id": name, "source": make.__name__, "category": make.__name__, "turns": [make(texts)]})
    draw.shuffle(rows)
    return rows


if __name__ == "__main__":
    main()
