"""Exact logits for the candidates of the vocabulary speculator, nothing for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specvocab_kernels import gather_dot
from torch import Tensor

from specvocab_model.config import ConfigError
from specvocab_model.heads.base import HeadOutput
from specvocab_model.speculator import VocabSpeculator

if TYPE_CHECKING:
    from specvocab_model.target import Target


class SpeculativeHead:
    """Selects ``k`` candidates with the speculator, then multiplies only their rows of ``lm_head``.

    Args:
        target: owner of ``lm_head``, its scale and its soft-cap.
        speculator: on the device and of the type of the hidden states it will see.
        impl: ``auto``, ``triton`` or ``torch``, of the candidates' exact logits (``specvocab_kernels.gather_dot``).

    Raises:
        ConfigError: the speculator was made for a vocabulary of another size.
    """

    def __init__(self, target: Target, speculator: VocabSpeculator, impl: str = "auto") -> None:
        if speculator.vocab_size != target.spec.vocab_size:
            raise ConfigError(
                f"the speculator covers {speculator.vocab_size} tokens, but the lm_head of {target.spec.name} has "
                f"{target.spec.vocab_size} rows; load the target that the draft was trained for"
            )
        self.target = target
        self.speculator = speculator
        self.impl = impl

    def __call__(self, hidden: Tensor) -> HeadOutput:
        """Logits ``[N, k]`` of the candidates of normalised hidden states ``[N, d]``."""
        ids = self.speculator.candidates(hidden)
        weight = self.target.lm_head_weight
        logits = gather_dot(hidden.to(weight.dtype), weight, ids, impl=self.impl)
        return HeadOutput(ids, self.target.scale_and_cap(logits))
