"""Training sequences on disk: a folder of parquet shards and a manifest.

One row is one training sequence, its token ids exactly as the engine saw and produced them. A shard is the answers to a
fixed range of prompts, so it is the unit of work as well: it appears whole (written under a temporary name, synced,
renamed) or not at all, and whoever continues a killed run makes the shards that are missing. ``manifest.json`` appears
last; a folder without it is not finished.

Imports neither torch nor transformers: training and its loader workers read data through this file.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data_gen.files import appearing_whole, make_folder, refuse_file, remove_stale, sha256_of, write_json, write_jsonl
from data_gen.rows import FINISH_REASONS, SCHEMA, Row, Skipped, skipped_in, table_of, validate_rows
from specvocab_model.config import ConfigError

if TYPE_CHECKING:
    from datasets import Dataset

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
UNFINISHED_FILE = "manifest.unfinished.json"
REJECTED_FILE = "rejected.jsonl"  # what was skipped, and why
ROWS_AT_ONCE = 64  # that are made ready for writing, which takes some milliseconds
MAKE_COMMAND = "python data_gen/main.py +experiment=NAME"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One finished shard file."""

    file: str
    num_rows: int
    num_loss_tokens: int
    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a finished folder holds and how it was made. The same settings give the same manifest, byte for byte."""

    schema_version: int
    target: str  # the name it was loaded by
    settings: dict[str, Any]  # everything the rows depend on; see ShardWriter
    num_prompts: int
    num_rows: int
    num_tokens: int
    num_loss_tokens: int
    finish_reasons: dict[str, int]  # rows by finish reason
    shards: list[Shard]
    skipped: dict[str, int] = field(default_factory=dict)  # prompts, or their later turns, by reason
    collected: dict[str, int] = field(default_factory=dict)  # how many prompts were read and chosen, by what happened

    @property
    def target_fingerprint(self) -> str:
        return self.settings["target"]["fingerprint"]


def read_manifest(folder: Path | str, *, command: str = MAKE_COMMAND) -> Manifest:
    """Read the manifest of a finished folder.

    Args:
        command: what the user types to make the folder, for the error message.

    Raises:
        ConfigError: the folder is missing, not finished, or of another schema version.
    """
    folder = Path(folder)
    refuse_file(folder)
    content = _read_json(folder / MANIFEST_FILE)
    if content is None:
        state = "is not finished; continue" if (folder / UNFINISHED_FILE).is_file() else "has no data; make"
        raise ConfigError(f"{folder} {state} it with `{command}`")
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{folder} has schema version {content.get('schema_version')}, this code reads {SCHEMA_VERSION}; "
            f"delete the folder and make it anew with `{command}`"
        )
    try:
        manifest = Manifest(**{**content, "shards": [Shard(**shard) for shard in content["shards"]]})
        assert isinstance(manifest.target_fingerprint, str)
    except (TypeError, KeyError, AttributeError, AssertionError) as error:  # edited by hand
        raise _damaged(folder / MANIFEST_FILE, f"{type(error).__name__}: {error}") from error
    return manifest


def missing_shards_of(folder: Path, manifest: Manifest, *, command: str = MAKE_COMMAND) -> list[str]:
    """Shards of the manifest that are not there, by name.

    Raises:
        ConfigError: one that is there has another size than the manifest says.
    """
    missing = []
    for shard in manifest.shards:
        path = folder / shard.file
        if not path.is_file():
            missing.append(shard.file)
        elif path.stat().st_size != shard.num_bytes:
            raise ConfigError(f"{path} has {path.stat().st_size} bytes instead of {shard.num_bytes}; delete it, and "
                              f"make it again with `{command}`")
    return missing


def load_rows(folder: Path | str, *, command: str = MAKE_COMMAND) -> Dataset:
    """The rows of a finished folder in prompt order, memory-mapped (through the Arrow cache of ``datasets``).

    Raises:
        ConfigError: the folder is missing or not finished, or a shard is not as the manifest describes it.
    """
    import datasets  # half a second, which the writing side need not pay

    folder = Path(folder)
    manifest = read_manifest(folder, command=command)
    if missing := missing_shards_of(folder, manifest, command=command):
        raise ConfigError(f"{folder / missing[0]} is missing; make it again with `{command}`")
    paths = [str((folder / shard.file).resolve()) for shard in manifest.shards if shard.num_rows]
    if not paths:
        return datasets.Dataset(SCHEMA.empty_table())
    try:
        rows = datasets.Dataset.from_parquet(paths)
    except (datasets.exceptions.DatasetsError, pa.ArrowException, OSError) as error:
        damaged = damaged_shards(folder, manifest) or [str(error).splitlines()[0]]
        raise ConfigError(f"{folder} cannot be read; damaged: {', '.join(damaged)}. Delete these, and make them again "
                          f"with `{command}`") from error
    if len(rows) != manifest.num_rows:
        raise _damaged(folder / MANIFEST_FILE, f"num_rows is {manifest.num_rows!r}, and there are {len(rows)}")
    return rows


def damaged_shards(folder: Path, manifest: Manifest) -> list[str]:
    """Shards of a folder that are not what was written, by name; reads all of them."""
    return [shard.file for shard in manifest.shards if sha256_of(folder / shard.file) != shard.sha256]


def document_lengths(rows: Dataset) -> np.ndarray:
    """Tokens of each row, int64 [N], without reading the tokens."""
    return pc.list_value_length(rows.data.column("input_ids")).to_numpy().astype(np.int64)


def split_documents(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Cut every document longer than ``seq_len`` into pieces, each a document of its own from then on.

    Args:
        lengths: int [N], tokens of each data set row.

    Returns:
        int64 [P, 3]: (row, first token, number of tokens) of every piece.
    """
    pieces_of = -(-lengths // seq_len)
    row = np.repeat(np.arange(len(lengths)), pieces_of)
    index_in_row = np.arange(len(row)) - np.repeat(pieces_of.cumsum() - pieces_of, pieces_of)
    start = index_in_row * seq_len
    return np.stack([row, start, np.minimum(lengths[row] - start, seq_len)], axis=1).astype(np.int64)


class ShardWriter:
    """Makes one folder, by one process or several that share the file system; a killed run is continued."""

    def __init__(
        self,
        folder: Path | str,
        *,
        target: str,
        settings: dict[str, Any],
        num_prompts: int,
        rows_per_shard: int,
        vocab_size: int,
        stop_token_ids: Sequence[int],
        collected: dict[str, int] | None = None,
    ) -> None:
        """
        Args:
            settings: whatever decides the content of the rows, as nested dicts of JSON values; holds
                ``target.fingerprint``. A folder begun with other settings is refused.
            num_prompts: shard ``i`` holds the answers to prompts ``[i * rows_per_shard, (i + 1) * rows_per_shard)``.
            vocab_size: rows of the target's ``lm_head``; every id must be smaller.
            stop_token_ids: ids that end a response, and appear nowhere else in it.
            collected: counts about the choice of the prompts, for the manifest alone.
        """
        self.folder = Path(folder)
        self.target = target
        self.settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file that it is compared with
        self.num_prompts = num_prompts
        self.rows_per_shard = rows_per_shard
        self.vocab_size = vocab_size
        self.stop_token_ids = frozenset(stop_token_ids)
        self.collected = collected or {}
        self._skipped: dict[int, list[Skipped]] = {}  # of the shards that were looked at

    @property
    def num_shards(self) -> int:
        return -(-self.num_prompts // self.rows_per_shard)

    def prompt_range(self, index: int) -> slice:
        return slice(index * self.rows_per_shard, min((index + 1) * self.rows_per_shard, self.num_prompts))

    def path(self, index: int) -> Path:
        return self.folder / f"shard-{index:05d}.parquet"

    def open(self) -> Manifest | None:
        """Begin or continue the folder; returns its manifest if nothing is left to do.

        All ranks may call this at once: they would write the same file.

        Raises:
            ConfigError: the folder was made or begun with other settings.
        """
        refuse_file(self.folder)
        finished, unfinished = self.folder / MANIFEST_FILE, self.folder / UNFINISHED_FILE
        begun = _read_json(unfinished)
        for content in (_read_json(finished), begun):
            if content is not None:
                self._check_settings(content)
        if finished.is_file():
            manifest = read_manifest(self.folder)
            if not missing_shards_of(self.folder, manifest):
                return manifest
            with suppress(FileNotFoundError):  # another rank was faster
                finished.replace(unfinished)
            return None
        make_folder(self.folder)
        if begun is None:
            if stray := sorted(self.folder.glob("shard-*.parquet")):
                raise ConfigError(f"{self.folder} holds {stray[0].name} but no manifest, so nobody knows how it was "
                                  f"made; delete the folder or name another")
            write_json(unfinished, {"schema_version": SCHEMA_VERSION, "settings": self.settings})
        return None

    def missing_shards(self) -> list[int]:
        return [index for index in range(self.num_shards) if not self.path(index).exists()]

    def skipped(self) -> list[Skipped]:
        """What was skipped in the shards that are there, in their order.

        Raises:
            ConfigError: one of them is damaged.
        """
        for index in range(self.num_shards):
            if index not in self._skipped and self.path(index).exists():
                self._skipped[index] = skipped_in(read_shard(self.path(index), []).schema)
        return [each for index in sorted(self._skipped) for each in self._skipped[index]]

    def write(self, index: int, rows: Sequence[Row], skipped: Sequence[Skipped] = ()) -> None:
        """Write shard ``index``: the rows of its prompts, and what became none.

        A shard that is there stays: where two workers made it, the manifest may already hold the first one's hash.

        Raises:
            ValueError: a row contradicts itself or the target.
        """
        for _ in self.write_in_parts(index, rows, skipped):
            pass

    def write_in_parts(
        self, index: int, rows: Sequence[Row], skipped: Sequence[Skipped] = ()
    ) -> Generator[None, None, None]:
        """As ``write``; yields now and then, for whoever must not be kept from other work. Then nothing is written yet.
        """
        tables = []
        for start in range(0, max(len(rows), 1), ROWS_AT_ONCE):
            if start:
                yield
            part = rows[start : start + ROWS_AT_ONCE]
            validate_rows(part, vocab_size=self.vocab_size, stop_token_ids=self.stop_token_ids)
            tables.append(table_of(part, skipped))
        with appearing_whole(self.path(index), once=True) as file:
            pq.write_table(pa.concat_tables(tables).combine_chunks(), file, compression="zstd",
                           write_page_checksum=True)

    def finalise(self) -> Manifest:
        """Write the manifest; called by one rank when all shards are there.

        Raises:
            ConfigError: two rows have the same id, or a shard cannot be read.
        """
        ids: Counter[str] = Counter()
        reasons = Counter(dict.fromkeys(FINISH_REASONS, 0))
        num_tokens = 0
        shards = []
        skipped: list[Skipped] = []
        for path in map(self.path, range(self.num_shards)):
            table = read_shard(path, ["id", "input_ids", "num_loss_tokens", "finish_reason"])
            ids.update(table["id"].to_pylist())
            skipped += skipped_in(table.schema)
            reasons.update(table["finish_reason"].to_pylist())
            num_tokens += sum(len(chunk.flatten()) for chunk in table["input_ids"].chunks)
            shards.append(Shard(
                file=path.name,
                num_rows=table.num_rows,
                num_loss_tokens=sum(table["num_loss_tokens"].to_pylist()),
                num_bytes=path.stat().st_size,
                sha256=sha256_of(path),
            ))
        if doubled := [row_id for row_id, count in ids.items() if count > 1]:
            raise ConfigError(f"{self.folder}: {len(doubled)} row ids appear more than once, first {doubled[0]!r}; "
                              "give the prompts other ids")
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            target=self.target,
            settings=self.settings,
            num_prompts=self.num_prompts,
            num_rows=ids.total(),
            num_tokens=num_tokens,
            num_loss_tokens=sum(shard.num_loss_tokens for shard in shards),
            finish_reasons=dict(reasons),
            shards=shards,
            skipped=dict(Counter(each.reason for each in skipped).most_common()),
            collected=self.collected,
        )
        if skipped:
            write_jsonl(self.folder / REJECTED_FILE, map(asdict, skipped))
        write_json(self.folder / MANIFEST_FILE, asdict(manifest))
        # A launcher that was killed may have left workers behind that finish this folder as well.
        (self.folder / UNFINISHED_FILE).unlink(missing_ok=True)
        remove_stale(self.folder)
        return manifest

    def _check_settings(self, made_with: dict[str, Any]) -> None:
        before = made_with["settings"] | {"schema_version": made_with.get("schema_version")}
        check_made_with(self.folder, before, self.settings | {"schema_version": SCHEMA_VERSION})


def read_shard(path: Path, columns: list[str] | None = None) -> pa.Table:
    """
    Raises:
        ConfigError: the file is not what was written.
    """
    try:
        return pq.read_table(path, columns=columns, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{path} is damaged ({str(error).splitlines()[0]}); delete it, and make it again with the "
                          "same command") from error


def supervised_ids(folder: Path | str, *, command: str = MAKE_COMMAND) -> Iterator[np.ndarray]:
    """The tokens under ``loss_mask`` of a finished folder, one shard in memory at a time.

    Raises:
        ConfigError: the folder is not finished, or a shard is missing or damaged.
    """
    folder = Path(folder)
    manifest = read_manifest(folder, command=command)
    if missing := missing_shards_of(folder, manifest, command=command):
        raise ConfigError(f"{folder / missing[0]} is missing; make it again with `{command}`")
    for shard in manifest.shards:
        table = read_shard(folder / shard.file, ["input_ids", "loss_mask"])
        ids, mask = (pc.list_flatten(table[name]).to_numpy() for name in ("input_ids", "loss_mask"))
        yield ids[mask == 1]


def check_made_with(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare the nested settings that ``folder`` was made with and those that are asked for.

    Raises:
        ConfigError: naming all that differ.
    """
    before, now = _flat(before), _flat(now)
    differing = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    if differing:
        listed = ", ".join(f"{key} was {before.get(key)!r} and is now {now.get(key)!r}" for key in differing)
        raise ConfigError(f"{folder} was made with other settings: {listed}. Set them back, give another "
                          f"folder, or make it anew after `rm -r {shlex.quote(str(folder))}`")


def _read_json(path: Path) -> dict[str, Any] | None:
    """A manifest, finished or not, as it is written; None if there is none.

    Raises:
        ConfigError: it has been damaged or edited.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
        raise _damaged(path, "it holds no settings")
    return content


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is damaged ({what}); restore it, or delete the folder and make it anew")


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as ``{"sampling.top_p": ...}``."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat
