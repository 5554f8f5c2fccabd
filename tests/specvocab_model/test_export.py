from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from specvocab_kernels.vocab_head import ExactSelection, vocab_head
from transformers import LlamaConfig

from specvocab_model import export, files
from specvocab_model.attention import DraftCache
from specvocab_model.config import LAYOUTS, ConfigError, DraftConfig, HeadConfig
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.export import Provenance, add_evaluation, load_checkpoint, save_checkpoint
from specvocab_model.heads.static import OwnHead
from specvocab_model.target import TargetSpec
from specvocab_model.vocab import VocabMap

SPEC = TargetSpec(
    name="some/target", model_type="qwen3", hidden_size=48, vocab_size=277, num_hidden_layers=12,
    num_attention_heads=4, num_key_value_heads=2, head_dim=20, intermediate_size=96, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}, max_position_embeddings=4096,
    eos_token_ids=(258, 256), pad_token_id=259, logit_softcap=None, logit_scale=0.5, fingerprint="a" * 64,
)
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 1024}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 1024,
             "beta_fast": 24.0, "beta_slow": 2.0}
PROVENANCE = Provenance(step=12, metrics={"loss": 2.5}, git_commit="c0ffee", config={"seed": 0})

# SERVING.md's list, by hand.
DRAFT_TENSORS = {
    "fc.weight", "norm.weight", "midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight", "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.v_proj.weight", "midlayer.self_attn.o_proj.weight", "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight", "midlayer.mlp.down_proj.weight",
}


def make_model(spec: TargetSpec = SPEC, **head) -> SpecVocabDraft:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SpecVocabDraft.build(spec, DraftConfig(num_unroll_steps=3),
                                     HeadConfig(**({"num_candidates": 20} | head)))
        for parameter in model.parameters():
            parameter.data.normal_(std=0.2)
    return model


@pytest.fixture
def model() -> SpecVocabDraft:
    return make_model()


@pytest.fixture
def folder(model, tmp_path):
    return save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE, dtype=torch.float32)


def edit_json(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not KeyError}))


def error_of(call) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_config_is_what_stock_engines_read(folder):
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "vocab_size": 277,
        "draft_vocab_size": None, "tie_word_embeddings": False, "torch_dtype": "float32", "hidden_size": 48,
        "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "rope_scaling": None, "max_position_embeddings": 4096,
        "attention_bias": False, "mlp_bias": False, "logit_scale": 0.5, "final_logit_softcapping": None,
        "num_aux_hidden_states": 3,
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": [1, 5, 8]},
    }
    assert {key: config[key] for key in expected} == expected
    assert "norm_before_residual" not in config


@pytest.mark.parametrize("rope", [SPEC.rope_parameters, LLAMA3_ROPE, YARN_ROPE])
@pytest.mark.parametrize("spelling", ["as written", "transformers 4", "transformers 5"])
def test_transformers_reads_the_same_architecture(rope, spelling, tmp_path):
    spec = dataclasses.replace(SPEC, rope_parameters=rope)
    folder = save_checkpoint(tmp_path / "export", make_model(spec), spec, PROVENANCE)
    if spelling == "transformers 4":
        edit_json(folder / "config.json", rope_parameters=KeyError)
    if spelling == "transformers 5":
        edit_json(folder / "config.json", rope_theta=KeyError, rope_scaling=KeyError)
    config = LlamaConfig.from_pretrained(folder)
    assert config.dtype == torch.bfloat16
    assert config.rope_parameters == rope
    assert (config.head_dim, config.num_key_value_heads, config.num_hidden_layers) == (20, 2, 1)
    assert load_checkpoint(folder).architecture == make_model(spec).architecture


def test_tensors_have_the_engines_names_and_nothing_else_is_stored(folder):
    assert load_file(folder / "model.safetensors").keys() == DRAFT_TENSORS
    assert load_file(folder / "vocabulary_speculator/model.safetensors").keys() == {
        "down_proj.weight", "vocab_proj.weight"
    }
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "vocabulary_speculator", "specvocab.json", "README.md", "custom_generate"
    }
    assert [path.name for path in folder.parent.iterdir()] == ["export"]


def test_files_have_the_permissions_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        folder = save_checkpoint(tmp_path / "export", make_model(), SPEC, PROVENANCE)
    finally:
        os.umask(before)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 7 and {path.stat().st_mode & 0o777 for path in files} == {0o640}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", [{}, {"rank": 5}, {"type": "full"}])
def test_what_is_loaded_is_what_was_saved(head, dtype, tmp_path):
    model = make_model(**head)
    save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE, dtype=dtype)
    loaded = SpecVocabDraft.from_pretrained(tmp_path / "export", target_spec=SPEC)
    expected = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == dtype and torch.equal(tensor, expected[name]), name
    assert loaded.architecture == model.architecture
    assert loaded.head_config.type == model.head_config.type
    if model.speculator is not None:
        assert loaded.speculator.selection == model.speculator.selection
        assert loaded.speculator.rank == model.speculator.rank


KEPT = VocabMap.from_ids([3, 4, 10, 100, 101, 276], 277)
EVERY = VocabMap.from_ids(range(277), 277)


def with_own_head(vocab: VocabMap, **head) -> SpecVocabDraft:
    model = make_model(**head)
    model.own_head = OwnHead(48, vocab)
    model.own_head.weight.data.normal_(generator=torch.Generator().manual_seed(4))
    return model


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
@pytest.mark.parametrize("vocab, head", [(KEPT, {"type": "full"}), (EVERY, {"type": "full"}), (EVERY, {})])
def test_a_head_of_its_own_is_loaded_as_it_was_saved(vocab, head, layout, tmp_path):
    """Reduced (static), full, and full with a speculator; the tensors that SERVING.md asks for, and types that last."""
    model = with_own_head(vocab, **head)
    folder = save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE, layout=layout)
    assert json.loads((folder / "config.json").read_text())["draft_vocab_size"] == len(vocab)
    stored = load_file(folder / "model.safetensors")
    assert stored["lm_head.weight"].shape == (len(vocab), 48) and stored["lm_head.weight"].dtype == torch.bfloat16
    if vocab is KEPT:
        assert stored["d2t"].tolist() == [3, 3, 8, 97, 97, 271] and stored["d2t"].dtype == torch.int64
        assert stored["t2d"].dtype == torch.bool and stored["t2d"].nonzero()[:, 0].tolist() == vocab.ids.tolist()
    else:
        assert not stored.keys() & {"d2t", "t2d"}
    loaded = load_checkpoint(folder, SPEC)
    assert loaded.own_head.ids.tolist() == vocab.ids.tolist()
    assert torch.equal(loaded.own_head.weight, model.own_head.weight.bfloat16())
    assert loaded.head_config.type == ("static" if head else "speculative")
    assert (loaded.speculator is None) == (model.speculator is None)
    if head:
        card = (folder / "README.md").read_text()
        assert f"its own over {len(vocab)} of 277 tokens" in card
        assert ("full-vocabulary EAGLE-3" in card) == (vocab is EVERY)


def test_a_speculator_on_a_reduced_head_is_refused(model, tmp_path):
    """Plugins would take row 2 of six for token 2."""
    both, message = with_own_head(KEPT), "rows it would take for other tokens"
    assert message in error_of(lambda: save_checkpoint(tmp_path / "both", both, SPEC, PROVENANCE))
    static = save_checkpoint(tmp_path / "static", with_own_head(KEPT, type="full"), SPEC, PROVENANCE)
    speculated = save_checkpoint(tmp_path / "speculated", model, SPEC, PROVENANCE)
    for file in ("config.json", "model.safetensors"):
        (speculated / file).write_bytes((static / file).read_bytes())
    assert message in error_of(lambda: load_checkpoint(speculated, SPEC))


@given(ids=st.sets(st.integers(0, 276), min_size=1), layout=st.sampled_from(LAYOUTS), short=st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_reduced_vocabulary_survives_and_any_wrong_offset_is_noticed(ids, layout, short):
    model = with_own_head(VocabMap.from_ids(ids, 277), type="full")
    with TemporaryDirectory() as root:
        folder = save_checkpoint(Path(root, "export"), model, SPEC, PROVENANCE, layout=layout)
        loaded = load_checkpoint(folder, SPEC)
        assert loaded.own_head.ids.tolist() == sorted(ids) and loaded.own_head.weight.shape == (len(ids), 48)
        if len(ids) == 277:
            return
        tensors = load_file(folder / "model.safetensors")
        tensors["d2t"][len(ids) // 2] += -1 if short else 1
        save_file(tensors, folder / "model.safetensors")
        assert "which are not the" in error_of(lambda: load_checkpoint(folder, SPEC))


def test_a_map_that_does_not_belong_to_the_head_is_refused(tmp_path):
    folder = save_checkpoint(tmp_path / "export", with_own_head(KEPT, type="full"), SPEC, PROVENANCE)
    path, load = folder / "model.safetensors", lambda: load_checkpoint(folder, SPEC)
    tensors = load_file(path)

    def write(**changes):
        save_file({name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}, path)

    stale = VocabMap.from_ids([3, 4, 10, 100, 102, 276], 277)
    write(d2t=stale.d2t)
    assert "which are not the 6 that t2d marks" in error_of(load)
    write(d2t=KEPT.ids)  # ids in the place of offsets
    assert "which are not the 6 that t2d marks" in error_of(load)
    write(d2t=stale.d2t, t2d=stale.t2d)  # of another training
    assert "model.safetensors is damaged or was changed" in error_of(load)
    write(t2d=torch.ones(300, dtype=torch.bool))  # of another tokenizer
    assert "t2d has shape (300,) instead of (277,)" in error_of(load)
    write(d2t=None)
    assert "d2t is missing" in error_of(load)
    write(**{"lm_head.weight": None})
    assert "lm_head.weight is missing" in error_of(load)
    write()
    edit_json(folder / "config.json", draft_vocab_size=None)
    assert "d2t is unknown; lm_head.weight is unknown; t2d is unknown" in error_of(load)
    edit_json(folder / "config.json", draft_vocab_size=277)
    assert "lm_head.weight has shape (6, 48) instead of (277, 48)" in error_of(load)


@pytest.mark.parametrize("precision, dtype", [("fp8", torch.float8_e4m3fn), ("int8", torch.int8)])
@pytest.mark.parametrize("selection", [{}, {"num_candidates": None, "tile": 64, "keep": 3}, {"selection": "exact"}])
def test_an_8_bit_head_is_loaded_as_it_was_saved(selection, precision, dtype, tmp_path):
    model = make_model(**selection)
    exact = model.speculator.vocab_proj.weight.detach().clone()
    model.speculator.quantize(precision)
    folder = save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE, dtype=torch.bfloat16)
    stored = load_file(folder / "vocabulary_speculator/model.safetensors")
    assert {name: tensor.dtype for name, tensor in stored.items()} == {
        "down_proj.weight": torch.bfloat16, "vocab_proj.weight": dtype, "vocab_proj.scales": torch.float32
    }
    rows = stored["vocab_proj.weight"].float() * stored["vocab_proj.scales"][:, None]  # by id, whatever the tiles
    torch.testing.assert_close(rows, exact, rtol=0.07, atol=0.01)
    config = json.loads((folder / "vocabulary_speculator/config.json").read_text())
    rule = model.speculator.selection
    assert config["quantization"] == precision and config["num_candidates"] == rule.num_candidates
    assert config["scales"] == {"tensor": "vocab_proj.scales", "per": "row", "dtype": "float32"}
    if "selection" in selection:
        assert (config["selection"], config["tile"], config["keep"]) == ("exact", None, None)
    else:
        assert (config["selection"], config["tile"], config["keep"]) == ("tile", rule.tile, rule.keep)

    loaded = load_checkpoint(folder, SPEC)
    assert loaded.speculator.selection == rule and loaded.speculator.quantization == precision
    lm_head = torch.randn(277, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    hidden = torch.randn(5, 48, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = [vocab_head(hidden, one.speculator.head_weights(lm_head)) for one in (model, loaded)]
    assert all(torch.equal(before, after) for before, after in zip(*results, strict=True))


def test_a_vocab_proj_of_another_type_than_named_is_refused(tmp_path):
    model = make_model()
    model.speculator.quantize("int8")
    folder = save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE)
    edit_json(folder / "vocabulary_speculator/config.json", quantization="fp8")
    assert "a vocab_proj of torch.int8, but its config.json says quantization='fp8'" in error_of(
        lambda: load_checkpoint(folder)
    )


def test_a_checkpoint_of_schema_1_is_read(model, folder):
    edit_json(folder / "specvocab.json", schema_version=1, candidate_recall=KeyError, tuning=KeyError)
    edit_json(folder / "vocabulary_speculator/config.json", schema_version=1, selection="exact", num_candidates=20,
              tile=KeyError, keep=KeyError, scales=KeyError)
    loaded = load_checkpoint(folder, SPEC)
    assert loaded.speculator.selection == ExactSelection(277, 20)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert Provenance.read(folder) == PROVENANCE


def test_a_loaded_draft_computes_the_same(model, folder):
    hidden, embeds = torch.randn(2, 1, 5, SPEC.hidden_size, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(5)[None]
    with torch.no_grad():
        outputs = [m.draft.forward_cached(hidden, embeds, positions, DraftCache())
                   for m in (model, load_checkpoint(folder))]
    assert torch.equal(*outputs)


def test_an_incomplete_model_is_not_written(tmp_path, model):
    def save():
        save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE)

    model.draft.extra = torch.nn.Linear(2, 2, bias=False)
    assert "extra.weight is unknown" in error_of(save)
    del model.draft.extra
    norm, model.draft.norm = model.draft.norm, torch.nn.Identity()
    assert "norm.weight is missing" in error_of(save)
    model.draft.norm = norm
    model.draft.fc = torch.nn.Linear(5, 48, bias=False)
    assert "fc.weight has shape (48, 5) instead of (48, 144)" in error_of(save)
    model = make_model()
    model.speculator.down_proj.weight.data[0, 0] = torch.nan
    assert "down_proj.weight is not finite" in error_of(save)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize("part", [".", "vocabulary_speculator"])
def test_an_incomplete_folder_is_not_loaded(part, folder):
    path = folder / part / "model.safetensors"
    tensors = load_file(path)
    name, tensor = next(iter(tensors.items()))
    save_file({k: v for k, v in tensors.items() if k != name}, path)
    assert f"{name} is missing" in error_of(lambda: load_checkpoint(folder))
    save_file(tensors | {"lm_head.weight": tensor.clone()}, path)
    assert "lm_head.weight is unknown" in error_of(lambda: load_checkpoint(folder))
    save_file(tensors | {name: tensor[:-1].clone()}, path)
    assert f"{name} has shape" in error_of(lambda: load_checkpoint(folder))
    path.write_bytes(path.read_bytes()[:-1])
    assert f"{path} is damaged or not complete" in error_of(lambda: load_checkpoint(folder))
    path.unlink()
    assert "is missing; copy or export the whole folder again" in error_of(lambda: load_checkpoint(folder))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"fingerprint": "b" * 64, "name": "other/target"},
         "was made for some/target (fingerprint aaaaaaaaaaaa), not for other/target (bbbbbbbbbbbb)"),
        ({"vocab_size": 278}, "has vocab_size=277, but some/target has 278"),
        ({"hidden_size": 64}, "has hidden_size=48, but some/target has 64"),
    ],
)
def test_another_target_is_refused(change, message, model, folder, tmp_path):
    other = dataclasses.replace(SPEC, **change)
    assert message in error_of(lambda: load_checkpoint(folder, other))
    if "fingerprint" not in change:
        assert message in error_of(lambda: save_checkpoint(tmp_path / "new", model, other, PROVENANCE))


@pytest.mark.parametrize(
    "file, change, message",
    [
        ("specvocab.json", {"schema_version": 3}, "schema_version=3, but this release reads 1 and 2"),
        ("vocabulary_speculator/config.json", {"schema_version": None}, "schema_version=None"),
        ("vocabulary_speculator/config.json", {"quantization": "int4"}, "quantization='int4'"),
        ("vocabulary_speculator/config.json", {"quantization": "int8"}, "vocab_proj.scales is missing"),
        ("vocabulary_speculator/config.json", {"tile": 100}, "config.json: head.tile=100 must be a power of two"),
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, "architectures=['LlamaForCausalLM']"),
        ("config.json", {"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ("config.json", {"norm_before_residual": "yes"}, "norm_before_residual='yes'; it must be true or false"),
        ("config.json", {"norm_before_fc": True}, "norm_before_fc=True; only False can be loaded"),
        ("config.json", {"fc_norm": True}, "fc_norm=True"),
        ("config.json", {"norm_output": True}, "norm_output=True"),
        ("config.json", {"model_type": "qwen3"}, "model_type='qwen3'"),
        ("config.json", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ("config.json", {"tie_word_embeddings": True}, "tie_word_embeddings=true, for which SGLang"),
        ("config.json", {"draft_vocab_size": KeyError}, "has no draft_vocab_size, without which SGLang does not start"),
        ("config.json", {"draft_vocab_size": 278}, "draft_vocab_size=278; it must be null, or between 1 and"),
        ("config.json", {"draft_vocab_size": 277}, "lm_head.weight is missing"),
        ("config.json", {"attention_bias": True}, "attention_bias=True"),
        ("config.json", {"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu'"),
        ("config.json", {"eagle_config": [1, 5, 8]}, "eagle_config=[1, 5, 8]; it must be an object or null"),
        ("config.json", {"eagle_aux_hidden_state_layer_ids": "2,6,9"}, "layer_ids='2,6,9'"),
        ("config.json", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, None, 8]}}, "layer_ids=[1, None, 8]"),
        ("config.json", {"hidden_size": "48"}, "Field 'hidden_size' expected int"),
        ("config.json", {"rope_parameters": "default"}, "Field 'rope_parameters'"),
        ("config.json", {"head_dim": 19}, "`head_dim`=19"),
        ("config.json", {"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ("config.json", {"draft_vocab_size": 100}, "lm_head.weight is missing; d2t is missing; t2d is missing"),
        ("config.json", {"eagle_aux_hidden_state_layer_ids": [1, 5, 8]}, "contradicts itself"),
        ("config.json", {"eagle_aux_hidden_state_layer_ids": [2, 6], "eagle_config": {}}, "exactly three layers"),
        ("config.json", {"eagle_aux_hidden_state_layer_ids": [9, 6, 2], "eagle_config": {}}, "they must ascend from 1"),
    ],
)
def test_what_cannot_be_understood_is_refused(file, change, message, folder):
    edit_json(folder / file, **change)
    assert message in error_of(lambda: load_checkpoint(folder))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_config_that_leaves_something_to_engines_is_refused(layout, model, tmp_path):
    folder = save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE, layout=layout)
    written = json.loads((folder / "config.json").read_text())
    ours = layout == "eagle3"
    part = written if ours else written["transformer_layer_config"]
    kept = dict(part)
    for key in ("rms_norm_eps", "num_hidden_layers", "head_dim", "logit_scale", "eagle_config")[: 4 + ours]:
        part.pop(key)
        (folder / "config.json").write_text(json.dumps(written))
        assert f"has no {key}, for which engines would take" in error_of(lambda: load_checkpoint(folder))
        part[key] = kept[key]
    for key in ("rope_theta", "rope_scaling", "rope_parameters"):
        part.pop(key)
    (folder / "config.json").write_text(json.dumps(written))
    assert "has no rope_theta, rope_scaling, for which" in error_of(lambda: load_checkpoint(folder))


def test_a_speculator_of_another_draft_is_refused(folder, tmp_path):
    full = save_checkpoint(tmp_path / "full", make_model(type="full"), SPEC, PROVENANCE)
    shutil.copytree(folder / "vocabulary_speculator", full / "vocabulary_speculator")
    said = error_of(lambda: load_checkpoint(full))
    assert "has a vocabulary_speculator that its specvocab.json does not know" in said


def test_what_engines_would_serve_wrongly_is_refused(folder, tmp_path):
    """Neither vLLM nor SGLang says a word about these."""
    path, load = folder / "config.json", lambda: load_checkpoint(folder, SPEC)
    edit_json(path, max_position_embeddings=2048)
    assert "max_position_embeddings=2048, but some/target is served up to 4096" in error_of(load)
    short = SpecVocabDraft.build(SPEC, DraftConfig(max_position_embeddings=4095), HeadConfig(num_candidates=20))
    assert "the draft has max_position_embeddings=4095, but" in error_of(
        lambda: save_checkpoint(tmp_path / "short", short, SPEC, PROVENANCE)
    )
    edit_json(path, max_position_embeddings=8192)
    assert load().architecture.max_position_embeddings == 8192
    edit_json(path, eagle_aux_hidden_state_layer_ids=[2, 6, 12], eagle_config={})
    assert "lie below the number of the target's layers, 12" in error_of(load)
    edit_json(path, eagle_aux_hidden_state_layer_ids=[2, 6, 9])
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"d2t": torch.zeros(277, dtype=torch.int64)}, folder / "model.safetensors")
    assert "d2t is unknown" in error_of(load)  # a map beside the full vocabulary


@pytest.mark.parametrize("rope", [SPEC.rope_parameters, LLAMA3_ROPE, YARN_ROPE])
def test_the_layout_of_speculators(rope, tmp_path):
    """The keys that speculators 0.9's Eagle3SpeculatorConfig and vLLM 0.33's reader of it ask for, by hand."""
    spec = dataclasses.replace(SPEC, rope_parameters=rope, logit_softcap=30.0)
    model = make_model(spec)
    folder = save_checkpoint(tmp_path / "export", model, spec, PROVENANCE, dtype=torch.float32, layout="speculators")
    config = json.loads((folder / "config.json").read_text())
    layer = config.pop("transformer_layer_config")
    expected = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 277,
        "norm_before_residual": False, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [2, 6, 9], "tie_word_embeddings": False,
    }
    assert {key: config[key] for key in expected} == expected
    assert config["speculators_config"] == {
        "algorithm": "eagle3", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1,
                              "accept_tolerance": 0.0}],
        "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
    }
    assert "model_type" not in config  # with one, vLLM does not look for speculators_config
    assert (layer["logit_scale"], layer["final_logit_softcapping"]) == (0.5, 30.0)
    llama = LlamaConfig(**layer)
    assert (llama.rope_parameters, llama.head_dim, llama.max_position_embeddings) == (rope, 20, 4096)
    assert load_file(folder / "model.safetensors").keys() == {
        name.replace("midlayer", "layers.0") for name in DRAFT_TENSORS
    }
    loaded = load_checkpoint(folder, spec)
    assert loaded.architecture == model.architecture
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("change, message", [
    ({"speculators_model_type": "dflash"}, "speculators_model_type='dflash'; only 'eagle3'"),
    ({"transformer_layer_config": None}, "transformer_layer_config=None; it must be an object"),
    ({"transformer_layer_config": {"model_type": "qwen3"}}, "a layer of model_type='qwen3'"),
    ({"norm_before_residual": KeyError}, "has no norm_before_residual, which vLLM takes for true"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "exactly three layers"),
])
def test_other_speculators_are_refused(change, message, model, tmp_path):
    folder = save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE, layout="speculators")
    edit_json(folder / "config.json", **change)
    assert message in error_of(lambda: load_checkpoint(folder, SPEC))


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_a_norm_before_the_residual_is_written_where_engines_read_it(layout, tmp_path):
    model = make_model()
    model.architecture = dataclasses.replace(model.architecture, norm_before_residual=True)
    folder = save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE, layout=layout)
    assert json.loads((folder / "config.json").read_text())["norm_before_residual"] is True
    loaded = load_checkpoint(folder, SPEC)
    assert loaded.architecture == model.architecture and loaded.draft.midlayer.norm_before_residual


def test_everything_is_on_the_disk_before_the_rename(model, tmp_path, monkeypatch):
    events = []
    monkeypatch.setattr(files, "flush", lambda path: events.append(path.name))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to)))
    save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE)
    before, after = events[: events.index("rename")], events[events.index("rename") + 1 :]
    assert {"config.json", "model.safetensors", "specvocab.json", "vocabulary_speculator", ".export.partial"} <= {
        *before
    }
    assert after == [tmp_path.name]


def test_parts_of_a_checkpoint_are_refused(folder):
    (folder / "specvocab.json").unlink()
    assert "a speculator but no specvocab.json" in error_of(lambda: load_checkpoint(folder))
    assert "config.json is missing" in error_of(lambda: load_checkpoint(folder / "nowhere"))
    (folder / "config.json").write_text("{")
    (folder / "vocabulary_speculator/model.safetensors").unlink()
    (folder / "vocabulary_speculator/config.json").unlink()
    (folder / "vocabulary_speculator").rmdir()
    assert "config.json is damaged: it is not JSON" in error_of(lambda: load_checkpoint(folder))


@pytest.mark.parametrize("layers", ["both", "vllm", "vllm, null", "sglang", "neither"])
def test_a_stock_eagle3_folder_loads_with_the_full_head(layers, tmp_path):
    model = make_model(type="full")
    folder = save_checkpoint(tmp_path / "export", model, SPEC, PROVENANCE, dtype=torch.float32)
    (folder / "specvocab.json").unlink()
    top, nested = "eagle_aux_hidden_state_layer_ids", "eagle_config"
    changes = {"both": {}, "vllm": {nested: KeyError}, "vllm, null": {nested: None}, "sglang": {top: KeyError},
               "neither": {nested: KeyError, top: KeyError}}[layers]
    edit_json(folder / "config.json", **changes, num_aux_hidden_states=KeyError)
    loaded = load_checkpoint(folder, SPEC)
    assert loaded.speculator is None and loaded.head_config.type == "full"
    assert loaded.architecture.feature_layers == (2, 6, 9)
    torch.testing.assert_close(loaded.draft.state_dict(), model.draft.state_dict(), rtol=0, atol=0)
    if layers == "neither":
        assert "say which target" in error_of(lambda: load_checkpoint(folder))


def test_an_earlier_checkpoint_is_replaced_whole_or_not_at_all(model, folder, monkeypatch):
    before = load_file(folder / "model.safetensors")
    smaller = make_model(type="full")
    with monkeypatch.context() as patch:
        patch.setattr(export, "model_card", lambda record: 1 / 0)  # stands for a kill after the tensors are written
        with pytest.raises(ZeroDivisionError):
            save_checkpoint(folder, smaller, SPEC, PROVENANCE)
    assert (folder / "vocabulary_speculator").exists()
    torch.testing.assert_close(load_file(folder / "model.safetensors"), before, rtol=0, atol=0)
    save_checkpoint(folder, smaller, SPEC, PROVENANCE)
    assert not (folder / "vocabulary_speculator").exists()
    assert [path.name for path in folder.parent.iterdir()] == ["export"]


def test_other_folders_are_not_overwritten(model, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    assert "not a SpecVocab checkpoint" in error_of(lambda: save_checkpoint(tmp_path, model, SPEC, PROVENANCE))
    assert (tmp_path / "thesis.tex").read_text() == "years of work"
    inside = tmp_path / "thesis.tex/some/export"
    assert "thesis.tex is a file, so" in error_of(lambda: save_checkpoint(inside, model, SPEC, PROVENANCE))


@pytest.mark.parametrize("folder", [".", "..", "/"])
def test_a_folder_without_a_name_is_not_replaced(folder, model, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert "name a folder of the checkpoint's own" in error_of(lambda: save_checkpoint(folder, model, SPEC, PROVENANCE))


def test_provenance_and_evaluation_are_recorded(folder):
    record = json.loads((folder / "specvocab.json").read_text())
    assert record["target"] == {"name": "some/target", "model_type": "qwen3", "fingerprint": "a" * 64,
                                "vocab_size": 277, "hidden_size": 48}
    assert (record["step"], record["metrics"], record["git_commit"], record["config"]) == (
        12, {"loss": 2.5}, "c0ffee", {"seed": 0}
    )
    card = (folder / "README.md").read_text()
    assert "Not evaluated yet" in card and 'AutoModelForCausalLM.from_pretrained("some/target"' in card
    compile(card.split("```python")[1].split("```")[0], "README.md", "exec")
    evaluation = {
        "tau": {"speculative": 1.875}, "tokens_per_second": {"autoregressive": 10.0, "speculative": 18.5},
        "candidate_recall": {"target_top1": 0.995, "draft_top1": 1.0, "num_positions": 200}, "lossless": True,
    }
    add_evaluation(folder, evaluation)
    card = (folder / "README.md").read_text()
    assert "| autoregressive | 1.000 | 10.0 |\n| speculative | 1.875 | 18.5 |" in card
    assert "99.50% of the target's and 100.00% of the full draft's" in card
    assert "Every greedy output was the same as the target's own" in card
    add_evaluation(folder, evaluation | {"lossless": False, "candidate_recall": None})
    assert "NOT always the same" in (folder / "README.md").read_text()
    assert json.loads((folder / "specvocab.json").read_text())["evaluation"]["tau"] == {"speculative": 1.875}
    load_checkpoint(folder, SPEC)
