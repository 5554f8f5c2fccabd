"""Where every sequence of a batch stands, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Texts:
    """All tensors int64 unless said otherwise; they are changed in place, for graphs remember where they are."""

    prompts: Tensor  # [B, columns], padded with 0 on the right
    prompt_lengths: Tensor  # [B]
    chunk_starts: Tensor  # [B], the next prompt token to be read
    lengths: Tensor  # [B], tokens of the text that the target has read
    remaining: Tensor  # [B], tokens that may still come out
    finished: Tensor  # bool [B]: it stands still

    @classmethod
    def finished_ones(cls, batch_size: int, num_columns: int, device: torch.device) -> Texts:
        def zeros(*size: int) -> Tensor:
            return torch.zeros(batch_size, *size, dtype=torch.int64, device=device)

        return cls(zeros(num_columns), zeros(), zeros(), zeros(), zeros(),
                   torch.ones(batch_size, dtype=torch.bool, device=device))

    def begin(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Put prompts into the first rows; the rows that are left over stay finished."""
        num_rows = len(self.lengths)
        width = max(map(len, prompts))
        padded = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
        self.prompts.zero_()
        self.prompts[: len(prompts), :width] = padded.to(self.prompts)
        self.prompt_lengths.copy_(torch.tensor([*map(len, prompts), *[1] * (num_rows - len(prompts))]))
        self.chunk_starts.zero_()
        self.remaining.fill_(max_new_tokens)
        self.finished.copy_(torch.arange(num_rows) >= len(prompts))

    def most_accepted(self, max_length: int, depth: int) -> Tensor:
        """The depth of the deepest node of a tree of ``depth`` that is judged, int64 [B].

        A round emits one token more than it accepts, and nothing is drafted beyond ``max_length`` positions.
        """
        return torch.minimum(self.remaining - 1, max_length - 1 - self.lengths).clamp(0, depth)
