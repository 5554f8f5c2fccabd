"""The vocabulary speculator: a low-rank guess at the logits, good enough to say which tokens deserve exact ones.

``s = vocab_proj(down_proj(h))`` costs ``r (d + V)`` multiplications instead of ``d V``. The ids with the largest ``s``,
of all or of each tile, become the candidates, and the exact logits ``U[ids] · h`` are computed for these alone. A
target's final scale and soft-cap are monotone, so the ranking, and with it the candidates, does not depend on them.

Trained is not ``vocab_proj`` itself but ``W`` [d, r] in ``vocab_proj = U W`` (``head.tied``): ``s = U (W down_proj h)``
is the exact logits of a hidden state that went through ``r`` numbers. A token that is rare in the training data is then
scored by its own row of ``U``. Rows of ``vocab_proj`` that are trained one by one, as published, lost such tokens
(docs/RESULTS.md): nearly all that reaches them is a push down.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from specvocab_kernels.vocab_head import (
    ExactSelection,
    HeadWeights,
    Selection,
    TileSelection,
    dequantize_vocab_proj,
    quantize_vocab_proj,
)
from torch import Tensor, nn

from specvocab_model.config import ConfigError, HeadConfig

if TYPE_CHECKING:
    from specvocab_model.target import Target

ROWS_AT_ONCE = 8192  # rows of lm_head converted to fp64 at one time: 256 MiB at hidden_size 4096
NUM_CANDIDATES = 2048
SMALLEST_TILE = 128  # of an automatic choice: at equal numbers of candidates, larger tiles with more kept recall more


def build_selection(config: HeadConfig, vocab_size: int) -> Selection:
    """The rule by which ``config`` chooses candidates.

    Where tile and keep are not given, tiles have 128 ids and keep as many of each as make ``num_candidates`` or just
    above; where one of 128 is already more than asked for, one is kept of the largest tiles that still make as many.
    """
    if config.selection == "tile" and config.tile is not None and config.keep is not None:
        return TileSelection(vocab_size, config.tile, config.keep)
    num_candidates = min(config.num_candidates or NUM_CANDIDATES, vocab_size)
    if config.selection == "exact":
        return ExactSelection(vocab_size, num_candidates)
    tile = max(SMALLEST_TILE, 1 << (vocab_size // num_candidates).bit_length() - 1)
    num_tiles = -(-vocab_size // tile)
    return TileSelection(vocab_size, tile, min(-(-num_candidates // num_tiles), tile))


def candidate_rule(selection: Selection) -> tuple[int, int]:
    """``selection`` as a rule on ranks: an id is a candidate if fewer than ``keep`` ids of its tile score above it.

    Returns:
        ``num_tiles``, where a tile is the ids that are equal modulo it (1: all), and ``keep``.
    """
    if isinstance(selection, TileSelection):
        return selection.num_tiles, selection.keep
    return 1, selection.num_candidates


class QuantizedVocabProj(nn.Module):
    """``vocab_proj`` in 8 bits with a scale a row, for inference; its tensors are those of the checkpoint.

    Args:
        weight: [V, r] float8_e4m3fn or int8.
        scales: [V] fp32.
    """

    weight: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, scales: Tensor) -> None:
        super().__init__()
        self.register_buffer("weight", weight)  # no parameters: a cast of the draft must not touch them
        self.register_buffer("scales", scales)

    def forward(self, reduced: Tensor) -> Tensor:
        """[..., r] -> [..., V]"""
        return reduced @ dequantize_vocab_proj(self.weight, self.scales).to(reduced.dtype).mT


class TiedVocabProj(nn.Module):
    """``vocab_proj`` while it is trained as a product with the target's frozen ``lm_head``: ``U W``.

    The weight of ``up_proj`` is ``W`` [d, r]: r d numbers to train, keep in an optimizer and sum over ranks, not r V.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(rank, hidden_size, bias=False)

    def product(self, lm_head: Tensor) -> Tensor:
        """[V, r], in the type of ``lm_head`` [V, d]; in fp32 for fp16, whose range gradients of single ids leave."""
        dtype = torch.float32 if lm_head.dtype == torch.float16 else lm_head.dtype
        with torch.autocast(lm_head.device.type, enabled=False):
            return lm_head.to(dtype) @ self.up_proj.weight.to(dtype)


class VocabSpeculator(nn.Module):
    """Approximate logits of rank ``r`` over the target's whole vocabulary, and which ids they make candidates.

    Args:
        hidden_size: ``d``, width of the draft's normalised output.
        rank: ``r``, between 1 and ``hidden_size``.
        selection: over the ``V`` rows of the target's ``lm_head``; see ``build_selection``.

    Raises:
        ConfigError: the rank lies outside its range.
    """

    def __init__(self, hidden_size: int, rank: int, selection: Selection) -> None:
        super().__init__()
        if not 1 <= rank <= hidden_size:
            raise ConfigError(f"rank={rank} must lie between 1 and hidden_size={hidden_size}; change head.rank")
        self.selection = selection
        self.quantization: str | None = None
        self.down_proj = nn.Linear(hidden_size, rank, bias=False)
        self.vocab_proj: nn.Linear | TiedVocabProj | QuantizedVocabProj = nn.Linear(
            rank, selection.vocab_size, bias=False
        )

    @property
    def rank(self) -> int:
        return self.down_proj.out_features

    @property
    def vocab_size(self) -> int:
        return self.selection.vocab_size

    @property
    def num_candidates(self) -> int:
        return self.selection.num_candidates

    @property
    def num_multiplications(self) -> int:
        """Of the approximate logits of one hidden state: ``r (d + V)``."""
        return self.rank * (self.down_proj.in_features + self.vocab_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """Approximate logits ``[..., V]`` of the normalised hidden states ``[..., d]``; not while it is tied."""
        return self.untied_vocab_proj()(self.down_proj(hidden))

    def factors(self, lm_head: Tensor) -> tuple[Tensor, Tensor]:
        """``down_proj`` [r, d] and ``vocab_proj`` [V, r], with gradients to what is trained; ``lm_head`` [V, d]."""
        assert not isinstance(self.vocab_proj, QuantizedVocabProj)  # those have no training
        if isinstance(self.vocab_proj, TiedVocabProj):
            return self.down_proj.weight, self.vocab_proj.product(lm_head)
        return self.down_proj.weight, self.vocab_proj.weight

    def tie(self) -> None:
        """Train ``W`` in the place of ``vocab_proj``, from now on until ``untie``; its values are not set."""
        self.vocab_proj = TiedVocabProj(self.down_proj.in_features, self.rank)

    @torch.no_grad()
    def untie(self, lm_head: Tensor) -> None:
        """Make ``vocab_proj`` the product with ``lm_head`` [V, d], in place, in fp32; nothing where it is not tied."""
        if not isinstance(self.vocab_proj, TiedVocabProj):
            return
        up_proj = self.vocab_proj.up_proj.weight
        self.vocab_proj = nn.Linear(self.rank, self.vocab_size, bias=False, device=up_proj.device)
        self._fill_vocab_proj(up_proj, lm_head)

    def untied_vocab_proj(self) -> nn.Linear | QuantizedVocabProj:
        """``vocab_proj`` with its V rows; raises ValueError while it is tied."""
        if isinstance(self.vocab_proj, TiedVocabProj):
            raise ValueError("a tied vocab_proj exists only as a product with lm_head; call untie(lm_head) first")
        return self.vocab_proj

    def _fill_vocab_proj(self, up_proj: Tensor, lm_head: Tensor) -> None:
        """``vocab_proj = lm_head · up_proj`` in fp64, rounded once."""
        vocab_proj = self.untied_vocab_proj().weight
        for filled, rows in zip(vocab_proj.split(ROWS_AT_ONCE), lm_head.split(ROWS_AT_ONCE), strict=True):
            filled.copy_(rows.double() @ up_proj.to(rows.device, torch.float64))

    def quantize(self, precision: str) -> None:
        """Round ``vocab_proj`` to ``fp8`` or ``int8``, in place; after that there is no training.

        Raises:
            ConfigError: it has 8 bits already.
            ValueError: it is tied.
        """
        vocab_proj = self.untied_vocab_proj()
        if self.quantization is not None:
            raise ConfigError(f"vocab_proj is {self.quantization} already; export the trained weights again")
        self.vocab_proj = QuantizedVocabProj(*quantize_vocab_proj(vocab_proj.weight, precision))
        self.quantization = precision

    def head_weights(self, lm_head: Tensor) -> HeadWeights:
        """What ``specvocab_kernels.vocab_head`` multiplies with, ``lm_head`` [V, d] shared; make it once a head.

        The factors are moved to ``lm_head``'s device and type, an 8-bit ``vocab_proj`` to its device.
        """
        if not isinstance(self.vocab_proj, QuantizedVocabProj):
            return HeadWeights.build(lm_head, *self.factors(lm_head), self.selection)
        return HeadWeights(
            lm_head=lm_head.detach().contiguous(),
            down_proj=self.down_proj.weight.detach().to(lm_head).contiguous(),
            vocab_proj=self.selection.arrange(self.vocab_proj.weight).to(lm_head.device).contiguous(),
            selection=self.selection,
            scales=self.selection.arrange(self.vocab_proj.scales).to(lm_head.device).contiguous(),
        )

    @torch.no_grad()
    def initialise(
        self,
        method: str,
        lm_head_weight: Tensor,
        final_hidden: Tensor | Iterable[Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Set both projections; the speculator may then be used with or without training.

        ``calibration``: rows of ``down_proj`` are the leading ``r`` eigenvectors of ``E[h hᵀ]`` over ``final_hidden``,
        and ``vocab_proj = U · down_projᵀ``: the logits of ``h`` projected onto the subspace that loses the least of it.
        ``svd``: the best rank-``r`` approximation of ``U`` itself, ``U ≈ (U_r S_r) V_rᵀ``, which is the same formula
        with the rows of ``U`` in the place of the hidden states. ``random``: normal, variance 1/fan-in.

        Args:
            method: one of the three above.
            lm_head_weight: ``U``, ``[V, d]``, any floating type and device.
            final_hidden: for ``calibration``, states after the final norm: one ``[N, d]`` tensor or a stream of them
                (see ``collect_final_hidden``); ``N`` at least the rank, a few thousand to be useful.
            generator: for ``random``, on the device of the parameters.

        Raises:
            ConfigError: unknown method, or hidden states that are too few or not finite.
            ValueError: ``lm_head_weight`` of another shape, or ``calibration`` without hidden states.
        """
        shape, expected = tuple(lm_head_weight.shape), (self.vocab_size, self.down_proj.in_features)
        if shape != expected:
            raise ValueError(f"lm_head has shape {shape}, but the speculator was built for {expected}")
        if method == "random":
            for weight in self.parameters():
                weight.normal_(std=weight.shape[1] ** -0.5, generator=generator)
            return
        if method == "calibration":
            if final_hidden is None:
                raise ValueError("init 'calibration' needs final hidden states of the target; pass final_hidden")
            chunks = [final_hidden] if isinstance(final_hidden, Tensor) else final_hidden
        elif method == "svd":
            chunks = lm_head_weight.split(ROWS_AT_ONCE)
        else:
            raise ConfigError(f"init {method!r} is not known; choose calibration, svd or random")
        basis = principal_directions(chunks, self.rank)
        self.down_proj.weight.copy_(basis)
        # Both factors come from the fp64 basis: rounding down_proj first would only add its error to vocab_proj.
        if isinstance(self.vocab_proj, TiedVocabProj):
            self.vocab_proj.up_proj.weight.copy_(basis.T)
        else:
            self._fill_vocab_proj(basis.T, lm_head_weight)


def principal_directions(chunks: Iterable[Tensor], rank: int) -> Tensor:
    """Leading ``rank`` eigenvectors of the second moment ``E[x xᵀ]`` of the rows of all chunks.

    Not centred: the logits are linear in ``x`` itself, so its mean is part of what has to be kept. Every eigenvector's
    largest entry is made positive, because eigenvectors come with an arbitrary sign that differs between machines.

    Args:
        chunks: tensors ``[n, d]``; only one is held at a time.
        rank: number of directions.

    Returns:
        fp64 ``[rank, d]`` with orthonormal rows, on the device of the chunks, by falling eigenvalue.

    Raises:
        ConfigError: fewer rows than ``rank``, or rows that are not finite.
    """
    moment: Tensor | None = None
    count = 0
    for chunk in chunks:
        rows = chunk.detach().double()
        product = rows.T @ rows
        moment = product if moment is None else moment.add_(product)
        count += rows.shape[0]
    if moment is None or count < rank:
        raise ConfigError(f"{count} states cannot determine {rank} directions; give more text or lower head.rank")
    if not torch.isfinite(moment).all():
        raise ConfigError("the states to initialise the speculator from are not all finite; check target.dtype")
    directions = torch.linalg.eigh(moment / count).eigenvectors.flip(-1)[:, :rank].T
    largest = directions.gather(-1, directions.abs().argmax(-1, keepdim=True))
    return directions * largest.sign()


def collect_final_hidden(target: Target, rows: Iterable[Any], num_tokens: int) -> Iterator[Tensor]:
    """Stream the target's final hidden states at the positions that predict supervised tokens.

    Args:
        target: supplies ``forward`` and the device.
        rows: data set rows with ``input_ids`` and ``loss_mask``, run one at a time so that memory stays small.
        num_tokens: stop after this many states.

    Yields:
        As ``supervised_states``.
    """

    def documents() -> Iterator[tuple[Tensor, Tensor]]:
        for row in rows:
            input_ids = torch.tensor([list(row["input_ids"])], dtype=torch.long, device=target.device)
            yield target.forward(input_ids).final_hidden[0], torch.tensor(list(row["loss_mask"]))

    return supervised_states(documents(), num_tokens)


def supervised_states(documents: Iterable[tuple[Tensor, Tensor]], num_tokens: int) -> Iterator[Tensor]:
    """The states that the draft will have to stand in for: at position ``t`` where ``loss_mask[t + 1] == 1``.

    Args:
        documents: final hidden states ``[T, d]`` of the target with their ``loss_mask`` ``[T]``.
        num_tokens: stop after this many states, without asking for another document.

    Yields:
        ``[n, d]`` in the target's type, at most ``num_tokens`` rows in total; fewer where the data end before.
    """
    left = num_tokens
    for final_hidden, loss_mask in documents:
        supervised = loss_mask[1:].to(final_hidden.device, torch.bool)
        states = final_hidden[:-1][supervised][:left]
        left -= states.shape[0]
        yield states
        if left <= 0:
            return
