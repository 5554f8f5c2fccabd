"""How fast an engine writes responses: tokens/s, hours for a data set, and how long the GPU idles.

    python scripts/bench_generate.py +experiment=smollm2_135m generation=greedy generation.samples_per_prompt=1 \\
        generation.num_prompts=2048 generation.max_new_tokens=256

Prompts are those of ``generation.prompt_files`` (or of the quickstart), repeated until there are
``generation.num_prompts`` (512). No token stops a response, so every prompt gets ``generation.max_new_tokens`` and two
runs compare. A first pass over all prompts is not counted: it compiles and captures. The hours are those of the answers
that data_gen/main.py would be asked for: to all prompts of the files and ``generation.magpie_prompts``, each
``generation.samples_per_prompt`` times; at most, because an answer that ends before ``generation.max_new_tokens`` takes
less. The engine of this process is timed again with attention under masks, as wide as the longest slot, instead of the
kernel that reads each slot's own columns (kernels/specvocab_kernels/slot_attention), a step of both by number of slots;
with ``--compiled-layers`` also with the target's layers compiled (specvocab_model/compiled_layers.py). Writes
``output_dir/bench_generate.json``. ``scripts/bench_data_gen.py`` times the whole command.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from specvocab_kernels.timing import median_ms

from data_gen.chat import encode_prompt
from data_gen.engines import ContinuousEngine, Engine, Rejected, SamplingParams, build_engine
from data_gen.engines.continuous_engine import CAPACITY_STEP, CHECK_EVERY
from data_gen.engines.slots import Slots
from data_gen.prompts import load_prompts
from data_gen.utilisation import QUICKSTART_PROMPTS, gpu_utilisation
from specvocab_model.cli import hydra_main
from specvocab_model.config import Config, ConfigError
from specvocab_model.target import load_spec_and_tokenizer

COMPILED = "--compiled-layers"  # an option beside Hydra's overrides
NUM_PROMPTS = 512
NUM_SLOTS = (32, 128, 512, 1024)  # of the steps that are timed
PROMPT_TOKENS = 80  # of each of these slots


def main() -> None:
    also_compiled = COMPILED in sys.argv
    sys.argv = [argument for argument in sys.argv if argument != COMPILED]

    @hydra_main
    def command(config: Config) -> None:
        """As the module says."""
        bench(config, also_compiled)

    command()


def bench(config: Config, also_compiled: bool) -> None:
    """
    Raises:
        ConfigError: what cannot be measured.
    """
    on_gpu = torch.cuda.is_available() and not config.distributed.cpu
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    prompts = prompts_of(config)  # first: what is wrong with them is said before anything is loaded
    engine = build_engine(config, device)
    if also_compiled and not isinstance(engine, ContinuousEngine):
        raise ConfigError(f"{COMPILED} is for generation.engine=transformers on a GPU, and this is "
                          f"{type(engine).__name__}; leave it out")
    result = measure(config, engine, prompts)
    if isinstance(engine, ContinuousEngine) and engine.own_columns:
        result["step_ms"] = step_times(config, engine)
        masked = measure(config, with_masks(engine), prompts)
        result["masked_attention_tokens_per_second"] = masked["tokens_per_second"]
    if also_compiled and isinstance(engine, ContinuousEngine):
        compiled = measure(config, with_compiled_layers(engine), prompts)
        result["compiled_layers_tokens_per_second"] = compiled["tokens_per_second"]
    result |= {"device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
               "torch": torch.__version__, "target": config.target.model, "engine": config.generation.engine}
    path = Path(config.output_dir) / "bench_generate.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(f"{name.replace('_', ' '):<28}{value}" for name, value in result.items()))


def prompts_of(config: Config) -> list[list[int]]:
    """Prompts as token ids.

    Raises:
        ConfigError: the chat template refuses one, or all are longer than ``generation.max_prompt_tokens``.
    """
    _, tokenizer = load_spec_and_tokenizer(config.target)
    files = config.generation.prompt_files or [str(QUICKSTART_PROMPTS)]
    limit = config.generation.max_prompt_tokens
    fitting = []
    for prompt in (prompt for file in files for prompt in load_prompts(file)):
        try:
            ids = encode_prompt(tokenizer, prompt.conversation(), config.target.chat_template_kwargs, prompt.tools)
        except ValueError as error:
            raise ConfigError(f"prompt {prompt.id!r} cannot be put to {config.target.model}: {error}; leave it out"
                              ) from error
        if len(ids) <= limit:
            fitting.append(ids)
    if not fitting:
        raise ConfigError(f"all prompts have more than generation.max_prompt_tokens={limit} tokens; raise it")
    return list(islice(cycle(fitting), config.generation.num_prompts or NUM_PROMPTS))


def step_times(config: Config, engine: ContinuousEngine, repeats: int = 5) -> dict[str, dict[str, float]]:
    """Milliseconds of a step on a GPU, by number of slots: with each slot's own columns, and under masks.

    Slots hold prompts of ``PROMPT_TOKENS`` and anything from none to all of ``generation.max_new_tokens``.
    """
    generation = config.generation
    params = SamplingParams(max_new_tokens=generation.max_new_tokens, stop_token_ids=(),
                            temperature=generation.temperature, top_k=generation.top_k, top_p=generation.top_p)
    num_tokens = PROMPT_TOKENS + params.max_new_tokens + (repeats + 1) * CHECK_EVERY
    capacity = -(-num_tokens // CAPACITY_STEP) * CAPACITY_STEP
    engine.drop_slots()
    times: dict[str, dict[str, float]] = {}
    for num_slots in NUM_SLOTS:
        for name, own_columns in (("own columns", True), ("masks", False)):
            slots = Slots(engine.target, params, num_slots=num_slots, capacity=capacity, own_columns=own_columns)
            slots.hold(PROMPT_TOKENS + torch.linspace(0, params.max_new_tokens - 1, num_slots).long())
            took = median_ms(partial(slots.steps, CHECK_EVERY), repeats, on_gpu=engine.target.device.type == "cuda")
            times.setdefault(str(num_slots), {})[name] = round(took / CHECK_EVERY, 2)
            del slots
            engine.drop_slots()
    return times


def with_masks(engine: ContinuousEngine) -> ContinuousEngine:
    """The same engine, attention under masks. The old one gives its slots up, and is done with."""
    engine.drop_slots()
    other = ContinuousEngine(engine.target, batch_tokens=engine.batch_tokens)
    other.own_columns = False
    return other


def with_compiled_layers(engine: ContinuousEngine) -> ContinuousEngine:
    """The same engine, whose target's layers are compiled. The old one gives its slots up, and is done with."""
    engine.drop_slots()
    return ContinuousEngine(engine.target.with_compiled_layers(), batch_tokens=engine.batch_tokens)


def num_answers(config: Config) -> int:
    """How many answers the configuration's prompt files and Magpie ask for, before any prompt is left out."""
    generation = config.generation
    num_prompts = sum(len(load_prompts(file)) for file in generation.prompt_files) + generation.magpie_prompts
    return num_prompts * generation.samples_per_prompt


def measure(config: Config, engine: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens/s and what follows from them, as a flat dict of JSON values.

    Raises:
        ConfigError: the engine rejected a prompt.
    """
    generation = config.generation
    params = SamplingParams(max_new_tokens=generation.max_new_tokens, stop_token_ids=(),
                            temperature=generation.temperature, top_k=generation.top_k, top_p=generation.top_p)
    for _ in engine.generate(prompts, params, seed=0):  # captures what the measured pass replays
        pass
    with gpu_utilisation() as samples:
        start = time.perf_counter()
        completions = [completion for _, completion in engine.generate(prompts, params, seed=1)]
        seconds = time.perf_counter() - start
    if rejected := [completion for completion in completions if isinstance(completion, Rejected)]:
        raise ConfigError(f"{len(rejected)} of {len(prompts)} prompts have no answer: {rejected[0].detail}")
    tokens = len(prompts) * params.max_new_tokens
    wanted = num_answers(config) or len(prompts)
    return {
        "num_prompts": len(prompts),
        "mean_prompt_tokens": round(sum(map(len, prompts)) / len(prompts), 1),
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "generated_tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "data_set_answers": wanted,
        "data_set_hours_at_most": round(wanted * params.max_new_tokens / (tokens / seconds) / 3600, 4),
        "gpu_idle_share": round(1 - sum(samples) / len(samples), 3) if samples else None,
    }


if __name__ == "__main__":
    main()
