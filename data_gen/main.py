"""Generate training data: the target's own answers to prompts.

    accelerate launch data_gen/main.py +experiment=qwen3_8b
    python data_gen/main.py +experiment=quickstart
    accelerate launch data_gen/main.py +experiment=qwen3_8b action=features data.features_path=FOLDER
    python data_gen/main.py +experiment=quickstart action=inspect 'inspect=[0,seed-17]'
    python data_gen/main.py +experiment=quickstart action=verify
    python data_gen/main.py +experiment=quickstart action=stats

Writes ``data.train_path`` and ``data.validation_path``. The same command, killed anywhere and started again, goes on
where it was, on any number of processes. The other actions look at what was written.
"""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from accelerate import PartialState

from data_gen.answers import AnswerKeeper, AnswerWriter
from data_gen.collect import TRAIN_FILE, VALIDATION_FILE, collect, prompts_folder, read_counts
from data_gen.engines import SamplingParams
from data_gen.magpie import invent_prompts
from data_gen.make_features import make_features
from data_gen.open_shards import RowWriter
from data_gen.prompt_store import PromptStore
from data_gen.prompts import load_prompts
from data_gen.show import inspect_rows
from data_gen.sources import check_sources
from data_gen.stage import Stage, StageRunner
from data_gen.token_stats import print_stats
from data_gen.verify import verify
from specvocab_model.cli import hydra_main
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import load_spec_and_tokenizer

SLOWEST_RANK = timedelta(days=30)  # ranks that are done wait for it


@hydra_main
def main(config: Config) -> None:
    if config.action in ("inspect", "verify", "stats"):
        look(config)
        return
    # Without cpu=True, accelerate finds no backend where there is no GPU, and each rank would do all the work alone.
    state = PartialState(cpu=config.distributed.cpu or not torch.cuda.is_available(), timeout=SLOWEST_RANK)
    if config.action == "features":
        make_features(config, state)
    else:
        generate(StageRunner(config, state))
    state.destroy_process_group()


def look(config: Config) -> None:
    """Show or check what is there.

    Raises:
        ConfigError: it is not there, or something is wrong with it.
    """
    spec, tokenizer = load_spec_and_tokenizer(config.target)
    if config.action == "inspect":
        inspect_rows(config, tokenizer)
    elif config.action == "verify":
        verify(config, spec, tokenizer)
    else:
        print_stats(config, tokenizer)


def generate(runner: StageRunner) -> None:
    """Collect the prompts and make rows of them.

    Raises:
        ConfigError: something is missing, or a folder holds data of other settings.
    """
    choose_prompts(runner)
    data = runner.config.data
    stages = [  # both are opened now: another command may choose anew while the first is at work
        answers(runner, "train", data.train_path, TRAIN_FILE),
        answers(runner, "validation", data.validation_path, VALIDATION_FILE),
    ]
    for stage in stages:
        runner.run(stage)


def choose_prompts(runner: StageRunner) -> None:
    """Have the target invent prompts, then choose among these and those of the sources, once for all ranks.

    Raises:
        ConfigError: there are none, or a source is missing or not as it should be.
    """
    generation = runner.config.generation
    if not generation.prompt_files and not generation.sources and not generation.magpie_prompts:
        raise ConfigError("no prompts: give generation.prompt_files or generation.sources, or set "
                          "generation.magpie_prompts")
    check_sources(generation)
    evaluation = load_prompts(runner.config.eval.prompts)
    invented, dropped = invent_prompts(runner) if generation.magpie_prompts else ([], Counter[str]())
    if runner.state.is_main_process:
        counts = collect(runner.config, invented, dropped, evaluation)
        runner.report("prompts: " + ", ".join(f"{count} {what}" for what, count in counts.items()))
    runner.state.wait_for_everyone()


def answers(runner: StageRunner, name: str, folder: str, file: str) -> Stage:
    """The stage that makes the rows of one side of the split.

    Raises:
        ConfigError: answers are to be kept, and there is no chat template to find them by.
    """
    config, generation = runner.config, runner.config.generation
    keep = generation.responses == "keep"
    if keep and runner.tokenizer.chat_template is None:
        raise ConfigError(f"generation.responses=keep needs a chat template, and {config.target.model!r} has none; use "
                          "regenerate")
    prompts = PromptStore(prompts_folder(config) / file)
    stop_token_ids = runner.spec.eos_token_ids
    write: RowWriter = partial(AnswerWriter, config, runner.tokenizer)
    if keep:
        write = partial(AnswerKeeper, config, runner.tokenizer, stop_token_ids)
    return Stage(
        name=name,
        folder=Path(folder),
        prompts=prompts,
        prompts_sha256=prompts.digest,
        write=write,
        params=None if keep else SamplingParams(
            max_new_tokens=generation.max_new_tokens,
            stop_token_ids=stop_token_ids,
            temperature=generation.temperature,
            top_k=generation.top_k,
            top_p=generation.top_p,
        ),
        stop_token_ids=stop_token_ids,
        settings={"answers": {
            "responses": generation.responses,
            "thinking_share": generation.thinking_share,
            "min_tokens": generation.min_response_tokens,
            "max_tokens": generation.max_new_tokens,
            "max_repetition": generation.max_repetition,
        }},
        collected=read_counts(config),
    )


if __name__ == "__main__":
    main()
