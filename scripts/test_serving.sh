#!/usr/bin/env bash
# Checkpoints in the engines themselves, on the CPU; not a part of scripts/test.sh, because engines are large.
#   bash scripts/test_serving.sh vllm [pytest arguments]
#   bash scripts/test_serving.sh sglang [pytest arguments]
# Minutes for the environment the first time (scripts/serving_env.sh), then about ten for the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

engine=${1:?say which engine: bash scripts/test_serving.sh vllm (or sglang)}
shift
bash scripts/serving_env.sh "$engine"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=
run_tests() { ".venv-$engine/bin/python" -m pytest "$@"; }

case $engine in
  vllm)
    export VLLM_LOGGING_LEVEL=WARNING VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1
    # The official wheel's loader; what it would compute with is missing without a GPU.
    PYTHONPATH=$PWD/.venv-vllm/official VLLM_TARGET_DEVICE=cpu run_tests tests/serving/test_vllm_loader.py "$@"
    run_tests tests/serving -k vllm "$@"
    ;;
  sglang)
    SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$PWD/tests/serving/stubs run_tests tests/serving/test_sglang_loader.py "$@"
    ;;
esac
