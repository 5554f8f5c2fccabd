"""The target's forward over packed rows as one CUDA graph: a small target is slower to launch than to compute.

Inputs are copied into tensors that the graph reads, outputs out of those that it writes, so that no later forward
changes what was returned, of this step's other micro-batches neither. Nothing in it depends on values that the host
would have to know: documents are offsets on the device (``packed_attention``), filled up with empty ones to a power of
two, for each of which there is a graph. They share one pool of memory, which holds what one forward needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from specvocab_model.graphs import Graphs
from specvocab_model.packed_attention import as_mask
from specvocab_model.public_drafts import LENGTH_DEPENDENT
from specvocab_model.target import Target, TargetOutput
from specvocab_model.target_spec import LAYOUTS

MOST_BYTES = 2**30  # of activations in the pool: a larger forward computes for longer than it takes to launch
FEWEST_DOCUMENTS = 8


def can_capture(target: Target, num_positions: int) -> bool:
    """Whether a forward over so many positions waits for nothing, and leaves the card's memory to others.

    transformers looks at the positions where rotary frequencies depend on the length.
    """
    spec = target.spec
    return (LAYOUTS[spec.model_type].compiles and spec.rope_parameters["rope_type"] not in LENGTH_DEPENDENT
            and activation_bytes(target, num_positions) <= MOST_BYTES)


def activation_bytes(target: Target, num_positions: int) -> int:
    """Roughly: residual, queries, keys and values, both halves of the MLP, and the states that are returned."""
    per_position = 6 * target.spec.hidden_size + 2 * target.spec.intermediate_size
    return target.lm_head_weight.element_size() * num_positions * per_position


class TargetGraph:
    """Forwards over rows of one shape; elsewhere than on a GPU they just run.

    Args:
        target: with ``packed_attention`` in use, and ``can_capture``.
        shape: (rows, tokens of a row).
    """

    def __init__(self, target: Target, shape: tuple[int, int]) -> None:
        self.target = target
        self.shape = torch.Size(shape)
        self.input_ids = torch.zeros(shape, dtype=torch.int64, device=target.device)
        self.position_ids = torch.zeros_like(self.input_ids)
        self.graphs = Graphs(target.device, enabled=True)
        self._offsets: dict[int, Tensor] = {}  # int32 [N + 1], by the number of documents N
        self._outputs: dict[int, TargetOutput] = {}  # likewise; what a graph writes

    def forward(self, input_ids: Tensor, position_ids: Tensor, offsets: Tensor) -> TargetOutput:
        """As ``Target.forward``, of rows [B, T] whose documents begin at ``offsets`` (``packed_attention.as_mask``)."""
        num_documents = max(FEWEST_DOCUMENTS, 1 << (len(offsets) - 2).bit_length())
        self.input_ids.copy_(input_ids)
        self.position_ids.copy_(position_ids)
        if num_documents not in self._offsets:
            self._offsets[num_documents] = offsets.new_empty(num_documents + 1)
        self._offsets[num_documents].fill_(input_ids.numel())[: len(offsets)].copy_(offsets)
        self.graphs.run((num_documents,), partial(self._forward, num_documents), _harmless)
        output = self._outputs[num_documents]
        return TargetOutput(output.features.clone(), output.final_hidden.clone(), None)

    def _forward(self, num_documents: int) -> None:
        self._outputs[num_documents] = self.target.forward(
            self.input_ids, position_ids=self.position_ids, attention_mask=as_mask(self._offsets[num_documents]))


def _harmless() -> Callable[[], object]:
    """A forward that is run too often changes nothing, so there is nothing to undo."""
    return lambda: None
