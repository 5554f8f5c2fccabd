"""Turn the result of a training run into the checkpoint that users and serving engines load.

    python scripts/export.py +experiment=quickstart [the overrides of the training run]

Reads ``output_dir/final/``, writes ``output_dir/export/``. Weights are stored in the target's type, because engines run
the draft in it. How candidates are selected may differ from training, what shapes the weights may not.

    export.weights=best       the checkpoint with the best simulated tau on the validation data, not the last step
    export.own_lm_head=true   with a copy of the target's lm_head, for an engine that cannot share it
    export=speculators        in the layout of the library speculators, to output_dir/export-speculators/
    export.output=FOLDER      there instead

With ``head.quantization=fp8`` or ``int8`` the speculator's ``vocab_proj`` is rounded to 8 bits. Where the validation
data are on this machine, the target then runs over some of them to say what that costs in candidate recall.
"""

from __future__ import annotations

import copy
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from data_gen.shards import MANIFEST_FILE, load_rows
from specvocab_model.cli import hydra_main
from specvocab_model.config import Config, ConfigError
from specvocab_model.decode import place_draft
from specvocab_model.draft import SpecVocabDraft
from specvocab_model.draft_states import collect_draft_states, describe_cost, quantization_cost
from specvocab_model.export import Provenance, save_checkpoint
from specvocab_model.files import read_json, require_fields
from specvocab_model.heads.static import OwnHead
from specvocab_model.target import TORCH_DTYPES, Target, TargetSpec, load_spec
from specvocab_model.tensor_files import read_tensors
from specvocab_model.vocab import VocabMap
from train.checkpoint import BEST_METRIC, best_checkpoint
from train.checkpoint_files import MODEL_FILE

FOLDERS = {"eagle3": "export", "speculators": "export-speculators"}  # of output_dir, by layout
RECALL_TOKENS = 4096  # of the validation data, that rounding is judged on

TRAIN_AGAIN = "remove its folder and start the training command again: it goes on from its last checkpoint"
TRAINING_FIELDS = {"step": int, "metrics": dict, "config": dict, "target_fingerprint": str,
                   "data_manifest_sha256": str, "git_commit": str | None}


@hydra_main
def main(config: Config) -> None:
    folder = export(config)
    print(f"exported to {folder}")


def export(config: Config) -> Path:
    """Export the run of ``config``; returns the folder.

    Raises:
        ConfigError: the run is not there, or it was trained with other settings or for another target.
    """
    output = Path(config.output_dir)
    final = output / "final"
    if not (final / "training.json").is_file():
        command = shlex.join(["accelerate", "launch", "train/main.py", *sys.argv[1:]])
        raise ConfigError(f"{final} holds no finished run; train it with: {command}")
    path = final / "training.json"
    training = read_json(path, TRAIN_AGAIN)
    require_fields(training, TRAINING_FIELDS, path, TRAIN_AGAIN)
    spec = load_spec(config.target)
    check_run(training, config, spec)
    weights, digest = final / MODEL_FILE, training.get("model_sha256")  # older runs do not have it
    if config.export.weights == "best":
        best, state = best_checkpoint(output)  # whole, so its digest is known to be right
        weights, digest = best / MODEL_FILE, None
        training |= {"step": state.best_step, "metrics": {BEST_METRIC: state.best_tau}}
        print(f"step {state.best_step}, with {BEST_METRIC} {state.best_tau:.4f} on the validation data")
    model = SpecVocabDraft.build(spec, config.draft, config.head).for_training()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    model.load_state_dict(read_tensors(weights, shapes, TRAIN_AGAIN, digest))
    tied = model.speculator is not None and config.head.tied
    if tied or config.export.own_lm_head:
        lm_head = Target.load(config.target, device="cpu", decoder=False).lm_head_weight.detach()
        if model.speculator is not None:
            model.speculator.untie(lm_head)
        if config.export.own_lm_head:
            copy_lm_head(model, lm_head, config)
    recall = None if config.head.quantization is None else quantize(model, config.head.quantization, config)
    provenance = Provenance(
        step=training["step"],
        metrics=training["metrics"],
        data_manifest_sha256=training["data_manifest_sha256"],
        git_commit=training["git_commit"],
        config=training["config"],
        candidate_recall=recall,
    )
    folder = Path(config.export.output or output / FOLDERS[config.export.layout])
    return save_checkpoint(folder, model, spec, provenance, dtype=TORCH_DTYPES[config.target.dtype],
                           layout=config.export.layout)


def copy_lm_head(model: SpecVocabDraft, lm_head: Tensor, config: Config) -> None:
    """Give the draft the target's ``lm_head`` [V, d] as its own.

    Raises:
        ConfigError: it has a head of its own already.
    """
    if model.own_head is not None:
        raise ConfigError("export.own_lm_head=true stores a copy of the target's lm_head, but this draft was trained "
                          "with one of its own; leave it out")
    model.own_head = OwnHead(lm_head.shape[1], VocabMap.from_ids(torch.arange(len(lm_head)), len(lm_head)))
    model.own_head.weight = nn.Parameter(lm_head)


def quantize(model: SpecVocabDraft, precision: str, config: Config) -> dict[str, Any] | None:
    """Round ``vocab_proj`` and say what that does to candidate recall; returns what is recorded of it."""
    trained = copy.deepcopy(model)
    assert trained.speculator is not None and model.speculator is not None  # HeadConfig sees to it
    model.speculator.quantize(precision)
    path = config.data.validation_path
    if not Path(path, MANIFEST_FILE).is_file():
        print(f"data.validation_path={path} is not on this machine: what rounding to {precision} costs in candidate "
              "recall is not measured")
        return None
    target = Target.load(
        config.target,
        device="cuda" if torch.cuda.is_available() and not config.distributed.cpu else "cpu",
        feature_layers=model.architecture.feature_layers,
    )
    place_draft(trained, target)
    states = collect_draft_states(target, trained, load_rows(path), num_steps=model.architecture.num_unroll_steps,
                                  num_tokens=RECALL_TOKENS)
    cost = quantization_cost(states, trained.lm_head_weight(target), before=trained.speculator, after=model.speculator)
    print(describe_cost(cost, f"positions of {path}"))
    return cost | {"measured_on": f"the validation data {path}"}


def check_run(training: dict[str, Any], config: Config, spec: TargetSpec) -> None:
    """Compare what shaped the weights at training time with the configuration given now.

    Raises:
        ConfigError: naming the first difference.
    """
    if training["target_fingerprint"] != spec.fingerprint:
        raise ConfigError(f"{config.output_dir} was trained for another target than {spec.name} (fingerprint "
                          f"{training['target_fingerprint'][:12]}, now {spec.fingerprint[:12]}); give that target")
    trained, now = training["config"], asdict(config)
    trained = trained | {"head": {"tied": False} | trained.get("head", {})}  # what earlier versions did
    head = {"static": ("type", "draft_vocab_size"), "full": ("type",)}.get(config.head.type, ("type", "rank", "tied"))
    for node, keys in {"draft": now["draft"].keys(), "head": head}.items():
        for key in keys:
            if key not in trained.get(node, {}):
                raise ConfigError(f"{config.output_dir} was trained by another version, which did not record "
                                  f"{node}.{key}; export it with that version, or train it again")
            if trained[node][key] != now[node][key]:
                raise ConfigError(f"{node}.{key}={now[node][key]!r}, but {config.output_dir} was trained with "
                                  f"{trained[node][key]!r}; give the overrides of the training run")


if __name__ == "__main__":
    main()
