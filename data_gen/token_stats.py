"""What a folder of rows is made of: lengths, turns, sources, and how often the target wrote which token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from data_gen.curves import Panel, svg
from data_gen.files import appearing_whole, write_json
from data_gen.shards import read_manifest, read_shard
from specvocab_model.config import Config

STATS_FILE, PLOT_FILE = "token_stats.json", "token_stats.svg"
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
SHARES = (0.5, 0.9, 0.95, 0.99, 0.999, 1.0)


def print_stats(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print, plot and save the statistics of the training data.

    Raises:
        ConfigError: they are not there, or damaged.
    """
    folder = Path(config.data.train_path)
    stats = token_stats(folder, len(tokenizer))
    write_json(folder / STATS_FILE, stats)
    with appearing_whole(folder / PLOT_FILE) as file:
        file.write(plot(stats).encode())
    print(table(stats))
    print(f"written to {folder / STATS_FILE}, plotted in {folder / PLOT_FILE}")


def token_stats(folder: Path, num_tokens: int) -> dict[str, Any]:
    """Statistics of a finished folder, one shard in memory at a time.

    Args:
        num_tokens: length of the tokenizer. The embedding may have more rows; such ids count nowhere.

    Returns:
        JSON values. ``token_counts[i]`` is how often id ``i`` is supervised; ``coverage`` lists how many of the most
        frequent tokens make up which share of all of them.

    Raises:
        ConfigError: the folder is not finished, or a shard is damaged.
    """
    manifest = read_manifest(folder)
    counts = np.zeros(num_tokens, dtype=np.int64)
    lengths, responses, turns = [np.zeros(0, dtype=np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    sources: Counter[str] = Counter()
    for shard in manifest.shards:
        shard_table = read_shard(folder / shard.file, ["source", "input_ids", "loss_mask"]).combine_chunks()
        sources.update(shard_table["source"].to_pylist())
        if not shard_table.num_rows:
            continue
        offsets = shard_table["input_ids"].chunk(0).offsets.to_numpy()
        ids = shard_table["input_ids"].chunk(0).flatten().to_numpy()
        mask = shard_table["loss_mask"].chunk(0).flatten().to_numpy().astype(bool)
        written = ids[mask]
        counts += np.bincount(written[written < num_tokens], minlength=num_tokens)
        begins = mask & ~np.concatenate([[False], mask[:-1]])  # a row never begins with a response
        lengths.append(np.diff(offsets))
        responses.append(np.add.reduceat(mask, offsets[:-1], dtype=np.int64))
        turns.append(np.add.reduceat(begins, offsets[:-1], dtype=np.int64))
    return {
        "num_rows": manifest.num_rows,
        "tokens_per_row": _quantiles(np.concatenate(lengths)),
        "response_tokens_per_row": _quantiles(np.concatenate(responses)),
        "response_histogram": _histogram(np.concatenate(responses)),
        "turns_per_row": {str(turn): count for turn, count in sorted(Counter(np.concatenate(turns).tolist()).items())},
        "sources": dict(sources.most_common()),
        "finish_reasons": manifest.finish_reasons,
        "skipped": manifest.skipped,
        "collected": manifest.collected,
        "num_response_tokens": int(counts.sum()),
        "num_distinct_tokens": int((counts > 0).sum()),
        "tokenizer_length": num_tokens,
        "coverage": coverage(counts),
        "token_counts": counts.tolist(),
    }


def coverage(counts: np.ndarray) -> list[dict[str, Any]]:
    """Shares of all occurrences, and how many of the most frequent tokens (``top_k``) reach them.

    Args:
        counts: int64 [V].
    """
    cumulative = np.sort(counts)[::-1].cumsum()
    total = int(cumulative[-1]) if len(cumulative) else 0
    if not total:
        return []
    curve = [{"share": share, "top_k": int(np.searchsorted(cumulative, share * total)) + 1} for share in SHARES]
    sizes = [size for size in (2**power for power in range(len(counts).bit_length())) if size <= len(counts)]
    curve += [{"share": float(cumulative[size - 1] / total), "top_k": size} for size in sizes]
    return sorted(curve, key=lambda point: (point["top_k"], point["share"]))


def _quantiles(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    quantiles = np.quantile(values, QUANTILES)
    named = {f"{quantile:.0%}": float(value) for quantile, value in zip(QUANTILES, quantiles, strict=True)}
    return {"mean": float(values.mean()), **named}


def _histogram(values: np.ndarray, num_bins: int = 40) -> list[list[float]]:
    """``[[left edge, right edge, rows], ...]``."""
    if not len(values):
        return []
    rows, edges = np.histogram(values, bins=min(num_bins, int(values.max() - values.min()) + 1))
    return [[float(left), float(right), int(count)] for left, right, count in zip(edges, edges[1:], rows, strict=False)]


def table(stats: dict[str, Any]) -> str:
    """``stats`` for a person."""
    lines = [f"{stats['num_rows']} rows, {stats['num_response_tokens']} response tokens, "
             f"{stats['num_distinct_tokens']} distinct of the tokenizer's {stats['tokenizer_length']}"]
    for name in ("tokens_per_row", "response_tokens_per_row"):
        lines.append(f"{name:24} " + ", ".join(f"{key} {value:.0f}" for key, value in stats[name].items()))
    for name in ("turns_per_row", "sources", "finish_reasons", "skipped", "collected"):
        lines.append(f"{name:24} " + (", ".join(f"{key}: {value}" for key, value in stats[name].items()) or "none"))
    reached = {point["share"]: point["top_k"] for point in reversed(stats["coverage"])}  # the fewest tokens of each
    needed = ", ".join(f"{share:.1%}: {reached[share]}" for share in SHARES if reached)
    return "\n".join([*lines, f"tokens for a coverage of {needed or 'none'}"])


def plot(stats: dict[str, Any]) -> str:
    """Response lengths and the coverage curve as one SVG picture."""
    lengths = [((left + right) / 2, rows) for left, right, rows in stats["response_histogram"]]
    covered = [(point["top_k"], 100 * point["share"]) for point in stats["coverage"]]
    return svg([
        Panel(title="response tokens of a row", x_label="tokens", y_label="rows", points=lengths, bars=True),
        Panel(title="share of response tokens that the k most frequent make up", x_label="k", y_label="%",
              points=covered, log_x=True),
    ])
