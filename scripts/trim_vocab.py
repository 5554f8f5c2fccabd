"""Choose the tokens of a static draft vocabulary: coverage of what is written against the draft's cost.

    python scripts/trim_vocab.py --target MODEL --data FOLDER [CHECKPOINT]
    python scripts/trim_vocab.py --target MODEL --data code=FOLDER --data chat=CORPUS.jsonl \\
        --min-coverage 0.95 --min-coverage code=0.99 --cost latency CHECKPOINT

Data are folders of this project, of which the tokens count that the target wrote, or corpora (.jsonl, .parquet, .csv,
.json, .txt, a data set's folder or hub id), of which the text counts, or what the assistant says in conversations. They
are read in pieces. Every --data is a domain; --split-by makes one of each value of a column (source, category).

The size k maximises U(k) = α C(k) + (1 - α) R(k) where each domain keeps its --min-coverage: C(k) is the share of the
tokens that the k most frequent make up (special and end tokens are always kept), R(k) = 1 - F(k) / F(V) what they save
of a draft step's --cost F: its FLOPs, the bytes it reads, or its time on this device. Every size of the grid is tried
(exact), and Optuna's TPE is run beside it. Written to --output: trim_vocab.json and .html; the tokens that are kept, as
d2t and t2d (vocab_map.safetensors) and as SGLang's --speculative-token-map (token_map.pt); and of an exported draft
CHECKPOINT the same draft with its head cut down to them (pruned/).
"""

from __future__ import annotations

import argparse
import html
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from data_gen.files import writing
from data_gen.token_counts import count_tokens
from specvocab_model.config import DTYPES, ConfigError, DraftConfig, TargetConfig
from specvocab_model.draft import DraftArchitecture, SpecVocabDraft
from specvocab_model.export import Provenance, check_destination, load_checkpoint, save_checkpoint
from specvocab_model.heads.static import prune, write_token_map
from specvocab_model.options import positive, run_command, seed, share, usable_device
from specvocab_model.target import TORCH_DTYPES, Target, TargetSpec, load_spec_and_tokenizer
from specvocab_model.tensor_files import write_safetensors
from specvocab_model.tuning.flops import DraftFlops, draft_bytes
from specvocab_model.tuning.latency import draft_seconds
from specvocab_model.tuning.trim import TrimChoice, TrimProblem, build_problem, exact, pareto_front, pool, tpe
from specvocab_model.vocab import VocabMap, most_frequent, special_ids
from train.charts import Line, chart, page, table

COSTS = ("flops", "bytes", "latency")
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)  # of coverage, that tables show
MEASURED_SIZES = 12  # whose time is measured; between them it is interpolated
CURVE_POINTS = 120
ALL = "all domains"

Cost = Callable[[np.ndarray], np.ndarray]
Study = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    run_command(build_parser(), trim, arguments)


def build_parser() -> argparse.ArgumentParser:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("checkpoint", nargs="?", help="folder of an exported draft that has the whole vocabulary")
    parser.add_argument("--target", required=True, help="hub id or folder")
    parser.add_argument("--gguf-file", help="GGUF file in that folder")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="the target's type, and the stored head's")
    parser.add_argument("--device", type=usable_device, default="cuda" if on_gpu else "cpu",
                        help="that --cost latency is measured on")
    parser.add_argument("--data", action="append", required=True, type=named_path, metavar="[NAME=]PATH")
    parser.add_argument("--split-by", metavar="COLUMN", help="a domain for each of its values: source, category")
    parser.add_argument("--min-coverage", action="append", default=[], type=named_share, metavar="[DOMAIN=]SHARE",
                        help="without DOMAIN: of every domain for which none is given")
    parser.add_argument("--equal-domains", action="store_true", help="all domains count the same, whatever their size")
    parser.add_argument("--alpha", type=share, default=0.5, help="weight of coverage; the cost has the rest")
    parser.add_argument("--cost", choices=COSTS, default="flops")
    parser.add_argument("--min-size", type=positive, default=50)
    parser.add_argument("--step", type=positive, default=64, help="sizes are multiples of it")
    parser.add_argument("--size", type=positive, help="keep so many, whatever the search says")
    parser.add_argument("--batch", type=positive, default=1, help="rows of a draft step, for --cost latency")
    parser.add_argument("--context", type=positive, default=512, help="cached positions, for bytes and latency")
    parser.add_argument("--trials", type=positive, default=200, help="of TPE")
    parser.add_argument("--seed", type=seed, default=0, help="of TPE")
    parser.add_argument("--output", default="outputs/trim_vocab")
    return parser


def named_path(text: str) -> tuple[str, str]:
    """(domain, path); a path alone names its domain by its last part."""
    name, equals, path = text.partition("=")
    named = (name, path) if name and equals and "/" not in name else (Path(text).stem, text)
    if named[0] == ALL:
        raise argparse.ArgumentTypeError(f"{ALL!r} stands for all of them together; call it something else")
    return named


def named_share(text: str) -> tuple[str | None, float]:
    name, equals, value = text.rpartition("=")
    return name if equals else None, share(value)


def trim(options: argparse.Namespace) -> None:
    """Count, search, print, write.

    Raises:
        ConfigError: data, target and checkpoint are missing, empty or do not fit, or the search's library is missing.
    """
    if find_spec("optuna") is None:
        raise ConfigError("the search needs optuna: pip install 'specvocab[tune]'")
    target_config = TargetConfig(model=options.target, gguf_file=options.gguf_file, dtype=options.dtype)
    spec, tokenizer = load_spec_and_tokenizer(target_config)
    model = None if options.checkpoint is None else load_draft(Path(options.checkpoint), spec)
    architecture = DraftArchitecture.from_target(spec, DraftConfig()) if model is None else model.architecture
    output = Path(options.output)
    pruned = output / "pruned"
    with writing(output):  # said before hours of counting
        output.mkdir(parents=True, exist_ok=True)
    if model is not None:
        check_destination(pruned)
    counts: dict[str, np.ndarray] = {}
    for name, path in options.data:
        found = count_tokens(name, path, tokenizer, spec.vocab_size, split_by=options.split_by)
        if twice := sorted(found.keys() & counts.keys()):
            raise ConfigError(f"two domains are called {twice[0]!r}; name them, as in --data NAME=PATH")
        counts |= {domain: counted.numpy() for domain, counted in found.items()}
    always_keep = special_ids(tokenizer, spec.eos_token_ids, spec.vocab_size)
    studies = search(counts, cost_of(options.cost, architecture, options), always_keep, options)
    size = options.size or studies[ALL]["exact"]["size"]
    vocab = most_frequent(torch.from_numpy(pool(counts, equal_domains=options.equal_domains)), size, always_keep)
    result = {
        "options": vars(options), "device": device_name(options), "vocab_size": spec.vocab_size,
        "num_special_tokens": len(always_keep), "draft_flops": asdict(DraftFlops.of(architecture)),
        "head_share_of_flops": DraftFlops.of(architecture).head_share(spec.vocab_size),
        "size": len(vocab), "coverage_of": {name: float(of_domain[vocab.ids.numpy()].sum() / of_domain.sum())
                                            for name, of_domain in counts.items()}, "domains": studies,
    }
    print(report_text(result))
    with writing(output):
        write(output, result, vocab)
    if model is not None:
        rows = model.lm_head_weight(Target.load(target_config, device="cpu", decoder=False))
        provenance = replace(Provenance.read(options.checkpoint), candidate_recall=None, tuning=None)
        prune(model, rows, vocab)
        save_checkpoint(pruned, model, spec, provenance, dtype=TORCH_DTYPES[options.dtype])
        print(f"the draft with these tokens alone: {pruned}")


def load_draft(folder: Path, spec: TargetSpec) -> SpecVocabDraft:
    """
    Raises:
        ConfigError: it is not one for this target, or has a reduced head already.
    """
    model = load_checkpoint(folder, spec)
    if model.own_head is not None and not model.own_head.is_full:
        raise ConfigError(f"{folder} has {len(model.own_head.ids)} of the target's tokens already; give a draft of the "
                          "whole vocabulary")
    return model


def cost_of(kind: str, architecture: DraftArchitecture, options: argparse.Namespace) -> Cost:
    """F of every size, [G] -> [G]."""
    if kind == "flops":
        flops = DraftFlops.of(architecture)
        return lambda sizes: flops.body + flops.head_row * sizes.astype(np.float64)
    if kind == "bytes":
        itemsize = TORCH_DTYPES[options.dtype].itemsize
        return lambda sizes: np.array([draft_bytes(architecture, int(size), itemsize=itemsize, context=options.context)
                                       for size in sizes], dtype=np.float64)
    measured = np.unique(np.geomspace(options.min_size, architecture.vocab_size, MEASURED_SIZES).astype(np.int64))
    body, heads = draft_seconds(architecture, measured.tolist(), batch=options.batch, context=options.context,
                                dtype=TORCH_DTYPES[options.dtype], device=torch.device(options.device))
    return lambda sizes: body + np.interp(sizes, measured, heads)


def search(
    counts: Mapping[str, np.ndarray], cost: Cost, always_keep: Sequence[int], options: argparse.Namespace
) -> dict[str, Study]:
    """Every domain alone, and all of them with one vocabulary."""
    given = {name: least for name, least in options.min_coverage if name is not None}
    of_all = [least for name, least in options.min_coverage if name is None]
    least = {name: given.get(name, of_all[-1] if of_all else 0.0) for name in [*counts, *given]}

    def study(domains: Mapping[str, np.ndarray], min_coverage: Mapping[str, float]) -> Study:
        problem = build_problem(domains, cost, always_keep=always_keep, min_coverage=min_coverage, alpha=options.alpha,
                                min_size=options.min_size, step=options.step, equal_domains=options.equal_domains)
        return record_of(problem, tpe(problem, num_trials=options.trials, seed=options.seed), domains)

    joint = {ALL: study(counts, least)}
    if len(counts) == 1:
        return joint
    return joint | {name: study({name: of_domain}, {name: least[name]}) for name, of_domain in counts.items()}


def record_of(problem: TrimProblem, found: TrimChoice | None, domains: Mapping[str, np.ndarray]) -> Study:
    """One search as JSON types."""
    best = exact(problem)
    front = pareto_front(problem)
    shown = {next((one.size for one in front if one.coverage >= level), front[-1].size) for level in LEVELS}
    at = np.unique(np.geomspace(1, len(problem.sizes), CURVE_POINTS).astype(np.int64)) - 1
    return {
        "num_tokens": int(sum(of_domain.sum() for of_domain in domains.values())),
        "num_distinct": int(np.count_nonzero(np.sum(list(domains.values()), axis=0))),
        "min_coverage": dict(zip(problem.domains, problem.min_coverage.tolist(), strict=True)),
        "exact": asdict(best),
        "tpe": None if found is None else asdict(found),
        "difference": None if found is None else {"size": found.size - best.size,
                                                  "utility": found.utility - best.utility},
        "front": [asdict(one) for one in front if one.size in shown | {best.size}],
        "curve": [asdict(problem.choice(int(index))) for index in at],
    }


def report_text(result: dict[str, Any]) -> str:
    """For a person."""
    lines = [f"V {result['vocab_size']}: the full head is {result['head_share_of_flops']:.1%} of the draft's FLOPs; "
             f"{result['num_special_tokens']} special tokens are always kept",
             f"{'domain':24}{'tokens':>12}{'distinct':>10}{'size':>8}{'coverage':>10}{'F/F(V)':>8}{'U':>8}{'TPE':>8}"
             f"{'U of TPE':>10}"]
    for name, study in result["domains"].items():
        best, found = study["exact"], study["tpe"]
        of_tpe = f"{found['size']:>8}{found['utility']:>10.4f}" if found else f"{'none':>8}"
        lines.append(f"{name:24}{study['num_tokens']:>12}{study['num_distinct']:>10}{best['size']:>8}"
                     f"{best['coverage']:>10.2%}{best['cost_ratio']:>8.3f}{best['utility']:>8.4f}{of_tpe}")
    joint = result["domains"][ALL]
    lines += ["", f"Pareto front of {ALL} (the least sizes for some coverages; * maximises U):"]
    lines.append(f"  {'size':>8}{'F/F(V)':>8}{'coverage':>10}  "
                 + "".join(f"{name:>18}" for name in joint["min_coverage"]))
    for one in joint["front"]:
        mark = "*" if one["size"] == joint["exact"]["size"] else " "
        lines.append(f"{mark} {one['size']:>8}{one['cost_ratio']:>8.3f}{one['coverage']:>10.2%}  "
                     + "".join(f"{covered:>18.2%}" for covered in one["coverage_of"].values()))
    return "\n".join(lines)


def report_page(result: dict[str, Any]) -> str:
    """The same with charts, as one HTML page."""
    studies: dict[str, Study] = result["domains"]

    def lines(x: str, y: str) -> list[Line]:
        drawn = [Line(label=name, points=[(one[x], one[y]) for one in study["curve"]], color=index)
                 for index, (name, study) in enumerate(studies.items())]
        drawn += [Line(label=f"{name}: chosen", points=[(study["exact"][x], study["exact"][y])], color=index, dots=True)
                  for index, (name, study) in enumerate(studies.items())]
        return drawn

    fronts = [Line(label=name, points=[(one["cost_ratio"], one["coverage"]) for one in study["front"]], color=index,
                   dots=True) for index, (name, study) in enumerate(studies.items())]
    title = f"Draft vocabulary of {result['options']['target']}"
    cost = result["options"]["cost"]
    charts = [
        chart("Coverage", lines("size", "coverage"), x_label="size k", log_x=True,
              note="share of the tokens that the k kept ones make up"),
        chart("Utility", lines("size", "utility"), x_label="size k", log_x=True,
              note=f"α C + (1 - α) R, α = {result['options']['alpha']}"),
        chart("Pareto front", fronts, x_label=f"{cost} of a draft step, in relation to the full head's",
              note="coverage against cost; further left and higher is better"),
    ]
    header = ["domain", "tokens", "distinct", "size", "coverage", "F/F(V)", "U", "TPE's size", "TPE's U"]
    rows = [[name, study["num_tokens"], study["num_distinct"],
             *(study["exact"][key] for key in ("size", "coverage", "cost_ratio", "utility")),
             *((study["tpe"] or {}).get(key) for key in ("size", "utility"))] for name, study in studies.items()]
    joint = studies[ALL]
    front = table(["size", "F/F(V)", "U", "coverage", *joint["min_coverage"]],
                  [[one["size"], one["cost_ratio"], one["utility"], one["coverage"], *one["coverage_of"].values()]
                   for one in joint["front"]])
    return page(title, f"<h1>{html.escape(title)}</h1><p class='soft'>{result['size']} tokens kept; cost: {cost}, "
                       f"{html.escape(result['device'])}</p><div class='card'>{table(header, rows)}</div>"
                       f"<h2>Curves</h2><div class='grid'>{''.join(charts)}</div>"
                       f"<h2>Pareto front of {ALL}</h2><div class='card'>{front}</div>")


def write(output: Path, result: dict[str, Any], vocab: VocabMap) -> None:
    (output / "trim_vocab.json").write_text(json.dumps(result, indent=2) + "\n")
    (output / "trim_vocab.html").write_text(report_page(result), encoding="utf-8")
    write_safetensors(output / "vocab_map.safetensors", {"d2t": vocab.d2t, "t2d": vocab.t2d})
    write_token_map(output / "token_map.pt", vocab)
    covered = ", ".join(f"{name} {part:.2%}" for name, part in result["coverage_of"].items())
    print(f"{len(vocab)} tokens kept, which cover {covered}; written to {output}: trim_vocab.json, trim_vocab.html, "
          "vocab_map.safetensors, token_map.pt")


def device_name(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name(options.device) if torch.device(options.device).type == "cuda" else "cpu"


if __name__ == "__main__":
    main()
