"""Functions and the target's decoder layers under torch.compile: one code for all layers, a quarter of the kernels.

transformers runs a layer as dozens of kernels (a norm alone is eight), and a small model waits for each to start.
Compiled, a layer is 15 to 17: seven products, attention, and what lies between them; the cache is written in place.
The final norm and the rotary embedding are compiled beside them.
Lengths are symbols, so that neither a batch nor a cache of another size compiles anew; only one row or one token do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

# Of torch.compile, by the device's type; elsewhere layers run as they are. Not one that captures CUDA graphs itself:
# the engines do that.
BACKENDS = {"cuda": "inductor"}
# Codes of a process. dynamo's own limit of 8 is soon reached: one or several rows, one or several tokens, with a cache,
# a mask or neither, for each type of layer. Beyond it dynamo warns and runs the layers as they are.
MOST_CODES = 64
ALIGNMENT = 8  # elements from row to row that fused attention wants of a mask; it copies others

Fuse = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Makes few kernels of a function, or leaves it as it is."""


class InPlaceCache(Cache):
    """A cache of tensors that never move, each layer's in one of its ``layers``: compiled code may write them."""


class OneLayer:
    """A cache of which attention sees its own layer alone.

    It ignores the layer's number, which would be a constant of the code: each layer would have one of its own.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        for stored in (layer.keys, layer.values):  # [rows, heads, columns, head_dim]: no symbols for what never varies
            torch._dynamo.mark_static(stored, [1, 3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple:
        return self.layer.update(key_states, value_states)


def compiled(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """``function`` in one graph where ``BACKENDS`` has the device's type, itself elsewhere.

    Tensors that it changes must not overlap with any that it is given beside them. Lengths are symbols, also those that
    are given as int.
    """
    if device.type not in BACKENDS:
        return function
    run = _compiled(function, BACKENDS[device.type], fullgraph=True)

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(cache_size_limit=MOST_CODES):
            return run(*args, **kwargs)

    return limited


def can_compile(device: torch.device, memory: Cache | None) -> bool:
    """Whether ``compiled_layers`` serves a forward there, with this cache."""
    return device.type in BACKENDS and (memory is None or isinstance(memory, InPlaceCache))


@contextmanager
def compiled_layers(decoder: nn.Module, device: torch.device, memory: Cache | None, argument: str) -> Iterator[None]:
    """Within it ``decoder`` runs compiled; the layers' hooks stay outside of the code, and see what they always see.

    Args:
        memory: the cache that is given to ``decoder``, under the name ``argument``.
    """
    run, masks = _compiled(_run, BACKENDS[device.type]), Masks(next(decoder.parameters()).dtype)
    layers: list[Any] = list(decoder.layers)  # type: ignore[arg-type]
    for number, layer in enumerate(layers):
        own = {} if memory is None else {argument: OneLayer(memory.layers[number])}
        layer.forward = partial(_forward, run, layer, masks, own)
    embeddings = decoder.get_input_embeddings()  # type: ignore[operator]  # one kernel as it is
    others: list[Any] = [module for module in decoder.children() if module not in (decoder.layers, embeddings)]
    for module in others:  # norm and rotary embeddings
        module.forward = partial(_forward_other, run, module)
    try:
        with torch._dynamo.config.patch(cache_size_limit=MOST_CODES):
            yield
    finally:
        for module in (*layers, *others):
            del module.forward  # the class's own shows again


class Masks:
    """What a forward's masks add to the scores.

    Attention would make that of a boolean mask in every layer; compiled, it would even make it for every head (torch
    2.6, where the length is a symbol), [B, H, T, T]. Here it is made once, and attention takes it as it is.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # with the mask, so that its id is not given away

    def additive(self, mask: Tensor | None) -> Tensor | None:
        if mask is None or mask.dtype != torch.bool:
            return mask
        if id(mask) not in self._made:
            width = -(-mask.shape[-1] // ALIGNMENT) * ALIGNMENT
            hidden = torch.zeros(*mask.shape[:-1], width, dtype=self.dtype, device=mask.device)[..., : mask.shape[-1]]
            self._made[id(mask)] = mask, hidden.masked_fill_(~mask, -torch.inf)
        return self._made[id(mask)][1]


def _forward(
    run: Callable[..., Tensor], layer: nn.Module, masks: Masks, own: dict[str, OneLayer], *args: Any, **kwargs: Any
) -> Tensor:
    return run(layer, args, kwargs | own | {"attention_mask": masks.additive(kwargs["attention_mask"])})


def _forward_other(run: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return run(module, args, kwargs)


@cache
def _compiled(function: Callable[..., Any], backend: str, fullgraph: bool = False) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True, backend=backend, fullgraph=fullgraph)


def _run(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    return type(module).forward(module, *args, **kwargs)
