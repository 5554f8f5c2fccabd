"""A SpecVocab draft inside transformers' ``generate``, through its hook ``custom_generate``.

    decode = SpeculativeDecoding.from_pretrained("outputs/qwen3_8b/export", model)
    model.generate(**inputs, custom_generate=decode, max_new_tokens=256)

or, as every exported folder holds a ``custom_generate/generate.py`` for that purpose:

    model.generate(**inputs, custom_generate=FOLDER, draft=FOLDER, trust_remote_code=True, max_new_tokens=256)

``generate`` prepares everything as for its own decoding: lengths, EOS, temperature, top-k, penalties, stopping
criteria. Its logits processors are applied to the target's logits after every draft, with the text up to there, so the
output is what ``generate`` gives without a draft: token for token when greedy (up to rounding, where the two best
logits tie), in distribution when sampled. Processors must be functions of text and logits, without a memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMode
from transformers.generation.streamers import BaseStreamer

from specvocab_model.config import ConfigError, TargetConfig
from specvocab_model.decode import ChainDrafter, Proposal, place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.heads import Head, build_head
from specvocab_model.sampling import Sampling, verify_greedy, verify_sampled
from specvocab_model.target import Target
from specvocab_model.target_spec import LAYOUTS, TargetSpec, load_spec_and_tokenizer

NUM_DRAFT_TOKENS = 7  # as eval.num_draft_tokens

Processor = Callable[[Tensor, Tensor], Tensor]
"""transformers' ``LogitsProcessorList``: a text int64 [1, T] and logits [1, V] -> logits [1, V]."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeDecoding:
    """A decoding loop for ``model.generate(custom_generate=...)``: chains of drafts, one sequence at a time."""

    target: Target  # the model that generate is called on
    draft: SpecVocabDraft  # placed beside it
    head: Head
    num_draft_tokens: int = NUM_DRAFT_TOKENS
    streamer: BaseStreamer | None = None  # here, because generate hands its own to no callable

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        model: PreTrainedModel,
        *,
        target: TargetConfig | None = None,
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        streamer: BaseStreamer | None = None,
    ) -> SpeculativeDecoding:
        """Load an exported checkpoint for ``model``.

        Args:
            folder: as ``scripts/export.py`` or ``scripts/convert.py`` writes it.
            model: the target, on one device.
            target: where ``model`` was loaded from, if that is not its ``name_or_path``.
            num_draft_tokens: length of a chain.
            streamer: is given the prompt and every token that is certain.

        Raises:
            ConfigError: the checkpoint is damaged or was made for another target.
        """
        return cls._beside(model, _Checkpoint.read(folder, model, target), num_draft_tokens, streamer)

    @classmethod
    def _beside(
        cls, model: PreTrainedModel, checkpoint: _Checkpoint, num_draft_tokens: int, streamer: BaseStreamer | None
    ) -> SpeculativeDecoding:
        draft = checkpoint.draft
        target = Target(checkpoint.spec, model, checkpoint.tokenizer, draft.architecture.feature_layers)
        place_draft(draft, target)
        head = build_head(draft.head_config.type, target, draft)
        return cls(target=target, draft=draft, head=head, num_draft_tokens=num_draft_tokens, streamer=streamer)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        *,
        logits_processor: Processor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Called by ``generate``; returns what it returns: the prompt and the new tokens, int64 [1, T].

        Raises:
            ConfigError: ``generate`` was asked for something that this loop does not do.
        """
        self._check(model, input_ids, generation_config, model_kwargs)
        text = _Text(input_ids.to(self.target.device), logits_processor, generation_config.do_sample)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        # A sliding-window cache would forget what drafts push out; see decode.py.
        cache = DynamicCache()
        drafter = _Drafter(self, text)
        unseen, proposal = text.input_ids, Proposal.empty(self.target)
        while True:
            num_drafts = len(proposal.token_ids)
            inputs = torch.cat([unseen, proposal.token_ids[None]], dim=1)
            output = self.target.forward(inputs, past_key_values=cache)
            scores = text.scores(self.target.logits(output.final_hidden[0, -(num_drafts + 1) :]), proposal.token_ids)
            num_accepted, next_id = text.verify(scores, proposal)
            if num_rejected := num_drafts - num_accepted:
                cache.crop(-num_rejected)
            for token_id in torch.cat([proposal.token_ids[:num_accepted], next_id]):
                text.append(token_id)
                if self.streamer is not None:
                    self.streamer.put(token_id[None].cpu())
                if stopping_criteria(text.input_ids, None).all():
                    return self._finish(text, generation_config)

            unseen, proposal = next_id[None], Proposal.empty(self.target)
            length = text.input_ids.shape[1]
            if (room := drafter.room(length, generation_config.max_length - length)) > 0:
                num_verified = inputs.shape[1] - num_rejected
                next_ids = torch.cat([inputs[:, 1:num_verified], unseen], dim=1)
                proposal = drafter.propose(output.features[:, :num_verified], next_ids, room)

    def _check(
        self, model: PreTrainedModel, input_ids: Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> None:
        if model is not self.target.model:
            raise ConfigError("this draft was loaded beside another model object; call SpeculativeDecoding."
                              "from_pretrained with the model that generates")
        if config.get_generation_mode() not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ConfigError(f"generate was asked for {config.get_generation_mode().value}; a draft serves greedy "
                              "decoding and sampling, leave num_beams and the like at their defaults")
        if input_ids.shape[0] != 1 or input_ids.shape[1] == 0:
            raise ConfigError(f"input_ids has shape {tuple(input_ids.shape)}; a draft serves one sequence of at least "
                              "one token at a time, call generate once for each")
        if model_kwargs.get("attention_mask") is not None:
            raise ConfigError("the attention_mask masks a part of input_ids; leave the padding out")
        cache: Cache | None = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
        if cache is not None and cache.get_seq_length():
            raise ConfigError(f"a cache of {cache.get_seq_length()} positions was given; a draft reads the whole text, "
                              "give generate the ids alone")
        for name, off in {"guidance_scale": (None, 1), "watermarking_config": (None,), "output_scores": (None, False),
                          "output_logits": (None, False), "output_attentions": (None, False),
                          "output_hidden_states": (None, False)}.items():
            if (value := config.to_dict().get(name)) not in off:
                raise ConfigError(f"generate was asked for {name}={value!r}, which is not served with a draft; leave "
                                  "it out")

    def _finish(self, text: _Text, config: GenerationConfig) -> GenerateDecoderOnlyOutput | Tensor:
        if self.streamer is not None:
            self.streamer.end()
        sequences: Any = text.input_ids  # LongTensor, says transformers, which is no class of any tensor
        return GenerateDecoderOnlyOutput(sequences=sequences) if config.return_dict_in_generate else sequences


@dataclass(frozen=True, kw_only=True)
class _Checkpoint:
    """A checkpoint and the facts of the target that it was checked against; holds no weight of the target."""

    spec: TargetSpec
    tokenizer: PreTrainedTokenizerBase
    draft: SpecVocabDraft

    @classmethod
    def read(cls, folder: str | Path, model: PreTrainedModel, target: TargetConfig | None = None) -> _Checkpoint:
        if len(devices := {str(parameter.device) for parameter in model.parameters()}) > 1:
            raise ConfigError(f"the model lies on {', '.join(sorted(devices))}; a draft reads several of its layers at "
                              "once, so load it on one device")
        spec, tokenizer = load_spec_and_tokenizer(target or _config_of(model))
        return cls(spec=spec, tokenizer=tokenizer, draft=SpecVocabDraft.from_pretrained(folder, target_spec=spec))


def _config_of(model: PreTrainedModel) -> TargetConfig:
    """Where a model was loaded from; how its attention is computed does not matter for decoding one sequence."""
    if not model.name_or_path:
        raise ConfigError("the model does not say where it was loaded from, so the draft cannot be checked against it; "
                          "pass target=TargetConfig(model=FOLDER_OR_HUB_ID)")
    layout = LAYOUTS.get(model.config.model_type, LAYOUTS["llama"])  # a type that is not listed is refused by its name
    return TargetConfig(model=model.name_or_path, attn_implementation=layout.attention[0])


class _Text:
    """The text so far, and how ``generate`` was asked to choose what follows it."""

    def __init__(self, input_ids: Tensor, processor: Processor, do_sample: bool) -> None:
        self.input_ids, self.processor, self.do_sample = input_ids, processor, do_sample

    def append(self, token_id: Tensor) -> None:
        """``token_id`` int64 []"""
        self.input_ids = torch.cat([self.input_ids, token_id[None, None]], dim=1)

    def scores(self, logits: Tensor, following: Tensor) -> Tensor:
        """Processed logits [n, V], where row ``i`` comes after the text and the first ``i`` tokens of ``following``."""
        whole, length = torch.cat([self.input_ids, following[None]], dim=1), self.input_ids.shape[1]
        return torch.cat([self.processor(whole[:, : length + i], logits[i : i + 1]) for i in range(len(logits))])

    def probabilities(self, scores: Tensor) -> Tensor:
        """fp64 [n, V]; uniform where a processor left none of a draft's candidates, which is as exact as any other."""
        return scores.double().clamp_min(torch.finfo(torch.float32).min).softmax(-1)

    def verify(self, scores: Tensor, proposal: Proposal) -> tuple[int, Tensor]:
        """The number of accepted drafts and the token after them, int64 [1]; ``scores`` [n + 1, V] are the target's."""
        if self.do_sample:
            return verify_sampled(self.probabilities(scores), proposal.probabilities, proposal.token_ids)
        return verify_greedy(scores, proposal.token_ids)


class _Drafter(ChainDrafter):
    """Drafts with the logits processors of ``generate``, so that it guesses what they will make of the target."""

    def __init__(self, decoding: SpeculativeDecoding, text: _Text) -> None:
        super().__init__(decoding.target, decoding.draft, decoding.head, decoding.num_draft_tokens, Sampling(), None)
        self.text = text
        self.chain = text.input_ids.new_empty(0)

    def propose(self, features: Tensor, next_ids: Tensor, num_tokens: int) -> Proposal:
        self.chain = self.chain[:0]
        return super().propose(features, next_ids, num_tokens)

    def _pick(self, hidden: Tensor) -> Proposal:
        hidden = self.draft.norm(hidden[:, 0])
        output = self.head(hidden)
        logits = output.dense_logits(self.target.spec.vocab_size)
        text = torch.cat([self.text.input_ids, self.chain[None]], dim=1)
        scores = self.text.processor(text, logits)
        probabilities = self.text.probabilities(scores) if self.text.do_sample else scores.new_empty(0, scores.shape[1])
        token_ids = torch.multinomial(probabilities, 1)[:, 0] if self.text.do_sample else scores.argmax(-1)
        self.chain = torch.cat([self.chain, token_ids])
        candidates = (None if output.ids is None else output.ids[0],)
        return Proposal(token_ids=token_ids, probabilities=probabilities, hidden=hidden, candidates=candidates)


_READ: WeakKeyDictionary[PreTrainedModel, dict[Path, _Checkpoint]] = WeakKeyDictionary()  # keeps no target alive


def generate(
    model: PreTrainedModel,
    *,
    draft: str | Path,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
    streamer: BaseStreamer | None = None,
    **arguments: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """``model.generate(**arguments)`` with the checkpoint in the folder ``draft``, which is read once for a model."""
    checkpoints, folder = _READ.setdefault(model, {}), Path(draft).resolve()
    if folder not in checkpoints:
        checkpoints[folder] = _Checkpoint.read(folder, model)
    decode = SpeculativeDecoding._beside(model, checkpoints[folder], num_draft_tokens, streamer)
    call: Any = model.generate
    return call(**arguments, custom_generate=decode)
