"""What the benchmarks of generation share: prompts that are always there, and how busy the GPU was."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUICKSTART_PROMPTS = Path(__file__).with_name("quickstart_prompts.jsonl")
SAMPLE_MS = 100  # of the GPU's utilisation


@contextmanager
def gpu_utilisation() -> Iterator[list[float]]:
    """A list that is filled, at the end of the context, with the share of time in which the first GPU ran a kernel."""
    samples: list[float] = []
    if shutil.which("nvidia-smi") is None:
        yield samples
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-i", "0",
               f"-lms={SAMPLE_MS}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield samples
    finally:
        process.terminate()
        output, _ = process.communicate()
        samples += [int(line) / 100 for line in output.split() if line.isdigit()]
