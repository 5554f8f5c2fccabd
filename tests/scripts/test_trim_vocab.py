"""scripts/trim_vocab.py on a tiny target: from data to the chosen vocabulary, its report and its page."""

from __future__ import annotations

import itertools
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data_gen.token_counts import count_tokens
from scripts import trim_vocab
from specvocab_model.config import DraftConfig, HeadConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import Provenance, load_checkpoint, save_checkpoint
from specvocab_model.heads import build_head
from specvocab_model.target import Target
from specvocab_model.tuning.trim import covered, keeping_order
from specvocab_model.vocab import VocabMap, special_ids
from tests.scripts.data import write_data
from tests.tiny import EOS_IDS, tiny_target

V = 277


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return tiny_target("llama", tmp_path_factory.mktemp("trim"))


@pytest.fixture
def arguments(target, tmp_path) -> list[str]:
    corpus = tmp_path / "corpus.jsonl"
    texts = [("code", "for i in x: print(i)"), ("chat", "How are you today?"), ("chat", "Zebras quiz")]
    corpus.write_text("".join(json.dumps({"category": name, "text": text}) + "\n" for name, text in texts * 5))
    return ["--target", target.spec.name, "--dtype", "float32", "--device", "cpu", "--trials", "20", "--step", "4",
            "--min-size", "8", "--output", str(tmp_path / "trimmed"), "--data", f"web={corpus}"]


def run(arguments: list[str], tmp_path: Path) -> dict:
    trim_vocab.main(arguments)
    return json.loads((tmp_path / "trimmed/trim_vocab.json").read_text())


def refused(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        trim_vocab.main(arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_domains_of_two_kinds_share_one_vocabulary(arguments, target, tmp_path, capsys):
    data = write_data(tmp_path / "data", num_rows=6)
    least = ["--min-coverage", "0.5", "--min-coverage", "web=0.97", "--alpha", "0.3"]
    result = run([*arguments, "--data", data, *least], tmp_path)
    studies = result["domains"]
    assert list(studies) == ["all domains", "web", "data"] and studies["data"]["num_tokens"] == 6 * 12
    joint = studies["all domains"]
    assert joint["min_coverage"] == {"web": 0.97, "data": 0.5}
    assert joint["exact"]["coverage_of"]["web"] >= 0.97 and joint["exact"]["coverage_of"]["data"] >= 0.5
    assert joint["exact"]["size"] > studies["web"]["exact"]["size"]
    for study in studies.values():
        assert study["tpe"]["utility"] <= study["exact"]["utility"]
        assert study["difference"]["size"] == study["tpe"]["size"] - study["exact"]["size"]
        assert study["exact"]["size"] in [one["size"] for one in study["front"]]
        assert all(one["utility"] == pytest.approx(0.3 * one["coverage"] + 0.7 * (1 - one["cost_ratio"]))
                   for one in study["curve"])

    tensors = load_file(tmp_path / "trimmed/vocab_map.safetensors")
    vocab = VocabMap.from_tensors(tensors["d2t"], tensors["t2d"])
    kept = set(vocab.ids.tolist())
    assert len(vocab) == result["size"] == joint["exact"]["size"] and kept >= set(EOS_IDS)
    for name, path in (("web", arguments[-1].removeprefix("web=")), ("data", data)):
        (counts,) = count_tokens(name, path, target.tokenizer, V).values()
        assert joint["exact"]["coverage_of"][name] == pytest.approx(int(counts[vocab.ids].sum()) / int(counts.sum()))
    out = capsys.readouterr().out
    assert "web" in out and f"{result['size']} tokens kept" in out


class Tags(HTMLParser):
    """That every element is closed, and what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        assert tag not in ("script", "img") and not any(name == "src" for name, _ in attrs)  # self-contained
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_domain_for_each_category_and_a_page(arguments, tmp_path):
    result = run([*arguments, "--split-by", "category", "--equal-domains"], tmp_path)
    assert list(result["domains"]) == ["all domains", "web/code", "web/chat"]
    tags = Tags()
    tags.feed((tmp_path / "trimmed/trim_vocab.html").read_text())
    assert not tags.open and tags.counts["polyline"] >= 9 and tags.counts["table"] == 2


@pytest.mark.parametrize("cost", trim_vocab.COSTS)
def test_every_cost_can_be_traded(cost, arguments, tmp_path):
    result = run([*arguments, "--cost", cost, "--context", "4"], tmp_path)
    assert list(result["domains"]) == ["all domains"]
    curve = result["domains"]["all domains"]["curve"]
    assert curve[-1]["size"] == V and curve[-1]["cost_ratio"] == 1 and curve[-1]["coverage"] == 1
    if cost != "latency":  # a tiny head's times are noise
        assert all(a["cost_ratio"] < b["cost_ratio"] for a, b in itertools.pairwise(curve))


def test_a_size_may_be_given(arguments, target, tmp_path, capsys):
    result = run([*arguments, "--size", "20"], tmp_path)
    assert result["size"] == 20
    (counts,) = count_tokens("web", arguments[-1].removeprefix("web="), target.tokenizer, V).values()
    order = keeping_order(counts.numpy(), special_ids(target.tokenizer, target.spec.eos_token_ids, V))
    tensors = load_file(tmp_path / "trimmed/vocab_map.safetensors")
    assert set(tensors["t2d"].nonzero()[:, 0].tolist()) == set(order[:20].tolist())
    share = int(counts[order[:20]].sum()) / int(counts.sum())
    assert result["coverage_of"] == {"web": share}
    assert f"20 tokens kept, which cover web {share:.2%}" in capsys.readouterr().out
    assert covered(counts.numpy(), order, torch.tensor([V]).numpy())[0] == 1
    assert run([*arguments, "--size", str(V + 5)], tmp_path)["size"] == V


def test_the_pruned_checkpoint_says_what_the_full_head_says_of_its_tokens(arguments, target, tmp_path, capsys):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(rank=6, num_candidates=20))
    provenance = Provenance(step=3, tuning={"head": "of the speculator"})
    checkpoint = save_checkpoint(tmp_path / "export", model, target.spec, provenance, dtype=torch.float32)
    run([*arguments, str(checkpoint), "--size", "40"], tmp_path)
    pruned = load_checkpoint(tmp_path / "trimmed/pruned", target.spec)
    kept = load_file(tmp_path / "trimmed/vocab_map.safetensors")["t2d"].nonzero()[:, 0]
    assert torch.equal(pruned.own_head.vocab.ids, kept) and len(kept) == 40 and pruned.speculator is None
    assert torch.load(tmp_path / "trimmed/token_map.pt") == kept.tolist()
    torch.testing.assert_close(dict(pruned.draft.state_dict()), dict(model.draft.state_dict()), rtol=0, atol=0)
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    place_draft(pruned, target)
    output = build_head("static", target, pruned)(hidden)
    torch.testing.assert_close(output.logits, build_head("full", target, model)(hidden).logits[:, kept])
    assert Provenance.read(tmp_path / "trimmed/pruned") == Provenance(step=3)

    again = refused([*arguments, str(tmp_path / "trimmed/pruned")], capsys)
    assert "has 40 of the target's tokens already; give a draft of the whole vocabulary" in again


def test_a_place_that_the_pruned_checkpoint_cannot_have_is_named_before_anything_is_counted(
    arguments, target, tmp_path, monkeypatch, capsys
):
    model = SpecVocabDraft.build(target.spec, DraftConfig(), HeadConfig(rank=6, num_candidates=20))
    checkpoint = save_checkpoint(tmp_path / "export", model, target.spec, Provenance(), dtype=torch.float32)
    (tmp_path / "trimmed/pruned").mkdir(parents=True)
    (tmp_path / "trimmed/pruned/thesis.tex").touch()
    monkeypatch.setattr(trim_vocab, "count_tokens", lambda *_, **__: pytest.fail("it counts"))
    assert "pruned is not empty and not a SpecVocab checkpoint" in refused([*arguments, str(checkpoint)], capsys)


@pytest.mark.parametrize("change, message", [
    (["--data", "nowhere.jsonl"], "there is no prompt file 'nowhere.jsonl'"),
    (["--min-coverage", "chat=0.9"], "given for chat, but the domains are web"),
    (["--size", "3"], "a draft vocabulary of 3 has no room for the 4 special tokens"),
    (["--device", "nosuch"], "argument --device: 'nosuch' cannot be used"),
    (["--output", __file__], f"cannot write {__file__}: File exists"),
    (["--data", "all domains=x.jsonl"], "'all domains' stands for all of them together"),
])
def test_what_cannot_work_ends_in_one_line(change, message, arguments, capsys):
    assert message in refused([*arguments, *change], capsys)


def test_two_domains_of_one_name_are_refused(arguments, capsys):
    assert "two domains are called 'web'" in refused([*arguments, *arguments[-2:]], capsys)


def test_an_empty_data_set_is_refused(arguments, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("")
    assert "holds no token to count" in refused([*arguments, "--data", str(tmp_path / "empty.jsonl")], capsys)
    empty = write_data(tmp_path / "rows", num_rows=1)
    (tmp_path / "nothing.jsonl").write_text('{"text": ""}\n')
    assert "holds no token" in refused([*arguments, "--data", empty, "--data", f"x={tmp_path}/nothing.jsonl"], capsys)


def test_the_search_says_what_it_needs(arguments, monkeypatch, capsys):
    monkeypatch.setattr(trim_vocab, "find_spec", lambda name: None)
    assert "needs optuna: pip install 'specvocab[tune]'" in refused(arguments, capsys)
