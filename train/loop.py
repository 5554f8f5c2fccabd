"""The training loop: step, log, validate, save, stop."""

from __future__ import annotations

import math
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from specvocab_model.acceptance import AcceptanceSums, summarise
from specvocab_model.config import TrainerConfig
from specvocab_model.losses import step_weights
from specvocab_model.transfers import Readback, send
from train.checkpoint import BEST_METRIC, save_final
from train.metrics import peak_memory_gib
from train.optim import learning_rate
from train.packing import PADDING_DOCUMENT, Batch
from train.preemption import EXIT_PREEMPTED, Preempted, requested
from train.validation import validate

if TYPE_CHECKING:
    from train.build import Run


class NonFiniteError(RuntimeError):
    """A loss or gradient that is not finite; nothing of its step is saved."""


class StepTotals(NamedTuple):
    """What one optimizer step holds, over all ranks and micro-batches."""

    valid: Tensor  # int64 [S], valid positions of each unroll step
    tokens: int  # without padding
    unrolled: int  # positions
    slots: int  # of tokens, with padding
    ranks_to_stop: int  # that were sent a signal


class LaunchedStep(NamedTuple):
    """An optimizer step that a GPU may still be at."""

    number: int
    totals: StepTotals
    row_ids: list[tuple[str, ...]]  # of this rank's micro-batches
    losses: list[Tensor]  # likewise
    sums: AcceptanceSums  # of this rank
    outcome: Readback  # objective and gradient norm, over all ranks


def train(run: Run) -> None:
    """Train from ``run.state.step`` to ``run.total_steps``, then write ``output_dir/final``.

    Raises:
        NonFiniteError: on all ranks at the same step.
        Preempted: on all ranks, when a checkpoint of the last whole step has been written.
        CheckpointError: on all ranks.
    """
    try:
        validation = train_steps(run) or validate(run)[0]
    except Preempted:
        if run.state.step > run.checkpoints.newest_step:
            run.checkpoints.save(run.state, run.updater)
        report(run, f"stopped by a signal after step {run.state.step}; start the same command to go on")
        run.tracker.finish(exit_code=EXIT_PREEMPTED)  # W&B may take its time, and a launcher kill it meanwhile
        run.accelerator.wait_for_everyone()  # a launcher ends the other ranks as soon as one is gone
        raise
    save_final(run.checkpoints.final, run.accelerator, run.updater, run.record(validation))
    if run.config.tracking.log_artifact:
        run.tracker.log_artifact(run.checkpoints.final)
    run.tracker.finish()


def train_steps(run: Run) -> dict[str, float]:
    """All optimizer steps that are left; returns the metrics of the last validation."""
    config, state, meter = run.config, run.state, run.meter
    progress = tqdm(total=run.total_steps, initial=state.step, unit="step", disable=None if run.is_main else True)
    run.model.train()
    validation = validate_if_due(run)  # what a signal broke off
    meter.restart_clock()
    launched: LaunchedStep | None = None
    for micro_batches in run.train_loader:
        totals = step_totals(run, micro_batches)
        if totals.ranks_to_stop:
            settle(run, launched)
            raise Preempted
        state.step += 1
        lr = learning_rate(state.step, run.total_steps, config.optim)
        is_last = state.step == run.total_steps
        should_log = is_last or state.step % config.trainer.log_every == 0

        # Step. What comes of it is read when the next one is launched, so that a GPU has work meanwhile; or at once,
        # where it is asked for.
        newest = launch_step(run, micro_batches, totals, lr, collect=should_log)
        settle(run, launched)
        launched, grad_norm = newest, None
        progress.update()
        if should_log or is_due(state.step, config.trainer):
            launched, grad_norm = None, settle(run, newest)

        # Log.
        if should_log and grad_norm is not None:
            total = AcceptanceSums.unstack(run.accelerator.reduce(newest.sums.stack(), "sum"))
            metrics = {f"train/{name}": value for name, value in summarise(total).items()}
            metrics |= {"optim/lr": lr, "optim/grad_norm": grad_norm, "epoch": state.step / run.steps_per_epoch,
                        "optim/skipped_steps": state.skipped_steps}
            metrics |= meter.flush() | {"perf/peak_memory_gib": highest_peak_memory(run)}
            run.tracker.log(metrics, state.step)
            report(run, progress_line(run, metrics))

        # Validate.
        if measured := validate_if_due(run):
            validation = measured
            meter.restart_clock()

        # Save.
        is_best = config.trainer.keep_best and state.best_step == state.step
        if is_last or is_best or state.step % config.trainer.save_every == 0:
            run.checkpoints.save(state, run.updater)
            meter.restart_clock()
    progress.close()
    return validation


def launch_step(
    run: Run, micro_batches: list[Batch], totals: StepTotals, lr: float, *, collect: bool
) -> LaunchedStep:
    """Forward, backward and update, without waiting for a GPU that computes them.

    Every unroll step's mean is over all its valid positions, of all ranks and micro-batches.
    """
    device = run.accelerator.device
    per_valid = run.config.trainer.loss_normalization == "valid"
    means_over = totals.valid if per_valid else torch.full_like(totals.valid, totals.slots)
    weights = send(step_weights(run.objective, means_over), device)
    losses: list[Tensor] = []
    sums = AcceptanceSums.zeros(run.num_unroll_steps, device)
    for index, batch in enumerate(micro_batches):
        with run.updater.micro_step(last=index == len(micro_batches) - 1):
            output = run.forward(batch, weights, collect=collect)
            run.updater.backward(output.loss)
        losses.append(output.loss.detach())
        sums = sums if output.sums is None else sums + output.sums
    grad_norm = run.updater.step(lr)
    objective = run.accelerator.reduce(torch.stack(losses).sum(), "sum")
    outcome = Readback(torch.stack([objective.double(), grad_norm.double()]))
    outcome.start()
    row_ids = [batch.row_ids for batch in micro_batches]
    return LaunchedStep(run.state.step, totals, row_ids, losses, sums, outcome)


def settle(run: Run, launched: LaunchedStep | None) -> float | None:
    """Wait for a step and count it; its gradient norm, or None where it has changed nothing or there is none.

    Raises:
        NonFiniteError: as ``skip_or_stop``.
    """
    if launched is None:
        return None
    objective, grad_norm = launched.outcome.wait()
    if not (math.isfinite(objective) and math.isfinite(grad_norm)):
        skip_or_stop(run, launched, objective, grad_norm)
        return None
    totals = launched.totals
    run.meter.update(objective, totals.tokens, totals.unrolled, totals.valid)
    return grad_norm


def is_due(step: int, trainer: TrainerConfig) -> bool:
    """Whether the validation data are measured, or a checkpoint written, after this step; besides the last one."""
    return step % trainer.validate_every == 0 or step % trainer.save_every == 0


def validate_if_due(run: Run) -> dict[str, float]:
    """Measure the validation data where this step asks for it and it has not been done; its metrics, or none."""
    state = run.state
    is_due = state.step == run.total_steps or state.step % run.config.trainer.validate_every == 0
    if not is_due or state.validated_step == state.step:
        return {}
    metrics, samples = validate(run)
    state.validated_step = state.step
    if metrics[BEST_METRIC] > state.best_tau:
        state.best_tau, state.best_step = metrics[BEST_METRIC], state.step
    run.tracker.log({f"validation/{name}": value for name, value in metrics.items()}, state.step)
    run.tracker.log_samples(samples, state.step)
    report(run, validation_line(run, metrics))
    return metrics


def step_totals(run: Run, micro_batches: list[Batch]) -> StepTotals:
    """Count one optimizer step's positions, and the ranks that were asked to stop, in one sum over all ranks."""
    counts = torch.zeros(run.num_unroll_steps + 4, dtype=torch.int64)
    for batch in micro_batches:
        counts[:-4] += batch.plan.rows.valid.sum(1)
        counts[-4] += (batch.document_ids != PADDING_DOCUMENT).sum()
        counts[-3] += len(batch.plan.unrolled.index)
        counts[-2] += batch.num_slots
    counts[-1] = requested()
    counts = run.sum_over_ranks(counts)
    return StepTotals(counts[:-4], *counts[-4:].tolist())


def highest_peak_memory(run: Run) -> float:
    """GiB, of the rank that has needed most."""
    own = torch.tensor([peak_memory_gib(run.accelerator.device)], device=run.accelerator.device)
    return float(run.accelerator.gather(own).max())


def skip_or_stop(run: Run, launched: LaunchedStep, objective: float, grad_norm: float) -> None:
    """Name the ranks and data set rows that a loss or gradient that is not finite came from.

    Both numbers are global, so all ranks decide alike; where every loss is finite, all rows of the step are suspects.

    Raises:
        NonFiniteError: the run has skipped as many steps as it may.
    """
    state, limit = run.state, run.config.trainer.skip_non_finite
    own = [(run.accelerator.process_index, bool(torch.isfinite(loss)), row_ids)
           for loss, row_ids in zip(launched.losses, launched.row_ids, strict=True)]
    everyone = gather_object(own)
    suspects = [entry for entry in everyone if not entry[1]] or everyone
    ranks = sorted({rank for rank, _, _ in suspects})
    rows = [row for _, _, row_ids in suspects for row in row_ids]
    found = (f"step {launched.number}: loss {objective}, gradient norm {grad_norm}; on ranks {ranks}, "
             f"rows {', '.join(rows)}. ")
    if state.skipped_steps == limit:
        raise NonFiniteError(f"{found}Lower optim.lr or look at these rows; the last checkpoint is from before this "
                             f"step (trainer.skip_non_finite={limit} such steps may be skipped)")
    state.skipped_steps += 1
    report(run, f"{found}Skipped, {state.skipped_steps} of at most {limit}")


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
