"""Which heads are compared, what each depends on, and how it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from specvocab_kernels.vocab_head import Selection
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from specvocab_model.config import CompareConfig, ConfigError, HeadConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.draft_states import DraftStates
from specvocab_model.evaluation import Variant
from specvocab_model.export import PARTS, load_checkpoint
from specvocab_model.files import sha256
from specvocab_model.heads import ClusterRouter, Head, LowRankHead, SpeculativeHead, StaticHead, build_head
from specvocab_model.speculator import VocabSpeculator, build_selection
from specvocab_model.target import Target, TargetSpec
from specvocab_model.tuning.choices import LowerRanks
from specvocab_model.vocab import VocabMap, most_frequent, special_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """One head. ``options`` are JSON values that, with draft and target, decide everything it does."""

    name: str
    kind: str  # of ``build_head``, or trained: a static head with a draft of its own
    options: dict[str, Any] = field(default_factory=dict)
    folder: str = ""  # of that draft


def list_rivals(
    config: CompareConfig, model: SpecVocabDraft, *, answers: str | None, corpus: str | None
) -> list[Rival]:
    """The heads that ``config`` asks for, the full one first: the others are judged by it.

    Args:
        answers, corpus: digests of the training data and of a corpus, None where there are none. They are part of the
            identity of heads that are cut for them or, in the case of the training data, fitted on them.

    Raises:
        ConfigError: a head needs a speculator that the draft does not have, or data that are not there.
    """
    own = model.own_head
    if own is not None and not own.is_full:
        raise ConfigError(f"the draft has {len(own.ids)} tokens, which no other head would fit; compare a draft of the "
                          "whole vocabulary, and name this one in compare.static_drafts")
    rivals = [Rival(name="full", kind="full")]
    if {"speculative", "low_rank"} & set(config.heads):
        rivals += _speculated(config, model, answers)
    vocab_size = model.architecture.vocab_size
    if "static" in config.heads:
        texts = {name: digest for name, digest in (("", answers), (" corpus", corpus)) if digest is not None}
        sizes = [size for size in dict.fromkeys(config.static_sizes) if size < vocab_size]
        if sizes and not texts:
            raise ConfigError("static heads are cut for the training data, and data.train_path is not on this machine; "
                              "bring it, name another text as compare.corpus, or leave static out of compare.heads")
        rivals += [Rival(name=f"static {size}{name}", kind="static", options={"size": size, "counts": digest})
                   for name, digest in texts.items() for size in sizes]
    rivals += _trained(dict.fromkeys(config.static_drafts), model)
    for size in (size for size in dict.fromkeys(config.shortlist_sizes) if size < vocab_size):
        if "cluster" in config.heads:
            fitted = _fitted(config, answers, "cluster") | {"num_clusters": config.num_clusters}
            rivals.append(Rival(name=f"cluster {size}", kind="cluster", options={"size": size, **fitted}))
        if "in_context" in config.heads:
            rivals.append(Rival(name=f"in_context {size}", kind="in_context", options={"size": size}))
    return rivals


def _speculated(config: CompareConfig, model: SpecVocabDraft, answers: str | None) -> list[Rival]:
    """The exported rank and number of candidates, then the one or the other changed."""
    speculator = model.speculator
    if speculator is None:
        raise ConfigError("the draft has no vocabulary speculator, which speculative and low_rank need; add one with "
                          "scripts/convert.py, or leave them out of compare.heads")
    trained, exported = speculator.rank, speculator.num_candidates
    half = [max(1, trained // 2)] if speculator.quantization is None else []
    lower = half if config.ranks is None else [rank for rank in dict.fromkeys(config.ranks) if rank != trained]
    if lower and max(lower) > trained:
        raise ConfigError(f"compare.ranks={config.ranks} goes above the draft's trained rank {trained}; leave out "
                          f"{max(lower)}")
    options: dict[int, dict[str, Any]] = {trained: {"rank": trained}}
    options |= {rank: {"rank": rank, **_fitted(config, answers, f"rank {rank}")} for rank in lower}
    numbers = {_selection(model, wanted).num_candidates: wanted for wanted in config.num_candidates}
    rivals = []
    if "speculative" in config.heads:
        pairs = [(trained, exported), *((trained, number) for number in numbers if number != exported),
                 *((rank, exported) for rank in lower)]
        rivals += [Rival(name=f"speculative r{rank} k{number}", kind="speculative",
                         options=options[rank] | ({} if number == exported else {"num_candidates": numbers[number]}))
                   for rank, number in pairs if number < speculator.vocab_size or number == exported]
    if "low_rank" in config.heads:
        rivals += [Rival(name=f"low_rank r{rank}", kind="low_rank", options=of_rank)
                   for rank, of_rank in options.items()]
    return rivals


def _fitted(config: CompareConfig, answers: str | None, what: str) -> dict[str, Any]:
    """The identity of what is fitted on draft states."""
    if answers is None:
        raise ConfigError(f"{what} is fitted on the training data, and data.train_path is not on this machine; bring "
                          "it, or leave such heads out of compare.heads and compare.ranks")
    return {"states": answers, "num_states": config.num_states}


def _trained(folders: Iterable[str], model: SpecVocabDraft) -> list[Rival]:
    """Drafts with a static head of their own, which read the same features of the target as ``model``."""
    rivals: dict[str, Rival] = {}
    layers = model.architecture.feature_layers
    for folder in folders:
        other = load_checkpoint(folder)
        if other.own_head is None:
            raise ConfigError(f"{folder} has no static head of its own; give drafts that were trained with head=static "
                              "in compare.static_drafts")
        if other.architecture.feature_layers != layers:
            raise ConfigError(f"{folder} reads the target's layers {list(other.architecture.feature_layers)}, and the "
                              f"draft it is compared with {list(layers)}; train both with one draft.feature_layers")
        name = f"static {len(other.own_head.vocab)} trained"
        if name in rivals:
            raise ConfigError(f"{rivals[name].folder} and {folder} both have a head of {len(other.own_head.vocab)} "
                              "tokens; leave one of them out of compare.static_drafts")
        rivals[name] = Rival(name=name, kind="trained", folder=folder, options={"draft": parts_digests(Path(folder))})
    return list(rivals.values())


def parts_digests(folder: Path) -> list[str]:
    """What tells one exported draft from another: its weights, its shape, and how it selects candidates."""
    return [sha256(folder / part) for part in PARTS if (folder / part).is_file()]


def _selection(model: SpecVocabDraft, num_candidates: int) -> Selection:
    """As the draft was exported, with another number of candidates."""
    config = HeadConfig(selection=model.head_config.selection, num_candidates=num_candidates)
    return build_selection(config, model.architecture.vocab_size)


class Vocabularies:
    """What static heads keep, known without the target's weights.

    Args:
        count: digest of a text (``Rival.options["counts"]``) -> how often each token occurs there, int64 [V].
    """

    def __init__(
        self, spec: TargetSpec, tokenizer: PreTrainedTokenizerBase, count: Callable[[str], Tensor]
    ) -> None:
        self.spec, self.count = spec, count
        self.always_keep = special_ids(tokenizer, spec.eos_token_ids, spec.vocab_size)

    def __call__(self, rival: Rival) -> VocabMap:
        if rival.kind == "trained":
            own_head = load_checkpoint(rival.folder, self.spec).own_head
            assert own_head is not None  # list_rivals saw to it
            return own_head.vocab
        return most_frequent(self.count(rival.options["counts"]), rival.options["size"], self.always_keep)


class Builder:
    """Makes the heads; what several of them need is made once, and only if one of them is asked for.

    Args:
        model: the draft, placed with ``place_draft``.
        collect: what the draft says on training text, for routers and lower ranks.
    """

    def __init__(
        self, target: Target, model: SpecVocabDraft, vocabularies: Vocabularies, *, collect: Callable[[], DraftStates],
        num_clusters: int, seed: int,
    ) -> None:
        self.target, self.model, self.vocabularies = target, model, vocabularies
        self.collect, self.num_clusters, self.seed = collect, num_clusters, seed

    def variant(self, rival: Rival) -> Variant:
        """Draft and head, to be decoded with."""
        target, model = self.target, self.model
        if rival.kind == "trained":
            own = place_draft(load_checkpoint(rival.folder, target.spec), target)
            return Variant(model=own, head=build_head("static", target, own))
        return Variant(model=model, head=self.head(rival))

    def head(self, rival: Rival) -> Head:
        target, model, options = self.target, self.model, rival.options
        rows = model.lm_head_weight(target)
        if rival.kind == "speculative":
            return SpeculativeHead(target, self.speculator(**options), rows)
        if rival.kind == "low_rank":
            return LowRankHead(target, self.speculator(**options))
        if rival.kind == "static":
            vocab = self.vocabularies(rival)
            return StaticHead(target, vocab, rows[vocab.ids.to(rows.device)])
        if rival.kind == "cluster":
            return build_head("cluster", target, model, router=self.router, size=options["size"])
        return build_head(rival.kind, target, model, **options)

    def speculator(self, rank: int, num_candidates: int | None = None, **fitted: Any) -> VocabSpeculator:
        """The draft's own, with another rank or number of candidates; ``fitted`` only identifies it."""
        own = self.model.speculator
        assert own is not None
        selection = own.selection if num_candidates is None else _selection(self.model, num_candidates)
        with torch.device("meta"):
            made = VocabSpeculator(own.down_proj.in_features, rank, selection)
        if rank == own.rank:  # the very same weights
            made.down_proj, made.vocab_proj, made.quantization = own.down_proj, own.vocab_proj, own.quantization
        else:
            down_proj, vocab_proj = (factor.to(self.target.lm_head_weight) for factor in self.lower_ranks(rank))
            made.down_proj.weight = nn.Parameter(down_proj, requires_grad=False)
            made.vocab_proj.weight = nn.Parameter(vocab_proj, requires_grad=False)
        return made

    @cached_property
    def states(self) -> DraftStates:
        return self.collect()

    @cached_property
    def lower_ranks(self) -> LowerRanks:
        assert self.model.speculator is not None
        return LowerRanks(self.model.speculator, self.states.hidden[self.states.rows.valid])

    @cached_property
    def router(self) -> ClusterRouter:
        """Learns to name the cluster of the full head's token."""
        valid = self.states.rows.valid
        with torch.no_grad():
            return ClusterRouter.fit(
                self.model.lm_head_weight(self.target), self.vocabularies.always_keep, self.states.hidden[valid],
                self.states.draft_ids[valid], num_clusters=self.num_clusters, seed=self.seed,
            )

    def read_bytes(self, rival: Rival) -> int:
        """Bytes of weights that a head reads for one position."""

        def size_of(weights: Iterable[Tensor]) -> int:
            return sum(weight.numel() * weight.element_size() for weight in weights)

        lm_head, options = self.target.lm_head_weight, rival.options
        row = size_of([lm_head[:1]])
        if rival.kind in ("static", "trained"):
            return len(self.vocabularies(rival)) * row
        if rival.kind in ("speculative", "low_rank"):
            speculator = self.speculator(**options)
            exact = speculator.num_candidates if rival.kind == "speculative" else 0
            return size_of([*speculator.parameters(), *speculator.buffers()]) + exact * row
        shortlist = options.get("size", len(lm_head)) * row
        return shortlist + (size_of(self.router.parameters()) if rival.kind == "cluster" else 0)
