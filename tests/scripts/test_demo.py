"""The demo prints the target's own text twice, and colours the tokens that were accepted drafts, no others."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
import torch

from scripts import demo
from specvocab_model.config import DraftConfig, HeadConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.engine import DecodeEngine, DraftShape
from specvocab_model.export import Provenance, load_checkpoint, save_checkpoint
from specvocab_model.heads import build_head
from specvocab_model.target import Target
from specvocab_model.terminal import Answer
from tests.tiny import save_target, tiny_model, tiny_target_config, tiny_tokenizer

TREE = DraftShape(1, 30, 30)  # so many guesses that an untrained draft is often right
NUM_TOKENS = 70
ESCAPE = "\x1b"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Writes one printable ASCII character, or a line's end, with every token, and never stops."""
    model, tokenizer = tiny_model("qwen3"), tiny_tokenizer()
    written = tokenizer("".join(map(chr, range(32, 127))) + "\n")["input_ids"]
    unwritten = torch.ones(model.config.vocab_size, dtype=torch.bool)
    unwritten[written] = False
    model.lm_head.weight.data[unwritten] = 0  # never the largest logit
    folder = save_target(model, tmp_path_factory.mktemp("demo") / "target")
    return Target.load(tiny_target_config(folder, "qwen3"), device="cpu")


@pytest.fixture(scope="module")
def checkpoint(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(type="full"))
    return save_checkpoint(tmp_path_factory.mktemp("demo") / "draft", model, target.spec, Provenance())


@pytest.fixture(scope="module")
def expected(target: Target, checkpoint: Path) -> list[tuple[str, bool]]:
    """The characters of the answer, and whether each was drafted, from what the engine records."""
    model = place_draft(load_checkpoint(checkpoint, target.spec), target)
    ids = target.tokenizer.apply_chat_template([{"role": "user", "content": demo.PROMPT}], add_generation_prompt=True,
                                               return_dict=False)
    engine = DecodeEngine(target, model, build_head("full", target, model), shape=TREE, capacity=len(ids) + NUM_TOKENS)
    (output,) = engine.generate([ids], max_new_tokens=NUM_TOKENS)
    drafted = [False]
    for accepted in output.accepted_per_round:
        drafted += [True] * accepted + [False]
    assert 10 < sum(drafted) < NUM_TOKENS / 2
    return list(zip(target.tokenizer.decode(output.sequences), drafted, strict=True))


def run(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *options: str, columns: int = 100
) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "12")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", stream)
    demo.main([str(checkpoint), "--device", "cpu", "--max-new-tokens", str(NUM_TOKENS), "--shape", "1x30x30", *options])
    return stream.getvalue()


def coloured(text: str) -> list[tuple[str, bool]]:
    """The characters of a terminal's text that leave a mark, and whether they are green."""
    green, found = False, []
    for part in re.findall(r"\x1b\[\d+m|.", text):
        if part.startswith(ESCAPE):
            green = part == "\x1b[32m"
        elif not part.isspace():
            found.append((part, green))
    return found


def visible(pairs: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    return [pair for pair in pairs if not pair[0].isspace()]


def test_two_columns_and_the_accepted_drafts_are_green(checkpoint, expected, monkeypatch):
    printed = run(checkpoint, monkeypatch, Terminal(), columns=100)
    final = printed.rpartition("\x1b[J")[2].splitlines()
    assert re.fullmatch(r"the target alone {35}with its draft", final[0])
    assert re.fullmatch(r"[\d.]+ tokens/s, τ 1.00, 70 tokens +[\d.]+ tokens/s, τ 1.\d\d, 70 tokens", final[1])
    body = final[2 : final.index("")]
    plain = "".join(line[:48] for line in body)
    assert coloured(plain) == visible([(char, False) for char, _ in expected])
    assert coloured("".join(line[48:] for line in body)) == visible(expected)
    assert "drafted and accepted" in printed and "the same 70 tokens" in final[-1]


def test_a_narrow_terminal_has_one_column(checkpoint, expected, monkeypatch):
    printed = run(checkpoint, monkeypatch, Terminal(), columns=60)
    frames = re.split(r"\x1b\[\d+F\x1b\[J", printed.partition(demo.PROMPT + "\n\n")[2])
    ups = [int(number) for number in re.findall(r"\x1b\[(\d+)F", printed)]
    drawn = [frame.rpartition("\n\n")[2].count("\n") for frame in frames[:-1]]  # behind an answer that stays
    assert drawn == ups and 2 < max(ups) <= 11
    kept = [frame.split("tokens\n")[1].partition("\n\n")[0] for frame in frames if "\n\n" in frame]
    assert [coloured(text.replace("\n", " ")) for text in kept] == [
        visible([(char, False) for char, _ in expected]), visible(expected)]
    assert max(map(len, kept[0].splitlines())) <= 59


def test_without_a_terminal_brackets_mark_the_drafts(checkpoint, target, expected, tmp_path, monkeypatch, capsys):
    folder = shutil.copytree(checkpoint, tmp_path / "stock")
    (folder / "specvocab.json").unlink()
    with pytest.raises(SystemExit):
        demo.main([str(folder)])
    assert "or say --target" in capsys.readouterr().err
    printed = run(folder, monkeypatch, io.StringIO(), "--target", target.spec.name)
    assert ESCAPE not in printed
    answer = "".join(char for char, _ in expected)
    marked = "".join(f"[{char}]" if drafted and char != "\n" else char for char, drafted in expected).replace("][", "")
    before, _, after = printed.partition("with its draft")
    assert answer in before
    assert marked in after and "the same 70 tokens" in after


def test_no_color_is_respected(checkpoint, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert ESCAPE not in run(checkpoint, monkeypatch, Terminal(), "--temperature", "1", "--shape", "2")


def test_characters_of_several_tokens_appear_whole():
    tokenizer = tiny_tokenizer()
    answer = Answer("", tokenizer, width=8)
    ids = tokenizer("né 🙂\x1b中文 ab abcdefghij\t|")["input_ids"]
    shown = []
    for number, token_id in enumerate(ids):
        answer.add([token_id], number % 2, seconds=1.0)
        shown.append(sum(len(line) for line in answer.lines))
    assert shown[:8] == [1, 1, 2, 3, 3, 3, 3, 4]  # é has two bytes, the smile four
    lines = ["".join(char for char, _ in line) for line in answer.lines]
    assert lines == ["né ", "🙂中文 ", "ab ", "abcdefgh", "ij    |"]  # two columns each; no control characters
    assert answer.tau == 1 and answer.tokens_per_second == len(ids)


def test_an_incomplete_character_is_shown_at_the_end():
    tokenizer = tiny_tokenizer()
    answer = Answer("", tokenizer, width=8)
    answer.add(tokenizer("aé")["input_ids"][:-1], 0, seconds=1.0)
    assert answer.lines == [[("a", False)]]
    answer.finish()
    assert answer.lines == [[("a", False), ("\N{REPLACEMENT CHARACTER}", False)]]


@pytest.mark.parametrize(("options", "message"), [
    (["--max-new-tokens", "512"], "but it must be 1 to 0"),
    (["--target", "nobody/nothing-of-that-name"], "target.model='nobody/nothing-of-that-name'"),
    (["--temperature", "-1"], "temperature=-1.0 must be 0 (greedy), or at least 1e-06 and finite"),
    (["--temperature", "nan"], "temperature=nan must be 0 (greedy), or at least 1e-06"),
    (["--temperature", "warm"], "could not convert string to float: 'warm'"),
    (["--shape", "0"], "drafts nothing"),
])
def test_errors_are_one_line(options, message, checkpoint, monkeypatch, capsys):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(SystemExit) as stopped:
        demo.main([str(checkpoint), "--device", "cpu", *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_folder_without_a_draft_says_how_to_make_one(tmp_path, capsys):
    with pytest.raises(SystemExit):
        demo.main([str(tmp_path)])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "bash scripts/quickstart.sh" in error and str(tmp_path) in error


def test_ctrl_c_ends_in_a_word(checkpoint, monkeypatch, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "load_checkpoint", interrupt)
    with pytest.raises(SystemExit) as stopped:
        demo.main([str(checkpoint)])
    assert stopped.value.code == 130 and capsys.readouterr().err == "interrupted\n"
