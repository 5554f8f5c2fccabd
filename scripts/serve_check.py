"""Is a checkpoint served as it was trained? Asks the engine that is installed here.

    python scripts/serve_check.py CHECKPOINT --engine vllm|sglang [--target MODEL] [--question TEXT ...]

First the checkpoint is read as for evaluation, and refused where an engine would serve it wrongly without a word. Then
the engine's own loader reads it, and its draft's logits are compared with the trainer's on the same features of the
target. At last the engine and our own decoder answer a few questions, and how many drafts each of them accepts is
compared. Exit code 1, and the known causes, where something differs.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from specvocab_model.chat_template import render
from specvocab_model.config import DTYPES, ConfigError, TargetConfig
from specvocab_model.decode import autoregressive_generate, place_draft
from specvocab_model.export import COPY_AGAIN, PROVENANCE_FILE, load_checkpoint
from specvocab_model.files import read_json, require_fields
from specvocab_model.options import positive, run_command
from specvocab_model.serving.check import (
    Agreement,
    Served,
    ServedDraft,
    acceptance_problems,
    compare_logits,
    decode,
    problems,
)
from specvocab_model.target import Target, load_spec, resolve_model

QUESTIONS = (
    "Write a short poem about the sea.",
    "Explain to a child why the sky is blue.",
    "A train leaves at 9:40 and takes 2 hours and 35 minutes. When does it arrive?",
    "Write a Python function that tells whether a number is prime.",
)
EXIT_DIFFERENT = 1
MAX_REASON = 500  # characters of an engine's own message


def _vllm(options: argparse.Namespace, target: str) -> ServedDraft:
    with _installed("vllm", "vLLM"):
        from specvocab_model.serving.vllm_check import VllmDraft

    return VllmDraft(options.checkpoint, target, dtype=options.dtype, num_draft_tokens=options.num_draft_tokens,
                     max_model_len=options.max_model_len)


def _sglang(options: argparse.Namespace, target: str) -> ServedDraft:
    with _installed("sglang", "SGLang"):
        from specvocab_model.serving.sglang_check import SGLangDraft

    return SGLangDraft(options.checkpoint, target, dtype=options.dtype, num_draft_tokens=options.num_draft_tokens,
                       max_model_len=options.max_model_len)


@contextmanager
def _installed(engine: str, name: str) -> Iterator[None]:
    """What is imported in this context needs an engine's own modules, which move between its releases."""
    if find_spec(engine) is None:
        raise ConfigError(f"--engine {engine} needs {name} in this environment: make another one for it, as it brings "
                          f"a torch of its own, and there pip install -e '.[{engine}]' (docs/SERVING.md)")
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"the {name} that is installed here is not one that this check can read ({error}); install a "
                          "version that docs/SERVING.md names") from error


ENGINES: dict[str, Callable[[argparse.Namespace, str], ServedDraft]] = {"vllm": _vllm, "sglang": _sglang}


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(build_parser(), report, arguments)


def report(options: argparse.Namespace) -> None:
    """``check``; exits with ``EXIT_DIFFERENT`` where something is wrong."""
    if found := check(options):
        print(*(f"! {line}" for line in found), sep="\n", file=sys.stderr)
        sys.exit(EXIT_DIFFERENT)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("checkpoint", type=Path, help="folder written by scripts/export.py or scripts/convert.py")
    parser.add_argument("--engine", choices=ENGINES, required=True)
    parser.add_argument("--target", help="hub id or folder; by default the one that specvocab.json names")
    parser.add_argument("--dtype", choices=DTYPES, help="of target and draft; by default that of the checkpoint")
    parser.add_argument("--question", action="append", help="to ask in the place of our own ones; may be repeated")
    parser.add_argument("--max-new-tokens", type=positive, default=64, help="longest answer")
    parser.add_argument("--num-draft-tokens", type=positive, default=5, help="length of a chain of drafts")
    parser.add_argument("--max-model-len", type=positive, default=2048, help="of the engine")
    parser.add_argument("--logits-only", action="store_true", help="let the engine load the draft, but serve nothing")
    return parser


def check(options: argparse.Namespace) -> list[str]:
    """Prints what is measured; returns what is wrong, one line each.

    Raises:
        ConfigError: the checkpoint cannot be served, or does not belong to the target.
    """
    record = read_record(options)
    name = options.target
    target_config = TargetConfig(model=name, dtype=options.dtype)
    model = load_checkpoint(options.checkpoint, load_spec(target_config))
    target = Target.load(target_config, device="cuda" if torch.cuda.is_available() else "cpu",
                         feature_layers=model.architecture.feature_layers)
    place_draft(model, target)
    prompts = encode(target, options)
    answer = autoregressive_generate(target, torch.tensor([prompts[0]], device=target.device),
                                     max_new_tokens=options.max_new_tokens).sequences
    with refusals(options.engine):
        served = ENGINES[options.engine](options, str(resolve_model(target_config)))  # engines do not know our cache
    print(f"{options.checkpoint} in {served.name} with {name} ({options.dtype})")
    with refusals(served.name):
        agreement = compare_logits(served, model, target, torch.tensor([prompts[0] + answer], device=target.device))
    print(describe(agreement))
    found = problems(served, model, target.spec, record.get("config"), agreement)
    if options.logits_only:
        return found
    own = decode(target, model, agreement.head, prompts, max_new_tokens=options.max_new_tokens,
                 num_draft_tokens=options.num_draft_tokens)
    # An engine reserves nearly all memory of a GPU, and refuses to start where another target takes its part.
    del target, model
    gc.collect()
    torch.cuda.empty_cache()
    with refusals(served.name):
        engine = served.serve(prompts, options.max_new_tokens)
    print(compare(served.name, engine, own))
    if engine.answers != own.answers and options.dtype != "float32":
        print(f"            in {options.dtype} engines round differently, which parts answers; --dtype float32 tells")
    recorded = recorded_tau(record.get("evaluation"), agreement.head, options.num_draft_tokens)
    return found + acceptance_problems(engine, own, recorded)


@contextmanager
def refusals(engine: str) -> Iterator[None]:
    """Whatever an engine raises, and they raise anything, as one line; its own log says the rest."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{engine} does not serve it: {type(error).__name__}: "
                          f"{' '.join(str(error).split())[:MAX_REASON]}") from error


def read_record(options: argparse.Namespace) -> dict[str, Any]:
    """``specvocab.json``; ``target`` and ``dtype``, where not given as options, are set to what the checkpoint says.

    Raises:
        ConfigError: it does not say.
    """
    path, config_path = options.checkpoint / PROVENANCE_FILE, options.checkpoint / "config.json"
    if not path.is_file():
        raise ConfigError(f"{options.checkpoint} has no {PROVENANCE_FILE}, so it is no folder that scripts/export.py "
                          "or scripts/convert.py wrote; give one (the latter makes one of a public draft)")
    record, config = read_json(path, COPY_AGAIN), read_json(config_path, COPY_AGAIN)
    if options.target is None:
        require_fields(record, {"target": dict}, path, COPY_AGAIN)
        require_fields(record["target"], {"name": str}, path, COPY_AGAIN)
        options.target = record["target"]["name"]
    if options.dtype is None:
        require_fields(config, {"torch_dtype": str}, config_path, COPY_AGAIN)
        options.dtype = config["torch_dtype"]
    return record


def recorded_tau(evaluation: dict[str, Any] | None, head: str, num_draft_tokens: int) -> float | None:
    """Tokens a round that an evaluation recorded with this head, had its chains been no longer than ours."""
    if evaluation is None or head not in evaluation["tau"]:
        return None
    kept_per_position: list[float] = evaluation["details"][head]["acceptance_per_position"]
    return 1 + sum(kept_per_position[:num_draft_tokens])


def encode(target: Target, options: argparse.Namespace) -> list[list[int]]:
    """The questions as ids.

    Raises:
        ConfigError: one does not fit into the engine's context with its answer, or the chat template refuses it.
    """
    options.max_model_len = min(options.max_model_len, target.spec.max_position_embeddings)
    prompts = []
    for question in options.question or QUESTIONS:
        try:
            ids = list(render(target.tokenizer, [{"role": "user", "content": question}]))
        except ValueError as error:
            raise ConfigError(f"{question!r} cannot be put to {target.spec.name}: {error}") from error
        if len(ids) + options.max_new_tokens > options.max_model_len:
            raise ConfigError(f"a question of {len(ids)} tokens and {options.max_new_tokens} of its answer do not fit "
                              f"into {options.max_model_len} positions; lower --max-new-tokens or raise "
                              "--max-model-len")
        prompts.append(ids)
    return prompts


def describe(agreement: Agreement) -> str:
    """``agreement`` for a person."""
    verdict = "equal within rounding" if agreement.equal else "DIFFERENT"
    lines = [f"logits      {verdict}: {agreement.engine_error:.1e} off the draft in a wider type (root mean square, "
             f"relative), the trainer's {agreement.rounding_error:.1e}"]
    if agreement.head == "speculative":
        lines.append(f"candidates  {agreement.engine_candidates:.2%} are those of the wider type, of the trainer's "
                     f"{agreement.rounding_candidates:.2%}")
    return "\n".join(lines)


def compare(name: str, engine: Served, own: Served) -> str:
    """Acceptance, for a person."""
    same = sum(ours == theirs for ours, theirs in zip_longest(own.answers, engine.answers))
    lines = [f"answers     {same} of {len(own.answers)} are our own decoder's, token for token"]
    for who, counts in ((name, engine), ("our own decoder", own)):
        shares = " ".join(f"{kept / max(1, counts.num_rounds):.2f}" for kept in counts.accepted_per_position)
        lines.append(f"{who:18}{counts.accepted:.3f} drafts accepted in each of {counts.num_rounds} rounds; by "
                     f"position {shares}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
