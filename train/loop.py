"""The training loop: step, log, validate, save, stop."""

from __future__ import annotations

import math
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from specvocab_model.acceptance import AcceptanceSums, summarise
from specvocab_model.losses import step_weights
from specvocab_model.unroll import UnrollPlan
from train.checkpoint import save_final
from train.metrics import peak_memory_gib
from train.optim import learning_rate
from train.packing import PADDING_DOCUMENT, Batch
from train.validation import validate

if TYPE_CHECKING:
    from train.build import Run


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not finite; the weights of this step are not saved."""


def train(run: Run) -> None:
    """Train from ``run.state.step`` to ``run.total_steps``, then write ``output_dir/final``.

    Raises:
        NonFiniteError: on all ranks at the same step.
    """
    config, state, meter = run.config, run.state, run.meter
    validation: dict[str, float] = {}
    progress = tqdm(total=run.total_steps, initial=state.step, unit="step", disable=None if run.is_main else True)
    run.model.train()
    meter.restart_clock()
    for micro_batches in run.train_loader:
        state.step += 1
        lr = learning_rate(state.step, run.total_steps, config.optim)
        is_last = state.step == run.total_steps
        should_log = is_last or state.step % config.trainer.log_every == 0

        # Step: every unroll step's mean is over all its valid positions, of all ranks and micro-batches.
        plans = [run.plan(batch) for batch in micro_batches]
        counts, num_tokens, num_unrolled, num_slots = count_positions(run, micro_batches, plans)
        means_over = counts if config.trainer.loss_normalization == "valid" else torch.full_like(counts, num_slots)
        weights = step_weights(run.objective, means_over).to(run.accelerator.device)
        losses: list[Tensor] = []
        sums = AcceptanceSums.zeros(run.num_unroll_steps, run.accelerator.device)
        for index, (batch, plan) in enumerate(zip(micro_batches, plans, strict=True)):
            with run.updater.micro_step(last=index == len(micro_batches) - 1):
                output = run.forward(batch, plan, weights, collect=should_log)
                run.updater.backward(output.loss)
            losses.append(output.loss.detach())
            sums = sums if output.sums is None else sums + output.sums
        grad_norm = run.updater.step(lr)
        objective = float(run.accelerator.reduce(torch.stack(losses).sum(), "sum"))
        if not (math.isfinite(objective) and math.isfinite(grad_norm)):
            raise non_finite_error(run, micro_batches, losses, objective, grad_norm)
        meter.update(objective, num_tokens, num_unrolled, counts)
        progress.update()

        # Log.
        if should_log:
            total = AcceptanceSums.unstack(run.accelerator.reduce(sums.stack(), "sum"))
            metrics = {f"train/{name}": value for name, value in summarise(total).items()}
            metrics |= {"optim/lr": lr, "optim/grad_norm": grad_norm, "epoch": state.step / run.steps_per_epoch}
            metrics |= meter.flush() | {"perf/peak_memory_gib": highest_peak_memory(run)}
            run.tracker.log(metrics, state.step)
            report(run, progress_line(run, metrics))

        # Validate.
        if is_last or state.step % config.trainer.validate_every == 0:
            validation, samples = validate(run)
            run.tracker.log({f"validation/{name}": value for name, value in validation.items()}, state.step)
            run.tracker.log_samples(samples, state.step)
            report(run, validation_line(run, validation))
            meter.restart_clock()

        # Save.
        if is_last or state.step % config.trainer.save_every == 0:
            run.checkpoints.save(state)
            meter.restart_clock()
    progress.close()

    # Stop.
    validation = validation or validate(run)[0]
    save_final(run.checkpoints.final, run.accelerator, run.model, run.record(validation))
    if config.tracking.log_artifact:
        run.tracker.log_artifact(run.checkpoints.final)
    run.tracker.finish()


def count_positions(run: Run, micro_batches: list[Batch], plans: list[UnrollPlan]) -> tuple[Tensor, int, int, int]:
    """Totals of one optimizer step over all ranks.

    Returns:
        Valid positions of each unroll step, int64 [S]; tokens without padding; unrolled positions; token slots.
    """
    counts = torch.zeros(run.num_unroll_steps + 3, dtype=torch.int64)
    for batch, plan in zip(micro_batches, plans, strict=True):
        counts[:-3] += plan.rows.valid.sum(1)
        counts[-3] += (batch.document_ids != PADDING_DOCUMENT).sum()
        counts[-2] += len(plan.unrolled.index)
        counts[-1] += batch.num_slots
    counts = run.accelerator.reduce(counts.to(run.accelerator.device), "sum").cpu()
    return counts[:-3], int(counts[-3]), int(counts[-2]), int(counts[-1])


def highest_peak_memory(run: Run) -> float:
    """GiB, of the rank that has needed most."""
    own = torch.tensor([peak_memory_gib(run.accelerator.device)], device=run.accelerator.device)
    return float(run.accelerator.gather(own).max())


def non_finite_error(
    run: Run, micro_batches: list[Batch], losses: list[Tensor], objective: float, grad_norm: float
) -> NonFiniteError:
    """Name the ranks and data set rows that a loss or gradient that is not finite came from.

    Both numbers are global, so all ranks decide alike; where every loss is finite, all rows of the step are suspects.
    """
    own = [(run.accelerator.process_index, bool(torch.isfinite(loss)), batch.row_ids)
           for loss, batch in zip(losses, micro_batches, strict=True)]
    everyone = gather_object(own)
    suspects = [entry for entry in everyone if not entry[1]] or everyone
    ranks = sorted({rank for rank, _, _ in suspects})
    rows = [row for _, _, row_ids in suspects for row in row_ids]
    return NonFiniteError(
        f"step {run.state.step}: loss {objective}, gradient norm {grad_norm}; on ranks {ranks}, "
        f"rows {', '.join(rows)}. Lower optim.lr or look at these rows; the last checkpoint is from before this step"
    )


def report(run: Run, line: str) -> None:
    """One line on rank 0, above the progress bar where there is one."""
    if run.is_main:
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


def progress_line(run: Run, metrics: dict[str, float]) -> str:
    left = timedelta(seconds=round((run.total_steps - run.state.step) * metrics["perf/seconds_per_step"]))
    mfu = f" | mfu {metrics['perf/mfu']:.1%}" if "perf/mfu" in metrics else ""
    return (
        f"step {run.state.step}/{run.total_steps} | objective {metrics['train/objective']:.4f} | "
        f"tau {metrics['train/simulated_tau/full']:.3f} full, "
        f"{metrics['train/simulated_tau/candidates']:.3f} candidates | "
        f"lr {metrics['optim/lr']:.2e} | grad {metrics['optim/grad_norm']:.3f} | "
        f"{metrics['perf/tokens_per_second']:,.0f} tok/s{mfu} | {metrics['perf/peak_memory_gib']:.1f} GiB | ETA {left}"
    )


def validation_line(run: Run, metrics: dict[str, float]) -> str:
    return (
        f"validation at step {run.state.step} | loss {metrics['loss']:.4f} | "
        f"tau {metrics['simulated_tau/full']:.3f} full, {metrics['simulated_tau/candidates']:.3f} candidates | "
        f"recall {metrics['candidate_recall/target_top1']:.2%}"
    )
