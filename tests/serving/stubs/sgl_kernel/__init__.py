"""In the place of SGLang's kernels, whose wheel cannot be imported without NVIDIA's driver.

SGLang's modules import names from here. On a CPU its layers take their plain torch paths and call none of them; its
attention and its decoding with chains of drafts call those that are written here in plain torch: slow, and for tests
alone. Every other name is a function that does nothing but raise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def _attend(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, scaling: float) -> Tensor:
    """``query`` [T, heads, head_dim] are the last T tokens of a text whose cache lies in ``slots``."""
    k, v = keys[slots].to(query), values[slots].to(query)
    seen = torch.ones(len(query), len(slots), dtype=torch.bool).tril(len(slots) - len(query))
    q, k, v = (x.transpose(0, 1)[None] for x in (query, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True)[0].transpose(0, 1)


def extend_attention_cpu(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, keys: Tensor, values: Tensor, k_scale: float, v_scale: float,
    req_to_token: Tensor, rows: Tensor, seq_lens: Tensor, extend_lens: Tensor, starts: Tensor, max_len: int,
    scaling: float, *others: Any
) -> None:
    """New tokens of several texts; the caller has put their keys and values into the cache."""
    for row, length, new, start in zip(
        rows.tolist(), seq_lens.tolist(), extend_lens.tolist(), starts.tolist(), strict=True
    ):
        part = slice(start, start + new)
        o[part] = _attend(q[part], keys, values, req_to_token[row, :length], scaling)


def decode_attention_cpu(
    q: Tensor, keys: Tensor, values: Tensor, k_scale: float, v_scale: float, o: Tensor, k: Tensor, v: Tensor,
    slots: Tensor, buffer: Tensor, req_to_token: Tensor, rows: Tensor, seq_lens: Tensor, scaling: float, *others: Any
) -> None:
    """One new token of each text, whose keys and values are put into the cache first."""
    keys[slots], values[slots] = k.reshape_as(keys[slots]).to(keys), v.reshape_as(values[slots]).to(values)
    for text, (row, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        o[text] = _attend(q[text : text + 1], keys, values, req_to_token[row, :length], scaling)[0]


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, rows: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """The texts' slots; those of drafts follow the text's own in a chain."""
    assert topk == 1
    return req_to_token[rows]


def build_tree_kernel_efficient_cpu(
    parents: Tensor, chosen: Tensor, seq_lens: Tensor, mask: Tensor, positions: Tensor, index: Tensor,
    next_token: Tensor, next_sibling: Tensor, topk: int, num_steps: int, width: int, mask_mode: int
) -> None:
    """A chain of ``width`` tokens for each text; SGLang's attention reads no mask of chains."""
    assert topk == 1
    places = torch.arange(width)
    positions.copy_((seq_lens[:, None] + places).flatten())
    index.copy_(torch.arange(index.numel()).view_as(index))
    next_token.copy_(torch.where(places + 1 < width, places + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor, retrive_index: Tensor,
    retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor
) -> None:
    """Keep drafts as long as they are the target's choice; ``target_predict`` is the target's after each of them."""
    texts, width = candidates.shape
    chosen = target_predict.view(texts, width)
    for text in range(texts):
        kept = 0
        while kept + 1 < accept_index.shape[1] and candidates[text, kept + 1] == chosen[text, kept]:
            kept += 1
        first = text * width
        accept_index[text, : kept + 1] = torch.arange(first, first + kept + 1)
        predicts[first : first + kept + 1] = chosen[text, : kept + 1]
        accept_token_num[text] = kept


def fill_bonus_tokens_cpu(tokens: Tensor, lengths: Tensor, bonus: Tensor, stride: int) -> None:
    """The last accepted token of each text."""
    bonus.copy_(tokens.flatten()[torch.arange(len(lengths)) * stride + lengths - 1])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, accepted: Tensor) -> None:
    """The slots of accepted tokens, side by side."""
    kept = accept_index[accept_index >= 0]
    accepted[: len(kept)] = slots[kept]


def assign_req_to_token_pool_cpu(
    rows: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, pool_len: int
) -> None:
    """Hand out ``slots`` to the positions of each text."""
    given = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        req_to_token[row, start:end] = slots[given : given + end - start].to(req_to_token)
        given += end - start


def assign_extend_cache_locs_cpu(
    rows: Tensor, req_to_token: Tensor, starts: Tensor, ends: Tensor, slots: Tensor, pool_len: int
) -> None:
    """The slots of these positions of each text, side by side."""
    parts = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    slots.copy_(torch.cat([req_to_token[row, start:end] for row, start, end in parts]))


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, req_to_token: Tensor, seq_lens: Tensor, slots: Tensor, pool_len: int, topk: int, num_steps: int
) -> None:
    """The slots behind each text, for its drafts."""
    assign_extend_cache_locs_cpu(rows, req_to_token, seq_lens, seq_lens + topk * num_steps, slots, pool_len)


def copy_all_layer_kv_cache_cpu(pointers: Tensor, strides: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Move slots of all caches, given by address and bytes a slot."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        moved = [ctypes.string_at(pointer + source * stride, stride) for source in sources.tolist()]
        for target, content in zip(targets.tolist(), moved, strict=True):
            ctypes.memmove(pointer + target * stride, content, stride)


for operator in (extend_attention_cpu, decode_attention_cpu):
    setattr(torch.ops.sgl_kernel, operator.__name__, operator)


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(f"sgl_kernel.{name} needs a GPU")

    return missing
