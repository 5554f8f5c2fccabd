"""Slots that are refilled write what each prompt alone would, token for token, in every kind of target."""

import random

import pytest
import torch
from specvocab_kernels.slot_attention import slot_attention

from data_gen.engines import Batch, Completion, SamplingParams, TransformersEngine
from data_gen.engines import continuous_engine as continuous_module
from data_gen.engines import slots as slots_module
from data_gen.engines.continuous_engine import ContinuousEngine, Queue
from specvocab_model.config import ConfigError
from tests.tiny import EOS_IDS, KINDS, tiny_target

BIG = 10**6


@pytest.fixture(scope="module", params=KINDS)
def target(request, tmp_path_factory):
    return tiny_target(request.param, tmp_path_factory.mktemp("continuous"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_target("llama", tmp_path_factory.mktemp("continuous"))


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(slots_module, "SMALLEST_WIDTH", 8)  # so that tiny runs see several widths
    monkeypatch.setattr(slots_module, "PREFILL_TOKENS", 60)  # and several prefills
    monkeypatch.setattr(continuous_module, "CAPACITY_STEP", 16)


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def run(engine, prompts, params, seed=0) -> list[Completion]:
    finished = list(engine.generate(prompts, params, seed=seed))
    assert sorted(index for index, _ in finished) == list(range(len(prompts)))
    return [completion for _, completion in sorted(finished, key=lambda pair: pair[0])]


def test_greedy_equals_one_prompt_at_a_time(target):
    prompts, params = random_prompts(12), SamplingParams(max_new_tokens=24, stop_token_ids=EOS_IDS)
    expected = run(TransformersEngine(target, batch_tokens=1), prompts, params)
    assert {completion.finish_reason for completion in expected} == {"stop", "length"}
    for batch_tokens in (BIG, 240):  # all at once; five slots
        for own_columns in (True, False):
            engine = ContinuousEngine(target, batch_tokens=batch_tokens)
            assert engine.own_columns == (target.model.config._attn_implementation != "eager")
            engine.own_columns &= own_columns
            assert run(engine, prompts, params) == expected


def test_the_kernel_writes_what_plain_torch_does(target, monkeypatch):
    """In Triton's interpreter where there is no GPU."""
    if target.model.config._attn_implementation == "eager":
        pytest.skip("attention that is not switched has no kernel")
    monkeypatch.setattr(continuous_module, "CHECK_EVERY", 1)  # no step in vain: the interpreter is slow
    monkeypatch.setattr(continuous_module, "LOOKS_AHEAD", 0)
    prompts, params = [[5] * 9, [6] * 3], SamplingParams(max_new_tokens=4, stop_token_ids=())
    expected = run(TransformersEngine(target, batch_tokens=1), prompts, params)
    calls = []

    def by_kernel(*arguments) -> torch.Tensor:
        calls.append(arguments)
        return slot_attention(*arguments, impl="triton")

    monkeypatch.setattr("data_gen.engines.grouped_attention.slot_attention", by_kernel)
    assert run(ContinuousEngine(target, batch_tokens=BIG), prompts, params) == expected
    assert calls


def test_one_engine_serves_different_calls(llama):
    engine, alone = ContinuousEngine(llama, batch_tokens=200), TransformersEngine(llama, batch_tokens=1)
    for count, limit, stops in ((9, 12, EOS_IDS), (2, 12, EOS_IDS), (9, 20, EOS_IDS), (5, 20, ()), (3, 1, ())):
        params = SamplingParams(max_new_tokens=limit, stop_token_ids=stops)
        prompts = random_prompts(count, seed=count)
        assert run(engine, prompts, params) == run(alone, prompts, params)
    assert run(engine, [], params) == []


def test_the_seed_and_the_place_decide_what_is_drawn(llama):
    prompts = random_prompts(10, seed=3)
    params = SamplingParams(max_new_tokens=16, stop_token_ids=EOS_IDS, temperature=0.9, top_k=50, top_p=0.9)
    first = run(ContinuousEngine(llama, batch_tokens=BIG), prompts, params, seed=5)
    assert run(ContinuousEngine(llama, batch_tokens=90), prompts, params, seed=5) == first, "slots do not matter"
    assert run(ContinuousEngine(llama, batch_tokens=BIG), prompts, params, seed=6) != first


def test_sampled_tokens_follow_the_distribution(llama, monkeypatch):
    monkeypatch.setattr(slots_module, "PREFILL_TOKENS", 10**5)
    prompt = random_prompts(1, seed=7)
    params = SamplingParams(max_new_tokens=1, stop_token_ids=(), temperature=0.8, top_k=5)
    completions = run(ContinuousEngine(llama, batch_tokens=BIG), prompt * 2000, params)
    drawn = torch.bincount(torch.tensor([completion.token_ids[0] for completion in completions]), minlength=277) / 2000
    hidden = llama.forward(torch.tensor(prompt)).final_hidden[:, -1]
    logits = llama.logits(hidden)[0].double() / 0.8
    kept = logits.topk(5).indices
    expected = torch.zeros_like(logits).index_copy(0, kept, logits[kept].softmax(0))
    assert (drawn - expected).abs().sum() / 2 < 0.04


def fail_above(num_slots: int, monkeypatch):
    def step(self):
        if self.num_slots > num_slots:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self)

    original = slots_module.Slots._step
    monkeypatch.setattr(slots_module.Slots, "_step", step)


def test_out_of_memory_halves_the_slots_and_loses_nothing(llama, monkeypatch, capfd):
    prompts, params = random_prompts(12, seed=2), SamplingParams(max_new_tokens=10, stop_token_ids=EOS_IDS)
    expected = run(TransformersEngine(llama, batch_tokens=1), prompts, params)
    fail_above(4, monkeypatch)
    engine = ContinuousEngine(llama, batch_tokens=BIG)
    assert run(engine, prompts, params) == expected
    said = capfd.readouterr().err.splitlines()
    tokens = max(map(len, prompts)) + 10
    assert said == [f"out of memory with room for {size} prompts at a time; going on with {half}, nothing is lost. "
                    f"generation.batch_tokens={half * tokens} starts like that" for size, half in ((12, 6), (6, 3))]
    assert run(engine, prompts, params) == expected
    assert capfd.readouterr().err == "", "what was learnt is kept"


def test_no_memory_for_one_prompt_ends_the_command(llama, monkeypatch):
    fail_above(0, monkeypatch)
    params = SamplingParams(max_new_tokens=10, stop_token_ids=())
    prompts = random_prompts(3)
    with pytest.raises(ConfigError, match=rf"with one prompt at a time, of {max(map(len, prompts)) + 10} tokens with "
                                          r"its answer; lower generation\.max_prompt_tokens"):
        run(ContinuousEngine(llama, batch_tokens=BIG), prompts, params)


def test_slots_kept_from_a_larger_call_are_given_up_before_the_command_ends(llama, monkeypatch, capfd):
    """One prompt is wanted, and there is no memory because there still is room for nine."""
    params = SamplingParams(max_new_tokens=10, stop_token_ids=())
    engine, prompts = ContinuousEngine(llama, batch_tokens=BIG), random_prompts(9)
    expected = run(engine, prompts, params)
    fail_above(4, monkeypatch)
    assert run(engine, prompts[:1], params) == expected[:1]
    assert capfd.readouterr().err.startswith("out of memory with room for 9 prompts at a time; going on with 4")


# ---- several batches ----


def stream(engine, batches: list[Batch], params, *, follow=lambda batch: None):
    """Completions of each batch, and what happened in order: batches taken ("+") and batches done ("-").

    Args:
        follow: the batch that comes when this one is done.
    """
    events: list[str] = []
    coming = list(batches)
    numbers = {batch: number for number, batch in enumerate(batches)}
    completions: dict[Batch, dict[int, Completion]] = {batch: {} for batch in batches}

    def source() -> Batch | None:
        if not coming:
            return None
        events.append(f"+{numbers[coming[0]]}")
        return coming.pop(0)

    for batch, index, completion in engine.stream(source, params):
        assert index not in completions[batch], "once"
        completions[batch][index] = completion
        if len(completions[batch]) == len(batch.prompts):
            events.append(f"-{numbers[batch]}")
            if (following := follow(batch)) is not None:
                numbers[following] = len(numbers)
                completions[following] = {}
                coming.append(following)
    assert all(len(own) == len(batch.prompts) for batch, own in completions.items())
    return [[own[index] for index in sorted(own)] for own in completions.values()], events


GREEDY = SamplingParams(max_new_tokens=24, stop_token_ids=EOS_IDS)
SAMPLED = SamplingParams(max_new_tokens=32, stop_token_ids=tuple(range(0, 277, 20)), temperature=1.0, top_p=0.95)


def test_batches_together_are_what_each_is_alone_in_fewer_steps(llama, monkeypatch):
    monkeypatch.setattr(continuous_module, "CHECK_EVERY", 2)
    steps = []
    original = slots_module.Slots.steps
    monkeypatch.setattr(slots_module.Slots, "steps", lambda self, count: steps.append(count) or original(self, count))
    batches = [Batch(random_prompts(9, seed=seed), seed) for seed in range(4)]
    tokens = 9 * (max(len(prompt) for batch in batches for prompt in batch.prompts) + SAMPLED.max_new_tokens)
    expected = [run(ContinuousEngine(llama, batch_tokens=tokens), batch.prompts, SAMPLED, batch.seed)
                for batch in batches]
    one_by_one = len(steps)
    lengths = {len(completion.token_ids) for own in expected for completion in own}
    assert min(lengths) < 12 and max(lengths) == 32, "uneven, so that slots idle at the end of a batch"
    steps.clear()
    completions, events = stream(ContinuousEngine(llama, batch_tokens=tokens), batches, SAMPLED)
    assert completions == expected
    for number in range(3):  # the next begins while the last answers are being written
        assert events.index(f"+{number + 1}") < events.index(f"-{number}")
    assert len(steps) <= 0.75 * one_by_one


def test_a_batch_that_follows_from_another_joins_those_under_way(llama):
    first = [Batch(random_prompts(6, seed=seed), seed) for seed in (1, 2)]
    second = Batch(random_prompts(4, seed=3), 3)
    completions, events = stream(ContinuousEngine(llama, batch_tokens=400), first, SAMPLED,
                                 follow=lambda batch: second if batch is first[0] else None)
    alone = ContinuousEngine(llama, batch_tokens=BIG)
    assert completions == [run(alone, batch.prompts, SAMPLED, batch.seed) for batch in (*first, second)]
    assert {"+2", "-2"} < set(events)


def test_longer_prompts_wait_for_larger_slots(llama):
    batches = [Batch([[7, 8]] * 5, 0), Batch([[number] * 40 for number in range(5)], 1), Batch([[9]] * 3, 2)]
    engine = ContinuousEngine(llama, batch_tokens=180)  # five slots for the first
    completions, _ = stream(engine, batches, SAMPLED)
    alone = ContinuousEngine(llama, batch_tokens=BIG)
    assert completions == [run(alone, batch.prompts, SAMPLED, batch.seed) for batch in batches]
    assert engine._slots.capacity >= 72 and engine._slots.num_slots == 2


def test_short_prompts_are_not_overtaken_by_later_batches():
    batches = iter([Batch([[1], [2, 2], [3, 3, 3], [4, 4, 4]], seed) for seed in range(3)])
    queue = Queue(lambda: next(batches, None), SAMPLED)
    order = []
    while queue.fill(2):  # while one of an older batch still waits
        order += [(job.batch.seed, job.index) for job in queue.begin(3, longest=3)]
    assert order == [(seed, index) for seed in range(3) for index in (2, 3, 1, 0)]


def test_out_of_memory_loses_and_doubles_nothing_of_several_batches(llama, monkeypatch):
    batches = [Batch(random_prompts(7, seed=seed), seed) for seed in range(3)]
    expected = [run(ContinuousEngine(llama, batch_tokens=BIG), batch.prompts, SAMPLED, batch.seed)
                for batch in batches]
    original, steps = slots_module.Slots._step, []

    def step(self):
        steps.append(self.num_slots)
        if len(steps) > 20 and self.num_slots > 4:  # some are done by then, others half written
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self)

    monkeypatch.setattr(slots_module.Slots, "_step", step)
    completions, _ = stream(ContinuousEngine(llama, batch_tokens=480), batches, SAMPLED)
    assert completions == expected
    assert max(steps) > 4 and steps[-1] <= 4


def test_an_error_of_the_source_ends_the_stream_and_not_the_engine(llama):
    engine, prompts = ContinuousEngine(llama, batch_tokens=400), random_prompts(6)
    given = iter([Batch(prompts, 0)])

    def source():
        for batch in given:
            return batch
        raise ConfigError("the disk is full")

    with pytest.raises(ConfigError, match="the disk is full"):
        list(engine.stream(source, SAMPLED))
    assert run(engine, prompts, SAMPLED) == run(ContinuousEngine(llama, batch_tokens=BIG), prompts, SAMPLED)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_how_far_a_gpu_is_behind_moves_nothing(llama, monkeypatch, ahead):
    """Steps are given to it before it is known what the last ones finished, and more where rows took long to write."""
    monkeypatch.setattr(continuous_module, "LOOKS_AHEAD", ahead)
    batches = [Batch(random_prompts(7, seed=seed), seed) for seed in range(3)]
    expected = [run(TransformersEngine(llama, batch_tokens=1), batch.prompts, GREEDY) for batch in batches]
    draws = random.Random(ahead)
    monkeypatch.setattr(slots_module.Look, "has_arrived", lambda self: draws.random() < 0.5)
    completions, _ = stream(ContinuousEngine(llama, batch_tokens=300), batches, GREEDY)
    assert completions == expected


@pytest.mark.gpu
def test_neither_prompts_nor_steps_wait_for_the_gpu(tmp_path):
    target = tiny_target("llama", tmp_path)
    target.model.to("cuda")
    slots = slots_module.Slots(target, GREEDY, num_slots=4, capacity=64, own_columns=False)

    def some() -> slots_module.Look:
        slots.admit([0, 2], random_prompts(2), torch.zeros(2, 0, dtype=torch.float64))
        return slots.steps(4)

    some().completions([0, 2])  # captures
    torch.cuda.set_sync_debug_mode("error")
    try:
        some()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_write_what_steps_write(kind, tmp_path):
    target = tiny_target(kind, tmp_path)
    prompts = random_prompts(20)
    for params in (SamplingParams(max_new_tokens=40, stop_token_ids=EOS_IDS),
                   SamplingParams(max_new_tokens=40, stop_token_ids=EOS_IDS, temperature=0.8, top_p=0.9)):
        expected = run(ContinuousEngine(target, batch_tokens=400), prompts, params)
        target.model.to("cuda")
        assert run(ContinuousEngine(target, batch_tokens=400), prompts, params) == expected
        target.model.to("cpu")
