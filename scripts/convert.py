"""Give a finished draft a vocabulary speculator, without training.

    python scripts/convert.py DRAFT --target MODEL --output FOLDER [--prompts FILE.jsonl] [--rank R] ...

DRAFT is the folder of a public EAGLE-3 draft in the naming of SafeAILab/EAGLE, SpecForge or speculators, or of one of
our own exports, whose speculator is then replaced. A reduced head gives way to the target's lm_head, or with --lm-head
own to its continuation to the full vocabulary; a full head of the draft's own is kept. The target answers the prompts,
or prompts that it invents from its own chat template. Four fifths of the answers calibrate the speculator. On the rest
are measured how often the draft is right under each head, and the candidate recall: how often the most probable token,
the target's and the full-vocabulary draft's, is among the candidates.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data_gen.chat import check_template_kwargs, encode_prompt, user_turn
from data_gen.engines import Completion, SamplingParams, TransformersEngine
from data_gen.prompts import Prompt, load_prompts
from specvocab_model import conversion
from specvocab_model.config import DTYPES, QUANTIZATIONS, SELECTIONS, ConfigError, HeadConfig, TargetConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.draft_states import (
    Coverage,
    collect_draft_states,
    describe_cost,
    measure_coverage,
    quantization_cost,
)
from specvocab_model.export import PROVENANCE_FILE, Provenance, check_destination, save_checkpoint
from specvocab_model.heads.static import OwnHead
from specvocab_model.options import positive, run_command, seed, usable_device
from specvocab_model.public_drafts import PublicDraft, open_draft
from specvocab_model.speculator import VocabSpeculator, build_selection, collect_final_hidden
from specvocab_model.target import Target
from specvocab_model.target_spec import load_spec_and_tokenizer

HELD_OUT = 5  # every fifth answer measures instead of calibrating
BATCH_TOKENS = 16384  # of the target's KV cache while it writes

Row = dict[str, list[int]]  # input_ids and loss_mask


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(build_parser(), convert, arguments)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("draft", help="folder of the finished draft")
    parser.add_argument("--output", required=True, help="folder for the new checkpoint")
    target = parser.add_argument_group("target")
    target.add_argument("--target", required=True, help="hub id or folder")
    target.add_argument("--gguf-file", help="GGUF file in that folder")
    target.add_argument("--dtype", choices=DTYPES, default="bfloat16",
                        help="the target's type, and the stored draft's (default: %(default)s)")
    target.add_argument("--attn-implementation", default="sdpa", help="(default: %(default)s)")
    target.add_argument("--chat-template-kwargs", type=json_object, default={}, metavar="JSON",
                        help="""variables of the chat template, e.g. '{"enable_thinking": false}'""")
    target.add_argument("--device", type=usable_device, default="cuda" if torch.cuda.is_available() else "cpu",
                        help="(default here: %(default)s)")
    parser.add_argument("--feature-layers", type=int, nargs=3, metavar="LAYER", help="""what a public draft reads, where
                        its config.json does not say so: indices into the target's hidden_states""")
    parser.add_argument("--lm-head", choices=conversion.LM_HEADS, help="in the place of a head that the draft brings; "
                        "by default target for a reduced one, own for a full one")
    text = parser.add_argument_group("text")
    text.add_argument("--prompts", help="jsonl of messages, prompt or turns; by default the target invents its prompts")
    text.add_argument("--num-prompts", type=positive, default=100,
                      help="how many are read or invented at most (default: %(default)s)")
    text.add_argument("--max-new-tokens", type=positive, default=128, help="longest answer (default: %(default)s)")
    text.add_argument("--seed", type=seed, default=0,
                      help="of the invented prompts; answers are greedy (default: %(default)s)")
    speculator = parser.add_argument_group("speculator")
    speculator.add_argument("--rank", type=positive, help="by default hidden_size / 8")
    speculator.add_argument("--selection", choices=SELECTIONS, default="tile",
                            help="the best of every tile, or of all (default: %(default)s)")
    speculator.add_argument("--num-candidates", type=int, help="by default 2048; of tiles at least so many")
    speculator.add_argument("--tile", type=int, help="ids of a tile, a power of two, in the place of --num-candidates")
    speculator.add_argument("--keep", type=int, help="candidates of a tile")
    speculator.add_argument("--quantization", choices=QUANTIZATIONS, help="8-bit vocab_proj")
    return parser


def json_object(text: str) -> dict[str, Any]:
    """An option's value; argparse prints the error."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def convert(options: argparse.Namespace) -> Coverage:
    """Calibrate, measure, save; returns what the candidates cover.

    Raises:
        ConfigError: draft, target or prompts are missing or do not fit together.
    """
    target_config = TargetConfig(model=options.target, gguf_file=options.gguf_file, dtype=options.dtype,
                                 attn_implementation=options.attn_implementation,
                                 chat_template_kwargs=options.chat_template_kwargs)
    check_folders(options)
    prompts = load_prompts(options.prompts, options.num_prompts) if options.prompts else None
    spec, tokenizer = load_spec_and_tokenizer(target_config)
    check_template_kwargs(tokenizer, options.chat_template_kwargs)
    draft = open_draft(options.draft, spec, options.feature_layers)
    model = draft.model
    head_config = HeadConfig(rank=options.rank or max(1, spec.hidden_size // 8),
                             num_candidates=options.num_candidates, selection=options.selection, tile=options.tile,
                             keep=options.keep, quantization=options.quantization)
    with torch.device("meta"):  # refuses a rank that does not fit, before the target has written for minutes
        VocabSpeculator(spec.hidden_size, head_config.rank or 0, build_selection(head_config, spec.vocab_size))
    target = Target.load(target_config, device=options.device, feature_layers=model.architecture.feature_layers)
    brought = conversion.own_head_of(draft, target)
    chosen = choose_head(draft, target, brought, options.lm_head)
    heads = conversion.full_heads(brought, target)
    model.own_head = heads[chosen]
    place_draft(model, target)

    rows = write_text(target, prompts, options)
    calibration_rows = [row for number, row in enumerate(rows) if number % HELD_OUT]
    held_out_rows = rows[::HELD_OUT]
    num_states = sum(sum(row["loss_mask"]) for row in calibration_rows)
    add_speculator(model, target, head_config, calibration_rows, num_states)
    exact = copy.deepcopy(model.speculator)
    place_draft(model, target)
    assert model.speculator is not None and exact is not None
    num_held_out = sum(sum(row["loss_mask"]) for row in held_out_rows)
    states = collect_draft_states(target, model, held_out_rows, num_steps=1, num_tokens=num_held_out)
    right = {name: conversion.agreement(states, target, head) for name, head in heads.items()}
    if brought is not None and not brought.is_full:
        right["reduced"] = conversion.agreement(states, target, brought)
    print(f"on {states.num_valid} positions the draft's most probable token is the target's\n" +
          "\n".join(f"  {share:.2%} with lm_head {name}" for name, share in right.items()))
    speculator, lm_head = model.speculator, model.lm_head_weight(target)
    recall = measure_coverage(states, speculator.head_weights(lm_head))
    print(f"rank {head_config.rank}, {speculator.num_candidates} candidates of {target.spec.vocab_size} tokens, "
          f"calibrated on {num_states} positions; on the {states.num_valid} others they hold\n"
          f"  {recall.target_top1:.2%} of the target's most probable tokens\n"
          f"  {recall.draft_top1:.2%} of the full-vocabulary draft's most probable tokens")
    shares: dict[str, Any] = {"num_positions": states.num_valid, "target_top1": recall.target_top1,
                              "draft_top1": recall.draft_top1}
    if options.quantization is not None:
        exact.quantize(options.quantization)
        shares = quantization_cost(states, lm_head, before=speculator, after=exact)
        print(describe_cost(shares, "of these positions"))
        model.speculator = exact

    shares["measured_on"] = f"the target's answers to {options.prompts or 'prompts of its own'}, held out"
    provenance = Provenance(metrics={"top1_agreement": right}, candidate_recall=shares,
                            config={"convert": vars(options)})
    save_checkpoint(options.output, model, target.spec, provenance, dtype=target.lm_head_weight.dtype)
    print(f"saved to {options.output}")
    return recall


def check_folders(options: argparse.Namespace) -> None:
    """Refuse a destination whose checkpoint would be lost; another run of the same conversion may replace its own.

    Raises:
        ConfigError: there is no draft, or something is at its destination that this conversion has not made.
    """
    if not Path(options.draft).is_dir():
        raise ConfigError(f"there is no folder {options.draft!r}; give that of a draft, which "
                          "`hf download OWNER/NAME --local-dir FOLDER` brings here")
    folder = check_destination(options.output)
    if folder.resolve() == Path(options.draft).resolve():
        raise ConfigError(f"--output {folder} is the draft that is to be converted; give another --output")
    if (folder / PROVENANCE_FILE).exists() and Provenance.read(folder).config != {"convert": vars(options)}:
        raise ConfigError(f"--output {folder} holds another checkpoint, not one that this command made with the same "
                          "options; give another --output, or remove the folder")


def choose_head(draft: PublicDraft, target: Target, brought: OwnHead | None, wanted: str | None) -> str:
    """See that the draft can stand on this target, and say which of ``conversion.LM_HEADS`` it gets.

    Raises:
        ConfigError: its embedding is another one, or it has no head that could be kept.
    """
    conversion.check_embedding(draft, target)
    print(f"the draft reads the target's hidden_states {list(draft.model.architecture.feature_layers)}")
    if draft.made_for not in (None, target.spec.name):
        print(f"the draft's files name {draft.made_for} as its target")
    if draft.model.architecture.norm_before_residual:
        print("the draft's layer adds to the normalised state (norm_before_residual): vLLM can serve it, SGLang cannot")
    if brought is None:
        if wanted == "own":
            raise ConfigError("--lm-head own: the draft brings no head but the target's; leave the option out")
        return "target"
    chosen = wanted or ("own" if brought.is_full else "target")
    print(f"the draft brings a head of its own, over {len(brought.ids)} of {brought.vocab_size} tokens; --lm-head "
          f"{chosen}: " + {
              "target": "the target's lm_head takes its place",
              "own": "it is kept" if brought.is_full else "it is continued to the full vocabulary",
          }[chosen])
    return chosen


def write_text(target: Target, prompts: list[Prompt] | None, options: argparse.Namespace) -> list[Row]:
    """Have the target answer the prompts, or prompts of its own invention, greedily.

    Raises:
        ConfigError: the chat template refuses the prompts, or there is too little usable text.
    """
    engine = TransformersEngine(target, batch_tokens=BATCH_TOKENS)
    if prompts is None:
        prompts = invent_prompts(engine, options)
    with refused_by_the_template(target):
        encode = partial(encode_prompt, target.tokenizer, template_kwargs=options.chat_template_kwargs)
        encoded = [encode(prompt.conversation(), tools=prompt.tools) for prompt in prompts]
    room = target.spec.max_position_embeddings - options.max_new_tokens
    encoded = [token_ids for token_ids in encoded if len(token_ids) <= room]
    if len(encoded) < 2:
        raise ConfigError(f"{len(encoded)} usable prompts of at most {room} tokens are too few to calibrate and "
                          "measure; give more with --prompts or --num-prompts, or lower --max-new-tokens")
    params = SamplingParams(max_new_tokens=options.max_new_tokens, stop_token_ids=target.spec.eos_token_ids)
    answers = generate(engine, encoded, params, options.seed, "answers")
    return [
        {"input_ids": prompt + answer.token_ids, "loss_mask": [0] * len(prompt) + [1] * len(answer.token_ids)}
        for prompt, answer in zip(encoded, answers, strict=True)
    ]


def invent_prompts(engine: TransformersEngine, options: argparse.Namespace) -> list[Prompt]:
    """What the target itself would say as the user (Magpie, https://arxiv.org/abs/2406.08464)."""
    tokenizer = engine.target.tokenizer
    with refused_by_the_template(engine.target):
        turn = user_turn(tokenizer, options.chat_template_kwargs)
    params = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        stop_token_ids=turn.stop_token_ids(engine.target.spec.eos_token_ids),
        temperature=1.0,
    )
    completions = generate(engine, [turn.header_ids] * options.num_prompts, params, options.seed, "prompts")
    texts = tokenizer.batch_decode([sampled.token_ids for sampled in completions], skip_special_tokens=True)
    words = [turn.words(text, sampled.finish_reason) for text, sampled in zip(texts, completions, strict=True)]
    return [Prompt(id=f"invented-{number}", source="invented", category="invented",
                   messages=({"role": "user", "content": content},)) for number, content in enumerate(words) if content]


@contextmanager
def refused_by_the_template(target: Target) -> Iterator[None]:
    """What a chat template refuses is the user's to mend: a ValueError inside becomes a ConfigError."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"cannot make prompts for {target.spec.name}: {error}") from error


def generate(
    engine: TransformersEngine, prompts: list[list[int]], params: SamplingParams, seed: int, description: str
) -> list[Completion]:
    """Completions in the order of the prompts, with a progress bar."""
    finished = engine.generate(prompts, params, seed=seed)
    completions = dict(tqdm(finished, total=len(prompts), desc=description, unit=" sequences"))
    return [completions[index] for index in range(len(prompts))]


def add_speculator(
    model: SpecVocabDraft, target: Target, head_config: HeadConfig, rows: list[Row], num_states: int
) -> None:
    """Give ``model`` a speculator calibrated over ``rows``: on the target's final hidden states, which its output
    imitates, or with a head of its own, whose space may be another, on its output itself.

    Raises:
        ConfigError: the rank does not fit the target, or there are fewer states than that.
    """
    selection = build_selection(head_config, target.spec.vocab_size)
    speculator = VocabSpeculator(target.spec.hidden_size, head_config.rank or 0, selection).to(target.device)
    if model.own_head is None:
        states = tqdm(collect_final_hidden(target, rows, num_states), total=len(rows), desc="calibration", unit=" rows")
    else:
        outputs = collect_draft_states(target, model, rows, num_steps=1, num_tokens=num_states)
        states = outputs.hidden[outputs.rows.valid]
    speculator.initialise("calibration", model.lm_head_weight(target), states)
    model.speculator, model.head_config = speculator, head_config


if __name__ == "__main__":
    main()
