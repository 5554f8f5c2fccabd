"""Prompts of more kinds and lengths out of short ones: follow-ups, summaries, questions about passages, translations.

    python scripts/mix_prompts.py prompts.jsonl mixed.jsonl

A draft that has read short conversations alone has never looked far back. Two of five prompts get a second turn about
the target's answer, and others are put together into texts of some 200 to 1000 tokens. Every record of the input is one
question, {"id", "source", "messages": [{"role": "user", "content"}]}; the same input gives the same output.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_gen.prompts import load_prompts
from specvocab_model.config import ConfigError
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
    run_command(parser, write, argv)


def write(args: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: a line is no prompt, or no question is short enough to be put together with others.
    """
    prompts = load_prompts(args.prompts)
    for prompt in prompts:
        if prompt.num_turns > 1 or [message["role"] for message in prompt.messages] != ["user"]:
            raise ConfigError(f"{args.prompts}: {prompt.id} is more than one question of a user, which cannot be put "
                              "together with others; leave it out, and add it to the output")
    questions = [prompt.messages[0]["content"] for prompt in prompts]
    if not any(len(question) < LONGEST_PART for question in questions):
        raise ConfigError(f"{args.prompts} has no question of less than {LONGEST_PART} characters; give shorter ones")
    rows = mixed([(prompt.id, prompt.source, question) for prompt, question in zip(prompts, questions, strict=True)])
    with args.output.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(f"{len(rows)} prompts in {args.output}")


def mixed(questions: Sequence[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Records of (id, source, question), shuffled with those made of them: 0.44 more."""
    draw, texts = random.Random(0), [text for _, _, text in questions]
    rows = [{"id": name, "source": source, "turns": [text, draw.choice(FOLLOW_UPS)] if draw.random() < FOLLOWED_UP
             else [text]} for name, source, text in questions]

    def some(least: int, most: int) -> list[str]:
        wanted, parts = draw.randint(least, most), list[str]()
        while sum(map(len, parts)) < wanted:
            text = draw.choice(texts)
            if len(text) < LONGEST_PART:
                parts.append(text)
        return parts

    def add(kind: str, share: float, make: Callable[[], str]) -> None:
        rows.extend({"id": f"{kind}-{number}", "source": kind, "turns": [make()]}
                    for number in range(round(share * len(texts))))

    def passages() -> str:
        parts = some(800, 2600)
        lines = "\n".join(f"[{number}] {text}" for number, text in enumerate(parts, start=1))
        return f"{lines}\n\nUse the passages above to answer. {draw.choice(parts)}"

    add("summary", 0.176, lambda: draw.choice(SUMMARIES).format(" ".join(some(500, 2600))))
    add("passages", 0.176, passages)
    add("translation", 0.088, lambda: f"Translate to {draw.choice(LANGUAGES)}: {draw.choice(texts)[:600]}")
    draw.shuffle(rows)
    return rows


if __name__ == "__main__":
    main()
