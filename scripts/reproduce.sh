#!/usr/bin/env bash
# A draft of a small target and its rivals from nothing, on one GPU: generate, train, export, measure.
#   bash scripts/reproduce.sh EXPERIMENT PROMPTS.jsonl QUESTIONS.jsonl [STAGE ...]
# EXPERIMENT, of configs/experiment, is smollm2_135m or gemma3_270m. PROMPTS are what the target answers for training,
# QUESTIONS (Spec-Bench's question.jsonl) what drafts are measured on; those are never trained on. Stages, in this order
# and all but the ablations by default:
#   fetch generate train train_static export tune speed tau tau_tree tau_sampled report ablations
# What is finished is not done again, as long as drafts, target, questions and options are the same. What was stopped
# goes on: a machine that is taken away costs minutes. With two GPUs, start independent stages side by side, each with
# its own CUDA_VISIBLE_DEVICES (train_static by size, with STATIC_SIZES=16000 and STATIC_SIZES=32000). Runs are in
# outputs/EXPERIMENT*, figures in outputs/EXPERIMENT_results, both in the repository. Without a network, put the wheels of the target into a folder and set
# PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER HF_HUB_OFFLINE=1. Other variables: TARGET, STEPS=1000 and ABLATION_STEPS=500
# optimizer steps, STATIC_SIZES='16000 32000', QUESTIONS_OF_SPEED=80, BATCH=16 texts at a time where only acceptance
# counts, EXTRA='key=value ...'.
set -euo pipefail

die() {
  echo "error: $*" >&2
  exit 2
}

[[ $# -ge 3 ]] || die "usage: bash scripts/reproduce.sh EXPERIMENT PROMPTS.jsonl QUESTIONS.jsonl [STAGE ...]"
for file in "$2" "$3"; do
  [[ -f $file ]] || die "there is no file $file (seen from $PWD); PROMPTS and QUESTIONS must be files of prompts"
done
name=$1 prompts=$(realpath "$2") questions=$(realpath "$3") target=${TARGET:-}
if [[ -d $target ]]; then target=$(realpath "$target"); fi
shift 3
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case $name in # some 400 candidates, and half and double the rank
  smollm2_135m) few_tile=128 ranks=(64 256) ;;
  gemma3_270m) few_tile=512 ranks=(40 160) ;;
  *) die "EXPERIMENT=$name must be smollm2_135m or gemma3_270m; add a line for another one here" ;;
esac

python=${PYTHON:-python}
target=${target:-$(sed -n 's/^model: //p' "configs/target/$name.yaml")}

quoted() { printf "'%s'" "${1//\'/\\\'}"; } # for Hydra, to which commas and brackets mean something

experiment=(+experiment="$name" "target.model=$(quoted "$target")" "generation.prompt_files=[$(quoted "$prompts")]"
  "eval.prompts=$(quoted "$questions")" ${EXTRA:-})
steps=(${STEPS:+"trainer.max_steps=$STEPS"})
mapfile -t sizes < <(tr ' ' '\n' <<<"${STATIC_SIZES:-16000 32000}" | sort -n) # of the static heads
for size in "${sizes[@]}"; do
  [[ $size =~ ^[1-9][0-9]*$ ]] || die "STATIC_SIZES='$STATIC_SIZES' must be numbers of tokens, separated by spaces"
done
batch=${BATCH:-16} data=data/$name results=outputs/${name}_results

fetch() { "$python" scripts/fetch_target.py "$target"; }

generate() { "$python" data_gen/main.py "${experiment[@]}"; }

train() { "$python" train/main.py "${experiment[@]}" "${steps[@]}"; }

static() { # SIZE: the overrides of a draft that is trained with so many of the most frequent tokens
  echo head=static "head.draft_vocab_size=$1" "run_name=${name}_static$1"
}

train_static() {
  local size
  for size in "${sizes[@]}"; do "$python" train/main.py "${experiment[@]}" "${steps[@]}" $(static "$size"); done
}

# Beside the trained drafts, the first one with its speculator in 8 bits, then with few candidates too, and with its head
# cut down to the most frequent tokens. Side by side: most of each is Python starting.
export_all() {
  local size statics=() prunings=()
  for size in "${sizes[@]}"; do
    statics+=("export_draft $(static "$size")")
    prunings+=("prune $size")
  done
  together export_draft "${statics[@]}" \
    "export_draft head.quantization=fp8 export.output=outputs/${name}_fp8/export" \
    "export_draft head.quantization=fp8 head.tile=$few_tile head.keep=1 export.output=outputs/${name}_few_fp8/export"
  together "${prunings[@]}"
}

export_draft() { "$python" scripts/export.py "${experiment[@]}" "$@"; }

prune() { # SIZE
  "$python" scripts/trim_vocab.py "outputs/$name/export" --target "$target" --data "$data/train" --size "$1" \
    --output "outputs/${name}_pruned$1"
}

together() { # COMMANDS, their words separated by spaces: all at once; fails if one does
  local command pid pids=()
  for command in "$@"; do
    $command &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || die "see above: one of the commands that ran side by side failed"; done
}

made_from() { # WORDS of a command: prints them and, of files and folders among them, hashes that tell them from others
  local word
  for word in "$@"; do
    echo "$word"
    if [[ -f $word ]]; then
      sha256sum "$word"
    elif [[ -d $word ]]; then
      find -L "$word" \( -name '*.safetensors' -o -name config.json -o -name manifest.json \) -print0 | sort -z |
        xargs -0 -r sha256sum
    fi
  done
}

is_made() { # RESULT, WORDS: whether it is there, and made from what these words name now
  local result=$1
  shift
  [[ -e $result && -e $result.made_from && $(made_from "$@") == "$(<"$result.made_from")" ]]
}

measure() { # NAME, options of bench_decode.py
  local file=$results/$1.json
  shift
  set -- --target "$target" --prompts "$questions" "$@"
  is_made "$file" "$@" && return
  "$python" scripts/bench_decode.py "$@" --json "$file.partial"
  mv "$file.partial" "$file"
  made_from "$@" >"$file.made_from"
}

speculative=(outputs/"$name"/export outputs/"${name}"_{fp8,few_fp8}/export)
static=("${sizes[@]/#/outputs/${name}_static}") pruned=("${sizes[@]/#/outputs/${name}_pruned}")
static=("${static[@]/%//export}") pruned=("${pruned[@]/%//pruned}")

tune() { # which (rank, tile, keep, precision) costs how much acceptance and time
  local file=$results/tune/tune_head.json
  set -- "${speculative[0]}" --target "$target" --data "$data/validation" --train-data "$data/train"
  is_made "$file" "$@" && return
  "$python" scripts/tune_head.py "$@" --output "$results/tune"
  made_from "$@" >"$file.made_from"
}

speed() { # one text at a time, an even choice of the questions
  measure speed --draft "${speculative[@]}" "${static[-1]}" --own-heads --num-prompts "${QUESTIONS_OF_SPEED:-80}" \
    --max-new-tokens 128 --shapes 7 8x10x60
}

tau() { # all questions, both turns, answers as long as Spec-Bench lets them be
  measure tau --draft "${speculative[@]}" "${static[@]}" "${pruned[@]}" --own-heads --batch "$batch" --shapes 7 \
    --max-new-tokens 1024
}

tau_tree() { # a tree has eight times the drafts of a chain
  measure tau_tree --draft "${speculative[@]}" "${static[-1]}" --own-heads --batch $(((batch + 1) / 2)) --shapes 8x10x60 \
    --max-new-tokens 1024
}

tau_sampled() {
  measure tau_sampled --draft "${speculative[@]}" "${static[@]}" "${pruned[@]}" --own-heads \
    --batch "$batch" --shapes 7 --max-new-tokens 1024 --temperature 1
}

report() {
  local ablations runs=(outputs/"$name" "${sizes[@]/#/outputs/${name}_static}")
  shopt -s nullglob # there may be none
  ablations=(outputs/"$name"_ablation_*)
  shopt -u nullglob
  "$python" scripts/report.py "${runs[@]}" --output "$results/report.html"
  "$python" scripts/results.py "$results" --runs "${runs[@]}" \
    --ablations "${ablations[@]}" --output "$results/results.md"
}

# Short runs that differ from `base` in one thing each. Adam makes the speculator's own steps independent of its loss's
# weight: with a small one the draft is trained as if that loss did not reach it.
ablations() {
  local rank loss steps
  ablation base
  ablation head_full head=full
  ablation init_random head.init=random
  ablation init_svd head.init=svd
  ablation vocab_proj_free head.tied=false
  ablation vocab_proj_free_eps_1e-6 head.tied=false optim.eps=1e-6 # rows of rare tokens have tiny gradients
  ablation aux_weight_0.001 trainer.aux_weight=0.001
  ablation aux_weight_1 trainer.aux_weight=1.0
  for rank in "${ranks[@]}"; do ablation "rank_$rank" "head.rank=$rank"; done
  ablation mean_over_slots trainer.loss_normalization=slot
  for loss in reverse_kl tv lk_hybrid; do ablation "loss_$loss" "trainer.loss=$loss"; done
  for steps in 1 3 5; do ablation "unroll_steps_$steps" "draft.num_unroll_steps=$steps"; done
  # Simulated acceptance over fewer steps is another quantity, so these are compared by decoding.
  measure ablation_unroll_steps --own-heads --num-prompts 80 --max-new-tokens 128 --batch "$batch" --shapes 7 \
    --draft outputs/"$name"_ablation_{base,unroll_steps_{1,3,5}}/export
}

ablation() { # NAME, overrides
  local run=${name}_ablation_$1
  shift
  local all=("${experiment[@]}" "run_name=$run" "trainer.max_steps=${ABLATION_STEPS:-500}" trainer.keep_checkpoints=1
    "$@")
  is_made "outputs/$run/export" "${all[@]}" "$data/train" && return
  "$python" train/main.py "${all[@]}"
  "$python" scripts/export.py "${all[@]}"
  made_from "${all[@]}" "$data/train" >"outputs/$run/export.made_from"
}

stages=(fetch generate train train_static export tune speed tau tau_tree tau_sampled report)
[[ $# -gt 0 ]] || set -- "${stages[@]}"
for stage in "$@"; do # before the first one takes hours
  [[ " ${stages[*]} ablations " == *" $stage "* ]] || die "there is no stage $stage; stages are ${stages[*]} ablations"
done
for stage in "$@"; do
  case $stage in
    export) export_all ;;
    *) "$stage" ;;
  esac
done
