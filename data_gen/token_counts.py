"""How often each token occurs in what a static draft vocabulary is cut for, read in pieces: it may exceed the memory.

Two kinds of data: folders of this project, of which the tokens count that the target wrote (VocabTrim, Goel et al.
2025, arXiv 2506.22694), and corpora of text, which are tokenised (FR-Spec, Zhao et al. 2025, arXiv 2502.14856).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data_gen.prompts import decode_line, parse_prompt
from data_gen.rows import SCHEMA
from data_gen.shards import MANIFEST_FILE, UNFINISHED_FILE, read_manifest, read_shard, supervised_ids
from data_gen.sources import records
from specvocab_model.config import ConfigError, SourceConfig
from specvocab_model.vocab import count_ids

MAX_DOMAINS = 256  # each has its counts and its search
BATCH_CHARACTERS = 2**18  # of text that is tokenised at one time
Piece = tuple[str, np.ndarray]  # domain, token ids


def count_tokens(
    name: str, path: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, split_by: str | None = None
) -> dict[str, Tensor]:
    """Occurrences by domain, each int64 [V].

    Args:
        name: of the only domain, or what the names of all of them begin with.
        path: a data folder, a ``.txt`` file, or what ``SourceConfig.path`` may be.
        split_by: a domain for each value of this column of the rows, or of this key of the records.

    Raises:
        ConfigError: the data are missing, damaged or empty, or have no such column, or one of too many values.
    """
    folder = Path(path)
    is_data_folder = (folder / MANIFEST_FILE).is_file() or (folder / UNFINISHED_FILE).is_file()
    pieces = _responses(folder, split_by) if is_data_folder else _texts(path, tokenizer, split_by)
    counts: dict[str, Tensor] = {}
    for value, ids in pieces:
        domain = f"{name}/{value}" if split_by else name
        counted = count_ids([ids], vocab_size)
        counts[domain] = counts[domain] + counted if domain in counts else counted
        if len(counts) > MAX_DOMAINS:
            raise ConfigError(f"{split_by!r} of {path} has more than {MAX_DOMAINS} values, each of which would be a "
                              "domain; split by a column of fewer, like source or category")
    if not any(int(counted.sum()) for counted in counts.values()):
        raise ConfigError(f"{path} holds no token to count; give a data folder with responses, or a corpus with text")
    return counts


def _responses(folder: Path, split_by: str | None) -> Iterator[Piece]:
    """What the target wrote, shard by shard."""
    if split_by is None:
        yield from (("", ids) for ids in supervised_ids(folder))
        return
    if split_by not in SCHEMA.names:
        raise ConfigError(f"the rows of {folder} have no column {split_by!r}; they are split by source")
    for shard in read_manifest(folder).shards:
        table = read_shard(folder / shard.file, ["input_ids", "loss_mask", split_by])
        for value in pc.unique(table[split_by]):
            rows = table.filter(pc.equal(table[split_by], value))
            ids, mask = (pc.list_flatten(rows[name]).to_numpy() for name in ("input_ids", "loss_mask"))
            yield str(value), ids[mask == 1]


def _texts(path: str, tokenizer: PreTrainedTokenizerBase, split_by: str | None) -> Iterator[Piece]:
    """The tokens of a corpus, at most ``BATCH_CHARACTERS`` of text at a time (and at least one record)."""
    waiting: dict[str, list[str]] = {}
    characters = 0
    for value, text in _documents(path, split_by):
        waiting.setdefault(value, []).append(text)
        characters += len(text)
        if characters >= BATCH_CHARACTERS:
            yield from _tokenised(waiting, tokenizer)
            waiting, characters = {}, 0
    yield from _tokenised(waiting, tokenizer)


def _tokenised(texts: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase) -> Iterator[Piece]:
    for value, of_value in texts.items():
        encoded: Sequence[list[int]] = tokenizer(of_value, add_special_tokens=False, verbose=False)["input_ids"]
        yield value, np.concatenate([np.asarray(ids, dtype=np.int64) for ids in encoded])


def _documents(path: str, split_by: str | None) -> Iterator[tuple[str, str]]:
    """(domain, text) of every record: its ``text``, or what the assistant says in a conversation.

    Raises:
        ConfigError: naming the record that is neither, or has no key ``split_by``.
    """
    if Path(path).suffix == ".txt" and split_by is not None:
        raise ConfigError(f"{path} has lines, and no {split_by!r} to split them by; leave out --split-by, or give "
                          "records")
    for where, record in records(SourceConfig(path=path)):
        try:
            if Path(path).suffix == ".txt":
                assert isinstance(record, bytes)
                yield "", record.decode()
                continue
            decoded = decode_line(record) if isinstance(record, bytes) else record
            yield _value_of(decoded, split_by), _text_of(decoded)
        except ValueError as error:  # not UTF-8, not JSON, or no such record
            raise ConfigError(f"{where}: {error}") from error


def _value_of(record: Any, split_by: str | None) -> str:
    if split_by is None:
        return ""
    if not isinstance(record, dict) or record.get(split_by) is None:
        raise ValueError(f"has no {split_by!r} to split the data by")
    return str(record[split_by])


def _text_of(record: Any) -> str:
    if isinstance(record, dict) and isinstance(record.get("text"), str):
        return record["text"]
    prompt = parse_prompt(record, source="corpus", keep=True)  # refuses what is no conversation with an answer
    said = [message["content"] for message in prompt.messages if message["role"] == "assistant"]
    return "\n".join(said)
