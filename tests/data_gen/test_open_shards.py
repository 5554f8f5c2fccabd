"""Shards that one rank makes together hold what each would hold alone, appear whole, and leave others their share."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

import data_gen.open_shards
import data_gen.shards
import data_gen.stage
from data_gen.claims import Claims
from data_gen.engines import Completion, ContinuousEngine, Engine
from data_gen.open_shards import OpenShards, ShardWork
from data_gen.rows import Row, ShardRows
from data_gen.shards import ShardWriter
from specvocab_model.target import Target
from tests.composing import config_of
from tests.data_gen.runs import FOLDERS, contents, overrides, run_here, talk, write_inputs


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("open-shards"))


def continuous(config, device) -> Engine:
    """On a CPU as well; slots for four shards or so."""
    return ContinuousEngine(Target.load(config.target, device=device), batch_tokens=4000)


class OneByOne(Engine):
    """Finishes every batch before it takes the next."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def stream(self, source, params):
        while (batch := source()) is not None:
            for index, completion in self.engine.generate(batch.prompts, params, seed=batch.seed):
                yield batch, index, completion


class Watched(Engine):
    """Calls ``look`` with how many batches are under way, whenever a completion was taken."""

    def __init__(self, engine: Engine, look) -> None:
        self.engine = engine
        self.look = look

    def stream(self, source, params):
        left = {}

        def watched_source():
            if (batch := source()) is not None:
                left[batch] = len(batch.prompts)
            return batch

        for batch, index, completion in self.engine.stream(watched_source, params):
            yield batch, index, completion
            left[batch] -= 1
            self.look(sum(1 for count in left.values() if count))


@pytest.mark.parametrize("settings_of", [overrides, talk])
def test_files_do_not_depend_on_what_is_made_together(root, monkeypatch, settings_of):
    name = settings_of.__name__
    monkeypatch.setattr(data_gen.stage, "build_engine", lambda *args: OneByOne(continuous(*args)))
    run_here(settings_of(root, f"{name}-apart"))
    under_way = []
    monkeypatch.setattr(data_gen.stage, "build_engine", lambda *args: Watched(continuous(*args), under_way.append))
    run_here(settings_of(root, f"{name}-together"))
    assert max(under_way) >= 3
    for run in ("apart", "together"):
        (root / f"{name}-{run}" / FOLDERS[0]).mkdir(exist_ok=True)  # where no prompts were invented
    assert contents(root / f"{name}-together") == contents(root / f"{name}-apart")


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_stops_one_shard_leaves_the_finished_ones_whole_and_no_claim(root, monkeypatch, error):
    run, arguments = root / error.__name__, overrides(root, error.__name__, "generation.magpie_prompts=0")
    data = run / FOLDERS[1]

    def fail_in_the_second(_):
        if list(data.glob("shard-*.parquet")) and list(data.glob(".shard-*.claim")):
            raise error("stopped")

    monkeypatch.setattr(data_gen.stage, "build_engine", lambda *args: Watched(continuous(*args), fail_in_the_second))
    with pytest.raises(error, match="stopped"):
        run_here(arguments)
    finished = {file.name: file.read_bytes() for file in data.glob("shard-*.parquet")}
    assert finished and not list(data.glob(".shard-*")) and not (data / "manifest.json").exists()
    monkeypatch.setattr(data_gen.stage, "build_engine", continuous)
    run_here(arguments)
    assert finished.items() <= {file.name: file.read_bytes() for file in data.iterdir()}.items()
    whole = root / f"{error.__name__}-whole"
    run_here(overrides(root, whole.name, "generation.magpie_prompts=0"))
    for each in (run, whole):
        (each / FOLDERS[0]).mkdir()
    assert contents(run) == contents(whole)


def test_an_engine_that_forgets_a_prompt_is_not_waited_for(root, monkeypatch):
    class Forgetful(Watched):
        def stream(self, source, params):
            finished = self.engine.stream(source, params)
            next(finished)
            yield from finished

    monkeypatch.setattr(data_gen.stage, "build_engine", lambda *args: Forgetful(continuous(*args), None))
    with pytest.raises(RuntimeError, match="left 1 prompts of 1 shards unanswered"):
        run_here(overrides(root, "forgetful", "generation.magpie_prompts=0"))


# ---- which shards, without an engine ----


class Echo(ShardWork):
    """Asks each prompt once."""

    def __init__(self, prompts, progress) -> None:
        self.prompts = prompts
        self.progress = progress
        self.answers = {}

    def ask(self):
        if not self.answers:
            yield [[1]] * len(self.prompts)

    def take(self, index, completion):
        self.answers[index] = completion.token_ids
        self.progress()

    def rows(self):
        return ShardRows([Row(id=prompt, source="", input_ids=[1, *self.answers[index]], loss_mask=[0, 1],
                              finish_reason="length") for index, prompt in enumerate(self.prompts)])


class Slow(Echo):
    """Notes when a prompt is encoded."""

    events: ClassVar[list[str]] = []

    def ask(self):
        for prompt in [] if self.answers else self.prompts:
            self.events.append(f"encoded {prompt}")
            yield [[1]]


class Bar(SimpleNamespace):
    def update(self):
        self.n += 1

    def refresh(self):
        pass


def open_shards(
    folder, claims, *, num_shards: int, rank: int = 0, num_ranks: int = 1, size: int = 2, write=Echo
) -> OpenShards:
    """Of ``size`` prompts each."""
    prompts = [str(number) for number in range(size * num_shards)]
    writer = ShardWriter(folder, target="t", settings={"target": {"fingerprint": "f"}}, num_prompts=len(prompts),
                         rows_per_shard=size, vocab_size=9, stop_token_ids=())
    return OpenShards(config_of(["+experiment=quickstart"]), stage="s", prompts=prompts, write=write, writer=writer,
                      claims=claims, progress=Bar(n=0, total=len(prompts)), rank=rank, num_ranks=num_ranks)


def all_batches(shards: OpenShards) -> list:
    shards._look_again = 0.0  # as if a second had gone by
    return list(iter(shards.next_batch, None))


@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 8), (2, 4), (3, 2), (5, 1), (8, 1), (20, 1)])
def test_a_rank_takes_no_more_than_its_share_of_what_is_missing(tmp_path, num_ranks, expected):
    with Claims(tmp_path) as claims:
        assert len(all_batches(open_shards(tmp_path, claims, num_shards=8, num_ranks=num_ranks))) == expected


def test_the_last_shards_are_left_to_whoever_has_none(tmp_path):
    written = Completion([3], "length")
    with Claims(tmp_path) as ours, Claims(tmp_path) as theirs:
        first = open_shards(tmp_path, ours, num_shards=4, num_ranks=2)
        batches = all_batches(first)
        assert len(batches) == 2
        for index in range(2):
            first.take(batches[0], index, written)
        assert all_batches(first) == [], "three are missing: one each, and one for whoever is first"
        second = open_shards(tmp_path, theirs, num_shards=4, rank=1, num_ranks=2)
        assert len(all_batches(second)) == 1
        for index in range(2):
            first.take(batches[1], index, written)
        last, = all_batches(first)
        assert all_batches(second) == []
        for index in range(2):
            first.take(last, index, written)
        assert len(first.writer.missing_shards()) == 1


def test_progress_counts_what_is_half_made(tmp_path):
    written = Completion([3], "length")
    with Claims(tmp_path) as claims:
        shards = open_shards(tmp_path, claims, num_shards=3)
        first, second, _ = all_batches(shards)
        seen = []
        for batch, index in ((first, 0), (second, 1), (first, 1), (second, 0)):
            shards.take(batch, index, written)
            seen.append(shards.progress.n)
        assert seen == [1, 2, 3, 4]
        assert [path.name for path in sorted(tmp_path.glob("*.parquet"))] == [
            "shard-00000.parquet", "shard-00001.parquet"]


def test_the_next_shard_is_encoded_between_the_answers_of_this_one(tmp_path, monkeypatch):
    monkeypatch.setattr(data_gen.open_shards, "ANSWERS_A_PART", 2)
    events = Slow.events
    with Claims(tmp_path) as claims:
        shards = open_shards(tmp_path, claims, num_shards=2, size=8, write=Slow)
        first = shards.next_batch()
        assert events == [f"encoded {number}" for number in range(8)], "what the engine waits for comes at once"
        events.clear()
        for index in range(7):
            shards.take(first, index, Completion([3], "length"))
            events.append("answered")
        assert events == ["answered", "encoded 8", "answered", "answered", "encoded 9", "answered", "answered",
                          "encoded 10", "answered", "answered"]
        shards.take(first, 7, Completion([3], "length"))
        assert [path.name for path in tmp_path.glob("*.parquet")] == ["shard-00000.parquet"]
        assert len(shards.next_batch().prompts) == 8 and events[-1] == "encoded 15"
        assert shards.next_batch() is None


def test_a_long_shard_is_written_between_the_answers_of_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(data_gen.open_shards, "ANSWERS_A_PART", 1)
    monkeypatch.setattr(data_gen.shards, "ROWS_AT_ONCE", 3)
    with Claims(tmp_path) as claims:
        shards = open_shards(tmp_path, claims, num_shards=2, size=8)
        first, second = all_batches(shards)
        for index in range(8):
            shards.take(first, index, Completion([3], "length"))
        written = []
        for index in range(7):
            written.append(len(shards.writer.missing_shards()) == 1)
            shards.take(second, index, Completion([3], "length"))
        assert written == [False, True, True, True, True, True, True]
        assert list(tmp_path.glob(".shard-00000.claim")) == []
        shards.take(second, 7, Completion([3], "length"))
        assert not shards.begin(), "nothing is left to be asked"
        assert shards.writer.missing_shards() == [], "so it is written"
