"""``README.md`` of an exported checkpoint, from its ``specvocab.json``."""

from __future__ import annotations

from typing import Any


def model_card(record: dict[str, Any]) -> str:
    """The model card; with a table of measurements once ``record["evaluation"]`` is there."""
    target, speculator = record["target"], record["speculator"]
    head = "the target's full vocabulary"
    if (size := record.get("draft_vocab_size")) is not None:  # older checkpoints do not have it
        head = f"an output embedding of its own over {size} of {target['vocab_size']} tokens"
    whole = "" if size is not None and size < target["vocab_size"] else "full-vocabulary "
    if speculator is not None:
        bits = f" in {speculator['quantization']}" if speculator["quantization"] else ""
        how = ""
        if speculator["selection"] == "tile":
            how = f", the best {speculator['keep']} of every {speculator['tile']}"
        head = (f"a vocabulary speculator of rank {speculator['rank']}{bits} that selects "
                f"{speculator['num_candidates']} of {target['vocab_size']} tokens at each step{how}")
    return f"""---
library_name: specvocab
tags: [speculative-decoding, eagle3]
---
# SpecVocab draft for {target['name']}

A draft model for speculative decoding with `{target['name']}`: one EAGLE-3 decoder layer and {head}.
The target verifies every token, so its output does not change; it only takes fewer forward passes.

{_measurements(record['evaluation'])}{_recall(record.get('candidate_recall'))}
## Use

In transformers' `generate`, where the package specvocab is installed (`trust_remote_code` runs the two lines of
`custom_generate/generate.py`, which import it):

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "path/to/this/folder"
tokenizer = AutoTokenizer.from_pretrained("{target['name']}")
model = AutoModelForCausalLM.from_pretrained("{target['name']}", dtype="auto")
text, chat = "What is speculative decoding?", tokenizer.chat_template is not None  # base models have no template
if chat:
    question = [{{"role": "user", "content": text}}]
    text = tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
inputs = tokenizer(text, add_special_tokens=not chat, return_tensors="pt")
output = model.generate(**inputs, custom_generate=folder, draft=folder, trust_remote_code=True, max_new_tokens=256)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```

`config.json` and `model.safetensors` are a stock {whole}EAGLE-3 draft, which engines load as it is. The draft
fits this target only (fingerprint `{target['fingerprint'][:12]}`). `specvocab.json` says how it was made.
"""


def _recall(recall: dict[str, Any] | None) -> str:
    """``Provenance.candidate_recall``; what 8 bits cost is of ``draft_states.quantization_cost``."""
    if recall is None:
        return ""
    where = f"{recall['num_positions']} positions of {recall.get('measured_on', 'the validation data')}"  # older: none
    if "before" not in recall:
        return (f"\nOn {where}, the candidates hold {recall['target_top1']:.2%} of the target's and "
                f"{recall['draft_top1']:.2%} of the full draft's most probable tokens.\n")
    before, after = recall["before"], recall["after"]
    return (f"\nRounding `vocab_proj` to {recall['quantization']} changed the candidate recall over {where} from "
            f"{before['target_top1']:.2%} to {after['target_top1']:.2%} of the target's and from "
            f"{before['draft_top1']:.2%} to {after['draft_top1']:.2%} of the full draft's most probable tokens.\n")


def _measurements(evaluation: dict[str, Any] | None) -> str:
    """A table of ``Evaluation.to_dict()``: one line for each way to decode, then what holds for all of them."""
    if evaluation is None:
        return "Not evaluated yet; `scripts/evaluate.py` adds a table here.\n"
    tau = {"autoregressive": 1.0} | evaluation["tau"]
    lines = ["| decoding | acceptance length τ | tokens/s |", "|---|---|---|"]
    lines += [f"| {name} | {tau[name]:.3f} | {speed:.1f} |" for name, speed in evaluation["tokens_per_second"].items()]
    recall = evaluation["candidate_recall"]
    if recall is not None and recall["num_positions"]:
        lines.append(f"\nCandidate recall over {recall['num_positions']} positions: {recall['target_top1']:.2%} of the "
                     f"target's and {recall['draft_top1']:.2%} of the full draft's most probable tokens.")
    if evaluation["lossless"] is not None:
        same = "the same as" if evaluation["lossless"] else "NOT always the same as"
        lines.append(f"\nEvery greedy output was {same} the target's own, token for token.")
    return "\n".join(lines) + "\n"
