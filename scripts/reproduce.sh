#!/usr/bin/env bash
# A draft of a small target and its rivals from nothing, on one GPU: generate, train, export, measure.
#   bash scripts/reproduce.sh EXPERIMENT PROMPTS.jsonl QUESTIONS.jsonl [STAGE ...]
# EXPERIMENT, of configs/experiment, is smollm2_135m or gemma3_270m. PROMPTS are what the target answers for training,
# QUESTIONS (Spec-Bench's question.jsonl) what drafts are measured on; those are never trained on. Stages, in this order
# and all but the ablations by default:
#   fetch generate train train_static16000 train_static32000 export tune speed tau tau_tree tau_sampled report ablations
# What is finished is not done again, and what was stopped goes on: a machine that is taken away costs minutes. With two
# GPUs, start independent stages side by side, each with its own CUDA_VISIBLE_DEVICES. Runs are in outputs/EXPERIMENT*,
# figures in outputs/EXPERIMENT_results. Without a network, put the wheels of the target into a folder and set
# PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER HF_HUB_OFFLINE=1. Other variables: TARGET, STEPS=1000 and ABLATION_STEPS=500
# optimizer steps, QUESTIONS_OF_SPEED=80, EXTRA='key=value ...'.
set -euo pipefail

die() {
  echo "error: $*" >&2
  exit 2
}

[[ $# -ge 3 ]] || die "usage: bash scripts/reproduce.sh EXPERIMENT PROMPTS.jsonl QUESTIONS.jsonl [STAGE ...]"
name=$1 prompts=$(realpath -e "$2") questions=$(realpath -e "$3")
shift 3
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case $name in # some 400 candidates, and half and double the rank
  smollm2_135m) few_tile=128 ranks=(36 144) ;;
  gemma3_270m) few_tile=512 ranks=(40 160) ;;
  *) die "EXPERIMENT=$name must be smollm2_135m or gemma3_270m; add a line for another one here" ;;
esac

python=${PYTHON:-python}
target=${TARGET:-$(sed -n 's/^model: //p' "configs/target/$name.yaml")}
experiment=(+experiment="$name" "target.model=$target" "generation.prompt_files=[$prompts]" "eval.prompts=$questions"
  ${EXTRA:-})
steps=(${STEPS:+"trainer.max_steps=$STEPS"})
data=data/$name results=outputs/${name}_results
static_sizes=(16000 32000)

fetch() { "$python" scripts/fetch_target.py "$target"; }

generate() { "$python" data_gen/main.py "${experiment[@]}"; }

train() { "$python" train/main.py "${experiment[@]}" "${steps[@]}"; }

static() { # SIZE: the overrides of a draft that is trained with so many of the most frequent tokens
  echo head=static "head.draft_vocab_size=$1" "run_name=${name}_static$1"
}

train_static() { "$python" train/main.py "${experiment[@]}" "${steps[@]}" $(static "$1"); }

# Beside the trained drafts, the first one with few candidates, with its weights in 8 bits, and with its head cut down to
# the most frequent tokens.
export_all() {
  local size
  export_as "${name}_few" "head.tile=$few_tile" head.keep=1
  export_as "${name}_few_fp8" "head.tile=$few_tile" head.keep=1 head.quantization=fp8
  "$python" scripts/export.py "${experiment[@]}"
  for size in "${static_sizes[@]}"; do
    "$python" scripts/export.py "${experiment[@]}" $(static "$size")
    "$python" scripts/trim_vocab.py "outputs/$name/export" --target "$target" --data "$data/train" --size "$size" \
      --output "outputs/${name}_pruned$size"
  done
}

export_as() { # FOLDER, overrides: the first draft, exported under another name
  local folder=outputs/$1
  shift
  "$python" scripts/export.py "${experiment[@]}" "$@"
  rm -rf "$folder" && mkdir -p "$folder"
  mv "outputs/$name/export" "$folder/export"
}

measure() { # NAME, options of bench_decode.py
  local file=$results/$1.json
  shift
  [[ -e $file ]] || "$python" scripts/bench_decode.py --target "$target" --prompts "$questions" --json "$file" "$@"
}

speculative=(outputs/"$name"/export outputs/"${name}"_few{,_fp8}/export)
static16=outputs/${name}_static16000/export static32=outputs/${name}_static32000/export
pruned=(outputs/"${name}"_pruned{16000,32000}/pruned)

tune() { # which (rank, tile, keep, precision) costs how much acceptance and time
  [[ -e $results/tune/tune_head.json ]] || "$python" scripts/tune_head.py "${speculative[0]}" --target "$target" \
    --data "$data/validation" --train-data "$data/train" --output "$results/tune"
}

speed() { # one text at a time, an even choice of the questions
  measure speed --draft "${speculative[@]}" "$static32" --own-heads --num-prompts "${QUESTIONS_OF_SPEED:-80}" \
    --max-new-tokens 128 --shapes 7 8x10x60
}

tau() { # all questions, both turns
  measure tau --draft "${speculative[@]}" "$static16" "$static32" "${pruned[@]}" --own-heads --batch 16 --shapes 7
}

tau_tree() { measure tau_tree --draft "${speculative[@]}" "$static32" --own-heads --batch 8 --shapes 8x10x60; }

tau_sampled() {
  measure tau_sampled --draft "${speculative[@]}" "$static16" "$static32" "${pruned[@]}" --own-heads --batch 16 \
    --shapes 7 --temperature 1
}

report() {
  "$python" scripts/report.py "outputs/$name" outputs/"$name"_static{16000,32000} --output "$results/report.html"
  "$python" scripts/results.py "$results" --runs "outputs/$name" outputs/"$name"_static{16000,32000} \
    --ablations outputs/"$name"_ablation_* --output "$results/results.md"
}

# Short runs that differ from `base` in one thing each. Adam makes the speculator's own steps independent of its loss's
# weight: with a small one the draft is trained as if that loss did not reach it.
ablations() {
  local rank loss steps
  ablation base
  ablation init_random head.init=random
  ablation init_svd head.init=svd
  ablation aux_weight_0.001 trainer.aux_weight=0.001
  ablation aux_weight_1 trainer.aux_weight=1.0
  for rank in "${ranks[@]}"; do ablation "rank_$rank" "head.rank=$rank"; done
  ablation mean_over_slots trainer.loss_normalization=slot
  for loss in reverse_kl tv lk_hybrid; do ablation "loss_$loss" "trainer.loss=$loss"; done
  for steps in 1 3 5; do ablation "unroll_steps_$steps" "draft.num_unroll_steps=$steps"; done
  # Simulated acceptance over fewer steps is another quantity, so these are compared by decoding.
  measure ablation_unroll_steps --own-heads --num-prompts 80 --max-new-tokens 128 --batch 16 --shapes 7 \
    --draft outputs/"$name"_ablation_{base,unroll_steps_{1,3,5}}/export
}

ablation() { # NAME, overrides
  local run=${name}_ablation_$1
  shift
  [[ -e outputs/$run/export/config.json ]] && return
  local all=("${experiment[@]}" "run_name=$run" "trainer.max_steps=${ABLATION_STEPS:-500}" trainer.keep_checkpoints=1 "$@")
  "$python" train/main.py "${all[@]}"
  "$python" scripts/export.py "${all[@]}"
}

[[ $# -gt 0 ]] || set -- fetch generate train train_static16000 train_static32000 export tune speed tau tau_tree tau_sampled report
for stage in "$@"; do
  case $stage in
    fetch | generate | train | tune | speed | tau | tau_tree | tau_sampled | report | ablations) "$stage" ;;
    train_static16000 | train_static32000) train_static "${stage#train_static}" ;;
    export) export_all ;;
    *) die "there is no stage $stage" ;;
  esac
done
