"""An answer streaming in the terminal: the target alone, then with its draft, whose accepted tokens are green.

    bash scripts/demo.sh [CHECKPOINT] [--prompt TEXT] [--shape 8x10x60] [--temperature 0.7]

Both answer the same prompt in the same engine, one after the other, each with the machine to itself; the finished plain
answer stays beside the other one where the terminal is wide enough. Either's clock runs from the prompt to its newest
token and includes what drawing takes. Not in a terminal, or with NO_COLOR set, both are printed when they are finished,
accepted drafts in [brackets].
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from data_gen.chat import encode_prompt
from specvocab_model.config import DTYPES, ConfigError, TargetConfig
from specvocab_model.decode import DecodeOutput, place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.engine import DecodeEngine, DraftShape
from specvocab_model.evaluation import WARM_UP_TOKENS, first_differences
from specvocab_model.export import COPY_AGAIN, PROVENANCE_FILE, load_checkpoint
from specvocab_model.files import read_json, require_fields
from specvocab_model.heads import build_head
from specvocab_model.options import draft_shape, positive, run_command, seed, temperature, usable_device
from specvocab_model.sampling import Sampling
from specvocab_model.target import Target, load_spec
from specvocab_model.terminal import Answer, Screen

REFERENCE_DRAFT = Path(__file__).resolve().parent.parent / "docs" / "reference_draft"
PROMPT = "Explain to a child why the sky is blue."


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(build_parser(), demo, arguments)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    on_gpu = torch.cuda.is_available()
    parser.add_argument("checkpoint", type=Path, nargs="?", default=REFERENCE_DRAFT,
                        help="folder written by scripts/export.py or scripts/convert.py; by default the one in docs")
    parser.add_argument("--target", help="hub id or folder; by default the one that specvocab.json names")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-new-tokens", type=positive, default=128, help="longest answer")
    parser.add_argument("--shape", type=draft_shape, default=DraftShape(3),
                        help="a chain's length (3 by default), or DEPTHxTOP_KxTOKENS of a dynamic tree")
    parser.add_argument("--temperature", type=temperature, default=Sampling(), help="0, the default, is greedy")
    parser.add_argument("--seed", type=seed, default=0, help="of what is drawn")
    parser.add_argument("--dtype", choices=DTYPES, help="by default float32 on a CPU, else the type of the training")
    parser.add_argument("--device", type=usable_device, default="cuda" if on_gpu else "cpu")
    return parser


def demo(options: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: there is no checkpoint or target, they do not belong together, or the prompt does not suit them.
    """
    config = target_config(options)
    model = load_checkpoint(options.checkpoint, load_spec(config))
    target = Target.load(config, device=options.device, feature_layers=model.architecture.feature_layers)
    place_draft(model, target)
    prompt_ids = encode(target, options, config)
    screen = Screen(sys.stdout)
    print(f"{target.spec.name}, {config.dtype}, {options.device}\n{options.checkpoint}, {describe(options.shape)}")
    print(f"{screen.drafted('drafted and accepted')}, the target's own\n\n> {options.prompt}\n")
    answers = [Answer(title, target.tokenizer, screen.column) for title in ("the target alone", "with its draft")]
    outputs = [
        watch(engine, answer, prompt_ids, options, screen, answers if screen.two_columns else [answer])
        for engine, answer in zip(make_engines(target, model, len(prompt_ids), options), answers, strict=True)
    ]
    if screen.two_columns:
        screen.keep(answers)
    print(conclusion(target, prompt_ids, answers, outputs, options.temperature))


def target_config(options: argparse.Namespace) -> TargetConfig:
    """The target as the checkpoint's training had it, save for what the options say.

    Raises:
        ConfigError: there is no checkpoint, or it does not say.
    """
    folder, path = options.checkpoint, options.checkpoint / PROVENANCE_FILE
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no draft; make one with `bash scripts/quickstart.sh`, or leave the folder "
                          f"out for the one in {REFERENCE_DRAFT}")
    if options.target is not None and not path.is_file():  # a stock draft
        config = TargetConfig(model=options.target)
    else:
        record = read_json(path, f"{COPY_AGAIN}, or say --target")
        require_fields(record, {"target": dict}, path, COPY_AGAIN)
        require_fields(record["target"], {"name": str}, path, COPY_AGAIN)
        trained = (record.get("config") or {}).get("target", {})
        config = TargetConfig(**trained | {"model": options.target or record["target"]["name"]})
    by_default = config.dtype if torch.device(options.device).type == "cuda" else "float32"
    return replace(config, dtype=options.dtype or by_default)


def encode(target: Target, options: argparse.Namespace, config: TargetConfig) -> list[int]:
    """
    Raises:
        ConfigError: the prompt is empty or too long, or the chat template refuses it.
    """
    question = {"role": "user", "content": options.prompt}
    try:
        ids = encode_prompt(target.tokenizer, [question], config.chat_template_kwargs)
    except ValueError as error:
        raise ConfigError(f"--prompt cannot be put to {target.spec.name}: {error}") from error
    room = target.spec.max_position_embeddings - options.max_new_tokens
    if not 1 <= len(ids) <= room:
        raise ConfigError(f"--prompt has {len(ids)} tokens, but it must be 1 to {room}: {target.spec.name} has "
                          f"{target.spec.max_position_embeddings} positions, of which --max-new-tokens takes "
                          f"{options.max_new_tokens}")
    return ids


def make_engines(
    target: Target, model: SpecVocabDraft, num_prompt_tokens: int, options: argparse.Namespace
) -> tuple[DecodeEngine, DecodeEngine]:
    """Plain and with the draft, alike in all else."""
    capacity = num_prompt_tokens + options.max_new_tokens
    head = build_head(model.head_config.type, target, model)
    # One answer each: compiling would take far longer than it saves.
    return (DecodeEngine(target, capacity=capacity, sampling=options.temperature, compile=False),
            DecodeEngine(target, model, head, shape=options.shape, capacity=capacity, sampling=options.temperature,
                         compile=False))


def describe(shape: DraftShape) -> str:
    if shape.is_chain:
        return f"chains of {shape.depth} drafts"
    return f"trees of {shape.num_drafts} drafts, {shape.depth} deep"


def watch(
    engine: DecodeEngine, answer: Answer, prompt_ids: list[int], options: argparse.Namespace, screen: Screen,
    shown: Sequence[Answer],
) -> DecodeOutput:
    """Decode once, drawing what is ``shown`` as ``answer`` grows."""
    device = engine.target.device

    def generate(max_new_tokens: int, on_tokens: Callable[[int, list[int], int], None] | None = None) -> DecodeOutput:
        generator = torch.Generator(device).manual_seed(options.seed)
        return engine.generate([prompt_ids], max_new_tokens=max_new_tokens, generator=generator, on_tokens=on_tokens)[0]

    def on_tokens(_row: int, new_ids: list[int], num_accepted: int) -> None:
        answer.add(new_ids, num_accepted, time.perf_counter() - start)
        screen.draw(shown, answer)

    # On a GPU the whole answer, which captures the graphs of all lengths.
    generate(options.max_new_tokens if device.type == "cuda" else min(options.max_new_tokens, WARM_UP_TOKENS))
    start = time.perf_counter()
    output = generate(options.max_new_tokens, on_tokens)
    answer.finish()
    if not screen.two_columns:
        screen.keep(shown)
    return output


def conclusion(
    target: Target, prompt_ids: list[int], answers: Sequence[Answer], outputs: Sequence[DecodeOutput],
    sampling: Sampling,
) -> str:
    plain, drafted = (output.sequences for output in outputs)
    slow, fast = (answer.tokens_per_second for answer in answers)
    speed = f"{fast / slow:.2f} times the target's own speed, {answers[1].tau:.2f} tokens per forward of the target"
    if not sampling.greedy:
        return f"{speed}; both are drawn from the target's distribution, so they differ"
    if plain == drafted:
        return f"{speed}; the same {len(plain)} tokens"
    input_ids = torch.tensor([prompt_ids], device=target.device)
    ((position, gap),) = first_differences(target, input_ids, plain, [drafted])
    return f"{speed}; they part at token {position + 1}, where the target's two best logits are {gap:.2g} apart"


if __name__ == "__main__":
    main()
