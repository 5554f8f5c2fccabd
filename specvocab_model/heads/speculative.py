"""Exact logits for the candidates of the vocabulary speculator, nothing for the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specvocab_kernels.vocab_head import vocab_head, vocab_head_top_n
from torch import Tensor

from specvocab_model.config import ConfigError
from specvocab_model.heads.base import Head, HeadOutput
from specvocab_model.speculator import VocabSpeculator

if TYPE_CHECKING:
    from specvocab_model.target import Target


class SpeculativeHead(Head):
    """Selects candidates with the speculator, then multiplies only their rows of ``lm_head``, in one operation.

    The speculator's weights are laid out for the kernel here, once: a head does not follow later changes of them.

    Args:
        target: owner of ``lm_head``, its scale and its soft-cap.
        speculator: on the target's device.
        lm_head: the draft's own output embedding ``[V, d]``; by default the target's.
        impl: of ``specvocab_kernels.vocab_head``: ``auto`` takes the full head where it is faster, ``candidates`` does
            not.

    Raises:
        ConfigError: the speculator was made for a vocabulary of another size.
    """

    def __init__(
        self, target: Target, speculator: VocabSpeculator, lm_head: Tensor | None = None, impl: str = "auto"
    ) -> None:
        if speculator.vocab_size != target.spec.vocab_size:
            raise ConfigError(
                f"the speculator covers {speculator.vocab_size} tokens, but the lm_head of {target.spec.name} has "
                f"{target.spec.vocab_size} rows; load the target that the draft was trained for"
            )
        self.weights = speculator.head_weights(target.lm_head_weight if lm_head is None else lm_head)
        self.scale, self.softcap = target.spec.logit_scale, target.spec.logit_softcap
        self.impl = impl

    def __call__(self, hidden: Tensor) -> HeadOutput:
        """Logits ``[N, k]`` of the candidates of normalised hidden states ``[N, d]``."""
        ids, logits = vocab_head(
            hidden.to(self.weights.lm_head.dtype),
            self.weights,
            logit_scale=self.scale,
            logit_softcap=self.softcap,
            impl=self.impl,
        )
        return HeadOutput(ids, logits)

    def top_n(self, hidden: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """As ``Head.top_n``, in the kernel."""
        return vocab_head_top_n(
            hidden.to(self.weights.lm_head.dtype), self.weights, n, logit_scale=self.scale, logit_softcap=self.softcap,
            impl=self.impl,
        )
