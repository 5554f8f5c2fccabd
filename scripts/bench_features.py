"""How fast features are written and read, against plain files of the same bytes on the same disk.

    python scripts/bench_features.py --folder /nvme/somewhere --gib 8

Nothing is computed: the same numbers are written for every document of chat-like lengths. Both ways end with ``fsync``;
before anything is read, the kernel is told to forget the files. Medians are printed, and another way comes first in
each round, because other users of a disk, and what a virtual one allows for at once, change its speed. A ratio of 1 is
the disk's own speed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from data_gen.features import TOKENS_AT_ONCE, FeatureStore
from data_gen.files import make_folder, write_json, writing
from specvocab_model.options import above_zero, positive, run_command

CHUNK = 2**24  # bytes of a plain read or write
SEQ_LEN = 4096
ROWS_PER_SHARD = 512


def store_of(folder: Path, num_bytes: int, hidden_size: int, *, seed: int = 0) -> FeatureStore:
    """A store in bf16 of about ``num_bytes`` for documents of log-normal lengths around 400 tokens."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(400), 0.8, size=num_bytes // (4 * hidden_size * 2 * 400) + 1)
    lengths = lengths.round().clip(2, SEQ_LEN).astype(np.int64)
    lengths = lengths[: max(1, int(np.searchsorted(lengths.cumsum() * 4 * hidden_size * 2, num_bytes)))]
    return FeatureStore(
        folder=folder, settings={}, hidden_size=hidden_size, dtype=torch.bfloat16, seq_len=SEQ_LEN,
        first_row=np.array([*range(0, len(lengths), ROWS_PER_SHARD), len(lengths)]),
        first_token=np.concatenate([[0], lengths.cumsum()]),
    )


def write_plain(folder: Path, store: FeatureStore, numbers: Tensor) -> None:
    """The bytes of every file of ``store``, one after another."""
    content = numbers.view(torch.uint8).numpy().data.cast("B")
    for shard in range(store.num_shards):
        with (folder / f"{shard}").open("wb", buffering=0) as file:
            left = store.shard_bytes(shard)
            with writing(Path(file.name)):
                while left:
                    left -= file.write(content[: min(left, CHUNK, len(content))])
                os.fsync(file.fileno())


def write_features(store: FeatureStore, numbers: Tensor) -> None:
    def outputs(pieces: np.ndarray) -> Tensor:
        return numbers[: len(pieces) * int(pieces[0, 2])].view(len(pieces), int(pieces[0, 2]), -1)

    store.fill(outputs, PartialState(cpu=True), alone=False)


def read_plain(folder: Path, store: FeatureStore) -> None:
    buffer = memoryview(bytearray(CHUNK))
    for shard in range(store.num_shards):
        with (folder / f"{shard}").open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def read_features(store: FeatureStore, order: np.ndarray) -> None:
    features, final_hidden = store.zeros(1, SEQ_LEN)
    for row in order.tolist():
        length = int(store.first_token[row + 1] - store.first_token[row])
        store.read(row, 0, length, features[0, :length], final_hidden[0, :length])


def forget(folder: Path) -> None:
    """Have the kernel drop what it remembers of the files in ``folder``."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def measure(folder: Path, num_bytes: int, hidden_size: int, repeats: int) -> dict[str, float]:
    """GB/s of each way, the median over ``repeats`` rounds, and the features' over the plain one."""
    plain, store = folder / "plain", store_of(folder / "features", num_bytes, hidden_size)
    numbers = torch.randn(TOKENS_AT_ONCE + SEQ_LEN, 4 * hidden_size).bfloat16()
    size = store.num_tokens * store.bytes_per_token
    in_order = np.arange(len(store.first_token) - 1)
    shuffled = np.random.default_rng(1).permutation(in_order)
    writes: dict[str, Callable[[], None]] = {
        "plain write": lambda: write_plain(plain, store, numbers),
        "features write": lambda: write_features(store, numbers),
    }
    reads: dict[str, Callable[[], None]] = {
        "plain read": lambda: read_plain(plain, store),
        "features read in order": lambda: read_features(store, in_order),
        "features read shuffled": lambda: read_features(store, shuffled),
    }
    taken: dict[str, list[float]] = {name: [] for name in (*writes, *reads)}
    for number in range(repeats):
        for path in (plain, store.folder):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        for ways in (writes, reads):
            for name in (*list(ways)[number % len(ways) :], *list(ways)[: number % len(ways)]):
                for path in (plain, store.folder):
                    forget(path)
                taken[name].append(seconds(ways[name]))
    speeds = {name: size / median(times) / 1e9 for name, times in taken.items()}
    ratios = {f"{name} / plain": speeds[name] / speeds[f"plain {name.split()[1]}"] for name in speeds
              if name.startswith("features")}
    return {"GB": size / 1e9, **speeds, **ratios}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure; a folder of ours in it")
    parser.add_argument("--gib", type=above_zero, default=8.0, help="more than the disk's own memory (%(default)s)")
    parser.add_argument("--hidden-size", type=positive, default=4096)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--json", type=Path)
    run_command(parser, bench, argv)


def bench(arguments: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: one of the folders cannot be made, or the disk does not take the files.
    """
    folder = arguments.folder / f"bench-features-{os.getpid()}"
    make_folder(folder)
    if arguments.json:
        make_folder(arguments.json.parent)  # said before minutes of measuring
    try:
        result = measure(folder, int(arguments.gib * 2**30), arguments.hidden_size, arguments.repeats)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for name, value in result.items():
        print(f"{name:<45}{value:.2f}")
    if arguments.json:
        write_json(arguments.json, result)


if __name__ == "__main__":
    main()
