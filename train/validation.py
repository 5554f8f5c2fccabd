"""Loss and simulated acceptance over the validation set."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specvocab_model.acceptance import AcceptanceSums, summarise

if TYPE_CHECKING:
    from train.build import Run


@torch.no_grad()
def validate(run: Run) -> dict[str, float]:
    """Metrics of the whole validation set, the same on every rank.

    Positions are summed, not means averaged, so ranks with fewer rows or none in the last micro-batch count for
    exactly what they hold.
    """
    sums = AcceptanceSums.zeros(run.num_unroll_steps, run.accelerator.device)
    unweighted = torch.ones(run.num_unroll_steps, device=run.accelerator.device)
    run.model.eval()
    for micro_batches in run.validation_loader:
        for batch in micro_batches:
            output = run.forward(batch, run.plan(batch), unweighted, collect=True)
            assert output.sums is not None
            sums = sums + output.sums
    run.model.train()
    total = run.accelerator.reduce(sums.stack(), "sum")
    return summarise(AcceptanceSums.unstack(total))
