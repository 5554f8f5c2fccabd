from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from specvocab_kernels.vocab_head import TileSelection

from scripts import export
from specvocab_model.config import (
    Config,
    ConfigError,
    DataConfig,
    DraftConfig,
    EvalConfig,
    ExportConfig,
    HeadConfig,
    TargetConfig,
)
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import load_checkpoint
from specvocab_model.target import Target, load_spec
from tests.scripts.data import write_data
from tests.tiny import tiny_target_folder
from train.checkpoint import TrainState
from train.checkpoint_files import write_manifest


@pytest.fixture
def config(tmp_path) -> Config:
    target = TargetConfig(model=str(tiny_target_folder(tmp_path / "target", "llama")), dtype="float32")
    return Config(
        run_name="tiny", output_dir=str(tmp_path / "run"), target=target, draft=DraftConfig(num_unroll_steps=3),
        head=HeadConfig(rank=5, num_candidates=20), data=DataConfig(train_path="t", validation_path="v"),
        eval=EvalConfig(prompts="p"),
    )


def finish_training(config: Config) -> SpecVocabDraft:
    """What train/main.py leaves behind."""
    spec = load_spec(config.target)
    model = SpecVocabDraft.build(spec, config.draft, config.head).for_training()
    final = Path(config.output_dir, "final")
    final.mkdir(parents=True)
    save_file(dict(model.state_dict()), final / "model.safetensors")
    record = {"step": 7, "metrics": {"loss": 1.5}, "config": asdict(config), "target_fingerprint": spec.fingerprint,
              "data_manifest_sha256": "d" * 64, "git_commit": "c0ffee"}
    (final / "training.json").write_text(json.dumps(record))
    return model


def test_the_run_becomes_a_checkpoint_in_the_targets_type(config):
    model = finish_training(config)
    folder = export.export(replace(config, head=replace(config.head, num_candidates=30)))
    loaded = load_checkpoint(folder, load_spec(config.target))
    model.speculator.untie(Target.load(config.target, device="cpu").lm_head_weight)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert loaded.speculator.selection == TileSelection(277, 128, 10)
    record = json.loads((folder / "specvocab.json").read_text())
    assert (record["step"], record["data_manifest_sha256"], record["git_commit"]) == (7, "d" * 64, "c0ffee")
    assert record["config"] == asdict(config)

    half = replace(config, target=replace(config.target, dtype="bfloat16"))
    assert load_checkpoint(export.export(half)).draft.fc.weight.dtype == torch.bfloat16


def keep_checkpoints(config: Config, *, best: int) -> dict[int, SpecVocabDraft]:
    """Checkpoints of steps 4 and 7 with different weights, of which ``best`` is said to be the best."""
    spec, models = load_spec(config.target), {}
    root = Path(config.output_dir, "checkpoints")
    for step in (4, 7):
        models[step] = SpecVocabDraft.build(spec, config.draft, config.head).for_training()
        folder = root / f"step-{step}"
        folder.mkdir(parents=True)
        save_file(dict(models[step].state_dict()), folder / "model.safetensors")
        torch.save([], folder / "rng.pt")
        state = TrainState(step=step, best_step=best, best_tau=2.25)
        (folder / "state.json").write_text(json.dumps({"state": asdict(state), "identity": {}}))
        write_manifest(folder)
    (root / "latest").write_text("step-7")
    return models


def test_the_best_checkpoint_is_exported_on_request(config, capsys):
    last = finish_training(config)
    kept = keep_checkpoints(config, best=4)
    best = replace(config, export=ExportConfig(weights="best"))
    folder = export.export(best)
    assert torch.equal(load_checkpoint(folder).draft.fc.weight, kept[4].draft.fc.weight)
    record = json.loads((folder / "specvocab.json").read_text())
    assert (record["step"], record["metrics"]) == (4, {"simulated_tau/candidates": 2.25})
    assert "step 4, with simulated_tau/candidates 2.2500" in capsys.readouterr().out
    assert torch.equal(load_checkpoint(export.export(config)).draft.fc.weight, last.draft.fc.weight)

    weights = Path(config.output_dir, "checkpoints/step-4/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"step-4/model.safetensors is missing or damaged"):
        export.export(best)
    shutil.rmtree(weights.parent)
    with pytest.raises(ConfigError, match=r"step-4, the best of the run, was not kept .*export.weights=final"):
        export.export(best)
    shutil.rmtree(weights.parent.parent)
    with pytest.raises(ConfigError, match=r"checkpoints holds no checkpoint; export the final weights"):
        export.export(best)


def test_a_copy_of_the_targets_head_is_exported_on_request(config):
    finish_training(config)
    folder = export.export(replace(config, export=ExportConfig(own_lm_head=True)))
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == 277
    lm_head = Target.load(config.target, device="cpu").lm_head_weight
    loaded = load_checkpoint(folder, load_spec(config.target))
    assert torch.equal(loaded.own_head.weight, lm_head) and loaded.own_head.is_full
    assert loaded.speculator.selection == TileSelection(277, 128, 7)


def test_a_trained_static_head_is_exported(config):
    config = replace(config, head=HeadConfig(type="static", draft_vocab_size=40))
    model = finish_training(config)
    loaded = load_checkpoint(export.export(config), load_spec(config.target))
    assert torch.equal(loaded.own_head.weight, model.own_head.weight) and len(loaded.own_head.ids) == 40
    with pytest.raises(ConfigError, match="was trained with one of its own"):
        export.export(replace(config, export=ExportConfig(own_lm_head=True)))
    with pytest.raises(ConfigError, match=r"head.draft_vocab_size=41, but .* was trained with 40"):
        export.export(replace(config, head=HeadConfig(type="static", draft_vocab_size=41)))


def test_another_folder_is_written_on_request(config, tmp_path):
    finish_training(config)
    folder = export.export(replace(config, export=ExportConfig(output=str(tmp_path / "a" / "draft"))))
    assert folder == tmp_path / "a" / "draft"
    load_checkpoint(folder, load_spec(config.target))
    assert not (Path(config.output_dir) / "export").exists()


def test_the_layout_of_speculators_has_a_folder_of_its_own(config):
    model = finish_training(config)
    export.export(config)
    folder = export.export(replace(config, export=ExportConfig(layout="speculators")))
    assert folder == Path(config.output_dir, "export-speculators") and folder.with_name("export").is_dir()
    assert "speculators_config" in json.loads((folder / "config.json").read_text())
    assert torch.equal(load_checkpoint(folder, load_spec(config.target)).draft.fc.weight, model.draft.fc.weight)


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_what_8_bits_cost_is_printed_and_recorded(precision, config, tmp_path, capsys):
    finish_training(config)
    config = replace(config, head=replace(config.head, quantization=precision))
    folder = export.export(config)
    assert "data.validation_path=v is not on this machine" in capsys.readouterr().out
    assert json.loads((folder / "specvocab.json").read_text())["candidate_recall"] is None

    config.data.validation_path = write_data(tmp_path / "validation", num_rows=3)
    folder = export.export(config)
    cost = json.loads((folder / "specvocab.json").read_text())["candidate_recall"]
    assert cost["quantization"] == precision
    assert cost["num_positions"] == 3 * (12 + 12 + 12)  # three steps, all of whose 12 tokens have a start before them
    printed = capsys.readouterr().out
    card = (folder / "README.md").read_text()
    for when in ("before", "after"):
        assert 0 < cost[when]["target_top1"] < 1
        assert f"{cost[when]['target_top1']:.2%}" in printed and f"{cost[when]['target_top1']:.2%}" in card
    assert f"of rank 5 in {precision} that selects 21 of 277 tokens at each step, the best 7 of every 128" in card
    assert load_checkpoint(folder).speculator.quantization == precision


def test_a_run_that_is_not_there_is_named_with_its_command(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["export.py", "+experiment=quickstart", "run_name=my run"])
    with pytest.raises(ConfigError, match=r"run.final holds no finished run; train it with: accelerate launch "
                                          r"train/main.py \+experiment=quickstart 'run_name=my run'$"):
        export.export(config)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head": HeadConfig(rank=6)}, r"head.rank=6, but .* was trained with 5"),
        ({"head": HeadConfig(rank=5, type="full")}, r"head.type='full', but .* was trained with 'speculative'"),
        ({"draft": DraftConfig(num_unroll_steps=3, feature_layers=[1, 2, 3])}, r"draft.feature_layers=\[1, 2, 3\]"),
    ],
)
def test_other_settings_than_those_of_the_run_are_refused(change, message, config):
    finish_training(config)
    with pytest.raises(ConfigError, match=message):
        export.export(replace(config, **change))
    assert not Path(config.output_dir, "export").exists()


def test_a_run_of_a_version_that_knew_fewer_settings_is_refused(config):
    finish_training(config)
    path = Path(config.output_dir, "final/training.json")
    record = json.loads(path.read_text())
    del record["config"]["draft"]["num_unroll_steps"]
    path.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=r"by another version, which did not record draft\.num_unroll_steps; export"):
        export.export(config)


def test_a_run_of_a_version_that_could_not_tie_is_exported_untied(config):
    config = replace(config, head=replace(config.head, tied=False))
    model = finish_training(config)
    path = Path(config.output_dir, "final/training.json")
    record = json.loads(path.read_text())
    del record["config"]["head"]["tied"]
    path.write_text(json.dumps(record))
    loaded = load_checkpoint(export.export(config))
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    with pytest.raises(ConfigError, match=r"head\.tied=True, but .* was trained with False"):
        export.export(replace(config, head=replace(config.head, tied=True)))


def test_another_target_than_that_of_the_run_is_refused(config, tmp_path):
    finish_training(config)
    other = str(tiny_target_folder(tmp_path / "other", "llama", seed=1))
    with pytest.raises(ConfigError, match="was trained for another target"):
        export.export(replace(config, target=replace(config.target, model=other)))
