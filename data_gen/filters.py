"""What makes a text worth less: that it repeats itself, or another one."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Sequence

import numpy as np

NGRAM = 8
SHINGLE = 5  # words
NUM_HASHES = 128  # of a signature
BAND_WIDTHS = (16, 8, 4, 2, 1)  # divisors of it
RECALL = 0.99  # of pairs that are exactly at the threshold
CHUNK = 4096  # shingles that are hashed at a time
LOOK_BACK = 8  # how many earlier texts of a band's bucket each is compared with


def repetition(items: Sequence[Hashable], ngram: int = NGRAM) -> float:
    """Share of the n-grams of ``items`` (ids, words) that have been there before: 0 for ordinary text, near 1 for a
    loop, 0 for what is shorter than an n-gram."""
    ngrams = list(zip(*(items[start:] for start in range(ngram)), strict=False))
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def shingles(text: str) -> np.ndarray:
    """Hashes of the runs of ``SHINGLE`` words of a text, each once: uint64 [S], S >= 1."""
    words = np.array([zlib.crc32(word.encode()) for word in text.split()] or [0], dtype=np.uint64)
    length = min(SHINGLE, len(words))
    runs = np.lib.stride_tricks.sliding_window_view(words, length)
    powers = np.array([pow(0x9E3779B97F4A7C15, 1 + place, 2**64) for place in range(length)], dtype=np.uint64)
    return np.unique(_mixed((runs * powers).sum(axis=1, dtype=np.uint64)))


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    """Shared elements over all elements of two sets, each an array of distinct values."""
    shared = len(np.intersect1d(first, second, assume_unique=True))
    return shared / (len(first) + len(second) - shared)


class NearDuplicates:
    """Finds texts of which an earlier one has nearly all word runs.

    MinHash signatures (Broder 1997) in bands (locality-sensitive hashing) propose pairs; the exact Jaccard similarity
    of their shingles decides. So nothing is dropped by mistake, and 1 % of the pairs at the threshold are missed.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.band_width = next(width for width in BAND_WIDTHS
                               if 1 - (1 - threshold**width) ** (NUM_HASHES // width) >= RECALL or width == 1)
        generator = np.random.default_rng(0)
        self._factors = generator.integers(0, 2**63, NUM_HASHES, dtype=np.uint64) * 2 + 1
        self._signatures: list[np.ndarray] = []

    def add(self, text: str) -> None:
        """Note the next text. Keeps 4 bytes a hash of it."""
        hashed = shingles(text)
        signature = np.full(NUM_HASHES, 2**64 - 1, dtype=np.uint64)
        for start in range(0, len(hashed), CHUNK):
            values = hashed[start : start + CHUNK, None] * self._factors
            np.minimum(signature, _mixed(values).min(axis=0), out=signature)
        self._signatures.append((signature >> np.uint64(32)).astype(np.uint32))

    def found(self, text_of: Callable[[int], str]) -> dict[int, int]:
        """The texts to drop, by their numbers in the order of ``add``, each with the earlier one that it resembles.

        Args:
            text_of: gives a text again by its number.
        """
        duplicates: dict[int, int] = {}
        for later, earlier in sorted(self._pairs()):
            if later in duplicates or earlier in duplicates:
                continue
            if jaccard(shingles(text_of(later)), shingles(text_of(earlier))) >= self.threshold:
                duplicates[later] = earlier
        return duplicates

    def _pairs(self) -> set[tuple[int, int]]:
        """Pairs (later, earlier) that agree in a band."""
        pairs: set[tuple[int, int]] = set()
        if not self._signatures:
            return pairs
        signatures = np.stack(self._signatures)
        for start in range(0, NUM_HASHES, self.band_width):
            band = np.ascontiguousarray(signatures[:, start : start + self.band_width])
            keys = band.view(f"V{band.itemsize * self.band_width}")[:, 0]
            _, bucket_of, sizes = np.unique(keys, return_inverse=True, return_counts=True)
            shared = np.flatnonzero(sizes[bucket_of] > 1)
            buckets: dict[int, list[int]] = {}
            for index in shared.tolist():
                members = buckets.setdefault(int(bucket_of[index]), [])
                pairs.update((index, earlier) for earlier in {*members[:1], *members[-LOOK_BACK:]})
                members.append(index)
        return pairs


def _mixed(values: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele et al. 2014): every bit of the result depends on every bit of the input."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
