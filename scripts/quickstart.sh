#!/usr/bin/env bash
# A SpecVocab draft for SmolLM2-135M-Instruct from nothing: install, fetch the target, generate, train, export, evaluate.
#   bash scripts/quickstart.sh [Hydra overrides]      e.g. target.model=FOLDER, then nothing is fetched
# A second run reuses what is finished; a run that was stopped anywhere goes on from there.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_environment
command -v nvidia-smi >/dev/null || export DS_ACCELERATOR=cpu # else DeepSpeed warns that it found no GPU
exec "$PYTHON" scripts/pipeline.py +experiment=quickstart "$@"
