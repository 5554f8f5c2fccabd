#!/usr/bin/env bash
# An answer streaming in the terminal: the target alone, then with its draft, whose accepted tokens are green.
#   bash scripts/demo.sh [CHECKPOINT] [--prompt TEXT] ...      --help lists the options
# Without CHECKPOINT, the trained draft in docs/reference_draft; its target is fetched where it is not there yet.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_environment
if [[ ${1:--} == -* && " $* " != *" --target"* ]]; then "$PYTHON" scripts/fetch_target.py; fi
exec "$PYTHON" scripts/demo.py "$@"
