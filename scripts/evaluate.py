"""Measure an exported draft: acceptance length, candidate recall, speed, and that the output is the target's own.

    python scripts/evaluate.py +experiment=quickstart
    python scripts/evaluate.py +experiment=qwen3_8b eval.prompts=spec_bench.jsonl eval.max_new_tokens=1024

Reads ``output_dir/export/``, writes ``output_dir/evaluation.json`` and the checkpoint's model card. Compared are plain
decoding, the draft as it was before training where it was trained here, and the draft with the full vocabulary and the
speculated one, or with the reduced one that it was trained or pruned to. Stopped at any moment, the same command goes
on with the prompts that are left.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from data_gen.eval_prompts import as_tokens, check_held_out
from data_gen.prompts import load_prompts
from specvocab_model.cli import hydra_main
from specvocab_model.config import Config, ConfigError, HeadConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.evaluation import Variant, evaluate
from specvocab_model.export import PARTS, PROVENANCE_FILE, Provenance, add_evaluation, held
from specvocab_model.files import read_json, replace_json, require_fields, sha256
from specvocab_model.heads import build_head
from specvocab_model.target import TORCH_DTYPES, Target, load_spec


@hydra_main
def main(config: Config) -> None:
    result = run(config)
    print(table(result))
    print(f"written to {Path(config.output_dir, 'evaluation.json')}")


def run(config: Config) -> dict[str, Any]:
    """Evaluate the checkpoint of ``config`` and record the result; returns what ``evaluation.json`` holds.

    Raises:
        ConfigError: checkpoint, prompts or target are missing or do not belong together, prompts were trained on, or
            another process evaluates the checkpoint or writes it.
    """
    folder = Path(config.output_dir, "export")
    if not (folder / "config.json").is_file():
        command = shlex.join(["python", "scripts/export.py", *sys.argv[1:]])
        raise ConfigError(f"{folder} holds no exported draft; make it with: {command}")
    if not (folder / PROVENANCE_FILE).is_file():
        raise ConfigError(f"{folder} has no {PROVENANCE_FILE}, in which the measurement is recorded: it is not a whole "
                          "export; copy or export it again, or make one of a stock draft with scripts/convert.py")
    with held(folder):  # two evaluations would mix their figures; those of an older draft do not belong into a new one
        return measure(folder, config)


def measure(folder: Path, config: Config) -> dict[str, Any]:
    """``run``, with the checkpoint in ``folder`` to itself."""
    prompts = load_prompts(config.eval.prompts, config.eval.num_prompts)
    check_held_out(prompts, config)
    model = SpecVocabDraft.from_pretrained(folder, target_spec=load_spec(config.target))
    target = Target.load(
        config.target,
        device="cuda" if torch.cuda.is_available() and not config.distributed.cpu else "cpu",
        feature_layers=model.architecture.feature_layers,
        dtype=TORCH_DTYPES[config.eval.dtype],
    )
    questions = [as_tokens(target, prompt, config, model.architecture.max_position_embeddings) for prompt in prompts]
    about = {
        "target": config.target.model,
        "prompts": config.eval.prompts,
        "num_prompts": len(prompts),
        "max_new_tokens": config.eval.max_new_tokens,
        "num_draft_tokens": config.eval.num_draft_tokens,
        "temperature": config.eval.temperature,
        "dtype": config.eval.dtype,
        "device": torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu",
    }
    unfinished = Unfinished(Path(config.output_dir, "evaluation.unfinished"), about | {
        "checkpoint": [sha256(folder / part) for part in PARTS if (folder / part).is_file()],
        "fingerprint": target.spec.fingerprint,
        "attention": config.target.attn_implementation,
        "asked": [[each.id, each.category, each.encode_turn([""] * (each.num_turns - 1))] for each in questions],
        "seed": config.seed,
    })
    evaluation = evaluate(
        target,
        make_variants(target, model, Provenance.read(folder).config),
        questions,
        max_new_tokens=config.eval.max_new_tokens,
        num_draft_tokens=config.eval.num_draft_tokens,
        temperature=config.eval.temperature,
        seed=config.seed,
        finished=unfinished.read(),
        on_prompt=unfinished.write,
    )
    result = about | evaluation.to_dict()
    add_evaluation(folder, result)
    replace_json(Path(config.output_dir, "evaluation.json"), result)
    unfinished.path.unlink(missing_ok=True)
    return result


class Unfinished:
    """What an evaluation has measured so far.

    Args:
        key: everything that decides the figures, as JSON types.
    """

    def __init__(self, path: Path, key: dict[str, Any]) -> None:
        self.path, self.digest = path, hashlib.sha256(json.dumps(key).encode()).hexdigest()

    def read(self) -> dict[str, Any] | None:
        """None where nothing is left of an evaluation, or what is left has another key."""
        if not self.path.is_file():
            return None
        fix = "remove it: the evaluation then begins anew"
        content = read_json(self.path, fix)
        require_fields(content, {"digest": str, "num_prompts": int, "measurements": dict}, self.path, fix)
        if content["digest"] != self.digest:
            print(f"{self.path} is of another draft, other prompts or other settings: the evaluation begins anew")
            return None
        print(f"going on after {content['num_prompts']} of the prompts")
        return content

    def write(self, measured: dict[str, Any]) -> None:
        replace_json(self.path, {"digest": self.digest, **measured})


def make_variants(target: Target, model: SpecVocabDraft, training: dict[str, Any] | None) -> dict[str, Variant]:
    """What is compared: the draft with each head that it has, and the same layer as it was before training.

    Args:
        training: ``Provenance.config``; a converted draft has none of a training, and began nobody knows where.
    """
    variants = {}
    if training is not None and "draft" in training:
        torch.manual_seed(training["seed"])
        untrained = place_draft(SpecVocabDraft(model.architecture, HeadConfig(type="full")), target)
        variants["untrained"] = Variant(model=untrained, head=build_head("full", target, untrained))
    place_draft(model, target)
    kind = model.head_config.type
    heads = ["full", kind] if kind == "speculative" else [kind]
    return variants | {kind: Variant(model=model, head=build_head(kind, target, model)) for kind in heads}


def table(result: dict[str, Any]) -> str:
    """``result`` for a person."""
    speed = result["tokens_per_second"]
    lines = [
        f"{result['target']} ({result['dtype']}, {result['device']}), {result['num_prompts']} prompts of "
        f"{result['prompts']}, {result['num_draft_tokens']} draft tokens, temperature {result['temperature']}",
        f"{'':16}{'τ':>8}{'tokens/s':>12}{'speed-up':>10}   accepted at each position",
        f"{'autoregressive':16}{1:8.2f}{speed['autoregressive']:12.1f}{1:10.2f}",
    ]
    for name, tau in result["tau"].items():
        accepted = " ".join(f"{share:.2f}" for share in result["details"][name]["acceptance_per_position"])
        ratio = speed[name] / speed["autoregressive"]
        lines.append(f"{name:16}{tau:8.2f}{speed[name]:12.1f}{ratio:10.2f}   {accepted}")
    categories = list(result["details"]["autoregressive"]["tau_per_category"])
    if len(categories) > 1:
        lines += ["", f"{'τ by category':26}" + "".join(f"{name:>13}" for name in result["tau"])]
        for category in categories:
            taus = [result["details"][name]["tau_per_category"][category] for name in result["tau"]]
            lines.append(f"{category:26}" + "".join(f"{tau:13.2f}" for tau in taus))
    lines += ["", *conclusions(result)]
    return "\n".join(lines)


def conclusions(result: dict[str, Any]) -> list[str]:
    """Recall and losslessness in words."""
    lines = []
    recall = result["candidate_recall"]
    if recall is not None and recall["num_positions"]:
        lines.append(f"the candidates hold the target's first choice in {recall['target_top1']:.2%} and the draft's in "
                     f"{recall['draft_top1']:.2%} of {recall['num_positions']} positions")
    if result["lossless"] is not None:
        lines.append(f"every output is the target's own, token for token: {'yes' if result['lossless'] else 'NO'}")
    for name, detail in result["details"].items():
        for found in detail["differences"]:
            lines.append(f"  {name}: prompt {found['id']}, turn {found['turn']}, new token {found['position']}: "
                         f"the target's two best logits are {found['top2_gap']:.2g} apart")
    return lines


if __name__ == "__main__":
    main()
