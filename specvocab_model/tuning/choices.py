"""The heads that are compared, and how well each covers what target and draft say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from specvocab_kernels.vocab_head import ExactSelection, HeadWeights, Selection, TileSelection
from torch import Tensor, nn

from specvocab_model.config import QUANTIZATIONS, ConfigError
from specvocab_model.draft_states import Coverage, DraftStates, candidate_ranks, coverage
from specvocab_model.speculator import VocabSpeculator, candidate_rule, principal_directions

PRECISIONS = (None, *QUANTIZATIONS)
TILES = (32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeChoice:
    """A speculator of some rank and precision, with the best ``keep`` of every ``tile`` or, without tiles, of all."""

    rank: int
    tile: int | None
    keep: int
    quantization: str | None

    def selection(self, vocab_size: int) -> Selection:
        if self.tile is None:
            return ExactSelection(vocab_size, self.keep)
        return TileSelection(vocab_size, self.tile, self.keep)

    def __str__(self) -> str:
        rule = f"top {self.keep}" if self.tile is None else f"tile {self.tile} keep {self.keep}"
        return f"rank {self.rank} {rule} {self.quantization or 'unquantised'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticChoice:
    """The ``size`` most frequent tokens of some text, the same at every step (FR-Spec, arXiv 2502.14856)."""

    size: int

    def __str__(self) -> str:
        return f"static {self.size}"


Choice = SpeculativeChoice | StaticChoice


class LowerRanks:
    """The trained speculator at smaller ranks.

    With ``z = down_proj h`` and ``G = E[z zᵀ]`` over draft states, the rank-r' speculator whose approximate logits are
    nearest in mean square to the trained ones, ``min E |vocab_proj z - W' D' h|²``, comes from the leading eigenvectors
    ``Q`` of ``G^½ vocab_projᵀ vocab_proj G^½``: ``W' = vocab_proj G^½ Q`` and ``D' = Qᵀ G^-½ down_proj``.

    Args:
        speculator: not in 8 bits.
        hidden: [n, d], states that ``G`` is taken over.

    Raises:
        ConfigError: ``vocab_proj`` has 8 bits.
    """

    def __init__(self, speculator: VocabSpeculator, hidden: Tensor) -> None:
        if not isinstance(speculator.vocab_proj, nn.Linear):
            raise ConfigError(f"vocab_proj has been rounded to {speculator.quantization}; export the trained weights "
                              "again with head.quantization=null")
        self.down_proj = speculator.down_proj.weight.detach().double()
        self.vocab_proj = speculator.vocab_proj.weight.detach()
        reduced = hidden.to(self.down_proj.device).double() @ self.down_proj.T
        values, vectors = torch.linalg.eigh(reduced.T @ reduced / len(reduced))
        scale = values.clamp_min(values.amax() * 1e-12).sqrt()  # directions that no state has stay invertible
        root, inverse = (vectors * scale) @ vectors.T, (vectors / scale) @ vectors.T
        wide = self.vocab_proj.double()
        self.leading = torch.linalg.eigh(root @ (wide.T @ wide) @ root).eigenvectors.flip(-1)
        self.root, self.inverse = root, inverse

    def __call__(self, rank: int) -> tuple[Tensor, Tensor]:
        """``down_proj`` [rank, d] and ``vocab_proj`` [V, rank], fp32; the trained ones at the full rank."""
        if rank == len(self.down_proj):
            return self.down_proj.float(), self.vocab_proj.float()
        leading = self.leading[:, :rank]
        return ((leading.T @ self.inverse @ self.down_proj).float(),
                self.vocab_proj.float() @ (self.root @ leading).float())


def calibrated_ranks(lm_head: Tensor, hidden: Tensor, ranks: Sequence[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Both factors of speculators as training starts them (``head.init=calibration``); a smaller one's rows are the
    first of a larger one's."""
    basis = principal_directions([hidden], max(ranks)).float()
    vocab_proj = lm_head.float() @ basis.T
    return {rank: (basis[:rank], vocab_proj[:, :rank]) for rank in sorted(ranks)}


class Judge:
    """Coverage of any choice on states collected once; scores are taken once for all tilings.

    Args:
        states: that the choices are judged on.
        lm_head: [V, d]; its type is that of the unquantised factors.
        ranks: rank -> ``down_proj`` [r, d] and ``vocab_proj`` [V, r].
        token_counts: [V], of the text that static heads are cut for; None: there are no static choices.
    """

    def __init__(
        self,
        states: DraftStates,
        lm_head: Tensor,
        ranks: Mapping[int, tuple[Tensor, Tensor]],
        token_counts: Tensor | None = None,
    ) -> None:
        self.states, self.lm_head, self.ranks = states, lm_head, ranks
        self.vocab_size = lm_head.shape[0]
        self.full_tau = states.simulated_tau()
        self._ranks_of: dict[tuple[int, str | None, int], tuple[Tensor, Tensor]] = {}
        self._place: Tensor | None = None
        if token_counts is not None:
            order = token_counts.to(lm_head.device).argsort(descending=True, stable=True)
            self._place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))

    def weights(self, choice: SpeculativeChoice) -> HeadWeights:
        """Of a head as ``choice`` says."""
        return HeadWeights.build(
            self.lm_head, *self.ranks[choice.rank], choice.selection(self.vocab_size), choice.quantization
        )

    def can_judge(self, choice: Choice) -> bool:
        return self._place is not None if isinstance(choice, StaticChoice) else choice.rank in self.ranks

    def __call__(self, choice: Choice) -> Coverage:
        states = self.states
        if isinstance(choice, StaticChoice):
            assert self._place is not None
            inside = self._place < choice.size
            return coverage(states, inside[states.target_ids].expand_as(states.draft_ids), inside[states.draft_ids])
        num_tiles, keep = candidate_rule(choice.selection(self.vocab_size))
        key = (choice.rank, choice.quantization, num_tiles)
        if key not in self._ranks_of:
            of_all_tiles = [-(-self.vocab_size // tile) for tile in TILES]
            self._measure(choice.rank, choice.quantization, of_all_tiles if num_tiles in of_all_tiles else [num_tiles])
        target_ranks, draft_ranks = self._ranks_of[key]
        return coverage(states, target_ranks < keep, draft_ranks < keep)

    def _measure(self, rank: int, quantization: str | None, nums_tiles: list[int]) -> None:
        exact = ExactSelection(self.vocab_size, 1)
        weights = HeadWeights.build(self.lm_head, *self.ranks[rank], exact, quantization)
        for num_tiles, ranks in zip(nums_tiles, candidate_ranks(self.states, weights, nums_tiles), strict=True):
            self._ranks_of[rank, quantization, num_tiles] = ranks
