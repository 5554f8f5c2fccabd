"""Everything a training run consists of, built from its configuration."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from accelerate import Accelerator
from accelerate.utils import broadcast, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from data_gen.shards import MANIFEST_FILE, supervised_ids
from specvocab_model.config import Config
from specvocab_model.draft import SpecVocabDraft, TrainOutput
from specvocab_model.losses import Objective
from specvocab_model.target import Target
from specvocab_model.vocab import VocabMap, count_ids, most_frequent, special_ids
from train.checkpoint import Checkpoints, TrainState
from train.identity import run_identity
from train.launch import build_accelerator, host_sum, limit_cpu_threads
from train.memory import MemoryEstimate, describe_step, resident_bytes
from train.metrics import FlopsModel, IntervalMeter, peak_flops
from train.optim import Updater, build_optimizer
from train.packing import Batch
from train.sharded_target import load_sharded
from train.target_outputs import TargetOutputs
from train.tracking import Tracker
from train.training_data import build_loader, calibration_states, open_data


@dataclass(slots=True, kw_only=True)
class Run:
    """A training run, ready for ``loop.train``."""

    config: Config
    accelerator: Accelerator
    target: Target
    target_outputs: TargetOutputs
    model: nn.Module  # SpecVocabDraft, wrapped by DDP or DeepSpeed
    objective: Objective
    updater: Updater
    sum_over_ranks: Callable[[Tensor], Tensor]  # of tensors on the CPU, see launch.host_sum
    train_loader: DataLoader
    validation_loader: DataLoader
    steps_per_epoch: int
    total_steps: int
    checkpoints: Checkpoints
    state: TrainState
    tracker: Tracker
    meter: IntervalMeter
    data_sha256: str

    @property
    def num_unroll_steps(self) -> int:
        return self.config.draft.num_unroll_steps

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    def forward(
        self, batch: Batch, step_weights: Tensor, *, collect: bool, collect_drafts: bool = False
    ) -> TrainOutput:
        """Target, then draft, on one micro-batch; ``step_weights`` [S] on the device."""
        on_cpu, batch = batch, batch.to(self.accelerator.device)
        output = self.target_outputs.of(on_cpu, batch)
        dtype = torch.bfloat16 if self.config.trainer.mixed_precision == "bf16" else torch.float32
        return self.model(
            features=output.features.to(dtype),
            final_hidden=output.final_hidden,
            token_embeds=self.target.embed(batch.input_ids).to(dtype),
            lm_head_weight=self.target.lm_head_weight,
            position_ids=batch.position_ids,
            document_ids=batch.document_ids,
            loss_mask=batch.loss_mask,
            step_weights=step_weights,
            objective=self.objective,
            collect=collect,
            collect_drafts=collect_drafts,
            plan=batch.plan,
        )

    def record(self, metrics: dict[str, float]) -> dict[str, Any]:
        """What ``final/training.json`` says about the run."""
        return {
            "step": self.state.step,
            "metrics": metrics,
            "config": asdict(self.config),
            "target_fingerprint": self.target.spec.fingerprint,
            "data_manifest_sha256": self.data_sha256,
            "git_commit": git_commit(),
        }


def build_run(config: Config) -> Run:
    """Load the target and the data, build the draft, and resume where an earlier run of this name stopped.

    Raises:
        ConfigError: launcher and configuration disagree, or the checkpoint belongs to another configuration.
    """
    accelerator = build_accelerator(config)
    set_seed(config.seed)
    target = load_target(config, accelerator)
    target_outputs = TargetOutputs(
        target, keep=config.trainer.cache_target, together=config.distributed.shard_target,
        shape=(config.trainer.micro_batch_size, config.data.seq_len))
    data_sha256 = hashlib.sha256((Path(config.data.train_path) / MANIFEST_FILE).read_bytes()).hexdigest()
    checkpoints = build_checkpoints(config, accelerator, target, data_sha256)
    resume_from = checkpoints.find() if config.trainer.resume else None
    train_data, train_pieces = open_data(config, accelerator, target, training=True)
    validation_data = open_data(config, accelerator, target, training=False)
    if resume_from is None:
        checkpoints.discard()
    states = None if resume_from else calibration_states(config, train_data, train_pieces, target_outputs)
    model = build_model(config, accelerator, target, states)
    if resume_from is None and model.own_head is not None:
        model.own_head.initialise(choose_vocabulary(config, accelerator, target), target.lm_head_weight)
    if resume_from is not None and accelerator.is_main_process:
        checkpoints.load_weights(resume_from, model)
    synchronise(model)
    estimate = MemoryEstimate.of(config, model, resident_bytes(target, config), accelerator.num_processes)
    flops_model, peak = FlopsModel.of(target, model), peak_flops(accelerator.device)
    prepared, optimizer = accelerator.prepare(model, build_optimizer(model, config.optim))
    updater = Updater(accelerator, prepared, optimizer, config.optim.max_grad_norm)
    state = TrainState() if resume_from is None else checkpoints.restore(resume_from, updater)

    train_loader, sampler = build_loader(config, accelerator, train_data, train_pieces, training=True)
    validation_loader, _ = build_loader(config, accelerator, *validation_data, training=False)
    total_steps = config.trainer.max_steps or config.trainer.num_epochs * sampler.steps_per_epoch
    sampler.first_step, sampler.num_steps = state.step, total_steps
    if accelerator.is_main_process:
        print(describe_step(config, accelerator.num_processes, sampler.steps_per_epoch, total_steps,
                            sampler.padding))
        print(estimate.describe(accelerator.device), flush=True)
        if accelerator.device.type == "cuda" and config.data.features_path is None:
            print(target_outputs.describe(), flush=True)
    tracker = build_tracker(config, accelerator, state, target, data_sha256)
    limit_cpu_threads(accelerator.device)  # last: a target is loaded, and cast, faster with several
    return Run(
        config=config,
        accelerator=accelerator,
        target=target,
        target_outputs=target_outputs,
        model=prepared,
        objective=build_objective(config, target),
        updater=updater,
        sum_over_ranks=host_sum(accelerator, config.distributed.timeout_s),
        train_loader=train_loader,
        validation_loader=validation_loader,
        steps_per_epoch=sampler.steps_per_epoch,
        total_steps=total_steps,
        checkpoints=checkpoints,
        state=state,
        tracker=tracker,
        meter=IntervalMeter(flops_model, None if peak is None else peak * accelerator.num_processes),
        data_sha256=data_sha256,
    )


def load_target(config: Config, accelerator: Accelerator) -> Target:
    if config.distributed.shard_target:
        return load_sharded(config.target, accelerator, config.draft.feature_layers)
    return Target.load(config.target, device=accelerator.device, feature_layers=config.draft.feature_layers,
                       decoder=config.data.features_path is None)


def build_checkpoints(config: Config, accelerator: Accelerator, target: Target, data_sha256: str) -> Checkpoints:
    identity = run_identity(config, world_size=accelerator.num_processes, device_type=accelerator.device.type,
                            target_fingerprint=target.spec.fingerprint, data_sha256=data_sha256)
    return Checkpoints(Path(config.output_dir), accelerator, keep=config.trainer.keep_checkpoints,
                       keep_best=config.trainer.keep_best, identity=identity)


def build_model(
    config: Config, accelerator: Accelerator, target: Target, states: Iterator[Tensor] | None
) -> SpecVocabDraft:
    """The draft in fp32 on the device; its forward runs under ``trainer.mixed_precision``.

    Args:
        states: of ``calibration_states``, for setting the speculator as ``head.init`` says; None where a checkpoint
            follows. Rank 0 sets it; the others only where a sharded target needs them to compute the states.
    """
    model = SpecVocabDraft.build(target.spec, config.draft, config.head).for_training().to(accelerator.device)
    computes = accelerator.is_main_process or config.distributed.shard_target
    if states is not None and model.speculator is not None and computes:
        generator = torch.Generator(accelerator.device).manual_seed(config.seed)
        model.speculator.initialise(config.head.init, target.lm_head_weight, states, generator)
    # Inside the module, because DeepSpeed's engine switches off an autocast that surrounds it.
    autocast = torch.autocast(accelerator.device.type, torch.bfloat16, enabled=config.trainer.mixed_precision == "bf16")
    model.forward = autocast(model.forward)  # type: ignore[method-assign]
    return model


@torch.no_grad()
def synchronise(model: SpecVocabDraft) -> None:
    """Rank 0's weights on all ranks, and the tokens that a static head has them for."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.copy_(broadcast(tensor.data))


def choose_vocabulary(config: Config, accelerator: Accelerator, target: Target) -> VocabMap:
    """The tokens of a static head: special ones, and the most frequent of the answers in the training data.

    Every rank counts for itself, so that all of them stop where it cannot be done.

    Raises:
        ConfigError: ``head.draft_vocab_size`` has no room for the special ones, or no token is supervised.
    """
    vocab_size = target.spec.vocab_size
    always_keep = special_ids(target.tokenizer, target.spec.eos_token_ids, vocab_size)
    counts = count_ids(supervised_ids(config.data.train_path), vocab_size)
    vocab = most_frequent(counts, config.head.draft_vocab_size, always_keep)
    share = int(counts[vocab.ids].sum()) / int(counts.sum())
    if accelerator.is_main_process:
        print(f"static head: {len(vocab)} of {vocab_size} tokens, which are {share:.2%} of the answers' tokens")
    return vocab


def build_objective(config: Config, target: Target) -> Objective:
    trainer = config.trainer
    return Objective(
        loss=trainer.loss,
        aux_weight=trainer.aux_weight,
        step_decay=trainer.step_decay,
        temperature=trainer.temperature,
        max_bytes=trainer.loss_memory_mib * 2**20,
        logit_scale=target.spec.logit_scale,
        logit_softcap=target.spec.logit_softcap,
    )


def build_tracker(
    config: Config, accelerator: Accelerator, state: TrainState, target: Target, data_sha256: str
) -> Tracker:
    """Start (or continue) tracking and save the resolved configuration, on rank 0."""
    output_dir, settings = Path(config.output_dir), asdict(config)
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    tracker = Tracker(
        config.tracking,
        name=config.run_name,
        output_dir=output_dir,
        run_id=state.tracker_run_id,
        first_step=state.step + 1,
        settings=settings,
        provenance={
            "git_commit": git_commit(),
            "target_fingerprint": target.spec.fingerprint,
            "data_manifest_sha256": data_sha256,
            "num_ranks": accelerator.num_processes,
            "device": torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "cpu",
            "torch": str(torch.__version__),  # yaml writes no subclass of str
            "transformers": transformers.__version__,
        },
        is_main=accelerator.is_main_process,
    )
    state.tracker_run_id = tracker.run_id
    return tracker


def git_commit() -> str | None:
    """Commit of the checkout this file is in; None when it is not in one."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on this machine
        return None
    return result.stdout.strip() if result.returncode == 0 else None
