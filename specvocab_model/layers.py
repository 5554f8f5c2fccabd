"""The small parts of the draft layer.

In training on a GPU, SwiGLU and rotary embedding are each compiled into one kernel a pass (docs/PERFORMANCE.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def compiled_in_training(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` under torch.compile where gradients are taken on a GPU, itself elsewhere.

    Lengths are symbols, so that no batch compiles anew. Decoding takes the plain function: there the check of the
    compiled one's conditions costs more than its kernel saves. The first argument says where things run.
    """

    @cache
    def compiled() -> Callable[..., Tensor]:
        return torch.compile(function, dynamic=True)

    @wraps(function)
    def run(first: Tensor, *others: Tensor) -> Tensor:
        return (compiled() if first.is_cuda and torch.is_grad_enabled() else function)(first, *others)

    return run


@compiled_in_training
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``, any shape. Compiled, it keeps ``gate`` and ``up`` for backward and nothing else."""
    return F.silu(gate) * up


@compiled_in_training
def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the Llama layout (a dimension and the one half a head further on make a pair).

    Args:
        heads: [.., H, D]; ``cos``, ``sin``: [.., D] of the positions.
    """
    cos, sin = cos[..., None, :].to(heads.dtype), sin[..., None, :].to(heads.dtype)
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-high, low], dim=-1) * sin


class RMSNorm(nn.Module):
    """Root-mean-square norm: reduced in fp32, returned in the type of its input, also under autocast.

    (Autocast leaves the weight in fp32, and fp32 it would make of everything that comes out.)
    """

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.rms_norm(hidden, self.weight.shape, self.weight.to(hidden.dtype), self.eps)


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(hidden), self.up_proj(hidden)))
