"""A decoder fit for measuring: nothing but the target, the draft and the head takes time.

``decode.py`` says in the fewest lines what speculative decoding is; this package does the same with static KV caches,
all bookkeeping on the device, and on a GPU every part of a round as one CUDA graph. It drafts chains and EAGLE-2's
dynamic trees, for several sequences at a time, and decodes plainly by the same code with no drafts.

    engine = DecodeEngine(target, model, head, shape=EAGLE2, capacity=2048)
    outputs = engine.generate([prompt_ids], max_new_tokens=256)          # list[DecodeOutput]
    baseline = DecodeEngine(target, capacity=2048).generate([prompt_ids], max_new_tokens=256)

Files: ``shapes`` (what is drafted), ``cache`` (static caches), ``attention`` (what a node of a tree sees), ``forward``
(the target's and the draft's layers on them), ``drafting`` (chains and trees), ``verification`` (which drafts stay),
``rounds`` (what a round changes), ``texts`` (where a batch stands; the host learns of it by ``transfers.Readback``),
``engine`` (the rounds, captured and replayed by ``graphs.Graphs``).
"""

from specvocab_model.engine.engine import DecodeEngine
from specvocab_model.engine.shapes import EAGLE2, DraftShape

__all__ = ["EAGLE2", "DecodeEngine", "DraftShape"]
