"""Generate training data: the target's own answers to prompts.

    accelerate launch data_gen/main.py +experiment=qwen3_8b
    python data_gen/main.py +experiment=quickstart

Writes ``data.train_path`` and ``data.validation_path``. The same command, killed anywhere and started again, goes on
where it was, on any number of processes.
"""

from __future__ import annotations

from datetime import timedelta
from itertools import chain
from pathlib import Path

import torch
from accelerate import PartialState

from data_gen.chat import encode_prompt
from data_gen.engines import SamplingParams
from data_gen.magpie import invent_prompts
from data_gen.prompts import Prompt, hold_out, load_prompts, split_prompts, unique_prompts
from data_gen.stage import Stage, StageRunner
from specvocab_model.cli import hydra_main
from specvocab_model.config import Config, ConfigError

SLOWEST_RANK = timedelta(days=30)  # ranks that are done wait for it


@hydra_main
def main(config: Config) -> None:
    # Without cpu=True, accelerate finds no backend where there is no GPU, and each rank would do all the work alone.
    state = PartialState(cpu=config.distributed.cpu or not torch.cuda.is_available(), timeout=SLOWEST_RANK)
    generate(StageRunner(config, state))
    state.destroy_process_group()


def generate(runner: StageRunner) -> None:
    """Collect the prompts and have the target answer them.

    Raises:
        ConfigError: something is missing, or a folder holds data of other settings.
    """
    train, validation = split(runner.config, collect_prompts(runner))
    runner.run(answers(runner, "train", runner.config.data.train_path, train))
    runner.run(answers(runner, "validation", runner.config.data.validation_path, validation))


def collect_prompts(runner: StageRunner) -> list[Prompt]:
    """The prompts of the files, then those that the target invents, each once and none of the evaluation's.

    Raises:
        ConfigError: there are none, or a file is missing or not as it should be.
    """
    generation = runner.config.generation
    if not generation.prompt_files and not generation.magpie_prompts:
        raise ConfigError("no prompts: give generation.prompt_files or set generation.magpie_prompts")
    evaluation = load_prompts(runner.config.eval.prompts)
    written = list(chain.from_iterable(map(load_prompts, generation.prompt_files)))
    counts = {"read": len(written)}
    invented: list[Prompt] = []
    if generation.magpie_prompts:
        invented, dropped = invent_prompts(runner)
        counts |= {"invented": len(invented)} | {f"invented but {reason}": count for reason, count in dropped.items()}
    prompts, counts["duplicates dropped"] = unique_prompts(written + invented)
    prompts, counts["held out for evaluation"] = hold_out(prompts, evaluation)
    counts["follow-up turns not asked"] = sum(len(prompt.follow_ups) for prompt in prompts)
    runner.report("prompts: " + ", ".join(f"{count} {what}" for what, count in counts.items() if count))
    return prompts[: generation.num_prompts]


def split(config: Config, prompts: list[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Training and validation prompts.

    Raises:
        ConfigError: one side is empty though it was asked for.
    """
    fraction = config.generation.validation_fraction
    train, validation = split_prompts(prompts, fraction)
    if not train or (fraction > 0 and not validation):
        raise ConfigError(f"generation.validation_fraction={fraction} leaves {len(train)} prompts for training and "
                          f"{len(validation)} for validation; give more prompts, or another fraction")
    return train, validation


def answers(runner: StageRunner, name: str, folder: str, prompts: list[Prompt]) -> Stage:
    generation = runner.config.generation
    return Stage(
        name=name,
        folder=Path(folder),
        prompts=prompts,
        encode=lambda prompt: encode_prompt(
            runner.tokenizer, prompt.conversation(), runner.config.target.chat_template_kwargs
        ),
        params=SamplingParams(
            max_new_tokens=generation.max_new_tokens,
            stop_token_ids=runner.spec.eos_token_ids,
            temperature=generation.temperature,
            top_k=generation.top_k,
            top_p=generation.top_p,
        ),
        role="assistant",
    )


if __name__ == "__main__":
    main()
