"""vLLM's entry point (group ``vllm.general_plugins``): every process of vLLM that loads a model calls ``register``."""

from __future__ import annotations

from vllm import ModelRegistry

from specvocab_model.eagle3 import ARCHITECTURE

ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")  # the second: what vLLM makes of speculators' layout
DRAFT = "specvocab_model.serving.vllm_draft:SpecVocabLlamaForCausalLMEagle3"


def register() -> None:
    """Put our subclass in the place of vLLM's EAGLE-3 Llama draft.

    By name, because vLLM imports models only when it has chosen a device. May be called any number of times.
    """
    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, DRAFT)
