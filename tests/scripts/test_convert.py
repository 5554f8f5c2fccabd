from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from specvocab_kernels.vocab_head import TileSelection

from scripts import convert
from specvocab_model import conversion
from specvocab_model.config import ConfigError, DraftConfig, HeadConfig
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.draft_states import DraftStates, collect_draft_states, measure_coverage
from specvocab_model.export import Provenance, load_checkpoint, save_checkpoint
from specvocab_model.heads import build_head
from specvocab_model.heads.static import OwnHead
from specvocab_model.layouts import speculators_config
from specvocab_model.speculator import VocabSpeculator
from specvocab_model.target import Target
from specvocab_model.unroll import JudgedRows
from specvocab_model.vocab import VocabMap
from tests.tiny import tile_candidates, tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Target:
    return tiny_target("qwen3", tmp_path_factory.mktemp("convert"))


@pytest.fixture(scope="module")
def draft(target, tmp_path_factory) -> Path:
    """A stock EAGLE-3 folder with feature layers of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SpecVocabDraft.build(target.spec, DraftConfig(feature_layers=[1, 3, 6]), HeadConfig(type="full"))
    folder = tmp_path_factory.mktemp("drafts") / "full"
    save_checkpoint(folder, model, target.spec, Provenance(), dtype=torch.float32)
    (folder / "specvocab.json").unlink()
    return folder


@pytest.fixture
def arguments(draft, target, tmp_path) -> list[str]:
    prompts = [{"prompt": f"What is {number} + 1?"} for number in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    return [str(draft), "--target", target.spec.name, "--dtype", "float32", "--device", "cpu", "--num-prompts", "12",
            "--max-new-tokens", "12", "--rank", "24", "--num-candidates", "60", "--output", str(tmp_path / "converted"),
            "--prompts", str(tmp_path / "prompts.jsonl")]


def run(arguments: list[str], **changes: str) -> None:
    """``changes`` by option name without dashes."""
    arguments = list(arguments)
    for option, value in changes.items():
        arguments[arguments.index(f"--{option}") + 1] = value
    convert.main(arguments)


def test_the_draft_stays_and_gains_a_calibrated_speculator(arguments, draft, target, tmp_path, capsys):
    run(arguments)
    before, after = load_checkpoint(draft), load_checkpoint(tmp_path / "converted", target.spec)
    torch.testing.assert_close(dict(after.draft.state_dict()), dict(before.draft.state_dict()), rtol=0, atol=0)
    assert after.architecture.feature_layers == (1, 3, 6)
    assert (after.speculator.rank, after.speculator.num_candidates) == (24, 60)
    basis = after.speculator.down_proj.weight.detach()
    torch.testing.assert_close(basis @ basis.T, torch.eye(24), atol=1e-5, rtol=0)
    torch.testing.assert_close(after.speculator.vocab_proj.weight, target.lm_head_weight @ basis.T)

    recall = json.loads((tmp_path / "converted/specvocab.json").read_text())["candidate_recall"]
    chance = 60 / target.spec.vocab_size
    assert recall["draft_top1"] > 3 * chance  # half the rank is left of 48; an unrelated choice would hit at chance
    printed = capsys.readouterr().out
    assert "rank 24, 60 candidates of 277 tokens" in printed
    assert f"{recall['target_top1']:.2%} of the target's" in printed
    assert f"{recall['draft_top1']:.2%} of the full-vocabulary draft's" in printed
    card = (tmp_path / "converted/README.md").read_text()
    assert (f"On {recall['num_positions']} positions of the target's answers to {tmp_path}/prompts.jsonl, held out, "
            f"the candidates hold {recall['target_top1']:.2%} of the target's") in card


KEPT = VocabMap.from_ids(range(5, 277, 4), 277)
# A head that was trained from noise may have another basis than the target's.
BASIS = torch.linalg.qr(torch.randn(48, 48, generator=torch.Generator().manual_seed(5))).Q


def publish(draft: Path, folder: Path, target: Target, *, spelling: str, **more: torch.Tensor) -> str:
    """The draft with other tensors beside its layer, as SafeAILab, SpecForge or speculators would write it."""
    shutil.copytree(draft, folder)
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors") | {name: tensor.clone() for name, tensor in more.items()}
    config["draft_vocab_size"] = len(tensors["lm_head.weight"]) if "lm_head.weight" in tensors else None
    if spelling == "speculators":
        config = speculators_config(config, target.spec, 3)
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    if spelling == "safeailab":
        torch.save(tensors, folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        config |= {"max_position_embeddings": 64}
    else:
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("spelling", ["safeailab", "speculators"])
def test_a_reduced_head_gives_way_to_the_targets(spelling, arguments, draft, target, tmp_path, capsys):
    head = {"lm_head.weight": target.lm_head_weight[KEPT.ids] @ BASIS, "d2t": KEPT.d2t, "t2d": KEPT.t2d,
            "embed_tokens.weight": target.model.get_input_embeddings().weight.bfloat16()}
    arguments[0] = publish(draft, tmp_path / "public", target, spelling=spelling, **head)
    run(arguments)
    before, after = load_checkpoint(draft), load_checkpoint(tmp_path / "converted", target.spec)
    torch.testing.assert_close(dict(after.draft.state_dict()), dict(before.draft.state_dict()), rtol=0, atol=0)
    assert after.own_head is None and after.speculator.num_candidates == 60
    assert after.architecture.max_position_embeddings == 512 and after.architecture.feature_layers == (1, 3, 6)
    basis = after.speculator.down_proj.weight
    torch.testing.assert_close(after.speculator.vocab_proj.weight, target.lm_head_weight @ basis.T)
    right = json.loads((tmp_path / "converted/specvocab.json").read_text())["metrics"]["top1_agreement"]
    assert right.keys() == {"target", "own", "reduced"}
    printed = capsys.readouterr().out
    assert "a head of its own, over 68 of 277 tokens; --lm-head target: the target's lm_head takes its place" in printed
    assert all(f"{share:.2%} with lm_head {name}" in printed for name, share in right.items())


@pytest.mark.parametrize("vocab", [KEPT, None])
def test_a_head_of_its_own_is_kept_on_request(vocab, arguments, draft, target, tmp_path, capsys):
    """A full one without asking, a reduced one continued to the full vocabulary."""
    whole = target.lm_head_weight.detach() @ BASIS
    head = {"lm_head.weight": whole}
    if vocab is not None:
        head = {"lm_head.weight": whole[vocab.ids], "d2t": vocab.d2t, "t2d": vocab.t2d}
    arguments[0] = publish(draft, tmp_path / "public", target, spelling="specforge", **head)
    run([*arguments, "--feature-layers", "1", "2", "5", *(["--lm-head", "own"] if vocab is not None else [])])
    after = load_checkpoint(tmp_path / "converted", target.spec)
    assert after.own_head.is_full and after.architecture.feature_layers == (1, 2, 5)
    torch.testing.assert_close(after.own_head.weight.detach(), whole, atol=1e-4, rtol=1e-4)
    basis = after.speculator.down_proj.weight.detach()
    torch.testing.assert_close(after.speculator.vocab_proj.weight.detach(), whole @ basis.T, atol=1e-4, rtol=1e-4)
    assert ("it is kept" if vocab is None else "it is continued to the full vocabulary") in capsys.readouterr().out

    # The candidates and the exact logits are those of this head, in the evaluation too.
    place_draft(after, target)
    hidden = torch.randn(3, 48, generator=torch.Generator().manual_seed(6))
    full, some = (build_head(kind, target, after)(hidden) for kind in ("full", "speculative"))
    torch.testing.assert_close(full.logits, target.scale_and_cap(hidden @ whole.T), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(some.logits, full.logits.gather(-1, some.ids.long()), atol=1e-3, rtol=1e-3)


def test_copies_of_the_targets_weights_are_left_out(arguments, draft, target, tmp_path, capsys):
    copies = {"lm_head.weight": target.lm_head_weight.bfloat16(),
              "embed_tokens.weight": target.model.get_input_embeddings().weight.half()}
    arguments[0] = publish(draft, tmp_path / "public", target, spelling="speculators", **copies)
    run(arguments)
    assert load_checkpoint(tmp_path / "converted", target.spec).own_head is None
    assert "a head of its own" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        run([*arguments, "--lm-head", "own"], output=str(tmp_path / "refused"))
    assert "--lm-head own: the draft brings no head but the target's" in capsys.readouterr().err


def test_another_embedding_is_refused(arguments, draft, target, tmp_path, capsys):
    other = target.model.get_input_embeddings().weight.flip(0)
    arguments[0] = publish(draft, tmp_path / "public", target, spelling="specforge", **{"embed_tokens.weight": other})
    with pytest.raises(SystemExit):
        run(arguments)
    assert "an embedding [277, 48] that is not" in capsys.readouterr().err
    assert not (tmp_path / "converted").exists()


def test_how_often_a_head_is_right(target):
    """Against a loop, with a head over some of the tokens."""
    own = OwnHead(48, KEPT)
    own.weight.data.normal_(generator=torch.Generator().manual_seed(7))
    hidden = torch.randn(1, 40, 48, generator=torch.Generator().manual_seed(8))
    rows = JudgedRows(torch.arange(40), torch.arange(40)[None], torch.arange(40)[None] < 30)
    best = [KEPT.ids.tolist()[int((own.weight @ state).argmax())] for state in hidden[0]]
    target_ids = torch.tensor([token if number % 3 else token + 1 for number, token in enumerate(best)])
    states = DraftStates(hidden=hidden, target_ids=target_ids, draft_ids=target_ids[None], rows=rows, num_positions=40)
    assert conversion.agreement(states, target, own) == 20 / 30
    agreed = (hidden[0, :30] @ target.lm_head_weight.T).argmax(-1) == target_ids[:30]
    assert conversion.agreement(states, target, None) == int(agreed.sum()) / 30


@pytest.mark.parametrize("precision", ["fp8", "int8"])
def test_an_8_bit_speculator_and_what_it_costs(precision, arguments, target, tmp_path, capsys):
    run([*arguments, "--quantization", precision])
    after = load_checkpoint(tmp_path / "converted", target.spec).speculator
    assert (after.quantization, after.vocab_proj.weight.element_size()) == (precision, 1)
    record = json.loads((tmp_path / "converted/specvocab.json").read_text())
    cost = record["candidate_recall"]
    assert cost["quantization"] == precision and cost["num_positions"] > 3
    assert abs(cost["after"]["draft_top1"] - cost["before"]["draft_top1"]) < 0.1
    assert (f"{cost['before']['target_top1']:.2%} -> {cost['after']['target_top1']:.2%} of the target's"
            in capsys.readouterr().out)


@pytest.mark.parametrize("options", [["--tile", "64"], ["--tile", "64", "--keep", "2"]])
def test_contradicting_selections_are_refused(options, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run([*arguments, *options])
    assert stopped.value.code == 2
    assert "head.tile=64" in capsys.readouterr().err


def test_a_speculator_of_ours_is_replaced(arguments, target, tmp_path):
    run(arguments)
    arguments[0] = str(tmp_path / "converted")
    run(arguments, rank="10", output=str(tmp_path / "again"))
    assert load_checkpoint(tmp_path / "again", target.spec).speculator.rank == 10


def test_a_checkpoint_of_another_origin_is_not_overwritten(arguments, tmp_path, capsys):
    """Nor the draft itself; the same conversion may be run again."""
    run(arguments)
    before = (tmp_path / "converted/specvocab.json").read_bytes()
    (tmp_path / "a").mkdir()
    for draft, rank, message in ((arguments[0], "10", "holds another checkpoint"),
                                 (str(tmp_path / "a/../converted"), "24", "is the draft that is to be converted")):
        with pytest.raises(SystemExit):
            run([draft, *arguments[1:]], rank=rank)
        error = capsys.readouterr().err.splitlines()[-1]
        assert message in error and "give another --output" in error
    assert (tmp_path / "converted/specvocab.json").read_bytes() == before
    for _ in range(2):
        run([*arguments, "--feature-layers", "1", "3", "6"], output=str(tmp_path / "other"))


def test_without_prompts_the_target_invents_them(arguments, target, tmp_path):
    arguments = arguments[:-2]
    run(arguments, **{"num-prompts": "60", "max-new-tokens": "40"})
    assert load_checkpoint(tmp_path / "converted", target.spec).speculator is not None


def test_recall_is_taken_where_the_draft_predicts_the_answer(draft, target, capsys):
    """The judged states against the training-time unroll, the counts against a loop."""
    model = load_checkpoint(draft)
    target = Target(target.spec, target.model, target.tokenizer, feature_layers=model.architecture.feature_layers)
    speculator = VocabSpeculator(target.spec.hidden_size, 24, TileSelection(target.spec.vocab_size, 128, 20))
    speculator.initialise("svd", target.lm_head_weight)
    input_ids = torch.randint(0, 256, (1, 14), generator=torch.Generator().manual_seed(0))
    row = {"input_ids": input_ids[0].tolist(), "loss_mask": [0] * 6 + [1] * 8}

    hidden_states = target.model(input_ids, output_hidden_states=True).hidden_states
    features = torch.cat([hidden_states[layer] for layer in (1, 3, 6)], -1)
    positions = torch.arange(14)[None]
    with torch.no_grad():
        embeds = target.embed(input_ids)
        drafted = model.draft.unroll(features, embeds, positions, torch.zeros_like(positions), 1)[0, 0, 4:12]
    states = collect_draft_states(target, model, [row, row], num_steps=1, num_tokens=100)
    assert " 16/16 " in capsys.readouterr().err  # the progress bar, which does not know before how many there are
    torch.testing.assert_close(states.hidden[0], torch.cat([drafted, drafted]))
    expected_ids = (hidden_states[-1][0, 5:13] @ target.lm_head_weight.T).argmax(-1).tolist()
    assert states.target_ids.tolist() == 2 * expected_ids

    recall = measure_coverage(states, speculator.head_weights(target.lm_head_weight))
    candidates = [tile_candidates(scores, num_tiles=3, keep=20) for scores in speculator(drafted).tolist()]
    draft_ids = (drafted @ target.lm_head_weight.T).argmax(-1).tolist()
    hits = [sum(token in found for token, found in zip(ids, candidates, strict=True))
            for ids in (expected_ids, draft_ids)]
    assert (states.num_valid, recall.target_top1, recall.draft_top1) == (16, hits[0] / 8, hits[1] / 8)
    assert 0 < hits[0] < 8 or 0 < hits[1] < 8


def test_the_target_gives_the_features_that_the_draft_reads(arguments, monkeypatch):
    seen = []

    def spy(target, model, rows, **options):
        seen.append((target.feature_layers, len(rows)))
        return collect_draft_states(target, model, rows, **options)

    monkeypatch.setattr(convert, "collect_draft_states", spy)
    convert.main(arguments)
    assert seen == [((1, 3, 6), 3)]  # 3 of 12 answers are held out


def test_what_the_chat_template_refuses_ends_in_one_line(arguments, tmp_path, capsys):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    target = tiny_target("qwen3", tmp_path)
    target.tokenizer.chat_template = template + target.tokenizer.chat_template
    target.tokenizer.save_pretrained(target.spec.name)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"messages": messages}))
    with pytest.raises(SystemExit) as stopped:
        run(arguments, target=target.spec.name)
    assert stopped.value.code == 2
    assert "no system message" in capsys.readouterr().err.strip().splitlines()[-1]


def test_a_bug_keeps_its_traceback(arguments, monkeypatch):
    def broken(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr(convert, "generate", broken)
    for some in (arguments, arguments[:-2]):  # answers to prompts of a file, and invented prompts
        with pytest.raises(ValueError, match="a bug") as caught:
            run(some)
        assert not isinstance(caught.value, ConfigError)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"target": "nowhere/at-all/x"}, "nowhere/at-all/x"),
        ({"rank": "49"}, "rank=49 must lie between 1 and hidden_size=48"),
        ({"num-prompts": "1"}, "1 usable prompts"),
        ({"max-new-tokens": "511"}, "0 usable prompts of at most 1 tokens"),
        ({"prompts": "missing.jsonl"}, "missing.jsonl"),
        ({"output": __file__}, "test_convert.py is a file; give another folder"),
        ({"output": str(Path(__file__).parent)}, "is not empty and not a SpecVocab checkpoint"),
    ],
)
def test_what_cannot_work_ends_in_one_line(changes, message, arguments, tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(arguments, **changes)
    assert stopped.value.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("changes", [
    {"output": __file__}, {"prompts": "missing.jsonl"}, {"rank": "49"}, {"device": "cuda:99"}, {"target": "no/where/x"},
])
def test_the_target_is_not_loaded_for_what_cannot_work(changes, arguments, monkeypatch):
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(SystemExit) as stopped:
        run(arguments, **changes)
    assert stopped.value.code == 2


def test_a_draft_that_is_not_there_is_missed_before_its_target(arguments, capsys):
    """Which may have to be downloaded first."""
    with pytest.raises(SystemExit) as stopped:
        run(["no/draft", *arguments[1:]], target="no/where/x")
    assert stopped.value.code == 2
    assert "error: there is no folder 'no/draft'; give that of a draft" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value", "message"), [
    ("--device", "abacus", "argument --device: 'abacus' cannot be used"),
    ("--chat-template-kwargs", "{", "argument --chat-template-kwargs: '{' is not JSON"),
    ("--chat-template-kwargs", "[1]", "argument --chat-template-kwargs: '[1]' is no JSON object"),
    ("--chat-template-kwargs", '{"quiet": true}', "target.chat_template_kwargs sets 'quiet', which the target's"),
    ("--chat-template-kwargs", '{"messages": []}', "target.chat_template_kwargs holds messages"),
])
def test_options_that_cannot_be_meant(option, value, message, arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        run([*arguments, option, value])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("invented", [False, True])
def test_variables_reach_the_chat_template(invented, arguments, tmp_path, monkeypatch):
    target = tiny_target("qwen3", tmp_path)
    mark = "{% if quiet is defined %}{{ 'Be quiet: ' ~ quiet }}{% endif %}"
    target.tokenizer.chat_template = mark + target.tokenizer.chat_template
    target.tokenizer.save_pretrained(target.spec.name)
    written, seen = convert.generate, []

    def spy(engine, prompts, *more):
        seen.extend(target.tokenizer.decode(prompt) for prompt in prompts)
        return written(engine, prompts, *more)

    monkeypatch.setattr(convert, "generate", spy)
    kept = arguments[:-2] if invented else arguments
    run([*kept, "--chat-template-kwargs", '{"quiet": 7}'], target=target.spec.name, **{"num-prompts": "40"})
    assert len(seen) > 12 and all(text.startswith("Be quiet: 7<|im_start|>user") for text in seen)


def test_tools_of_a_prompt_are_described_to_the_target(arguments, tmp_path, monkeypatch):
    target = tiny_target("qwen3", tmp_path)
    target.tokenizer.chat_template = "{{ tools[0].name }}" + target.tokenizer.chat_template
    target.tokenizer.save_pretrained(target.spec.name)
    record = {"prompt": "What time is it?", "tools": [{"name": "clock"}]}
    (tmp_path / "prompts.jsonl").write_text("\n".join([json.dumps(record)] * 20))
    written, seen = convert.generate, []

    def spy(engine, prompts, *more):
        seen.extend(target.tokenizer.decode(prompt) for prompt in prompts)
        return written(engine, prompts, *more)

    monkeypatch.setattr(convert, "generate", spy)
    run(arguments, target=target.spec.name)
    assert len(seen) == 12 and all(text.startswith("clock<|im_start|>user") for text in seen)


@pytest.mark.parametrize("option", ["max-new-tokens", "num-prompts", "rank"])
def test_a_count_of_nothing_is_refused(option, arguments, capsys):
    """Without tokens to write, the engine would wait for an EOS for ever."""
    with pytest.raises(SystemExit) as stopped:
        run(arguments, **{option: "0"})
    assert stopped.value.code == 2
    assert f"argument --{option}: 0 must be at least 1" in capsys.readouterr().err


def test_a_draft_of_another_target_is_refused(arguments, tmp_path, capsys):
    other = tiny_target("llama", tmp_path, vocab_size=290)
    with pytest.raises(SystemExit):
        run(arguments, target=other.spec.name)
    assert "has vocab_size=277, but" in capsys.readouterr().err
