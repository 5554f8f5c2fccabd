"""What the target says about a batch: computed, remembered, or read from the features on disk."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specvocab_model import packed_attention
from specvocab_model.target import Target, TargetOutput
from specvocab_model.target_graph import TargetGraph, can_capture
from train.packing import PADDING_DOCUMENT, Batch


class TargetOutputs:
    """Features and final hidden states of packed rows.

    On a CPU a document is computed alone, so its numbers do not depend on what it was packed with: a run that computes
    them, one that remembers them (``keep``), a resumed one, whose memory starts empty, and one that reads them from
    disk (``data_gen/features.py``, which computes alike) see the same bits. A GPU computes whole rows, where it would
    otherwise wait for kernels to start, except with ``keep``. Their documents are given as offsets to flash attention
    where it can take the target's heads; else transformers makes a mask, for which the host waits.

    Args:
        keep: remember every document's outputs. Takes 4 hidden states a token, where the target is.
        together: the target is sharded, so all ranks must run it equally often: on whole rows everywhere.
        shape: (rows, tokens) of the micro-batches that a GPU runs as a CUDA graph, see ``target_graph``.
    """

    def __init__(
        self, target: Target, *, keep: bool = False, together: bool = False, shape: tuple[int, int] | None = None
    ) -> None:
        self.target = target
        self.together = together
        self.keep = keep
        self.kept: dict[bytes, TargetOutput] = {}  # by the document's tokens
        self.by_offsets = target.device.type == "cuda" and packed_attention.use(target)
        self.graph: TargetGraph | None = None
        if shape is not None and self.by_offsets and not (keep or together) and can_capture(target, math.prod(shape)):
            self.graph = TargetGraph(target, shape)

    def describe(self) -> str:
        """One line: how a GPU runs the target."""
        if not self.by_offsets:
            return "target: transformers makes a mask for packed rows, and the host waits for it"
        how = "kernel by kernel" if self.graph is None else f"in a CUDA graph of {self.graph.shape.numel()} tokens"
        return f"target: documents of packed rows go to flash attention as offsets, {how}"

    def of(self, batch: Batch, on_device: Batch) -> TargetOutput:
        """Outputs [B, T, ..] on the target's device; where the rows are padded they are anything finite.

        Args:
            batch: on the CPU; ``on_device``: the same where the target is.
        """
        if on_device.features is not None:
            assert on_device.final_hidden is not None
            return TargetOutput(on_device.features, on_device.final_hidden, None)
        if self.keep or (self.target.device.type == "cpu" and not self.together):
            return self._by_document(batch)
        return self._by_row(on_device.input_ids, on_device.position_ids, on_device.plan.unrolled.spans.key_offsets)

    def _by_row(self, input_ids: Tensor, position_ids: Tensor, offsets: Tensor) -> TargetOutput:
        if self.graph is not None and input_ids.shape == self.graph.shape:
            return self.graph.forward(input_ids, position_ids, offsets)
        mask = packed_attention.as_mask(offsets) if self.by_offsets else None
        return self.target.forward(input_ids, position_ids=position_ids, attention_mask=mask)

    def _by_document(self, batch: Batch) -> TargetOutput:
        weight, shape = self.target.lm_head_weight, batch.input_ids.shape
        features = weight.new_zeros(shape.numel(), 3 * weight.shape[1])
        final_hidden = weight.new_zeros(shape.numel(), weight.shape[1])
        for document in documents(batch):
            output = self._of(batch.input_ids.flatten()[document])
            features[document], final_hidden[document] = output.features[0], output.final_hidden[0]
        return TargetOutput(features.view(*shape, -1), final_hidden.view(*shape, -1), None)

    def _of(self, input_ids: Tensor) -> TargetOutput:
        key = input_ids.numpy().tobytes()
        if key in self.kept:
            return self.kept[key]
        output = self.target.forward(input_ids[None].to(self.target.device))
        if self.keep:
            self.kept[key] = output
        return output


def documents(batch: Batch) -> list[slice]:
    """Where the documents lie in the flattened rows; padding is none."""
    begins = (batch.position_ids.flatten() == 0).nonzero()[:, 0].tolist()
    ends = [*begins[1:], batch.position_ids.numel()]
    owners = batch.document_ids.flatten()[torch.tensor(begins)].tolist()
    return [slice(begin, end) for begin, end, owner in zip(begins, ends, owners, strict=True)
            if owner != PADDING_DOCUMENT]
