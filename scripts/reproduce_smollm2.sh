#!/usr/bin/env bash
# scripts/reproduce.sh for SmolLM2-135M-Instruct: bash scripts/reproduce_smollm2.sh PROMPTS.jsonl QUESTIONS.jsonl [STAGE ...]
exec bash "$(dirname "${BASH_SOURCE[0]}")/reproduce.sh" smollm2_135m "$@"
