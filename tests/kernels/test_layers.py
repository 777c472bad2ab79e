"""Packed linear maps, norms and rotations against their naive twins and against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from fovea.core.errors import UnsupportedModel
from fovea.engine.layers.linear import FusedLinear, Linear, RMSNorm
from fovea.kernels import reference
from fovea.kernels.torch_kernels import TorchKernels

pytestmark = pytest.mark.kernels

TYPES = [torch.float32, torch.bfloat16]


PACKED = TorchKernels(pack=True)


def require_packed_product(dtype: torch.dtype) -> None:
    if PACKED.product(torch.zeros(8, 8, dtype=dtype), None, None, False) is None:
        pytest.skip(f"this machine has no packed product for {dtype}")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_a_packed_product_equals_the_plain_one(dtype: torch.dtype, bias: bool, rows: int) -> None:
    require_packed_product(dtype)
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 48).to(dtype), torch.randn(80, 48).to(dtype)
    offset = torch.randn(80).to(dtype) if bias else None
    product = PACKED.product(weight, offset, None, False)
    assert product is not None
    theirs = reference.linear(x, weight, offset)
    tolerance = 1e-4 if dtype is torch.float32 else 0.25
    torch.testing.assert_close(product(x, None), theirs, atol=tolerance, rtol=1e-2)


@pytest.mark.parametrize("packed", [True, False])
def test_activation_gate_and_residual_are_applied_after_the_product(packed: bool) -> None:
    torch.manual_seed(0)
    layer = Linear(16, 12, bias=True, activation="silu", gated=True)
    layer.weight.data.normal_()
    layer.bias.data.normal_()  # type: ignore[union-attr]
    x, residual = torch.randn(3, 16), torch.randn(3, 6)
    gate, up = torch.nn.functional.linear(x, layer.weight, layer.bias).chunk(2, dim=-1)
    theirs = residual + torch.nn.functional.silu(gate) * up
    if packed:
        layer.pack(PACKED)
    torch.testing.assert_close(layer(x, residual), theirs, atol=1e-5, rtol=1e-5)


def test_an_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="'swoosh' is not supported; supported: silu"):
        Linear(2, 2, bias=False, activation="swoosh")


def test_packing_a_layer_frees_the_plain_weight_unless_it_is_kept() -> None:
    require_packed_product(torch.float32)
    first, second = Linear(16, 8, bias=False), Linear(16, 8, bias=False)
    for layer in (first, second):
        layer.weight.data.normal_()
    x = torch.randn(3, 16)
    before = [layer(x) for layer in (first, second)]
    first.pack(PACKED)
    second.pack(PACKED, keep=True)
    assert (first.weight.numel(), second.weight.numel()) == (0, 8 * 16)
    for layer, result in zip((first, second), before, strict=True):
        torch.testing.assert_close(layer(x), result, atol=1e-5, rtol=1e-5)


def test_weights_that_cannot_be_packed_stay_plain() -> None:
    assert PACKED.product(torch.zeros(8, 8, dtype=torch.float16), None, None, False) is None
    assert PACKED.product(torch.zeros(8, 1), None, None, False) is None
    layer = Linear(1, 4, bias=True)
    layer.weight.data.fill_(2.0)
    layer.bias.data.fill_(1.0)  # type: ignore[union-attr]
    layer.pack(PACKED)
    assert layer(torch.tensor([[3.0]])).tolist() == [[7.0] * 4]


def test_a_fused_map_is_filled_part_by_part() -> None:
    layer = FusedLinear(4, {"q_proj": 2, "k_proj": 3}, bias=True)
    for name, view in layer.checkpoint_views():
        view.fill_(
            {"../q_proj.weight": 1.0, "../q_proj.bias": 2.0, "../k_proj.weight": 3.0, "../k_proj.bias": 4.0}[
                name
            ]
        )
    assert layer(torch.ones(1, 4)).tolist() == [[6.0, 6.0, 16.0, 16.0, 16.0]]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rms_norm_equals_llamas(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 3, 64) * 7).to(dtype)
    theirs = LlamaRMSNorm(64, 1e-5).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    ours = RMSNorm(64, 1e-5)
    ours.weight.data = theirs.weight.data
    exact = dtype is torch.bfloat16
    torch.testing.assert_close(
        reference.rms_norm(x, theirs.weight, 1e-5),
        theirs(x),
        atol=0 if exact else 1e-6,
        rtol=0 if exact else 1e-6,
    )
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-2 if exact else 1e-5)


def test_rotation_equals_llamas() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    angles = torch.rand(1, 6, 8).repeat(1, 1, 2) * 9
    theirs, _ = apply_rotary_pos_emb(query, key, angles.cos(), angles.sin())
    ours = reference.rotate(query[0].transpose(0, 1), angles[0].cos()[:, None], angles[0].sin()[:, None])
    torch.testing.assert_close(ours.transpose(0, 1), theirs[0], atol=1e-6, rtol=1e-6)
