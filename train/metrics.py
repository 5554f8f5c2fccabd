"""Throughput of training: tokens per second, model FLOPs utilisation, peak memory."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specvocab_model.draft import SpecVocabDraft
from specvocab_model.target import Target

# Dense bf16 tensor-core peaks in FLOP/s, by a part of torch.cuda.get_device_name(); data sheets of the makers.
PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
}


def peak_flops(device: torch.device) -> float | None:
    """Peak of one device, or None where it is not known (then no MFU is reported)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory this rank has had allocated: of the GPU by torch, on the CPU the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts in KiB


def count_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """FLOPs that one optimizer step needs, 2 per multiply-add; attention scores and recomputation are left out.

    The frozen target runs forward (2 per parameter and token), the draft forward and backward (6; ``fc`` 4, because
    the target's features get no gradient). Prompt positions only leave a key at step 0, and what the draft's attention
    projects of a token is the same at every step (see ``unroll.unroll``). Output embeddings cost 2 V d for the
    teacher's row, and for every student row 2 V d forward and 2 V d back to the hidden state: the embedding gets no
    gradient. Left out is the product that makes a tied ``vocab_proj``, once a micro-batch: as much as r more rows of
    the student, of tens of thousands.
    """

    target_body: int  # parameters of the target without its two embeddings
    fuse: int  # of fc: used once a token
    projections: int  # of the halves of q, k, v that read the token: used once a token; as many read the hidden state
    rest: int  # of o_proj and the MLP: used at every unrolled position of every step
    lm_head: int  # V * d
    speculator: int  # r * (d + V)
    own_head: int = 0  # D * d, of a static head: it takes the place of lm_head for the student, and is trained

    @classmethod
    def of(cls, target: Target, model: SpecVocabDraft) -> FlopsModel | None:
        """None for mixture-of-experts targets: how many of their parameters a token uses is not in the spec."""
        if target.spec.model_type.endswith("_moe"):
            return None
        embedding = target.model.get_input_embeddings().weight.numel()
        target_body = count_parameters(target.model.get_decoder()) - embedding
        return cls.of_draft(model, target.lm_head_weight, target_body)

    @classmethod
    def of_draft(cls, model: SpecVocabDraft, lm_head_weight: Tensor, target_body: int) -> FlopsModel:
        """``target_body`` is 0 where the target does not run."""
        layer = model.draft.midlayer
        attention = layer.self_attn
        return cls(
            target_body=target_body,
            fuse=count_parameters(model.draft.fc),
            projections=sum(map(count_parameters, (attention.q_proj, attention.k_proj, attention.v_proj))) // 2,
            rest=count_parameters(attention.o_proj) + count_parameters(layer.mlp),
            lm_head=lm_head_weight.numel(),
            speculator=0 if model.speculator is None else model.speculator.num_multiplications,
            own_head=0 if model.own_head is None else count_parameters(model.own_head),
        )

    def step(self, num_tokens: int, num_unrolled: int, valid_counts: Tensor) -> float:
        """FLOPs of an optimizer step.

        Args:
            num_tokens: without padding.
            num_unrolled: positions that every step is computed at (``unroll.UnrolledPositions``).
            valid_counts: [S], of ``losses.valid_counts``.
        """
        steps, pairs = len(valid_counts), float(valid_counts.sum())
        per_token = 2 * self.target_body + 4 * self.fuse + 6 * 2 * self.projections  # step 0 projects every position
        per_unrolled = 6 * (self.rest * steps + self.projections * (steps - 1))
        student = 6 * self.own_head if self.own_head else 4 * self.lm_head
        heads = float(valid_counts[0]) * 2 * self.lm_head + pairs * (student + 6 * self.speculator)
        return num_tokens * per_token + num_unrolled * per_unrolled + heads


@dataclass(slots=True)
class IntervalMeter:
    """What happened since the last log line. Validation and saving are left out by ``restart_clock``."""

    flops_model: FlopsModel | None
    peak: float | None  # FLOP/s of all ranks together
    steps: int = 0
    seconds: float = 0.0
    objective: float = 0.0
    tokens: int = 0
    valid_tokens: int = 0
    flops: float = 0.0
    _clock: float = field(default_factory=time.perf_counter)

    def restart_clock(self) -> None:
        self._clock = time.perf_counter()

    def update(self, objective: float, num_tokens: int, num_unrolled: int, valid_counts: Tensor) -> None:
        """One optimizer step; all arguments are totals over all ranks."""
        now = time.perf_counter()
        self.seconds += now - self._clock
        self._clock = now
        self.steps += 1
        self.objective += objective
        self.tokens += num_tokens
        self.valid_tokens += int(valid_counts[0])
        if self.flops_model is not None:
            self.flops += self.flops_model.step(num_tokens, num_unrolled, valid_counts)

    def flush(self) -> dict[str, float]:
        """Means and rates of the interval, which starts anew."""
        metrics = {
            "train/objective": self.objective / self.steps,
            "perf/seconds_per_step": self.seconds / self.steps,
            "perf/tokens_per_second": self.tokens / self.seconds,
            "perf/valid_tokens_per_second": self.valid_tokens / self.seconds,
        }
        if self.flops_model is not None and self.peak is not None:
            metrics["perf/mfu"] = self.flops / self.seconds / self.peak
        self.steps = self.tokens = self.valid_tokens = 0
        self.seconds = self.objective = self.flops = 0.0
        return metrics
