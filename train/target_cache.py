"""The target's outputs, kept in memory: over several epochs of a small data set, the target runs once."""

from __future__ import annotations

import torch
from torch import Tensor

from specvocab_model.target import Target, TargetOutput
from train.packing import PADDING_DOCUMENT, Batch


class TargetCache:
    """Outputs of the target by document.

    A document is computed alone, so that what is kept does not depend on what it happened to be packed with: a resumed
    run, which starts with an empty cache, sees the same numbers. It takes 4 hidden states a token, where the target is
    (8 ``hidden_size`` bytes in bf16).
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.outputs: dict[bytes, TargetOutput] = {}  # by the document's tokens

    def forward(self, batch: Batch) -> TargetOutput:
        """As ``Target.forward`` on the packed rows of ``batch``, which is on the CPU; zeros where it is padding."""
        weight, shape = self.target.lm_head_weight, batch.input_ids.shape
        features = weight.new_zeros(shape.numel(), 3 * weight.shape[1])
        final_hidden = weight.new_zeros(shape.numel(), weight.shape[1])
        for document in documents(batch):
            output = self._of(batch.input_ids.flatten()[document])
            features[document], final_hidden[document] = output.features[0], output.final_hidden[0]
        return TargetOutput(features.view(*shape, -1), final_hidden.view(*shape, -1), None)

    def _of(self, input_ids: Tensor) -> TargetOutput:
        key = input_ids.numpy().tobytes()
        if key not in self.outputs:
            self.outputs[key] = self.target.forward(input_ids[None].to(self.target.device))
        return self.outputs[key]


def documents(batch: Batch) -> list[slice]:
    """Where the documents lie in the flattened rows; padding is none."""
    begins = (batch.position_ids.flatten() == 0).nonzero()[:, 0].tolist()
    ends = [*begins[1:], batch.position_ids.numel()]
    owners = batch.document_ids.flatten()[torch.tensor(begins)].tolist()
    return [slice(begin, end) for begin, end, owner in zip(begins, ends, owners, strict=True)
            if owner != PADDING_DOCUMENT]
