"""The transformers engine writes what ``generate`` would, whatever the batch, and stops where it is told to."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_gen.engines import Completion, SamplingParams, TransformersEngine
from data_gen.engines.transformers_engine import batches_by_length, left_pad
from tests.tiny import EOS_IDS, KINDS, PAD_ID, tiny_target

ONE_BATCH = 10**6


@pytest.fixture(scope="module", params=KINDS)
def target(request, tmp_path_factory):
    return tiny_target(request.param, tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_target("llama", tmp_path_factory.mktemp("engine"))


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def run(target, prompts, params, *, batch_tokens=ONE_BATCH, seed=0) -> list[Completion]:
    finished = list(TransformersEngine(target, batch_tokens=batch_tokens).generate(prompts, params, seed=seed))
    assert sorted(index for index, _ in finished) == list(range(len(prompts)))
    return [completion for _, completion in sorted(finished, key=lambda pair: pair[0])]


def generate_alone(target, prompt, max_new_tokens: int) -> list[int]:
    """The independent path: transformers' own greedy search with a batch of one, so without padding."""
    output = target.model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
        max_new_tokens=max_new_tokens, eos_token_id=list(EOS_IDS), pad_token_id=PAD_ID,
    )
    return output[0, len(prompt):].tolist()


def test_greedy_equals_generate_one_by_one(target):
    prompts, limit = random_prompts(8), 24  # padded, and longer than Gemma's sliding window
    expected = [generate_alone(target, prompt, limit) for prompt in prompts]
    params = SamplingParams(max_new_tokens=limit, stop_token_ids=EOS_IDS)
    for batch_tokens in (ONE_BATCH, 150):
        completions = run(target, prompts, params, batch_tokens=batch_tokens)
        for token_ids, completion in zip(expected, completions, strict=True):
            assert completion.token_ids == token_ids
            assert completion.finish_reason == ("stop" if token_ids[-1] in EOS_IDS else "length")


def test_every_stop_token_ends_a_row_at_its_first_appearance_and_is_kept(llama):
    prompts = random_prompts(16, seed=1)
    free = run(llama, prompts, SamplingParams(max_new_tokens=20, stop_token_ids=()))
    assert all((len(c.token_ids), c.finish_reason) == (20, "length") for c in free)
    stops = (free[0].token_ids[3], free[1].token_ids[9], free[2].token_ids[0])
    stopped = run(llama, prompts, SamplingParams(max_new_tokens=20, stop_token_ids=stops))
    reasons = set()
    for whole, cut in zip(free, stopped, strict=True):
        ends = [place for place, token in enumerate(whole.token_ids) if token in stops]
        assert cut.token_ids == (whole.token_ids[: ends[0] + 1] if ends else whole.token_ids)
        assert cut.finish_reason == ("stop" if ends else "length")
        reasons.add(cut.finish_reason)
    assert reasons == {"stop", "length"}, "the test should see both"


def test_the_generation_config_of_the_model_changes_nothing(llama):
    prompts, params = random_prompts(4), SamplingParams(max_new_tokens=12, stop_token_ids=())
    expected = run(llama, prompts, params)
    llama.model.generation_config.repetition_penalty = 5.0
    try:
        assert run(llama, prompts, params) == expected
    finally:
        llama.model.generation_config.repetition_penalty = None


def test_a_seed_fixes_what_is_sampled(llama):
    prompts = [[1, 2, 3]] * 8
    params = SamplingParams(max_new_tokens=10, stop_token_ids=EOS_IDS, temperature=1.0)
    first = run(llama, prompts, params, seed=5)
    assert run(llama, prompts, params, seed=5) == first
    assert run(llama, prompts, params, seed=6) != first
    assert len({tuple(completion.token_ids) for completion in first}) > 1, "rows of a batch must not draw alike"


def test_sampling_follows_the_models_distribution(llama):
    """First tokens of 4000 padded rows against the probabilities of an unpadded forward: Pearson's chi-square."""
    prompt, count = [10, 20, 30], 4000
    params = SamplingParams(max_new_tokens=1, stop_token_ids=(), temperature=0.7, top_k=12)
    drawn = run(llama, [*[prompt] * count, [7] * 9], params)[:-1]
    logits = llama.model(torch.tensor([prompt])).logits[0, -1].double() / 0.7
    kept = logits.topk(12)
    expected = dict(zip(kept.indices.tolist(), (kept.values.softmax(-1) * count).tolist(), strict=True))
    observed = torch.bincount(torch.tensor([c.token_ids[0] for c in drawn]), minlength=len(logits))
    assert int(observed[kept.indices].sum()) == count
    statistic = sum((int(observed[token]) - mean) ** 2 / mean for token, mean in expected.items())
    assert statistic < 31.3  # 0.999 quantile with 11 degrees of freedom


def test_top_p_and_low_temperature_are_greedy(llama):
    prompts, limits = random_prompts(6), {"max_new_tokens": 8, "stop_token_ids": EOS_IDS}
    greedy = run(llama, prompts, SamplingParams(**limits))
    assert run(llama, prompts, SamplingParams(**limits, temperature=1e-4)) == greedy
    assert run(llama, prompts, SamplingParams(**limits, temperature=1.0, top_p=1e-6)) == greedy
    assert run(llama, prompts, SamplingParams(**limits, temperature=1.0, top_k=1)) == greedy


@given(lengths=st.lists(st.integers(1, 50), max_size=40), max_new_tokens=st.integers(1, 30),
       batch_tokens=st.integers(1, 400))
def test_batches_hold_every_prompt_once_and_stay_within_the_bound(lengths, max_new_tokens, batch_tokens):
    batches = batches_by_length(lengths, max_new_tokens, batch_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[index] for index in batch)
        assert len(batch) == 1 or len(batch) * (longest + max_new_tokens) <= batch_tokens
    ordered = [lengths[index] for batch in batches for index in batch]
    assert ordered == sorted(lengths, reverse=True)


def test_left_padding():
    input_ids, mask = left_pad([[5], [6, 7, 8]], 0, torch.device("cpu"))
    assert input_ids.tolist() == [[0, 0, 5], [6, 7, 8]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]
