"""Chat templates in the manner of well-known ones, in our own words, for the tiny tokenizer; and real ones."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from specvocab_model.target import target_cache_dir
from tests.tiny import CHAT_TEMPLATE, ENDOFTEXT_ID, tiny_tokenizer

BOS = "<|endoftext|>"

# BOS and a system block in front of everything, contents trimmed, tools and their results known.
LLAMA3 = (
    "{{ bos_token }}"
    "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] | trim %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{{ '<|im_start|>system\\n\\nToday: 26 Jul 2024\\n' + first }}"
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}{{ '<|im_end|>' }}"
    "{% for m in rest %}"
    "{% if m['role'] == 'tool' %}{{ '<|im_start|>ipython\\n\\n' + m['content'] + '<|im_end|>' }}"
    "{% elif m['tool_calls'] %}{{ '<|im_start|>assistant\\n\\n' }}{% for call in m['tool_calls'] %}"
    "{{ call['function']['name'] + call['function']['arguments'] | tojson }}{% endfor %}{{ '<|im_end|>' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\\n\\n' + m['content'] | trim + '<|im_end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}"
)

# No system role, roles that must alternate, contents trimmed, another name for the assistant.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' }}"
    "{{ m['content'] | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)

# Earlier thoughts are left out, the last answer always gets a block of them, and thinking can be switched off.
QWEN3 = (
    "{% set found = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set found.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% set words = m['content'].split('</think>') %}"
    "{% if loop.index0 > found.last %}{{ '<think>\\n' + words[0].replace('<think>', '') .strip('\\n') "
    "if words | length > 1 else '<think>\\n' }}{{ '\\n</think>\\n\\n' }}{% endif %}"
    "{{ words[-1].lstrip('\\n') }}{% for call in m['tool_calls'] or [] %}{{ call | tojson }}{% endfor %}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)

TEMPLATES = {"chatml": CHAT_TEMPLATE, "llama3": LLAMA3, "gemma": GEMMA, "qwen3": QWEN3}


def tokenizer_with(chat_template: str | None, *, adds_bos: bool = True) -> PreTrainedTokenizerBase:
    """The tiny tokenizer with another template, which puts BOS in front of plain text as Llama's does."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.bos_token = BOS
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, ENDOFTEXT_ID)]
        )
    return tokenizer


REAL = {  # where they may lie on this machine
    "smollm2": target_cache_dir() / "HuggingFaceTB--SmolLM2-135M-Instruct",
    "qwen3": Path(os.environ.get("SPECVOCAB_QWEN3_TOKENIZER", "nowhere")),
}


@cache
def real_tokenizer(name: str) -> PreTrainedTokenizerBase:
    folder = REAL[name]
    if not folder.is_dir():
        pytest.skip(f"no tokenizer of {name} in {folder}; scripts/fetch_target.py brings SmolLM2's, "
                    "$SPECVOCAB_QWEN3_TOKENIZER names a folder with Qwen3's")
    gguf = sorted(folder.glob("*.gguf"))
    return AutoTokenizer.from_pretrained(folder, **({"gguf_file": gguf[0].name} if gguf else {}))
