"""Print rows so that one sees what is trained on: context, supervised text and special tokens apart."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_gen.shards import load_rows
from specvocab_model.config import Config, ConfigError

RESET = "\x1b[0m"
COLOURS = {"context": "\x1b[2m", "supervised": "\x1b[32m", "special": "\x1b[35m", "supervised special": "\x1b[1;30;42m"}
MARK = "▁"  # around supervised text where there are no colours


def inspect_rows(config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
    """Print the rows that ``inspect`` names.

    Raises:
        ConfigError: there is no such row.
    """
    colours = sys.stdout.isatty()
    for name in config.inspect:
        path, number, row = find_row(config, name)
        print(f"{path} row {number}: id {row['id']!r}, source {row['source']!r}, {len(row['input_ids'])} tokens, "
              f"{row['num_loss_tokens']} supervised, finish_reason {row['finish_reason']}")
        print(painted(tokenizer, row["input_ids"], row["loss_mask"], colours=colours), end="\n\n")
    legend = {kind: f"{colour}{kind}{RESET}" for kind, colour in COLOURS.items()}
    print("legend: " + (", ".join(legend.values()) if colours else f"{MARK} stands before and behind supervised text"))


def find_row(config: Config, name: str) -> tuple[str, int, dict[str, Any]]:
    """The row whose id is ``name``, of the training or the validation data; else the training row of that number.

    Returns:
        The folder, the row's number in it, and the row.

    Raises:
        ConfigError: there is no such row.
    """
    folders = (config.data.train_path, config.data.validation_path)
    for path in folders:
        rows = load_rows(path)
        for start, ids in _batches(rows["id"]):
            if name in ids:
                number = start + ids.index(name)
                return path, number, rows[number]
    rows = load_rows(folders[0])
    if not name.isdecimal() or int(name) >= len(rows):
        raise ConfigError(f"inspect={name!r} is neither the id of a row in {' or '.join(folders)}, nor a number below "
                          f"{len(rows)}, the rows of the first")
    return folders[0], int(name), rows[int(name)]


def _batches(column: Sequence[str], size: int = 4096) -> Iterator[tuple[int, list[str]]]:
    for start in range(0, len(column), size):
        yield start, list(column[start : start + size])


def spans(
    tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int], loss_mask: Sequence[int]
) -> list[tuple[str, str]]:
    """A row as runs of text of one kind (a key of ``COLOURS``): [(kind, text), ...].

    Ids that the tokenizer does not have are shown as ``<id 151700>``.
    """
    special = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}

    def kind(item: tuple[int, int]) -> str:
        token, supervised = item
        if token in special or token >= len(tokenizer):
            return "supervised special" if supervised else "special"
        return "supervised" if supervised else "context"

    runs = []
    for name, items in groupby(zip(input_ids, loss_mask, strict=True), kind):
        tokens = [token for token, _ in items]
        if name.endswith("special"):  # decode leaves out what it does not know
            text = "".join(str(tokenizer.decode([token])) if token < len(tokenizer) else f"<id {token}>"
                           for token in tokens)
        else:
            text = str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        runs.append((name, text))
    return runs


def painted(
    tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int], loss_mask: Sequence[int], *, colours: bool
) -> str:
    """A row for the terminal, in colours or with marks around supervised text."""
    runs = spans(tokenizer, input_ids, loss_mask)
    if colours:
        return "".join(f"{COLOURS[kind]}{text}{RESET}" for kind, text in runs)
    pieces = []
    for supervised, group in groupby(runs, lambda run: run[0].startswith("supervised")):
        text = "".join(text for _, text in group)
        pieces.append(f"{MARK}{text}{MARK}" if supervised else text)
    return "".join(pieces)
