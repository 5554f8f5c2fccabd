#!/usr/bin/env bash
# Lint, type check and all tests, without a GPU or a network.
#   bash scripts/test.sh [pytest arguments]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

install_environment dev
export HF_HUB_OFFLINE=1 # tests make their own models; one that asks the hub must fail, not wait
export TOKENIZERS_PARALLELISM=false
"$PYTHON" -m ruff check .
"$PYTHON" -m mypy & # beside the tests: it has use for one core only
types=$!
tests=0
"$PYTHON" -m pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder "$@" || tests=$?
wait $types
exit $tests
