"""Attention by offsets against transformers' masks, in every kind of layer that a supported target has."""

from __future__ import annotations

import pytest
import torch

from specvocab_model.packed_attention import NAME, as_mask, can_attend, flash, reference
from specvocab_model.target import Target
from specvocab_model.target_spec import LAYOUTS
from tests.specvocab_model.test_target import layout_folder, layout_target, token_ids  # noqa: F401  fixtures

DOCUMENTS = ([9, 1, 14], [1, 16, 7])  # longer than the sliding windows of the tiny targets, which are 6
SDPA_TYPES = [model_type for model_type, layout in LAYOUTS.items() if "sdpa" in layout.attention]


def positions_and_offsets(*rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    lengths = torch.tensor([0, *(length for lengths in rows for length in lengths)])
    return positions, lengths.cumsum(0).int()


def both(target: Target, device: str = "cpu"):
    ids = token_ids(2, 24).to(device)
    positions, offsets = (each.to(device) for each in positions_and_offsets(*DOCUMENTS))
    masked = target.forward(ids, position_ids=positions)
    target.model.set_attn_implementation(NAME)
    filled = torch.cat([offsets, offsets[-1:].expand(3)])  # empty documents, as a graph has them
    by_offsets = [target.forward(ids, position_ids=positions, attention_mask=as_mask(each))
                  for each in (offsets, filled)]
    again = target.forward(ids, position_ids=positions)  # without offsets, as ever
    target.model.set_attn_implementation("sdpa")
    return masked, by_offsets, again


@pytest.mark.parametrize("model_type", SDPA_TYPES)
def test_offsets_say_what_a_mask_says(layout_target, model_type):  # noqa: F811
    masked, by_offsets, again = both(layout_target(model_type))
    assert torch.equal(again.final_hidden, masked.final_hidden)
    for output in by_offsets:
        torch.testing.assert_close(output.features, masked.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(output.final_hidden, masked.final_hidden, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dtype", "head_dim", "expected"), [
    (torch.bfloat16, 64, True), (torch.float16, 256, True), (torch.float32, 64, False), (torch.bfloat16, 20, False),
    (torch.bfloat16, 512, False),
])
def test_what_flash_attention_takes(dtype, head_dim, expected):
    assert can_attend(dtype, head_dim) == expected


# ---- on the card ----


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("groups", [1, 3])
def test_gpu_flash_attention_sees_what_the_reference_sees(window, groups):
    generator = torch.Generator("cuda").manual_seed(0)
    _, offsets = positions_and_offsets([200, 1, 55], [256])
    query, key, value = (torch.randn(512, heads, 64, device="cuda", dtype=torch.bfloat16, generator=generator)
                         for heads in (3 * groups, 3, 3))
    offsets = torch.cat([offsets, offsets[-1:].expand(4)]).cuda()
    ours = flash(query, key, value, offsets, 256, 0.2, window)
    wanted = reference(query.float(), key.float(), value.float(), offsets, 256, 0.2, window)
    torch.testing.assert_close(ours.float(), wanted, rtol=0.02, atol=0.02)
