"""What the head multiplies with: ``lm_head`` and the two factors of the speculator, 8-bit where wanted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specvocab_kernels.vocab_head.selection import Selection, TileSelection

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LARGEST = {"fp8": 448.0, "int8": 127.0}


@dataclass(frozen=True, kw_only=True, eq=False)
class HeadWeights:
    """Weights of a speculated vocabulary, as the kernels want them. ``HeadWeights.build`` makes one from plain weights.

    Args:
        lm_head: ``[V, d]`` float32, bfloat16 or float16, contiguous; by id, whatever the selection.
        down_proj: ``[r, d]`` likewise.
        vocab_proj: ``[selection.num_rows, r]`` in the order of ``selection.arrange``: float32, bfloat16, float16,
            float8_e4m3fn or int8, contiguous.
        selection: ``ExactSelection`` or ``TileSelection``.
        scales: ``[selection.num_rows]`` float32 for 8-bit ``vocab_proj``: a row is ``vocab_proj[i] * scales[i]``.

    Raises:
        ValueError: shapes, dtypes, strides or devices do not fit.
    """

    lm_head: Tensor
    down_proj: Tensor
    vocab_proj: Tensor
    selection: Selection
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        shapes = (
            f"got lm_head {list(self.lm_head.shape)}, down_proj {list(self.down_proj.shape)}, "
            f"vocab_proj {list(self.vocab_proj.shape)} for {self.selection}"
        )
        if not self.lm_head.dim() == self.down_proj.dim() == self.vocab_proj.dim() == 2:
            raise ValueError(f"vocab_head: needs lm_head [V, d], down_proj [r, d], vocab_proj [rows, r]; {shapes}")
        if self.lm_head.shape[0] != self.selection.vocab_size or self.vocab_proj.shape[0] != self.selection.num_rows:
            raise ValueError(
                f"vocab_head: the selection wants an lm_head of {self.selection.vocab_size} rows and a vocab_proj of "
                f"{self.selection.num_rows}, in the order of selection.arrange(); {shapes}"
            )
        if self.lm_head.shape[1] != self.down_proj.shape[1] or self.down_proj.shape[0] != self.vocab_proj.shape[1]:
            raise ValueError(f"vocab_head: lm_head and down_proj share d, down_proj and vocab_proj share r; {shapes}")
        quantized = self.vocab_proj.dtype in QUANTIZED.values()
        for name, tensor in (("lm_head", self.lm_head), ("down_proj", self.down_proj), ("vocab_proj", self.vocab_proj)):
            if tensor.dtype not in FLOATS and not (quantized and name == "vocab_proj"):
                raise ValueError(f"vocab_head: {name} is {tensor.dtype}, which it cannot be; see HeadWeights")
            if not tensor.is_contiguous():
                raise ValueError(f"vocab_head: {name} has strides {tensor.stride()}; call .contiguous() once before")
            if tensor.device != self.lm_head.device:
                raise ValueError(f"vocab_head: {name} is on {tensor.device}, lm_head on {self.lm_head.device}")
        if quantized != (self.scales is not None):
            raise ValueError("vocab_head: scales belong to an 8-bit vocab_proj, and to no other")
        if self.scales is not None and (
            self.scales.shape != self.vocab_proj.shape[:1]
            or self.scales.dtype != torch.float32
            or self.scales.device != self.lm_head.device
        ):
            raise ValueError(
                f"vocab_head: scales must be [{self.vocab_proj.shape[0]}] float32 on {self.lm_head.device}, got "
                f"{list(self.scales.shape)} {self.scales.dtype} on {self.scales.device}"
            )

    @classmethod
    def build(
        cls,
        lm_head: Tensor,
        down_proj: Tensor,
        vocab_proj: Tensor,
        selection: Selection,
        precision: str | None = None,
    ) -> HeadWeights:
        """From a ``vocab_proj`` ``[V, r]`` by id; ``precision`` ``"fp8"`` or ``"int8"`` quantises it, None keeps it.

        The factors are converted to ``lm_head``'s dtype and device if they differ.
        """
        rows = vocab_proj.detach().to(lm_head.device)
        scales = None
        if precision is not None:
            rows, scales = quantize_vocab_proj(rows, precision)
            scales = selection.arrange(scales).contiguous()
        else:
            rows = rows.to(lm_head.dtype)
        return cls(
            lm_head=lm_head.detach().contiguous(),
            down_proj=down_proj.detach().to(lm_head.device, lm_head.dtype).contiguous(),
            vocab_proj=selection.arrange(rows).contiguous(),
            selection=selection,
            scales=scales,
        )

    @property
    def vocab_size(self) -> int:
        return self.lm_head.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.lm_head.shape[1]

    @property
    def rank(self) -> int:
        return self.down_proj.shape[0]

    @property
    def tiled(self) -> bool:
        return isinstance(self.selection, TileSelection)


def quantize_vocab_proj(weight: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    """Round to 8 bits with one scale a row: ``weight[i] ≈ q[i] * scales[i]``.

    Args:
        weight: ``[V, r]`` floating.
        precision: ``"fp8"`` (e4m3) or ``"int8"`` (symmetric, -127 to 127).

    Returns:
        ``q`` ``[V, r]`` float8_e4m3fn or int8, and ``scales`` ``[V]`` float32. A row of zeros has scale 1.

    Raises:
        ValueError: unknown precision, or a weight that is not finite.
    """
    if precision not in QUANTIZED:
        raise ValueError(f"quantize_vocab_proj: precision={precision!r} is not known; choose 'fp8' or 'int8'")
    weight = weight.detach().float()
    if not torch.isfinite(weight).all():
        raise ValueError("quantize_vocab_proj: the weight is not finite")
    largest = weight.abs().amax(dim=1)
    scales = torch.where(largest > 0, largest / LARGEST[precision], 1.0)
    scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
    rows = weight / scales.unsqueeze(1)
    if precision == "int8":
        return rows.round().clamp(-127, 127).to(torch.int8), scales
    return rows.to(torch.float8_e4m3fn), scales


def dequantize_vocab_proj(q: Tensor, scales: Tensor | None) -> Tensor:
    """float32 ``[rows, r]``, whatever the precision."""
    return q.float() if scales is None else q.float() * scales.unsqueeze(1)
