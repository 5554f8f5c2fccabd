"""The speculative head on the rows of ``lm_head`` that one of several ranks holds; on one rank, on all of them.

Engines that serve a model on several GPUs cut ``lm_head`` by rows, one range of ids a rank. ``vocab_proj`` is cut at
the same ids, every rank chooses candidates among its own, and their logits meet in one reduction:

    greedy    [N, 2] (best logit, its id) of every rank, and the largest wins
    sampled   [N, rows] logits of every rank, −inf where an id is no candidate, side by side as for a full head
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from specvocab_kernels.vocab_head import ExactSelection, HeadWeights, Selection, TileSelection, vocab_head
from specvocab_kernels.vocab_head.weights import FLOATS
from torch import Tensor, nn

from specvocab_model.config import ConfigError
from specvocab_model.speculator import QuantizedVocabProj, VocabSpeculator

AllGather = Callable[[Tensor], Tensor]
"""``[N, n]`` of this rank -> ``[N, ranks * n]`` of all ranks in order, on every rank."""


def shard_selection(selection: Selection, num_rows: int) -> Selection:
    """The rule for one rank's ``num_rows`` ids.

    Tiles stay as large and keep as many, so all ranks together have about as many candidates as one rank alone. An
    exact selection keeps all of its ``num_candidates`` on every rank: wherever the best of all ids lie, each of them is
    among its rank's, so the candidates of all ranks contain those of one rank alone.
    """
    if isinstance(selection, TileSelection):
        return TileSelection(num_rows, selection.tile, selection.keep)
    return ExactSelection(num_rows, selection.num_candidates)


def shard_speculator(speculator: VocabSpeculator, first_id: int, num_rows: int) -> VocabSpeculator:
    """The speculator of the ids ``first_id … first_id + num_rows - 1``; its weights are views of the whole one's.

    Raises:
        ConfigError: there is no such id.
    """
    if not 0 <= first_id < first_id + num_rows <= speculator.vocab_size:
        raise ConfigError(f"a rank with {num_rows} ids from {first_id} on cannot be served with a vocabulary of "
                          f"{speculator.vocab_size}; use fewer ranks (tensor_parallel_size)")
    ids = slice(first_id, first_id + num_rows)
    with torch.device("meta"):  # every weight is replaced
        shard = VocabSpeculator(
            speculator.down_proj.in_features, speculator.rank, shard_selection(speculator.selection, num_rows)
        )
    shard.down_proj = speculator.down_proj
    whole = speculator.untied_vocab_proj()
    if isinstance(whole, QuantizedVocabProj):
        shard.vocab_proj = QuantizedVocabProj(whole.weight[ids], whole.scales[ids])
        shard.quantization = speculator.quantization
    else:
        shard.untied_vocab_proj().weight = nn.Parameter(whole.weight[ids], requires_grad=False)
    return shard


def check_lm_head(lm_head: Tensor) -> None:
    """See that an engine's ``lm_head`` is of a floating type.

    Raises:
        ConfigError: it is not.
    """
    if lm_head.dtype not in FLOATS:
        raise ConfigError(f"the target's lm_head is stored as {lm_head.dtype}, but a speculated vocabulary needs "
                          "float32, bfloat16 or float16; serve a target whose lm_head is not quantised, and let no "
                          "setting of the engine quantise the draft's copy")


class ShardedHead:
    """A speculator laid out for the kernel, once, to be used with an ``lm_head`` that is given with every call.

    Engines share the target's ``lm_head`` with the draft only after the draft is loaded, so it cannot be kept here.
    Nothing waits for the device and every shape follows from ``N``: calls can be captured in a CUDA graph.

    Args:
        speculator: of the whole vocabulary.
        first_id: of this rank.
        lm_head: ``[rows, d]`` of this rank without padding; only its shape, type and device matter.
        logit_scale, logit_softcap: of the target.
        impl: of ``specvocab_kernels.vocab_head``.

    Raises:
        ConfigError: the rank's ids are not in the vocabulary, or ``lm_head`` is not of a floating type.
    """

    def __init__(
        self,
        speculator: VocabSpeculator,
        first_id: int,
        lm_head: Tensor,
        *,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        impl: str = "auto",
    ) -> None:
        check_lm_head(lm_head)
        self.first_id, self.num_rows = first_id, lm_head.shape[0]
        placed = shard_speculator(speculator, first_id, self.num_rows).head_weights(lm_head)
        self.down_proj, self.vocab_proj, self.scales = placed.down_proj, placed.vocab_proj, placed.scales
        self.selection = placed.selection
        self.logit_scale, self.logit_softcap, self.impl = logit_scale, logit_softcap, impl

    def candidates(self, hidden: Tensor, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's candidates of normalised hidden states ``[N, d]``.

        Returns:
            ids int32 ``[N, k]`` counted from ``first_id``, and logits fp32 ``[N, k]``; of many rows ``k`` is all ids
            of the rank, and they are one row expanded, where all of ``lm_head`` is faster than the candidates.

        Raises:
            ConfigError: the ``lm_head`` that was shared is not of a floating type.
        """
        check_lm_head(lm_head)
        weights = HeadWeights(lm_head=lm_head, down_proj=self.down_proj, vocab_proj=self.vocab_proj,
                              selection=self.selection, scales=self.scales)
        return vocab_head(hidden.to(lm_head.dtype), weights, logit_scale=self.logit_scale,
                          logit_softcap=self.logit_softcap, impl=self.impl)

    def greedy_tokens(self, hidden: Tensor, lm_head: Tensor, all_gather: AllGather | None = None) -> Tensor:
        """The best candidate of all ranks, int64 ``[N]``, as target ids; among equals that of the lowest rank.

        Args:
            all_gather: of the ranks; none where there is one.
        """
        ids, logits = self.candidates(hidden, lm_head)
        values, columns = logits.max(dim=-1, keepdim=True)
        tokens = ids.gather(-1, columns).long() + self.first_id
        if all_gather is None:
            return tokens.squeeze(-1)
        # One message of pairs. fp32 holds every id below 2^24 exactly; engines' gathers do not all know int64.
        pairs = all_gather(torch.cat([values, tokens.float()], dim=-1)).unflatten(-1, (-1, 2))
        winner = pairs[..., 0].argmax(-1, keepdim=True)
        return pairs[..., 1].gather(-1, winner).squeeze(-1).long()

    def dense_logits(self, hidden: Tensor, lm_head: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Logits ``[N, width]`` of this rank's ids and padding behind them, −inf where an id is no candidate."""
        ids, logits = self.candidates(hidden, lm_head)
        dense = torch.full((hidden.shape[0], width), -torch.inf, dtype=dtype, device=hidden.device)
        return dense.scatter_(-1, ids.long(), logits.to(dtype))
