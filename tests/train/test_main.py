"""What the command says when something is missing."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import yaml

from specvocab_model.config import ConfigError
from tests.tiny import CHAT_TEMPLATE
from tests.train.runs import NUM_TRAIN_ROWS, config_of, final_weights, logged, overrides
from train import build, tracking, training_data
from train import main as command


def run_command(monkeypatch, arguments: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["train/main.py", *arguments])
    try:
        command.main()
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(build.Target, "load", lambda *args, **kwargs: pytest.fail("the target was loaded"))


def test_all_data_that_are_missing_are_named_at_once_before_the_target_is_looked_for(
    root, monkeypatch, capsys, nothing_is_loaded
):
    monkeypatch.setattr(command, "load_spec_and_tokenizer", lambda *args: pytest.fail("it may be downloaded now"))
    arguments = overrides(root, "missing", "target.model=nobody/no-such-model", f"data.train_path={root}/absent train",
                          f"data.validation_path={root}/absent")
    assert run_command(monkeypatch, arguments) == 2
    message = capsys.readouterr().err
    assert message.count("error:") == 1
    for path in (root / "absent train", root / "absent"):
        assert f"{path} has no data" in message
    assert "`python data_gen/main.py run_name=missing " in message
    assert f"'data.train_path={root}/absent train'" in message  # quoted for the shell
    assert not list((root / "missing").iterdir())


def test_a_tracking_backend_that_is_not_installed_is_named_before_anything_is_loaded(
    root, monkeypatch, capsys, nothing_is_loaded
):
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    assert run_command(monkeypatch, overrides(root, "untracked", "tracking=tensorboard")) == 2
    assert capsys.readouterr().err == (
        "error: tracking=tensorboard needs tensorboard: pip install 'specvocab[tensorboard]'\n")


def test_a_target_that_is_missing_is_named_with_what_to_do(
    root, monkeypatch, capsys, nothing_is_loaded
):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert run_command(monkeypatch, overrides(root, "no-target", "target.model=nobody/no-such-model")) == 2
    message = capsys.readouterr().err
    assert "nobody/no-such-model" in message and "target.model=FOLDER" in message and message.count("\n") == 1


@pytest.mark.parametrize(("change", "message"), [
    ("draft.feature_layers=[2,4,99]", "draft.feature_layers=[2, 4, 99] must be below the target's 8 layers"),
    ("draft.num_key_value_heads=3", "draft.num_attention_heads=4 must be a multiple of draft.num_key_value_heads=3"),
    ("head.rank=99", "rank=99 must lie between 1 and hidden_size=48; change head.rank"),
])
def test_a_draft_that_does_not_fit_the_target_is_refused(
    root, monkeypatch, capsys, nothing_is_loaded, change, message
):
    assert run_command(monkeypatch, overrides(root, "misfit", change)) == 2
    assert message in capsys.readouterr().err


THINKING = CHAT_TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)


@pytest.mark.parametrize(("made_with", "trained_with", "agree"), [
    ({"enable_thinking": False}, {}, False),
    ({"enable_thinking": False}, {"enable_thinking": True}, False),
    ({"enable_thinking": False}, {"enable_thinking": False}, True),
    ({"enable_thinking": True}, {}, True),  # the template's default: the ids decide, not the words
    (None, {}, True),
])
def test_data_that_the_template_rendered_otherwise_are_refused(root, tmp_path, made_with, trained_with, agree):
    target = tmp_path / "target"
    shutil.copytree(root / "target", target)
    (target / "chat_template.jinja").write_text(THINKING)
    for name in ("train", "validation"):
        shutil.copytree(root / name, tmp_path / name)
        manifest = json.loads((tmp_path / name / "manifest.json").read_text())
        manifest["settings"] |= {} if made_with is None else {"chat_template_kwargs": made_with}
        (tmp_path / name / "manifest.json").write_text(json.dumps(manifest))
    config = config_of(overrides(tmp_path, "thinking"))
    config.target.chat_template_kwargs = trained_with
    if agree:
        command.check_inputs(config)
        return
    with pytest.raises(ConfigError, match=r"was made with chat_template_kwargs={'enable_thinking': False}, which "
                                          r"gives other ids than target.chat_template_kwargs={.*}: the draft would"):
        command.check_inputs(config)


def test_data_of_another_target_are_refused(root, tmp_path, monkeypatch, capsys, nothing_is_loaded):
    manifest = json.loads((root / "train" / "manifest.json").read_text())
    manifest["settings"]["target"]["fingerprint"] = "of another"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert run_command(monkeypatch, overrides(root, "other", f"data.train_path={tmp_path}")) == 2
    message = capsys.readouterr().err
    assert f"{tmp_path} was generated by another target, 'tiny', than" in message
    assert f"{root / 'validation'} was generated" not in message


def test_a_data_set_without_rows_is_refused(root, tmp_path, monkeypatch, capsys):
    manifest = json.loads((root / "validation" / "manifest.json").read_text()) | {"shards": [], "num_rows": 0}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert run_command(monkeypatch, overrides(root, "empty", f"data.validation_path={tmp_path}")) == 2
    assert f"{tmp_path} has no rows" in capsys.readouterr().err


def test_the_command_trains_and_writes_what_it_was_told_and_what_came_out(root, monkeypatch):
    arguments = overrides(root, "command", "trainer.max_steps=2")
    assert run_command(monkeypatch, arguments) == 0
    assert [step for step, _ in logged(root, "command", "train/loss")] == [1, 2]
    resolved = yaml.safe_load((root / "command" / "config.yaml").read_text())
    assert resolved["optim"]["lr"] == 3e-3 and resolved["output_dir"] == str(root / "command")
    training = json.loads((root / "command" / "final" / "training.json").read_text())
    assert training["step"] == 2 and training["config"] == resolved
    assert training["metrics"]["simulated_tau/candidates"] >= 1.0
    assert {name.split(".")[0] for name in final_weights(root, "command")} == {"draft", "speculator"}


def test_data_that_teach_nothing_are_refused_and_cost_no_earlier_result(root, monkeypatch, capsys):
    monkeypatch.setattr(training_data, "any_supervised", lambda rows, pieces: len(rows) == NUM_TRAIN_ROWS)
    (root / "nothing" / "final").mkdir(parents=True)
    assert run_command(monkeypatch, overrides(root, "nothing", "trainer.max_steps=2", "trainer.resume=false")) == 2
    assert (root / "nothing" / "final").exists()
    assert f"{root / 'validation'}: no document has a supervised token after its second one" in capsys.readouterr().err


def test_two_runs_in_one_folder_are_refused(tmp_path, monkeypatch):
    with command.alone_in(tmp_path / "run"):
        with pytest.raises(ConfigError, match=r"another training run writes to .*run; wait for it"), \
                command.alone_in(tmp_path / "run"):
            pytest.fail("the lock was given twice")
        monkeypatch.setenv("RANK", "1")
        with command.alone_in(tmp_path / "run"):
            pass  # the other ranks of the same run
    monkeypatch.setenv("RANK", "0")
    with command.alone_in(tmp_path / "run"):
        pass  # free again
