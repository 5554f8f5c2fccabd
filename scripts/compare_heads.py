"""Which vocabulary head wins, for this target on these prompts: one draft with every head, in the same decoding.

    python scripts/compare_heads.py +experiment=quickstart
    python scripts/compare_heads.py +experiment=qwen3_8b eval.prompts=spec_bench.jsonl 'compare.train_static=[32000]'

Takes the experiment's exported draft; where there is none, scripts/pipeline.py makes it first with the same overrides.
Compared are the heads of ``compare`` (CompareConfig in specvocab_model/config). Prints tables, and writes all of it
with charts to ``output_dir/compare_heads/``: compare_heads.json and .html. Decoded turns and measured times are kept
there, so that another run decodes and measures only what is missing: another head or prompt, or what a killed run left.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data_gen.eval_prompts import as_tokens, check_held_out
from data_gen.files import appearing_whole, write_json
from data_gen.prompts import Prompt, load_prompts
from data_gen.shards import MANIFEST_FILE, load_rows
from data_gen.token_counts import count_tokens
from specvocab_model.cli import hydra_main
from specvocab_model.comparison.costs import RoundCost, head_seconds, measure_round
from specvocab_model.comparison.records import (
    Records,
    TurnRecord,
    baseline_tokens_per_second,
    kinds_outside,
    outside,
    summarise,
)
from specvocab_model.comparison.rivals import Builder, Rival, Vocabularies, list_rivals, parts_digests
from specvocab_model.config import Config
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.draft_states import DraftStates, collect_draft_states
from specvocab_model.evaluation import Turn, evaluate
from specvocab_model.export import load_checkpoint
from specvocab_model.files import exclusive, listing, read_json, sha256
from specvocab_model.signals import exit_on_sigterm, running
from specvocab_model.target import TORCH_DTYPES, Target, load_spec_and_tokenizer
from specvocab_model.tuning.search import predicted_speed
from train.heads_page import html_page, text_table
from train.sweep.points import literal

REPOSITORY = Path(__file__).resolve().parent.parent
STATIC = ("static", "trained")
DIGITS = 16  # of a digest
COMPARED_FOLDER = "compare_heads"


@hydra_main
def main(config: Config) -> None:
    exit_on_sigterm()
    make_drafts(config)
    result = run(config)
    folder = Path(config.output_dir, COMPARED_FOLDER)
    print(text_table(result))
    print(f"written to {folder}: compare_heads.json, compare_heads.html")


def make_drafts(config: Config) -> None:
    """Run the commands that make what is missing: the experiment's draft, and the static heads that are asked for.

    These are then part of ``config.compare.static_drafts``. Exits with the code of a command that fails.
    """
    if not Path(config.output_dir, "export", "config.json").is_file():
        start("scripts/pipeline.py", sys.argv[1:])
    several = config.distributed.strategy != "single"
    for size in config.compare.train_static:
        folder = Path(config.output_dir, COMPARED_FOLDER, f"static_{size}")
        settings = {"head": "static", "head.draft_vocab_size": size, "head.quantization": None,
                    "run_name": f"{config.run_name}-static-{size}", "output_dir": str(folder)}
        overrides = [*sys.argv[1:], *(f"{key}={literal(value)}" for key, value in settings.items())]
        if not (folder / "export" / "config.json").is_file():
            start("train/main.py", overrides, several_ranks=several)
            start("scripts/export.py", overrides)
        config.compare.static_drafts.append(str(folder / "export"))


def start(script: str, overrides: Sequence[str], *, several_ranks: bool = False) -> None:
    launcher = ["-m", "accelerate.commands.launch"] if several_ranks else []
    with running([sys.executable, *launcher, str(REPOSITORY / script), *overrides]) as process:
        code = process.wait()
    if code != 0:
        sys.exit(code if code > 0 else 128 - code)


def run(config: Config) -> dict[str, Any]:
    """Compare, record, and return what ``compare_heads.json`` holds.

    Raises:
        ConfigError: draft, data or prompts are missing or do not belong together, prompts were trained on, or another
            process compares in this folder.
    """
    folder = Path(config.output_dir, COMPARED_FOLDER)
    # Two would mend each other's half-written lines.
    with exclusive(folder / "compare_heads.lock", f"another comparison writes to {folder}; wait for it, or stop it"):
        comparison = Comparison(config)
        if comparison.missing() or comparison.unmeasured():
            comparison.complete()
        result = comparison.result()
        write_json(folder / "compare_heads.json", result)
        (folder / "compare_heads.html").write_text(html_page(result), encoding="utf-8")
    return result


class Comparison:
    """The heads of one configuration, and what is known of them."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.folder = Path(config.output_dir, COMPARED_FOLDER)
        self.prompts = load_prompts(config.eval.prompts, config.eval.num_prompts)
        check_held_out(self.prompts, config)
        self.spec, self.tokenizer = load_spec_and_tokenizer(config.target)
        self.draft_folder = Path(config.output_dir, "export")
        self.model = load_checkpoint(self.draft_folder, self.spec)
        self.texts = texts(config)
        self.rivals = list_rivals(config.compare, self.model, answers=self.texts.get("answers"),
                                  corpus=self.texts.get("corpus"))
        self.device = torch.device("cuda" if torch.cuda.is_available() and not config.distributed.cpu else "cpu")
        self.digests = {rival.name: self.identity(rival) for rival in self.rivals}
        self.round_key = digest(["round", self.shared_identity, config.compare.context])
        self.vocabularies = Vocabularies(self.spec, self.tokenizer, cache(self.count))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.records = Records(self.folder / "turns.jsonl")
        self.costs_path = self.folder / "costs.json"
        self.costs: dict[str, dict[str, Any]] = {}
        if self.costs_path.exists():
            self.costs = read_json(self.costs_path, "remove it: costs are measured again")

    @cached_property
    def shared_identity(self) -> list[Any]:
        """Everything that decides what the heads do, beside their own options."""
        config = self.config
        decoding = {key: value for key, value in asdict(config.eval).items() if key not in ("prompts", "num_prompts")}
        return [parts_digests(self.draft_folder), self.spec.fingerprint, config.target.chat_template_kwargs, decoding,
                config.seed, self.device_name]

    def identity(self, rival: Rival) -> str:
        return digest([self.shared_identity, rival.kind, rival.options])

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def count(self, text: str) -> Tensor:
        """Token frequencies of the text with this digest, int64 [V]; counted once for all runs."""
        path = self.folder / f"counts_{digest([text, self.spec.fingerprint])}.npy"
        if path.exists():
            return torch.from_numpy(np.load(path))
        name = next(name for name, known in self.texts.items() if known == text)
        data = self.config.data.train_path if name == "answers" else self.config.compare.corpus
        assert data is not None
        (counts,) = count_tokens(name, data, self.tokenizer, self.spec.vocab_size).values()
        with appearing_whole(path) as file:
            np.save(file, counts.numpy())
        return counts

    def missing(self) -> dict[tuple[str, ...], list[Prompt]]:
        """Prompts by the heads that they have not been decoded with."""
        groups: dict[tuple[str, ...], list[Prompt]] = defaultdict(list)
        for prompt in self.prompts:
            key = prompt.digest[:DIGITS]
            names = tuple(rival.name for rival in self.rivals
                          if not self.records.has(self.digests[rival.name], key, prompt.num_turns))
            groups[names].append(prompt)
        groups.pop((), None)
        return groups

    def unmeasured(self) -> list[Rival]:
        """Heads whose cost is not known; all of them where the rest of a round is not."""
        known = self.costs.keys() if self.round_key in self.costs else set()
        return [rival for rival in self.rivals if self.digests[rival.name] not in known]

    def complete(self) -> None:
        """Load the target, decode and measure what is missing."""
        config = self.config
        target = Target.load(config.target, device=self.device, feature_layers=self.model.architecture.feature_layers,
                             dtype=TORCH_DTYPES[config.eval.dtype])
        model = place_draft(self.model, target)
        builder = Builder(target, model, self.vocabularies, collect=lambda: self.draft_states(target, model),
                          num_clusters=config.compare.num_clusters, seed=config.seed)
        variants = cache(lambda name: builder.variant(next(one for one in self.rivals if one.name == name)))
        for names, prompts in self.missing().items():
            positions = model.architecture.max_position_embeddings
            asked = [replace(as_tokens(target, prompt, config, positions), id=prompt.digest[:DIGITS])
                     for prompt in prompts]
            print(f"decoding {len(asked)} prompts with {len(names)} heads: {', '.join(names)}", flush=True)
            evaluate(target, {name: variants(name) for name in names}, asked, seed=config.seed,
                     max_new_tokens=config.eval.max_new_tokens, num_draft_tokens=config.eval.num_draft_tokens,
                     temperature=config.eval.temperature, on_turn=self.keep)
        unmeasured = self.unmeasured()
        seconds = {name: head_seconds(variants(name).head, target, num_draft_tokens=config.eval.num_draft_tokens)
                   for name in ["full", *(rival.name for rival in unmeasured if rival.name != "full")]}
        for rival in unmeasured:  # in relation to the full head at the same time: machines have good and bad days
            self.costs[self.digests[rival.name]] = {"seconds": seconds[rival.name], "full_seconds": seconds["full"],
                                                    "num_bytes": builder.read_bytes(rival)}
        if self.round_key not in self.costs:
            self.costs[self.round_key] = asdict(self.measure_round(target, model))
        write_json(self.costs_path, self.costs)

    def draft_states(self, target: Target, model: SpecVocabDraft) -> DraftStates:
        return collect_draft_states(target, model, load_rows(self.config.data.train_path),
                                    num_steps=model.architecture.num_unroll_steps,
                                    num_tokens=self.config.compare.num_states)

    def measure_round(self, target: Target, model: SpecVocabDraft) -> RoundCost:
        num_drafts = self.config.eval.num_draft_tokens
        positions = min(self.spec.max_position_embeddings, model.architecture.max_position_embeddings)
        context = min(self.config.compare.context, positions - num_drafts - 1)
        return measure_round(target, model, num_draft_tokens=num_drafts, context=context)

    def keep(self, turn: Turn) -> None:
        """Record one decoded turn."""
        output = turn.output
        self.records.append(TurnRecord(
            head=self.digests[turn.variant],
            prompt=turn.prompt.id,
            turn=turn.number,
            category=turn.prompt.category,
            num_prompt_tokens=turn.num_prompt_tokens,
            sequences=output.sequences,
            num_target_forwards=output.num_target_forwards,
            accepted=output.accepted_per_round,
            proposed=output.proposals,
            seconds=turn.seconds,
            num_baseline_tokens=turn.num_baseline_tokens,
            baseline_seconds=turn.baseline_seconds,
            recall=None if turn.recall is None else list(turn.recall),
            top2_gap=None if turn.difference is None else turn.difference.top2_gap,
        ))

    def result(self) -> dict[str, Any]:
        """All figures, as JSON types."""
        config, num_drafts = self.config, self.config.eval.num_draft_tokens
        category = {prompt.digest[:DIGITS]: prompt.category for prompt in self.prompts}  # of today's file
        turns = {rival.name: [replace(turn, category=category[turn.prompt])
                              for turn in self.records.of(self.digests[rival.name], category)] for rival in self.rivals}
        round_cost, full_cost = RoundCost(**self.costs[self.round_key]), self.costs[self.digests["full"]]
        measured = round_cost.kappa(full_cost["seconds"], num_drafts)
        kappa = measured if config.compare.kappa is None else config.compare.kappa
        kappa_of_bytes = round_cost.kappa_of_bytes(full_cost["num_bytes"], num_drafts)
        heads: dict[str, dict[str, Any]] = {}
        for rival in self.rivals:
            cost, summary = self.costs[self.digests[rival.name]], summarise(turns[rival.name])
            ratio = summary["tau"] / heads["full"]["tau"] if heads else 1.0
            nu, nu_of_bytes = cost["seconds"] / cost["full_seconds"], cost["num_bytes"] / full_cost["num_bytes"]
            heads[rival.name] = {
                "kind": rival.kind, "options": rival.options, **summary, "tau_ratio": ratio, **cost,
                "predicted_speed": predicted_speed(ratio, nu, kappa),
                "predicted_speed_of_bytes": predicted_speed(ratio, nu_of_bytes, kappa_of_bytes),
                **(self.evidence(rival, turns) if rival.kind in STATIC else {}),
            }
        return {
            "target": config.target.model, "dtype": config.eval.dtype, "device": self.device_name,
            "prompts": config.eval.prompts, "num_prompts": len(self.prompts), **{key: getattr(config.eval, key)
            for key in ("max_new_tokens", "num_draft_tokens", "temperature")},
            "kappa": kappa, "kappa_measured": measured, "kappa_of_bytes": kappa_of_bytes,
            "round_without_heads": asdict(round_cost),
            "autoregressive_tokens_per_second": baseline_tokens_per_second(turns["full"]),
            "heads": heads,
        }

    def evidence(self, rival: Rival, turns: Mapping[str, Sequence[TurnRecord]]) -> dict[str, Any]:
        """What a static vocabulary cannot say, by category and by kind of token."""
        vocab, own = self.vocabularies(rival), turns[rival.name]
        found = outside(own, turns["full"], vocab.t2d)
        text_of = {token: str(self.tokenizer.decode([token])) for one in own for token in one.sequences}
        return {"size": len(vocab), "coverage": 1 - found["all"]["outside"], "outside": found,
                "kinds_outside": kinds_outside(own, vocab.t2d, text_of)}


def texts(config: Config) -> dict[str, str]:
    """Digests of the texts whose frequencies count, where they are: the training data's answers, and a corpus."""
    found = {}
    manifest = Path(config.data.train_path, MANIFEST_FILE)
    if manifest.is_file():
        found["answers"] = sha256(manifest)[:DIGITS]  # holds the shards' own hashes
    if config.compare.corpus is not None:
        path = Path(config.compare.corpus)
        found["corpus"] = digest([str(path), listing(path)])  # of a hub id there is none
    return found


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:DIGITS]


if __name__ == "__main__":
    main()
