#!/usr/bin/env bash
# A SpecVocab draft for SmolLM2-135M-Instruct from nothing: install, fetch the target, generate, train, export, evaluate.
#   bash scripts/quickstart.sh [Hydra overrides]
# A second run reuses what is finished; a run that was stopped anywhere goes on from there.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_environment
export TOKENIZERS_PARALLELISM=false # tokenizers warns when a process that has used it forks
"$PYTHON" scripts/fetch_target.py
exec "$PYTHON" scripts/pipeline.py +experiment=quickstart "$@"
