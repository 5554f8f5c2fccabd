"""Loss and simulated acceptance over the validation set, and the draft's part in a few of its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specvocab_model.acceptance import AcceptanceSums, summarise
from train.preemption import Preempted, requested
from train.samples import Sample, make_samples

if TYPE_CHECKING:
    from train.build import Run


@torch.no_grad()
def validate(run: Run) -> tuple[dict[str, float], list[Sample]]:
    """Metrics of the whole validation set, the same on every rank, and samples of its first micro-batch on rank 0.

    Positions are summed, not means averaged, so ranks with fewer rows or none in the last micro-batch count for
    exactly what they hold.

    Raises:
        Preempted: on all ranks, between two micro-batches.
    """
    num_samples = run.config.tracking.num_samples
    samples: list[Sample] | None = None if num_samples else []
    sums = AcceptanceSums.zeros(run.num_unroll_steps, run.accelerator.device)
    unweighted = torch.ones(run.num_unroll_steps, device=run.accelerator.device)
    run.model.eval()
    for micro_batches in run.validation_loader:
        if any_rank_must_stop(run):
            run.model.train()
            raise Preempted
        for batch in micro_batches:
            output = run.forward(batch, unweighted, collect=True, collect_drafts=samples is None)
            assert output.sums is not None
            sums = sums + output.sums
            if samples is None:
                assert output.drafts is not None
                tokenizer = run.target.tokenizer
                samples = make_samples(batch, output.drafts, tokenizer, num_samples) if run.is_main else []
    run.model.train()
    total = run.accelerator.reduce(sums.stack(), "sum")
    return summarise(AcceptanceSums.unstack(total)), samples or []


def any_rank_must_stop(run: Run) -> bool:
    return bool(run.sum_over_ranks(torch.tensor(int(requested()))))
