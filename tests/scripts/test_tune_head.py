"""scripts/tune_head.py on a tiny target, from an exported draft to the chosen head in its checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from scripts import tune_head
from specvocab_model.config import DraftConfig, HeadConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.draft_states import collect_draft_states, measure_coverage
from specvocab_model.export import Provenance, load_checkpoint, save_checkpoint
from specvocab_model.target import Target
from tests.scripts.data import write_data
from tests.tiny import tiny_target

PROVENANCE = Provenance(step=3, metrics={"loss": 1.0}, git_commit="c0ffee")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return tiny_target("llama", tmp_path_factory.mktemp("tune"))


@pytest.fixture
def checkpoint(target, tmp_path) -> Path:
    return write_checkpoint(target, tmp_path / "export")


def write_checkpoint(target: Target, folder: Path, **head) -> Path:
    """A draft that agrees with the target now and then: its speculator is good, so that heads differ."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SpecVocabDraft.build(target.spec, DraftConfig(num_unroll_steps=2), HeadConfig(rank=24, **head))
    model.speculator.initialise("svd", target.lm_head_weight)
    if model.head_config.quantization:
        model.speculator.quantize(model.head_config.quantization)
    return save_checkpoint(folder, model, target.spec, PROVENANCE, dtype=torch.float32)


@pytest.fixture
def arguments(checkpoint, target, tmp_path) -> list[str]:
    return [str(checkpoint), "--target", target.spec.name, "--dtype", "float32", "--device", "cpu", "--data",
            write_data(tmp_path / "data", num_rows=20), "--trials", "25", "--context", "16", "--num-draft-tokens", "2",
            "--min-tau-ratio", "0.9", "--output", str(tmp_path / "tuned")]


def refused(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        tune_head.main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_the_best_head_is_found_written_and_applied(arguments, checkpoint, target, tmp_path, capsys):
    before = load_checkpoint(checkpoint)
    options = tune_head.build_parser().parse_args(arguments)
    _, _, states, _ = tune_head.load(options)
    tune_head.main([*arguments, "--apply"])
    result = json.loads((tmp_path / "tuned/tune_head.json").read_text())
    best, outcomes = result["best"], result["outcomes"]
    assert len(outcomes) > 10 and len({one["head"] for one in outcomes}) == len(outcomes)
    assert best["speed"] == max(one["speed"] for one in outcomes if one["tau_ratio"] >= 0.9)
    for one in outcomes:
        nu = one["seconds"] / result["full"]["seconds"]
        ratio = one["coverage"]["simulated_tau"] / result["full"]["simulated_tau"]
        assert one["speed"] == pytest.approx(ratio * (1 + result["kappa"]) / (1 + nu * result["kappa"]))
    for one in result["front"]:  # nothing is both faster and better
        assert not any(other["seconds"] < one["seconds"] and other["tau_ratio"] >= one["tau_ratio"]
                       for other in outcomes)
    out = capsys.readouterr().out
    assert best["head"] in out and "no --train-data" in out
    svg = (tmp_path / "tuned/tune_head.svg").read_text()
    assert ElementTree.fromstring(svg).tag.endswith("svg") and svg.count("<circle") > len(outcomes)

    after = load_checkpoint(checkpoint, target.spec)
    torch.testing.assert_close(dict(after.draft.state_dict()), dict(before.draft.state_dict()), rtol=0, atol=0)
    choice = best["choice"]
    assert (after.speculator.rank, after.speculator.selection.tile, after.speculator.selection.keep) == (
        choice["rank"], choice["tile"], choice["keep"]
    )
    assert after.speculator.quantization == choice["quantization"]
    assert Provenance.read(checkpoint).tuning == best and Provenance.read(checkpoint).metrics == {"loss": 1.0}

    # What was expected of the choice is what the written head covers on the same documents.
    found = measure_coverage(states, after.speculator.head_weights(target.lm_head_weight))
    assert asdict(found) == pytest.approx(best["coverage"])


def test_lower_ranks_lose_the_least_that_a_rank_can(target, tmp_path):
    """Against numpy's truncated SVD of the approximate logits themselves (Eckart-Young)."""
    model = load_checkpoint(write_checkpoint(target, tmp_path / "export"))
    hidden = torch.randn(300, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(0, -2, 48)
    lower = tune_head.LowerRanks(model.speculator, hidden)
    logits = model.speculator(hidden).detach().double()
    singular = torch.linalg.svdvals(logits)
    for rank in (1, 6, 23):
        down_proj, vocab_proj = lower(rank)
        assert down_proj.shape == (rank, 48) and vocab_proj.shape == (277, rank)
        error = (hidden @ down_proj.T @ vocab_proj.T - logits).norm().item()
        assert error == pytest.approx(singular[rank:].square().sum().sqrt().item(), rel=1e-3)
    assert torch.equal(lower(24)[0], model.speculator.down_proj.weight)


def test_static_vocabularies_are_the_most_frequent_tokens(arguments, target, tmp_path):
    data = write_data(tmp_path / "train", num_rows=30, seed=1)
    options = tune_head.build_parser().parse_args([*arguments, "--train-data", data])
    counts = tune_head.token_counts(options, target.spec)
    assert int(counts.sum()) == 30 * 12  # the answers alone
    _, _, states, ranks = tune_head.load(options)
    judge = tune_head.Judge(states, target.lm_head_weight, ranks, counts)
    kept = set(sorted(range(277), key=lambda i: (-int(counts[i]), i))[:100])
    valid = states.rows.valid
    hits = [int(token) in kept for token in states.target_ids.expand_as(valid)[valid]]
    assert judge(tune_head.StaticChoice(size=100)).target_top1 == sum(hits) / len(hits)
    assert judge(tune_head.StaticChoice(size=277)).simulated_tau == judge.full_tau
    tune_head.main([*arguments, "--train-data", data, "--min-tau-ratio", "0.1"])
    outcomes = json.loads((tmp_path / "tuned/tune_head.json").read_text())["outcomes"]
    assert any("size" in one["choice"] for one in outcomes)


def test_times_of_another_device_choose_the_head(arguments, checkpoint, tmp_path, capsys):
    tune_head.main(["--latency-only", "--shapes", "277x48", "--ranks", "12,24", "--dtype", "float32", "--device", "cpu",
                    "--output", str(tmp_path / "card")])
    file = tmp_path / "card/latency.json"
    record = json.loads(file.read_text())
    (shape,) = record["shapes"]
    for number, entry in enumerate(shape["heads"]):
        entry["seconds"] = shape["full"] * (0.1 if number == 3 else 0.5)
    file.write_text(json.dumps(record))
    options = [*arguments, "--latencies", str(file), "--min-tau-ratio", "0.1"]
    assert "give its --kappa" in refused(options, capsys)
    tune_head.main([*options, "--kappa", "0.5", "--ranks", "12,24"])
    result = json.loads((tmp_path / "tuned/tune_head.json").read_text())
    assert {one["head"] for one in result["outcomes"]} == {entry["head"] for entry in shape["heads"]
                                                            if "size" not in entry["choice"]}
    assert result["kappa"] == 0.5 and result["best"]["head"] == shape["heads"][3]["head"]
    assert "has no head of rank 7" in refused([*options, "--kappa", "0.5", "--ranks", "7"], capsys)
    assert "has no shape 277x48 with batch 2" in refused([*options, "--kappa", "0.5", "--batch", "2"], capsys)


@pytest.mark.parametrize("draft", [True, False])
def test_recall_table(draft, arguments, target, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tune_head, "TABLE_TOPS", (8, 60))
    arguments = [*(arguments if draft else arguments[1:]), "--table", "--ranks", "6,24"]
    tune_head.main(arguments)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")][1:]
    cells = [[part.strip() for part in line.strip("|").split("|")] for line in lines]
    assert {row[0] for row in cells} == {"6", "24"} and {row[1] for row in cells} >= {"exact top 8", "exact top 60"}
    by_rule = {(row[0], row[1]): [float(cell.split()[0]) for cell in row[3:]] for row in cells}
    assert by_rule["24", "exact top 60"][0] >= by_rule["6", "exact top 8"][0]
    options = tune_head.build_parser().parse_args(arguments)
    _, _, states, ranks = tune_head.load(options)
    down_proj, vocab_proj = ranks[6]
    scores = states.hidden[states.rows.valid] @ down_proj.T @ vocab_proj.T
    wanted = states.target_ids.expand_as(states.rows.valid)[states.rows.valid]
    hits = (scores.topk(8).indices == wanted[:, None]).any(1).double().mean().item()
    assert by_rule["6", "exact top 8"][0] == pytest.approx(hits, abs=6e-5)


def test_states_simulate_the_same_tau_as_training(target, checkpoint, capsys):
    """Chains followed one by one from every start position."""
    model = load_checkpoint(checkpoint)
    rows = [{"input_ids": ids.tolist(), "loss_mask": [0] * 6 + [1] * 8}
            for ids in torch.randint(0, 250, (4, 14), generator=torch.Generator().manual_seed(5))]
    states = collect_draft_states(target, model, rows, num_steps=2, num_tokens=1000)
    survived = starts = 0
    at = {(step, int(states.rows.student[step, n])): n for step in range(2) for n in range(len(states.target_ids))
          if states.rows.valid[step, n]}
    for (step, start), n in at.items():
        if step:
            continue
        starts += 1
        for later in range(2):
            n = at.get((later, start))
            if n is None or states.draft_ids[later, n] != states.target_ids[n]:
                break
            survived += 1
    assert states.simulated_tau() == 1 + survived / starts
    assert states.num_valid == len(at) == 4 * 2 * 8
    capsys.readouterr()
    limited = collect_draft_states(target, model, rows, num_steps=2, num_tokens=9)
    assert " 9/9 " in capsys.readouterr().err
    assert len(limited.target_ids) == 16  # whole documents


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda a: a[1:], "give checkpoint, or --latency-only"),
        (lambda a: [a[0]], "give target, data, or"),
        (lambda a: [*a, "--min-tau-ratio", "1.5"], "no head tried reaches 1.5 of the full head's τ"),
        (lambda a: [*a, "--ranks", "30"], "--ranks 30 is above the trained rank 24"),
        (lambda a: [*a[1:], "--table", "--ranks", "8,4000"], "--ranks 4000 is above the target's hidden_size"),
        (lambda a: [*a, "--seed", "-1"], "argument --seed: -1 must lie between 0 and 4294967295"),
        (lambda a: [*a, "--latencies", "nowhere.json", "--kappa", "1"], "there is no file nowhere.json"),
    ],
)
def test_what_cannot_work_ends_in_one_line(change, message, arguments, capsys):
    assert message in refused(change(arguments), capsys)


def test_heads_that_cannot_be_tuned_are_refused(arguments, target, tmp_path, capsys):
    arguments[0] = str(write_checkpoint(target, tmp_path / "rounded", quantization="int8"))
    assert "vocab_proj has been rounded to int8; export the trained weights again" in refused(arguments, capsys)


def test_the_search_says_what_it_needs(arguments, monkeypatch, capsys):
    monkeypatch.setattr(tune_head, "find_spec", lambda name: None)
    assert "needs optuna: pip install 'specvocab[tune]'" in refused(arguments, capsys)
