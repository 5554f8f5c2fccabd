"""What one token costs a draft, part by part, from its shape alone."""

from __future__ import annotations

from dataclasses import dataclass

from specvocab_model.draft import DraftArchitecture


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFlops:
    """FLOPs of the draft's matrix products for one token, a multiplication and an addition each counted.

    The formula of "Balancing Coverage and Draft Latency in Vocabulary Trimming for Faster Speculative Decoding", for a
    layer that reads the token's embedding and the hidden state side by side (``2d``). Attention over cached positions,
    norms and activations are left out: they are small, and no vocabulary changes them.
    """

    fc: int
    q: int
    k: int
    v: int
    o: int
    mlp: int
    head_row: int  # of one token of the vocabulary

    @classmethod
    def of(cls, architecture: DraftArchitecture) -> DraftFlops:
        hidden_size = architecture.hidden_size
        query_size = architecture.num_attention_heads * architecture.head_dim
        key_size = architecture.num_key_value_heads * architecture.head_dim
        return cls(
            fc=2 * 3 * hidden_size * hidden_size,
            q=2 * 2 * hidden_size * query_size,
            k=2 * 2 * hidden_size * key_size,
            v=2 * 2 * hidden_size * key_size,
            o=2 * query_size * hidden_size,
            mlp=3 * 2 * hidden_size * architecture.intermediate_size,
            head_row=2 * hidden_size,
        )

    @property
    def body(self) -> int:
        """Everything but the head."""
        return self.fc + self.q + self.k + self.v + self.o + self.mlp

    def total(self, draft_vocab_size: int) -> int:
        """F(k), with a head of ``draft_vocab_size`` rows."""
        return self.body + self.head_row * draft_vocab_size

    def head_share(self, draft_vocab_size: int) -> float:
        """Of the head in ``total``."""
        return self.head_row * draft_vocab_size / self.total(draft_vocab_size)


def draft_bytes(architecture: DraftArchitecture, draft_vocab_size: int, *, itemsize: int, context: int) -> int:
    """Bytes that one draft step reads: every weight once (of all rows of a batch), and the cached keys and values.

    Args:
        itemsize: bytes of a weight, and of a cached number.
        context: cached positions.
    """
    weights = DraftFlops.of(architecture).total(draft_vocab_size) // 2
    norms = 4 * architecture.hidden_size
    cached = 2 * context * architecture.num_key_value_heads * architecture.head_dim
    return itemsize * (weights + norms + cached)
