#!/usr/bin/env bash
# An answer streaming in the terminal: the target alone, then with its draft, whose accepted tokens are green.
#   bash scripts/demo.sh [CHECKPOINT] [--prompt TEXT] ...      --help lists the options
# Without CHECKPOINT, the one that scripts/quickstart.sh makes.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_environment
exec "$PYTHON" scripts/demo.py "$@"
