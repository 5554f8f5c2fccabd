"""SGLang's entry point (group ``sglang.srt.plugins``): every process of SGLang calls ``register`` when it starts."""

from __future__ import annotations

from sglang.srt.models.registry import ModelRegistry

from specvocab_model.eagle3 import ARCHITECTURE
from specvocab_model.serving.sglang_draft import SpecVocabLlamaForCausalLMEagle3


def register() -> None:
    """Put our subclass in the place of SGLang's EAGLE-3 Llama draft. May be called any number of times."""
    ModelRegistry.models[ARCHITECTURE] = SpecVocabLlamaForCausalLMEagle3
