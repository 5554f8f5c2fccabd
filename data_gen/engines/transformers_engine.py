"""The target itself, in this process.

Not ``model.generate``: it computes finished rows until the longest of the batch is done, with ordinary answers half the
work or more; and it takes repetition penalties and the like from the model's ``generation_config.json``, which would
train the draft on another distribution than the one it is judged by.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from data_gen.engines.base import Completion, Engine, Finished, SamplingParams, Source
from specvocab_model.sampling import Sampling
from specvocab_model.target import Target


class TransformersEngine(Engine):
    """Batches prompts of similar length; a row leaves its batch as soon as it is finished."""

    def __init__(self, target: Target, *, batch_tokens: int) -> None:
        """
        Args:
            batch_tokens: bound on rows * (longest prompt + max_new_tokens) of a batch, which bounds its KV cache.
        """
        self.target = target
        self.batch_tokens = batch_tokens

    def stream(self, source: Source, params: SamplingParams) -> Generator[Finished, None, None]:
        """See ``Engine.stream``. One batch of ``source`` after the other: a CPU gains nothing by mixing them."""
        while (given := source()) is not None:
            generator = torch.Generator(self.target.device).manual_seed(given.seed)
            lengths = [len(prompt) for prompt in given.prompts]
            for indices in batches_by_length(lengths, params.max_new_tokens, self.batch_tokens):
                for row, completion in self._decode([given.prompts[index] for index in indices], params, generator):
                    yield given, indices[row], completion

    @torch.inference_mode()
    def _decode(
        self, prompts: Sequence[list[int]], params: SamplingParams, generator: torch.Generator
    ) -> Iterator[tuple[int, Completion]]:
        """Continue one batch, all rows in step; yields ``(row, completion)``."""
        sampling = Sampling(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
        input_ids, mask = left_pad(prompts, self.target.spec.pad_token_id, self.target.device)
        position_ids = (mask.cumsum(-1) - 1).clamp_min(0)
        cache = DynamicCache(config=self.target.model.config)
        rows = list(range(len(prompts)))  # which prompt each row of the shrinking batch continues
        responses: list[list[int]] = [[] for _ in prompts]
        while rows:
            output = self.target.forward(
                input_ids, position_ids=position_ids, attention_mask=mask, past_key_values=cache
            )
            uniform = torch.rand(len(rows), 1, dtype=torch.float64, device=self.target.device, generator=generator)
            next_ids = choose(self.target.logits(output.final_hidden[:, -1]), sampling, uniform)
            unfinished = []
            for place, (row, token_id) in enumerate(zip(rows, next_ids.tolist(), strict=True)):
                responses[row].append(token_id)
                if token_id in params.stop_token_ids:
                    yield row, Completion(responses[row], "stop")
                elif len(responses[row]) == params.max_new_tokens:
                    yield row, Completion(responses[row], "length")
                else:
                    unfinished.append(place)
            if 0 < len(unfinished) < len(rows):
                keep = torch.tensor(unfinished, device=self.target.device)
                cache.batch_select_indices(keep)
                next_ids, mask, position_ids = next_ids[keep], mask[keep], position_ids[keep]
            rows = [rows[place] for place in unfinished]
            input_ids = next_ids[:, None]
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            position_ids = position_ids[:, -1:] + 1


def batches_by_length(lengths: Sequence[int], max_new_tokens: int, batch_tokens: int) -> list[list[int]]:
    """Group prompts of similar length, the longest first: what does not fit into memory fails at once.

    Args:
        lengths: tokens of each prompt.
        batch_tokens: bound on rows * (longest prompt + max_new_tokens); a prompt that exceeds it runs alone.

    Returns:
        Lists of indices into ``lengths``, each index once.
    """
    batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if batches and (len(batches[-1]) + 1) * (lengths[batches[-1][0]] + max_new_tokens) <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def left_pad(prompts: Sequence[list[int]], pad_token_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one matrix whose last column is every prompt's last token.

    Returns:
        ``input_ids`` and ``attention_mask`` (1 for tokens, 0 for padding), both int64 [B, T].
    """
    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), pad_token_id)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    return input_ids.to(device), mask.to(device)


def choose(logits: Tensor, sampling: Sampling, uniform: Tensor) -> Tensor:
    """One token id for each row: the largest logit, or where the distribution function passes ``uniform``.

    A uniform number a row, looked up in the distribution function, takes a third of multinomial's time, which draws V.

    Args:
        logits: [N, V].
        uniform: fp64 [N, 1] in [0, 1); not looked at if ``sampling`` is greedy.

    Returns:
        int64 [N].
    """
    if sampling.greedy:
        return logits.argmax(-1)
    cumulative = sampling.probabilities(logits).cumsum(-1)
    return torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)[:, 0]
