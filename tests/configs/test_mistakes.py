"""Every kind of mistake in a configuration stops the command with one line on stderr and exit code 2."""

import subprocess
import sys

import pytest

from scripts import evaluate
from specvocab_model.cli import hydra_main
from specvocab_model.config import ConfigError
from tests.composing import config_of

HERE = "+experiment=quickstart"
# Found while Hydra composes, or by the schema: through the whole command.
MISTAKES = {
    "no experiment": ([], "no value for run_name: choose an experiment"),
    "unknown experiment": (["+experiment=quikstart"], "Could not find 'experiment/quikstart' (there are: "),
    "experiment without plus": (["experiment=quickstart"], "use +experiment=quickstart"),
    "added root key": ([HERE, "+typo=1"], "Key 'typo' not in 'Config'"),
    "added key": ([HERE, "+optim.lrr=1"], "Key 'lrr' not in 'OptimConfig' (at optim.lrr); did you mean lr?"),
    "misspelt key": ([HERE, "trainer.max_step=1"], "did you mean max_steps?"),
    "misspelt node": ([HERE, "optm.lr=1"], "did you mean optim?"),
    "unknown choice of a group": ([HERE, "distributed=zero4"],
                                  "'distributed/zero4' (there are: ddp, single, zero1, zero2, zero3)"),
    "number where a group goes": ([HERE, "optim=3"], "Config group override must be a string"),
    "text for a number": ([HERE, "optim.lr=fast"], "Value 'fast' of type 'str' could not be converted to Float"),
    "fraction for an integer": ([HERE, "trainer.num_epochs=1.5"], "(at trainer.num_epochs)"),
    "text in a list of numbers": ([HERE, "optim.betas=[0.9,x]"], "(at optim.betas[1])"),
    "no boolean": ([HERE, "trainer.resume=maybe"], "not a valid bool"),
    "null where a value is needed": ([HERE, "trainer.num_epochs=null"], "trainer.num_epochs"),
    "missing value": ([HERE, "data.train_path=???"], "no value for data.train_path"),
    "removed target": ([HERE, "~target"], "no value for target.model"),
    "removed key": ([HERE, "~optim.lr"], "optim.lr"),
    "unknown name": ([HERE, "trainer.loss=kl"], "trainer.loss='kl' is not known; choose one of forward_kl, "),
    "out of range": ([HERE, "optim.warmup_ratio=2"], "optim.warmup_ratio=2.0 must lie between 0 and 1"),
    "output below a file": ([HERE, f"output_dir={__file__}/run"],
                            f"Not a directory: '{__file__}/run'; choose another output_dir or run_name"),
    "a misspelt source": ([HERE, "generation.sources=[{paht: x}]"], "did you mean path?"),
    "broken interpolation": ([HERE, "optim.lr=${sed}"], "Interpolation key 'sed' not found (at optim.lr)"),
    "interpolation of the wrong type": ([HERE, "optim.lr=${run_name}"], "(at optim.lr)"),
    "no equals sign": ([HERE, "trainer.max_steps"], "cannot read the override 'trainer.max_steps'"),
    "multirun": ([HERE, "optim.lr=1e-3,1e-4", "-m"], "--multirun runs all points in one process"),
    "open bracket": ([HERE, "optim.betas=["], "cannot read the override 'optim.betas=['"),
}
# Found by the schema alone, whatever has composed the values.
CONTRADICTIONS = {
    "no end": ([HERE, "compare.kappa=inf"], "compare.kappa=inf must be at least 0 and finite"),
    "all too hot": ([HERE, "generation.temperature=inf"], "temperature=inf must be 0 (greedy), or at least 1e-06 and"),
    "next to nothing": ([HERE, "eval.temperature=1e-320"], "must be 0 (greedy), or at least 1e-06 and finite"),
    "no limit": ([HERE, "optim.lr=inf"], "optim.lr=inf must be positive and finite"),
    "nothing to draft": ([HERE, "data.seq_len=2"], "data.seq_len=2 must be at least 3"),
    **{f"empty {key}": ([HERE, f"{key}="], f"{key}='' is empty")
       for key in ("run_name", "output_dir", "target.model", "data.train_path", "data.validation_path")},
    "validation is training, spelt otherwise": ([HERE, "data.validation_path=./${data.train_path}/"],
                                                "is also data.train_path"),
    "negative": ([HERE, "optim.lr=-1"], "optim.lr=-1.0 must be positive"),
    "negative eps": ([HERE, "optim.eps=-1"], "optim.eps=-1.0 must be positive"),
    "negative seed": ([HERE, "seed=-1"], "seed=-1 must lie between 0 and 2**32 - 1"),
    "odd head": ([HERE, "draft.head_dim=21"], "draft.head_dim=21 must be even"),
    **{f"no {size}": ([HERE, f"draft.{size}=0"], f"draft.{size}=0 must be at least 1")
       for size in ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
                    "max_position_embeddings")},
    "a server for no engine": ([HERE, "generation.base_urls=[http://a]"], "no other engine has any"),
    "no server for the engine": ([HERE, "generation.engine=openai"], "the openai engine needs the URLs of its servers"),
    "a host for a URL": ([HERE, "generation=server", "generation.base_urls=[host:8000]"], "give URLs such as http://"),
    "a server twice": ([HERE, "generation=server", "generation.base_urls=[http://a,http://a]"], "names a server twice"),
    "no such API key": ([HERE, "generation=server", "generation.server_api_key_env=ABSENT_KEY"], "export it, or drop"),
    "tile without keep": ([HERE, "head.tile=64"], "head.tile=64 and head.keep=None come together"),
    "keep without tile": ([HERE, "head.keep=1"], "head.tile=None and head.keep=1 come together"),
    "tiles of an exact head": ([HERE, "head.tile=64", "head.keep=1", "head.selection=exact"], "'exact' has no tiles"),
    "two numbers of candidates": ([HERE, "head.tile=64", "head.keep=1", "head.num_candidates=9"],
                                  "head.tile=64 and head.keep=1 fix the number of candidates"),
    "odd tile": ([HERE, "head.tile=96", "head.keep=1"], "head.tile=96 must be a power of two"),
    "more kept than there are": ([HERE, "head.tile=4", "head.keep=5"], "head.keep=5 must be at most head.tile=4"),
    "unknown quantization": ([HERE, "head.quantization=int4"], "head.quantization='int4' is not known; choose one of"),
    "quantization of no speculator": ([HERE, "head=full", "head.quantization=fp8"], "head.type='full' has none"),
    "greedy with top-p": ([HERE, "generation.top_p=0.9"], "generation.temperature=0 is greedy"),
    "top-p of nothing": ([HERE, "generation.top_p=0", "generation.temperature=1"], "top_p=0 leaves no token"),
    "greedy magpie": ([HERE, "generation.magpie_temperature=0"], "would invent the same prompt every time"),
    "an unknown action": ([HERE, "action=look"], "action='look' is not known; choose one of generate, "),
    "kept and invented": ([HERE, "generation.responses=keep"], "magpie_prompts=400 have no answers that"),
    "samples that are all alike": ([HERE, "generation.samples_per_prompt=2"], "the same answer so many times"),
    "a source without a path": ([HERE, "generation.sources=[{weight: 1}]"], "generation.sources"),
    "a weight of nothing": ([HERE, "generation.sources=[{path: x, weight: 0}]"], "weight=0.0 of x must be positive"),
    "all prompts alike": ([HERE, "generation.near_duplicate_threshold=0"], "calls all prompts alike"),
    "thinking said twice": ([HERE, "generation.thinking_share=0.5", "+target.chat_template_kwargs.enable_thinking=1"],
                            "contradict each other"),
    "a variable of every template": ([HERE, "+target.chat_template_kwargs.messages=1"], "holds messages, which is"),
    "validation is training": ([HERE, "data.validation_path=${data.train_path}"], "is also data.train_path"),
}


def run(command, arguments: list[str], monkeypatch, tmp_path) -> int:
    monkeypatch.setattr(sys, "argv", ["command", *arguments])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        command()
    return stop.value.code


@pytest.mark.parametrize(("arguments", "expected"), MISTAKES.values(), ids=MISTAKES.keys())
def test_mistake_stops_with_one_line(arguments, expected, monkeypatch, tmp_path, capsys):
    @hydra_main
    def command(config):
        pytest.fail("the command started")

    assert run(command, arguments, monkeypatch, tmp_path) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("error: ")
    assert expected in err


@pytest.mark.parametrize(("arguments", "expected"), CONTRADICTIONS.values(), ids=CONTRADICTIONS.keys())
def test_contradiction_is_named_in_one_line(arguments, expected):
    with pytest.raises(ConfigError) as refused:
        config_of(arguments)
    assert expected in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("body", "expected"), [
    ("optim: {lrr: 1}", "did you mean lr?"),
    ("optim: {lr: fast}", "(at optim.lr)"),
    ("defaults: [override /traget: qwen3_8b]", "traget"),
    ("optim: {lr: 1", "expected ',' or '}'"),
], ids=["misspelt key", "wrong type", "misspelt group", "broken YAML"])
def test_mistake_in_an_experiment_file(body, expected, monkeypatch, tmp_path, capsys):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{body}\n")

    @hydra_main
    def command(config):
        pytest.fail("the command started")

    arguments = ["--config-dir", str(tmp_path), "+experiment=mine", "run_name=mine"]
    assert run(command, arguments, monkeypatch, tmp_path) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and expected in err


def test_hydra_can_show_the_configuration_without_running(monkeypatch, tmp_path, capsys):
    @hydra_main
    def command(config):
        pytest.fail("the command started")

    monkeypatch.setattr(sys, "argv", ["command", HERE, "--cfg", "job"])
    monkeypatch.chdir(tmp_path)
    command()
    assert "run_name: quickstart" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_help_says_what_the_command_is_for(monkeypatch, tmp_path, capsys):
    assert run(evaluate.main, ["--help"], monkeypatch, tmp_path) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{evaluate.__doc__.strip()}\n\n== Configuration groups ==\n")
    assert "distributed: ddp, " in shown


def test_only_the_first_rank_of_a_machine_speaks(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run(hydra_main(lambda config: None), ["+experiment=nope"], monkeypatch, tmp_path) == 2
    assert capsys.readouterr().err == ""


PROGRAM = """
from specvocab_model.cli import hydra_main
from specvocab_model.config import ConfigError

@hydra_main
def main(config):
    {body}

main()
"""


@pytest.mark.parametrize(("body", "code", "first", "last"), [
    ("raise ConfigError('no data: make it')", 2, "error: no data: make it", "error: no data: make it"),
    ("raise RuntimeError('a bug')", 1, "Traceback (most recent call last):", "RuntimeError: a bug"),
    ("raise KeyboardInterrupt", 130, "interrupted", "interrupted"),
])
@pytest.mark.usefixtures("forked")
def test_what_the_command_raises(body, code, first, last, tmp_path):
    """A real process: the command's own ConfigError is one line, a bug keeps its traceback, nothing is left behind."""
    script = tmp_path / "command.py"
    script.write_text(PROGRAM.format(body=body))
    run = subprocess.run([sys.executable, script, HERE], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == code
    assert run.stdout == ""
    lines = run.stderr.splitlines()
    assert (lines[0], lines[-1]) == (first, last)
    assert "hydra/" not in run.stderr
    written = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    assert written == ["command.py", "outputs", "outputs/quickstart"]  # no .hydra folder, no log, no clock
