"""Which settings decide the numbers of a run: what checkpoints and sweeps compare before they go on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from specvocab_model.config import Config

# What may differ between the run that wrote a checkpoint and the one that resumes: it does not touch the numbers, or
# (loss_memory_mib, how rows are shared out) only the order of sums. The target and the data are compared by content,
# not by path, and the device by what it is, not by how it was asked for.
FREE_SETTINGS = (
    "action", "inspect", "run_name", "output_dir", "target.model", "target.chat_template_kwargs", "data.train_path",
    "data.validation_path", "data.features_path", "data.num_workers", "generation.", "tracking.", "eval.", "export.",
    "compare.", "sweep.", "distributed.", "trainer.micro_batch_size", "trainer.gradient_accumulation_steps",
    "trainer.resume", "trainer.log_every", "trainer.validate_every", "trainer.save_every", "trainer.keep_",
    "trainer.loss_memory_mib", "trainer.skip_non_finite", "head.quantization",
)


def run_identity(
    config: Config, *, world_size: int, device_type: str, target_fingerprint: str, data_sha256: str
) -> dict[str, Any]:
    """Everything that decides the numbers of a run, flat: a checkpoint is resumed only by the same."""
    settings = {key: value for key, value in flatten(asdict(config)) if not key.startswith(FREE_SETTINGS)}
    rows = world_size * config.trainer.micro_batch_size * config.trainer.gradient_accumulation_steps
    return {**settings, "device": device_type, "target fingerprint": target_fingerprint,
            "training data sha256": data_sha256,
            "rows a step (ranks * trainer.micro_batch_size * trainer.gradient_accumulation_steps)": rows}


def flatten(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``{"optim": {"lr": 1}}`` as ``("optim.lr", 1)``."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
