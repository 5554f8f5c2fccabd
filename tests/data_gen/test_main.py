"""The command as a whole: what its rows are, that a kill costs nothing, and that ranks do not matter."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import PartialState

import data_gen.stage
from data_gen.chat import encode_prompt, user_turn
from data_gen.collect import TRAIN_FILE, VALIDATION_FILE
from data_gen.engines import Rejected, SamplingParams, TransformersEngine
from data_gen.magpie import invented_prompts
from data_gen.main import choose_prompts, look
from data_gen.prompt_store import PromptStore
from data_gen.prompts import load_prompts
from data_gen.shards import load_rows, read_manifest
from data_gen.stage import StageRunner, rows_per_shard
from specvocab_model.config import ConfigError
from specvocab_model.target import Target
from tests.data_gen.runs import (
    ENVIRONMENT,
    FOLDERS,
    MAIN,
    NUM_PROMPTS,
    TOO_LONG,
    config_of,
    contents,
    overrides,
    run_here,
    talk,
    write_inputs,
)
from tests.tiny import CHAT_TEMPLATE, EOS_IDS, tiny_target_config, tiny_tokenizer

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("generation"))


@pytest.fixture(scope="module")
def whole(root) -> dict[str, bytes]:
    """The files of a run that nothing interrupted."""
    run_here(overrides(root, "whole"))
    return contents(root / "whole")


def rows_of(folder: Path) -> list[dict]:
    return [row | {"messages": json.loads(row["messages"])} for row in load_rows(folder).to_list()]


def invented_in(run: Path):
    tokenizer = tiny_tokenizer()
    return invented_prompts(load_rows(run / FOLDERS[0]), user_turn(tokenizer), tokenizer)


def test_every_prompt_is_answered_once_and_split(root, whole):
    train, validation = (rows_of(root / "whole" / name) for name in FOLDERS[1:])
    invented, dropped = invented_in(root / "whole")
    assert invented and dropped["unfinished"]
    asked = [prompt.id for prompt in [*load_prompts(root / "prompts.jsonl"), *invented] if prompt.id != TOO_LONG]
    assert sorted(row["id"] for row in train + validation) == sorted(asked)
    for rows in (train, validation):
        ids = [row["id"] for row in rows]
        assert ids and ids == [prompt_id for prompt_id in asked if prompt_id in ids], "rows are in the order of prompts"
    manifests = [read_manifest(root / "whole" / name) for name in FOLDERS[1:]]
    assert [manifest.skipped for manifest in manifests if manifest.skipped] == [{"prompt too long": 1}]
    assert sum(manifest.num_prompts - manifest.num_rows for manifest in manifests) == 1


def test_invented_prompts_are_asked_as_they_were_written(root, whole):
    invented, _ = invented_in(root / "whole")
    texts = {prompt.id: prompt.messages[0]["content"] for prompt in invented}
    rows = [row for name in FOLDERS[1:] for row in rows_of(root / "whole" / name) if row["source"] == "magpie"]
    assert {row["id"]: row["messages"][0]["content"] for row in rows} == texts
    header = user_turn(tiny_tokenizer()).header_ids
    for row in rows_of(root / "whole" / "data-magpie"):
        assert row["input_ids"][: len(header)] == header
        assert row["loss_mask"] == [0] * len(header) + [1] * (len(row["input_ids"]) - len(header))


def test_invented_prompts_end_where_the_template_names_the_next_speaker():
    """Hand-made rows of a target whose template ends a user's turn with ordinary text."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE.replace("<|im_end|>", "").replace("<|im_start|>assistant", "[Assistant]")
    said = [("Why is it so?\n[Assistant]\nBecause", "length"), ("Why is it so, and", "length"), ("How far?", "stop"),
            ("Hm\n[Assistant]\nA long answer", "length"), ("\n[Assistant]\nHello to you", "length")]
    rows = [{"id": str(number), "messages": json.dumps([{"role": "user", "content": text}]), "finish_reason": reason}
            for number, (text, reason) in enumerate(said)]
    prompts, dropped = invented_prompts(rows, user_turn(tokenizer), tokenizer)
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["Why is it so?", "How far?"]
    assert dropped == {"unfinished": 1, "too short": 2}


def test_what_is_evaluated_is_not_generated(root, tmp_path, capsys):
    """Whoever wrote it, and in whatever spelling; only the first turn of an evaluation prompt counts."""
    records = [{"prompt": "count to   3. "}, {"turns": ["Count to one more than 1.", "Count to 0."]}]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = overrides(root, "held-out", "generation.magpie_prompts=0", f"eval.prompts={tmp_path / 'eval.jsonl'}")
    (root / "more.jsonl").write_text(json.dumps({"id": "m", "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to 3."}]}))
    arguments.append(f"generation.prompt_files=[{root}/prompts.jsonl,{root}/more.jsonl]")
    choose_prompts(StageRunner(config_of(arguments), PartialState(cpu=True)))
    chosen = {prompt.id for file in (TRAIN_FILE, VALIDATION_FILE)
              for prompt in PromptStore(root / "held-out" / "data-prompts" / file)}
    assert {f"p-{number}" for number in range(NUM_PROMPTS)} - chosen == {"p-1", "p-7"}
    assert "m" not in chosen
    assert "2 held out for evaluation" in capsys.readouterr().out


@pytest.mark.parametrize(("num_prompts", "at_most", "expected"), [
    (2000, 2048, 64),  # the validation prompts of an 8B experiment: 32 shards, not one
    (98000, 2048, 1532),  # 64 shards
    (10**6, 2048, 2048),
    (15, 2048, 64),
    (400, 64, 64),
    (400, 4, 4),
])
def test_shards_are_small_enough_for_several_ranks(num_prompts, at_most, expected):
    assert rows_per_shard(num_prompts, at_most=at_most) == expected


def test_prompts_that_are_all_too_long_are_no_success(root):
    changes = ("generation.magpie_prompts=0", "generation.max_prompt_tokens=1")
    for _ in range(2):  # also when the empty folder is found again
        with pytest.raises(ConfigError, match=r"none of the \d+ train prompts became a row: prompt too long \d+ \("):
            run_here(overrides(root, "too-long", *changes))


def test_greedy_rows_are_prompt_ids_and_generated_ids(root):
    """Nothing is tokenised again: with random bytes as answers, text would not give the ids back."""
    changes = ("generation.temperature=0", "generation.magpie_prompts=0")
    run_here(overrides(root, "greedy", *changes))
    target = Target.load(tiny_target_config(root / "target", "llama"), device="cpu")
    params = SamplingParams(max_new_tokens=24, stop_token_ids=EOS_IDS)
    alone = TransformersEngine(target, batch_tokens=1)  # batches of one
    conversations = {prompt.id: prompt.conversation() for prompt in load_prompts(root / "prompts.jsonl")}
    rows = [row for name in FOLDERS[1:] for row in rows_of(root / "greedy" / name)]
    assert len(rows) == NUM_PROMPTS - 1
    not_from_text = 0
    for row in rows:
        prompt_ids = encode_prompt(target.tokenizer, conversations[row["id"]])
        (_, completion), = alone.generate([prompt_ids], params, seed=0)
        assert row["input_ids"] == prompt_ids + completion.token_ids
        assert row["loss_mask"] == [0] * len(prompt_ids) + [1] * len(completion.token_ids)
        assert row["num_loss_tokens"] == len(completion.token_ids)
        assert row["finish_reason"] == completion.finish_reason
        assert (row["input_ids"][-1] in EOS_IDS) == (completion.finish_reason == "stop")
        assert row["messages"][:-1] == conversations[row["id"]] and row["messages"][-1]["role"] == "assistant"
        text = row["messages"][-1]["content"]
        not_from_text += target.tokenizer(text)["input_ids"] != completion.token_ids
    assert not_from_text > 0
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}


def test_a_finished_run_is_recognised_without_loading_the_target(root, whole, monkeypatch, capsys):
    def refuse(*_):
        raise AssertionError("loaded the target")

    monkeypatch.setattr(data_gen.stage, "build_engine", refuse)
    run_here(overrides(root, "whole", "generation.batch_tokens=300"))  # decides how, not what
    assert contents(root / "whole") == whole
    assert capsys.readouterr().out.count("finished before") == 3
    with pytest.raises(AssertionError, match="loaded the target"):
        run_here(overrides(root, "fresh"))


def test_a_command_that_chooses_other_prompts_meanwhile_changes_nothing(root, whole, monkeypatch):
    run = StageRunner.run

    def another_meanwhile(runner, stage):
        if stage.name == "train":
            monkeypatch.setattr(StageRunner, "run", run)
            with pytest.raises(ConfigError, match="was made with other settings"):
                run_here(overrides(root, "meanwhile", "generation.validation_fraction=0.5"))
        return run(runner, stage)

    run_here(overrides(root, "meanwhile"))
    for name in FOLDERS[1:]:
        (root / "meanwhile" / name / "shard-00000.parquet").unlink()
    monkeypatch.setattr(StageRunner, "run", another_meanwhile)
    run_here(overrides(root, "meanwhile"))
    assert contents(root / "meanwhile") == whole


def test_a_rank_waits_as_often_for_a_finished_folder_as_for_one_that_it_helps_to_fill(root, whole, monkeypatch):
    waits = []
    monkeypatch.setattr(PartialState, "wait_for_everyone", lambda state: waits.append(state.process_index))
    run_here(overrides(root, "waiting"))
    first = len(waits)
    run_here(overrides(root, "waiting"))
    assert first and len(waits) == 2 * first, "another launcher may finish it between the looks of two ranks"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("generation.top_p=0.5", "sampling.top_p was 1.0 and is now 0.5"),
        ("generation.max_prompt_tokens=190", "prompts.max_tokens was 200 and is now 190"),
        ("generation.rows_per_shard=5", "rows_per_shard was 4 and is now 5"),
        ("seed=3", "seed was 0 and is now 3"),
        ("target.dtype=bfloat16", "target.dtype was 'float32' and is now 'bfloat16'"),
        ("+target.chat_template_kwargs.message=x", "chat_template_kwargs.message was None and is now 'x'"),
        ("generation.validation_fraction=0.5", "prompts.count was"),
    ],
)
def test_data_of_other_settings_is_never_mixed_in(root, whole, change, named):
    with pytest.raises(ConfigError, match="was made with other settings") as error:
        run_here(overrides(root, "whole", change))
    assert named in str(error.value) and "rm -r " in str(error.value)
    assert contents(root / "whole") == whole


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["target.model=no/such-model"], r"no/such-model.*give its folder: target\.model=FOLDER"),
        (["generation.prompt_files=[]", "generation.magpie_prompts=0"], "no prompts: give generation.prompt_files"),
        (["generation.prompt_files=[absent.jsonl]"], "there is no prompt file 'absent.jsonl'"),
        (["eval.prompts=absent.jsonl"], "there is no prompt file 'absent.jsonl'"),
        (["+target.chat_template_kwargs.thinkng=false"], "sets 'thinkng', which the target's chat template never"),
        (["generation.thinking_share=0.5"], "generation.thinking_share sets 'enable_thinking', which the"),
        (["generation.max_new_tokens=400"], "= 600 exceeds the 512 positions"),
        (["generation.magpie_prompts=0", "generation.num_prompts=2"], "leaves . prompts for training"),
    ],
)
def test_what_cannot_run_stops_before_anything_is_loaded(root, monkeypatch, changes, reason):
    monkeypatch.setattr(data_gen.stage, "build_engine", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=reason):
        run_here(overrides(root, "refused", *changes))


def killed_when(seen: Path, command: list[str]) -> None:
    """Start ``command``; as soon as the file ``seen`` is there, kill it and the workers that it has started."""
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        while not seen.exists():
            assert process.poll() is None, "ended before it was killed"
            time.sleep(0.002)
        launcher = psutil.Process(process.pid)
        workers = launcher.children(recursive=True)
        for each in (launcher, *workers):
            with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
                each.kill()
        psutil.wait_procs(workers)
    assert process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_killed_twice_and_continued_on_other_ranks_nothing_is_lost_or_doubled(root, whole):
    run = root / "killed"
    arguments = [str(MAIN), *overrides(root, "killed")]
    killed_when(run / "data-magpie" / "shard-00001.parquet", [sys.executable, *arguments])
    assert not (run / "data-magpie" / "manifest.json").exists()
    killed_when(run / "data" / "shard-00000.parquet", [*TORCHRUN, *arguments])
    assert (run / "data-magpie" / "manifest.json").exists() and not (run / "data" / "manifest.json").exists()
    run_here(overrides(root, "killed"))
    # What a rank was writing when it was killed stays for an hour, under a temporary name.
    assert {name: content for name, content in contents(run).items() if not name.endswith(".tmp")} == whole


def test_two_ranks_give_the_rows_of_one(root, whole):
    cpu = torch.cuda.is_available()  # without a GPU nobody has to say that there is none
    command = [*TORCHRUN, str(MAIN), *overrides(root, "ranks", f"distributed.cpu={cpu}")]
    result = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert contents(root / "ranks") == whole
    lines = result.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["magpie", "prompts", "train", "validation"], "only rank 0 speaks"
    assert "tokens/s" in lines[-1]


# ---- conversations ----


def data_of(run: Path) -> dict[str, bytes]:
    return {str(file.relative_to(run)): file.read_bytes() for name in FOLDERS[1:] for file in (run / name).iterdir()
            if not file.name.endswith(".tmp")}


@pytest.mark.usefixtures("forked")
def test_conversations_that_are_killed_end_in_the_rows_of_an_unbroken_run(root):
    run_here(talk(root, "talk"))
    rows = [row for name in FOLDERS[1:] for row in rows_of(root / "talk" / name)]
    answered = Counter(sum(message["role"] == "assistant" for message in row["messages"]) for row in rows)
    assert answered[2] + answered[3] > 0, "some conversations go on"
    assert not any("old" in message["content"] for row in rows for message in row["messages"])
    for row in rows:  # the ids of every answer, or of the row's own where the bytes are no text, are the engine's
        assert row["loss_mask"][-1] == 1 and 0 < row["num_loss_tokens"] == sum(row["loss_mask"])
    manifests = [read_manifest(root / "talk" / name) for name in FOLDERS[1:]]
    ended_early = {row["id"].split("#")[0] for row in rows if row["finish_reason"] == "length"}
    assert sum(manifest.skipped.get("answer cut", 0) for manifest in manifests) <= len(ended_early)
    arguments = [sys.executable, str(MAIN), *talk(root, "talk-killed")]
    killed_when(root / "talk-killed" / "data" / "shard-00000.parquet", arguments)
    run_here(talk(root, "talk-killed"))
    assert data_of(root / "talk-killed") == data_of(root / "talk")
    deleted = root / "talk-killed" / "data" / "shard-00001.parquet"
    deleted.unlink()
    run_here(talk(root, "talk-killed"))  # not "finished before": what is missing is made again
    assert data_of(root / "talk-killed") == data_of(root / "talk")


def test_answers_are_kept_without_loading_the_target(root, monkeypatch):
    monkeypatch.setattr(data_gen.stage, "build_engine", None)
    run_here(talk(root, "kept", "generation.responses=keep", "generation.temperature=0"))
    rows = [row for name in FOLDERS[1:] for row in rows_of(root / "kept" / name)]
    tokenizer = tiny_tokenizer()
    assert len(rows) == 16
    for row in rows:
        number = row["id"].split()[1]
        text = tokenizer.decode([token for token, mark in zip(row["input_ids"], row["loss_mask"], strict=True) if mark])
        assert text == f"old {number}<|im_end|>older {number}<|im_end|>" and row["finish_reason"] == "stop"
    with pytest.raises(ConfigError, match=r"answers.responses was 'keep' and is now 'regenerate'"):
        run_here(talk(root, "kept", "generation.temperature=0"))


class Refusing:
    """An engine that gives up prompts of certain lengths."""

    def __init__(self, engine, refused) -> None:
        self.engine = engine
        self.refused = refused

    def stream(self, source, params):
        for batch, index, completion in self.engine.stream(source, params):
            refuse = self.refused(batch.prompts[index])
            yield batch, index, Rejected("server refused the prompt", "400") if refuse else completion


def test_prompts_that_the_engine_gives_up_are_listed_and_too_many_stop_the_run(root, whole, monkeypatch):
    build = data_gen.stage.build_engine
    refused = encode_prompt(tiny_tokenizer(), [{"role": "user", "content": "Count to 10."}])
    monkeypatch.setattr(data_gen.stage, "build_engine", lambda *args: Refusing(build(*args), lambda ids: True))
    with pytest.raises(ConfigError, match=r"the engine gave up 4 of 4 prompts, more than .*share=0\.05; the last: "
                                          r"server refused the prompt \(400\)"):
        run_here(overrides(root, "given-up"))
    assert not list((root / "given-up").rglob("*.parquet")), "a later start may have better luck"
    monkeypatch.setattr(data_gen.stage, "build_engine",
                        lambda *args: Refusing(build(*args), lambda ids: ids == refused))
    run_here(overrides(root, "given-up", "generation.max_rejected_share=0.3"))
    folder = next(folder for folder in FOLDERS[1:] if read_manifest(root / "given-up" / folder).skipped.get(
        "server refused the prompt"))
    listed = [json.loads(line) for line in (root / "given-up" / folder / "rejected.jsonl").read_text().splitlines()]
    assert [(each["id"], each["detail"]) for each in listed if not each["by_choice"]] == [("p-10", "400")]
    rows = {row["id"]: row for name in FOLDERS[1:] for row in rows_of(root / "given-up" / name)}
    others = {row["id"]: row for name in FOLDERS[1:] for row in rows_of(root / "whole" / name)}
    assert rows == {row_id: row for row_id, row in others.items() if row_id != "p-10"}


def test_prompts_that_the_template_refuses_stop_the_run_when_they_are_many(root):
    strict = root / "strict"
    shutil.copytree(root / "target", strict)
    (strict / "chat_template.jinja").write_text(
        "{% if '1' in messages[0]['content'] %}{{ raise_exception('no ones') }}{% endif %}" + CHAT_TEMPLATE)
    arguments = overrides(root, "refused-prompts", f"target.model={strict}", "generation.magpie_prompts=0")
    with pytest.raises(ConfigError, match=r"\d of \d+ prompts were rejected, more than generation.max_rejected_share="
                                          r"0.05; the last is 'p-1\d?': refused by the chat template .*no ones"):
        run_here(arguments)
    train = root / "refused-prompts" / "data"
    for _ in range(4):  # what earlier runs and other processes rejected counts as well
        with pytest.raises(ConfigError, match=r"of \d+ prompts were rejected, more than .*share=0\.3"):
            run_here([*arguments, "generation.max_rejected_share=0.3"])
    assert not (train / "manifest.json").exists()
    run_here([*arguments, "generation.max_rejected_share=0.9"])
    (train / "manifest.json").rename(train / "manifest.unfinished.json")
    with pytest.raises(ConfigError, match=r"of \d+ prompts were rejected, more than .*share=0\.3"):
        run_here([*arguments, "generation.max_rejected_share=0.3"])
    run_here([*arguments, "generation.max_rejected_share=0.9"])
    rows = [row["id"] for name in FOLDERS[1:] for row in rows_of(root / "refused-prompts" / name)]
    assert rows and not any("1" in row_id for row_id in rows)


def test_the_command_verifies_and_counts_what_it_made(root, whole, capsys):
    look(config_of([*overrides(root, "whole"), "action=verify"]))
    look(config_of([*overrides(root, "whole"), "action=stats"]))
    out = capsys.readouterr().out
    assert out.count(" 0 problems") == 2 and "coverage" in out
    for name in ("token_stats.json", "token_stats.svg"):
        (root / "whole" / "data" / name).unlink()
