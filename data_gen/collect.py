"""Which prompts are asked: read from all sources, each once, none of the evaluation's, mixed and split.

One process does it, in a folder beside the training data; every rank then reads the result from there.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from data_gen.files import make_folder, remove_stale, write_json, write_jsonl
from data_gen.filters import NearDuplicates, repetition
from data_gen.prompt_store import PromptStore, prompt_writer
from data_gen.prompts import Message, Prompt, is_validation, question
from data_gen.rows import Skipped
from data_gen.shards import REJECTED_FILE
from data_gen.sources import read_source, sources_of
from specvocab_model.config import Config, ConfigError

TRAIN_FILE, VALIDATION_FILE = "train.arrow", "validation.arrow"
COUNTS_FILE = "counts.json"
DERIVED = re.compile(r"(.*)[~#][0-9]+", re.DOTALL)  # _split numbers samples with ~, answers.rows_of rows with #


def prompts_folder(config: Config) -> Path:
    train_path = Path(config.data.train_path)
    return train_path.with_name(f"{train_path.name}-prompts")


def read_counts(config: Config) -> dict[str, int]:
    """What ``collect`` returned."""
    return json.loads((prompts_folder(config) / COUNTS_FILE).read_text())


def collect(
    config: Config, invented: Iterable[Prompt], dropped: Mapping[str, int], evaluation: Iterable[Prompt]
) -> dict[str, int]:
    """Choose the prompts for training and for validation, and write them into ``prompts_folder``.

    Args:
        invented: prompts of the target's own, which follow those of the sources.
        dropped: how many of these were not usable, and why; counted with the rest.
        evaluation: prompts that must not be among them.

    Returns:
        How many prompts were read, and how many were left out for which reason.

    Raises:
        ConfigError: a source cannot be read, too many of its records are malformed, or a side of the split is empty.
    """
    folder = prompts_folder(config)
    make_folder(folder)
    remove_stale(folder)
    chooser = _Chooser(config, evaluation)
    chosen_file = folder / f"chosen-{uuid.uuid4().hex}.arrow"  # a process that was started apart chooses as well
    with prompt_writer(chosen_file) as add:
        for source, prompt in _offered(config, invented):
            if chosen := chooser.choose(prompt, source):
                add(chosen)
    every = PromptStore(chosen_file)
    chosen_file.unlink()  # it stays mapped
    chooser.drop_near_duplicates(every)
    write_jsonl(folder / REJECTED_FILE, map(asdict, chooser.skipped))
    chooser.check_rejected(folder)
    _split(every, chooser.order(), folder, config)
    counts = dict(chooser.counts) | {f"invented but {reason}": count for reason, count in dropped.items()}
    write_json(folder / COUNTS_FILE, counts)
    return counts


def _offered(config: Config, invented: Iterable[Prompt]) -> Iterator[tuple[int, Prompt | Skipped]]:
    """Everything that is read, with the number of its source; the target's own prompts have the last number."""
    sources = sources_of(config.generation)
    for number, source in enumerate(sources):
        for prompt in read_source(source, keep=config.generation.responses == "keep"):
            yield number, prompt
    for prompt in invented:
        yield len(sources), prompt


class _Chooser:
    """Takes prompts one by one, and keeps of each no more than choosing needs."""

    def __init__(self, config: Config, evaluation: Iterable[Prompt]) -> None:
        self.config = config
        self.counts: Counter[str] = Counter()
        self.skipped: list[Skipped] = []
        self.held_out = {question(prompt.messages) for prompt in evaluation}
        self.digests: set[bytes] = set()
        self.ids: dict[str, tuple[int, str]] = {}  # with the source's number, and what the prompt calls its source
        self.stems: set[str] = set()  # of the ids; see stems_of
        self.source_of: list[int] = []  # of each chosen prompt
        threshold = config.generation.near_duplicate_threshold
        self.near_duplicates = None if threshold is None else NearDuplicates(threshold)
        self.dropped: set[int] = set()  # chosen at first, but near-duplicates

    def choose(self, prompt: Prompt | Skipped, source: int) -> Prompt | None:
        """The prompt under the id that it gets; None if it is left out."""
        self.counts["read" if source < len(sources_of(self.config.generation)) else "invented"] += 1
        if isinstance(prompt, Prompt):
            prompt = self._judge(prompt, source)
        if isinstance(prompt, Skipped):
            self._skip(prompt)
            return None
        self.digests.add(likeness(prompt))
        self.ids[prompt.id] = source, prompt.source
        self.stems.update(stems_of(prompt.id))
        self.source_of.append(source)
        if self.near_duplicates is not None:
            self.near_duplicates.add(question(prompt.messages))
        return prompt

    def _judge(self, prompt: Prompt, source: int) -> Prompt | Skipped:
        asked = question(prompt.messages)
        limit = self.config.generation.max_repetition
        if likeness(prompt) in self.digests:
            return Skipped(id=prompt.id, reason="duplicate", by_choice=True)
        if asked in self.held_out:
            return Skipped(id=prompt.id, reason="held out for evaluation", by_choice=True)
        if limit is not None and repetition(asked.split()) > limit:
            return Skipped(id=prompt.id, reason="repetitive question", by_choice=True)
        # Two data sets may both count from 0, and two parts of one data set or two files train.jsonl have one name.
        for name in (prompt.id, f"{prompt.source}:{prompt.id}", f"{prompt.source}:{source}:{prompt.id}"):
            if self.ids.get(name) == (source, prompt.source):
                break
            if not self._is_taken(name):
                return replace(prompt, id=name)
        return Skipped(id=prompt.id, reason="id taken", detail=f"by another prompt of {prompt.source!r}; give the "
                                                               "records of a source different ids, or none")

    def _is_taken(self, prompt_id: str) -> bool:
        """Whether a row of another prompt has this id, or may get it, or one of this prompt may get that one's."""
        return prompt_id in self.ids or prompt_id in self.stems or any(stem in self.ids for stem in stems_of(prompt_id))

    def _skip(self, each: Skipped) -> None:
        self.skipped.append(each)
        self.counts[each.reason] += 1

    def drop_near_duplicates(self, prompts: PromptStore) -> None:
        if self.near_duplicates is None:
            return
        for index, original in self.near_duplicates.found(lambda index: question(prompts[index].messages)).items():
            self.dropped.add(index)
            self._skip(Skipped(id=prompts[index].id, reason="near-duplicate", detail=f"of {prompts[original].id}",
                               by_choice=True))

    def check_rejected(self, folder: Path) -> None:
        """Raises ConfigError if more of what was read is malformed than ``generation.max_rejected_share`` allows."""
        rejected = [each for each in self.skipped if not each.by_choice]
        share = self.config.generation.max_rejected_share
        if len(rejected) > share * self.counts["read"]:
            first = rejected[0]
            raise ConfigError(f"{len(rejected)} of {self.counts['read']} prompts were rejected, more than "
                              f"generation.max_rejected_share={share}; all are listed in {folder / REJECTED_FILE}, the "
                              f"first is {first.id}: {first.detail}")

    def order(self) -> list[int]:
        """Which of the chosen prompts are asked, as indices in the order of asking."""
        sources = sources_of(self.config.generation)
        kept = np.array([index for index in range(len(self.source_of)) if index not in self.dropped], dtype=np.int64)
        source_of = np.array(self.source_of, dtype=np.int64)[kept]
        limit = self.config.generation.num_prompts
        weights = [source.weight for source in sources if source.weight is not None]
        if not weights:
            return kept[:limit].tolist()
        pools = [kept[source_of == number] for number in range(len(sources))]
        mixed = mixture(pools, weights, limit, self.config.seed)
        for source, pool in zip(sources, pools, strict=True):
            part = "".join(f" {each}" for each in (source.subset, source.split) if each not in (None, "train"))
            self.counts[f"of {source.path}{part} in the mixture"] += int(np.isin(pool, mixed).sum())
        return [*mixed, *kept[source_of == len(sources)].tolist()][:limit]


def likeness(prompt: Prompt) -> bytes:
    """Hash of what every chat template shows of a prompt: some trim contents, and few show the ids of tool calls."""
    def shown(message: Message) -> Message:
        calls = [{key: value for key, value in call.items() if key != "id"} for call in message.get("tool_calls", ())]
        return message | {"content": message["content"].strip(), "tool_calls": calls, "tool_call_id": None}

    follow_ups = tuple(tuple(map(shown, messages)) for messages in prompt.follow_ups)
    return bytes.fromhex(replace(prompt, messages=tuple(map(shown, prompt.messages)), follow_ups=follow_ups).digest)


def stems_of(prompt_id: str) -> list[str]:
    """The prompts whose samples (``a~0``) or rows (``a#1``, ``a~0#1``) would have this id."""
    stems = []
    while match := DERIVED.fullmatch(prompt_id):
        prompt_id = match[1]
        stems.append(prompt_id)
    return stems


def mixture(pools: Sequence[np.ndarray], weights: Sequence[float], limit: int | None, seed: int) -> list[int]:
    """The largest mixture of at most ``limit`` elements whose shares are the weights', evenly interleaved.

    Args:
        pools: what each source has, int64 [N_s] each; a random part of it is taken, in random order.
        limit: None: until one pool is used up.

    Raises:
        ConfigError: a source has nothing.
    """
    shares = np.array(weights) / sum(weights)
    if not all(len(pool) for pool in pools):
        raise ConfigError(f"generation.sources: {[len(pool) for pool in pools]} prompts cannot be mixed by weight; "
                          "remove the sources that have none")
    total = min(len(pool) / share for pool, share in zip(pools, shares, strict=True))
    total = total if limit is None else min(total, limit)
    generator = np.random.default_rng(seed)
    taken: list[np.ndarray] = []
    places: list[np.ndarray] = []
    for pool, share in zip(pools, shares, strict=True):
        count = max(1, min(len(pool), round(total * share)))
        taken.append(generator.permutation(pool)[:count])
        places.append((np.arange(count) + 0.5) / count)
    return np.concatenate(taken)[np.argsort(np.concatenate(places), kind="stable")].tolist()


def _split(prompts: PromptStore, order: Sequence[int], folder: Path, config: Config) -> None:
    """Write training and validation prompts, each as often as it is to be answered.

    Raises:
        ConfigError: one side is empty though it was asked for.
    """
    generation = config.generation
    counts = {False: 0, True: 0}
    with prompt_writer(folder / TRAIN_FILE) as train, prompt_writer(folder / VALIDATION_FILE) as validation:
        for index in order:
            prompt = prompts[index]
            side = is_validation(prompt.id, generation.validation_fraction)
            counts[side] += 1
            for sample in range(generation.samples_per_prompt):
                name = f"{prompt.id}~{sample}" if generation.samples_per_prompt > 1 else prompt.id
                (validation if side else train)(replace(prompt, id=name))
    if not counts[False] or (generation.validation_fraction > 0 and not counts[True]):
        raise ConfigError(f"generation.validation_fraction={generation.validation_fraction} leaves {counts[False]} "
                          f"prompts for training and {counts[True]} for validation; give more prompts, or another "
                          "fraction")
