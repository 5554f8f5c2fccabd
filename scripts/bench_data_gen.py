"""How fast the whole of data_gen/main.py writes answers, and how long the GPU waits for it.

    python scripts/bench_data_gen.py +experiment=smollm2_135m generation=greedy generation.samples_per_prompt=1 \\
        'generation.prompt_files=[PROMPTS.jsonl]' generation.magpie_prompts=0

Writes into a folder that it removes afterwards. Without a GPU the engine's loop is the real one, but its slots decode
nothing: steps take ``STEP_MS`` for ``MOST_SLOTS`` slots, answers are words of the prompts, and the share of time in
which no step was queued is what the loop, the tokenizer and the files cost a GPU. Prompts are repeated until there are
``generation.num_prompts`` (2800) then. Writes ``output_dir/bench_data_gen.json``.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor

from data_gen.answers import AnswerWriter
from data_gen.engines import ContinuousEngine, SamplingParams, continuous_engine
from data_gen.engines.slots import Look
from data_gen.main import generate
from data_gen.prompts import load_prompts
from data_gen.shards import Manifest
from data_gen.stage import Stage, StageRunner
from data_gen.utilisation import QUICKSTART_PROMPTS, gpu_utilisation
from specvocab_model.cli import hydra_main
from specvocab_model.config import Config

NUM_PROMPTS = 2800
STEP_MS = 11.5  # of MOST_SLOTS slots; SmolLM2-135M on an H200 with 512 to 768 columns
LAUNCH_MS, PREFILL_MS = 5.0, 2.0  # of the prompts that are admitted together: of the host, then of the GPU
ANSWER_TOKENS = 320  # on average


class TimedRunner(StageRunner):
    """Notes how long each stage takes, the engine loaded before."""

    def __init__(self, config: Config, state: PartialState) -> None:
        super().__init__(config, state)
        self.stages: dict[str, dict[str, float]] = {}

    def run(self, stage: Stage) -> Manifest:
        start, cpu = time.perf_counter(), time.process_time()
        manifest = super().run(stage)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        self.stages[stage.name] = {
            "prompts": manifest.num_prompts, "response_tokens": manifest.num_loss_tokens, "seconds": round(seconds, 2),
            "tokens_per_second": round(manifest.num_loss_tokens / seconds),
            "host_cpu_ms_a_prompt": round(1e3 * cpu / max(manifest.num_prompts, 1), 3),
        }
        return manifest


@dataclass
class SimulatedGPU:
    """When it will have done what it was given."""

    done_at: float = 0.0
    idle_seconds: float = 0.0

    def give(self, seconds: float) -> None:
        now = time.perf_counter()
        if self.done_at:
            self.idle_seconds += max(0.0, now - self.done_at)
        self.done_at = max(now, self.done_at) + seconds


@dataclass
class Moment:
    """An event of the simulated GPU."""

    at: float

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))


class SimulatedSlots:
    """What ``Slots`` looks like from outside."""

    def __init__(
        self, gpu: SimulatedGPU, words: Tensor, stop: int, params: SamplingParams, num_slots: int, capacity: int
    ) -> None:
        self.gpu, self.words, self.stop, self.params = gpu, words, stop, params
        self.num_slots, self.capacity = num_slots, capacity
        self.random = np.random.default_rng(0)
        self.counts, self.lengths = torch.zeros(2, num_slots, dtype=torch.int64)
        self.written = torch.zeros(num_slots, params.max_new_tokens, dtype=torch.int64)

    def release(self, slots: list[int]) -> None:
        """Nothing is remembered of them."""

    def admit(self, slots: list[int], prompts: list[list[int]], uniforms: Tensor) -> None:
        time.sleep(LAUNCH_MS / 1e3)
        self.gpu.give(PREFILL_MS / 1e3)
        limit = self.params.max_new_tokens
        self.lengths[slots] = torch.from_numpy(self.random.gamma(2.2, ANSWER_TOKENS / 2.2, len(slots)).astype(int) + 4)
        starts = torch.from_numpy(self.random.integers(0, len(self.words) - limit, len(slots)))
        self.written[slots] = self.words[starts[:, None] + torch.arange(limit)]
        short = torch.tensor(slots)[self.lengths[slots] <= limit]
        self.written[short, self.lengths[short] - 1] = self.stop
        self.lengths.clamp_(max=limit)
        self.counts[slots] = 1

    def steps(self, count: int) -> Look:
        self.gpu.give(count * STEP_MS / 1e3 * self.num_slots / continuous_engine.MOST_SLOTS)
        self.counts = torch.minimum(self.counts + count, self.lengths)
        moment: Any = Moment(self.gpu.done_at)
        return Look(self.counts >= self.lengths, self.counts.clone(), self.written.clone(), moment)


class SimulatedEngine(ContinuousEngine):
    """The loop of the engine, over slots that decode nothing."""

    def __init__(self, make: Any) -> None:
        self._make = make
        self.batch_tokens = 2**30
        self._slots = None
        self._tried = self._num_tokens = 0

    def _new_slots(self, params: SamplingParams, num_slots: int, capacity: int) -> Any:
        return self._make(params, num_slots, capacity)


@hydra_main
def main(config: Config) -> None:
    output = Path(config.output_dir)
    folder = output / "bench_data_gen"
    shutil.rmtree(folder, ignore_errors=True)
    config.data.train_path, config.data.validation_path = str(folder / "train"), str(folder / "validation")
    on_gpu = torch.cuda.is_available() and not config.distributed.cpu
    runner = TimedRunner(config, PartialState(cpu=not on_gpu))
    try:
        result = measured(runner) if on_gpu else simulated(runner, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    (output / "bench_data_gen.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def measured(runner: TimedRunner) -> dict[str, Any]:
    """On the GPU; idle from when it first runs a kernel of the stages to when it last does."""
    _ = runner.engine
    with gpu_utilisation() as samples:
        generate(runner)
    busy = [place for place, share in enumerate(samples) if share > 0]
    used = samples[busy[0] : busy[-1] + 1] if busy else []
    return {"device": torch.cuda.get_device_name(), "stages": runner.stages,
            "gpu_idle_share": round(1 - sum(used) / len(used), 3) if used else None}


def simulated(runner: TimedRunner, folder: Path) -> dict[str, Any]:
    """One stage of answers with a GPU that decodes nothing."""
    config, generation = runner.config, runner.config.generation
    chosen = [prompt for file in generation.prompt_files or [str(QUICKSTART_PROMPTS)] for prompt in load_prompts(file)]
    prompts = [replace(chosen[number % len(chosen)], id=f"{number:06d}", follow_ups=())
               for number in range(generation.num_prompts or NUM_PROMPTS)]
    text = " ".join(str(message["content"]) for prompt in chosen for message in prompt.messages)
    words = torch.tensor(runner.tokenizer(text, add_special_tokens=False)["input_ids"])
    stop_token_ids = runner.spec.eos_token_ids
    words = words[~torch.isin(words, torch.tensor(stop_token_ids))]
    words = words.repeat(2 + generation.max_new_tokens // len(words))
    gpu = SimulatedGPU()
    runner.__dict__["engine"] = SimulatedEngine(partial(SimulatedSlots, gpu, words, stop_token_ids[0]))
    start = time.perf_counter()
    runner.run(Stage(
        name="simulated", folder=folder, prompts=prompts, prompts_sha256="", stop_token_ids=stop_token_ids,
        write=partial(AnswerWriter, config, runner.tokenizer),
        params=SamplingParams(max_new_tokens=generation.max_new_tokens, stop_token_ids=stop_token_ids),
    ))
    return {"device": f"simulated, {STEP_MS} ms a step", "stages": runner.stages,
            "gpu_idle_share": round(gpu.idle_seconds / (time.perf_counter() - start), 3)}


if __name__ == "__main__":
    main()
