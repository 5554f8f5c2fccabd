"""The small parts against transformers' Llama, and compiled against plain."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from specvocab_model.layers import MLP, RMSNorm, rotate, swiglu


def test_rotate_is_llamas():
    heads, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    wanted, _ = apply_rotary_pos_emb(heads, heads, cos, sin, unsqueeze_dim=2)
    torch.testing.assert_close(rotate(heads, cos, sin), wanted)


def test_mlp_is_llamas():
    llama = LlamaMLP(LlamaConfig(hidden_size=12, intermediate_size=20, num_attention_heads=2))
    ours = MLP(12, 20)
    ours.load_state_dict(llama.state_dict())
    hidden = torch.randn(3, 4, 12)
    torch.testing.assert_close(ours(hidden), llama(hidden))


def test_norm_is_llamas_and_keeps_the_type_of_its_input():
    llama, ours = LlamaRMSNorm(24, eps=1e-5), RMSNorm(24, eps=1e-5)
    torch.nn.init.normal_(llama.weight)
    ours.load_state_dict(llama.state_dict())
    hidden = torch.randn(3, 24) * 5
    torch.testing.assert_close(ours(hidden), llama(hidden))
    with torch.autocast("cpu", torch.bfloat16):
        half = ours(hidden.bfloat16())
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), llama(hidden), rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("function, shapes", [(swiglu, [(0,), (0,)]), (rotate, [(4, 32), (32,), (32,)])])
def test_compiled_and_plain_agree_and_no_length_compiles_anew(function, shapes):
    for length in (65, 130, 131, 48, 1000):
        with torch._dynamo.config.patch(error_on_recompile=length != 65):
            inputs = [torch.randn(length, *(shape if shape != (0,) else (64,)), device="cuda") for shape in shapes]
            inputs[0].requires_grad_()
            compiled = function(*inputs)
            (gradient,) = torch.autograd.grad(compiled.square().sum(), inputs[0])
        plain = function.__wrapped__(*inputs)
        torch.testing.assert_close(compiled, plain, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, torch.autograd.grad(plain.square().sum(), inputs[0])[0],
                                   rtol=1e-4, atol=1e-4)
