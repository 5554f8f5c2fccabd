"""Where prompts come from: files and Hugging Face data sets, read record by record.

No source is loaded whole, but for ``.json`` files: they hold one list, and are parsed in one piece.
"""

from __future__ import annotations

import csv
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq

from data_gen.prompts import COLUMNS, FORMS, Prompt, decode_line, opened, parse_prompt, read_lines
from data_gen.rows import Skipped
from specvocab_model.config import ConfigError, GenerationConfig, SourceConfig

READ_ROWS = 256  # of a parquet file at a time
READ_ERRORS = (OSError, EOFError, zlib.error)  # the disk's, and those of a damaged .gz file
LONGEST_CELL = 2**31 - 1


def sources_of(generation: GenerationConfig) -> list[SourceConfig]:
    return [*(SourceConfig(path=path) for path in generation.prompt_files), *generation.sources]


def check_sources(generation: GenerationConfig) -> None:
    """See that what looks like a file is there, before anything is generated.

    Raises:
        ConfigError: naming the file.
    """
    for source in sources_of(generation):
        if _is_file_name(source.path) and not Path(source.path).exists():
            raise ConfigError(f"there is no prompt file {source.path!r} (relative to {Path.cwd()})")


def read_source(source: SourceConfig, *, keep: bool) -> Iterator[Prompt | Skipped]:
    """The prompts of a source in its order; a record that is none comes as ``Skipped``.

    Args:
        keep: see ``parse_prompt``.

    Raises:
        ConfigError: the source is missing, cannot be read at all, or is empty.
    """
    name = Path(source.path.removesuffix(".gz")).stem if _is_file_name(source.path) else source.path
    count = 0
    for where, record in records(source):
        if count == source.num_records:
            break
        count += 1
        try:
            decoded = decode_line(record) if isinstance(record, bytes) else record
        except ValueError as error:
            yield Skipped(id=where, reason="unreadable", detail=str(error))
            continue
        try:
            prompt = parse_prompt(decoded, name, keep=keep)
        except ValueError as error:
            yield Skipped(id=where, reason="malformed", detail=str(error))
            continue
        yield prompt
    if not count:
        raise ConfigError(f"{source.path} holds no prompts")


def records(source: SourceConfig) -> Iterator[tuple[str, bytes | dict[str, Any]]]:
    """The records of a source, each with where it stands; lines of jsonl as they are, not decoded.

    Raises:
        ConfigError: the source is missing or cannot be read.
    """
    path = Path(source.path)
    if not _is_file_name(source.path):
        return _data_set(source)
    if not path.is_file():
        raise ConfigError(f"there is no prompt file {source.path!r} (relative to {Path.cwd()})")
    readers = {".parquet": _parquet, ".csv": _csv, ".json": _json}
    return readers.get(_kind(path), read_lines)(path)


def _kind(path: Path) -> str:
    """The ending that says what is in a file, compressed or not."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def _is_file_name(path: str) -> bool:
    """Whether it names a file: one that is there, or by its ending."""
    return Path(path).is_file() or (_kind(Path(path)) in (".jsonl", ".json", ".csv", ".parquet")
                                    and not Path(path).is_dir())


def _parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            _refuse_doubled(path, file.schema_arrow.names)
            for batch in file.iter_batches(READ_ROWS):
                for record in batch.to_pylist():
                    yield f"{path}, row {number}", _without_nulls(record)
                    number += 1
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read after {number} rows: {_first_line(error)}") from error


def _csv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    csv.field_size_limit(LONGEST_CELL)
    number = 0
    try:
        with opened(path) as content, io.TextIOWrapper(content, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)  # else a quote that nobody closes makes one cell of all the rest
            _refuse_doubled(path, reader.fieldnames or [])
            for record in reader:
                yield f"{path}, row {number}", {key: value for key, value in record.items() if value not in (None, "")}
                number += 1
    except (csv.Error, UnicodeDecodeError, *READ_ERRORS) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 CSV with a line of column names, after {number} rows: "
                          f"{error}") from error


def _refuse_doubled(path: Path, columns: Sequence[str]) -> None:
    """Raises ConfigError if two columns have one name: a record would hold one of them."""
    if doubled := [name for name, count in Counter(columns).items() if count > 1 and name in COLUMNS]:
        raise ConfigError(f"{path} has {columns.count(doubled[0])} columns {doubled[0]!r}; give them different names")


def _json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with opened(path) as file:
            content = json.loads(file.read().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no JSON ({error}); a file with an object a line is called .jsonl") from error
    except READ_ERRORS as error:
        raise ConfigError(f"{path} cannot be read: {_first_line(error)}") from error
    if not isinstance(content, list):
        raise ConfigError(f"{path} holds {type(content).__name__}, not a list of records")
    for number, record in enumerate(content):
        yield f"{path}, record {number}", record


def _data_set(source: SourceConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Memory-mapped: from the hub, a folder of data files, or a folder that ``save_to_disk`` wrote."""
    import datasets  # half a second, for those who need it

    folder = Path(source.path)
    errors = (*READ_ERRORS, ValueError, TypeError, RuntimeError, pa.ArrowException, httpx.HTTPError,
              datasets.exceptions.DatasetsError)  # RuntimeError: the data set is a script
    number = 0
    try:
        if (folder / "state.json").is_file():
            data = datasets.load_from_disk(source.path)
        elif (folder / "dataset_dict.json").is_file():
            data = datasets.load_from_disk(str(folder / source.split))
        else:
            data = datasets.load_dataset(source.path, source.subset, split=source.split)
        known = [name for name in data.column_names if name in COLUMNS]
        if not set(known) & set(FORMS):
            raise ConfigError(f"{source.path} has the columns {', '.join(data.column_names)}; expected one of "
                              f"{', '.join(FORMS)}")
        for record in data.select_columns(known):  # pictures and the like are not decoded
            yield f"{source.path}, row {number}", _without_nulls(record)
            number += 1
    except ConfigError:
        raise
    except errors as error:  # not found, unknown subset or split; a damaged file
        raise ConfigError(f"generation.sources: path={source.path!r}, subset={source.subset}, split={source.split} "
                          f"cannot be read after {number} rows: {_first_line(error.__cause__ or error)}") from error


def _without_nulls(value: Any) -> Any:
    """A record without the keys that it does not have: Arrow gives every object those of all others in its column, with
    nulls, and a template would show them as arguments of a tool."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
