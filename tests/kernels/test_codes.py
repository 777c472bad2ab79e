"""Weights that are quantized already: values, products, layouts, and weights of several schemes."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fovea.kernels.activation import finish
from fovea.kernels.codes import CodedProduct, Codes, join
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.native.layouts import EVEN8, NESTED4, NESTED6, ZERO32, ZERO128, packable
from fovea.kernels.native.products import NativeProduct
from fovea.kernels.quantize import INT4, INT8, product, quantize_rows
from tests.support.codes import SCHEMES, codes_of, numbers

pytestmark = pytest.mark.kernels

BF16 = torch.bfloat16


LAYOUTS = {
    "Q4_0": (ZERO32, 32),
    "Q4_1": (INT4.number, 32),
    "Q5_0": (EVEN8, 32),
    "Q8_0": (EVEN8, 32),
    "Q4_K": (NESTED4, 32),
    "Q5_K": (NESTED6, 16),
    "Q6_K": (NESTED6, 16),
    "AWQ": (ZERO128, 128),
    "GPTQ in groups of 64": (ZERO32, 32),
    "one scale per output": (ZERO128, 128),
    "int8": (INT8.number, 128),
}
"""The number of the layout that holds the codes of a scheme, and values of k in one of its groups."""
EVERY_SCHEME = pytest.mark.parametrize("scheme", SCHEMES)


@pytest.fixture(scope="module")
def native(lib: ctypes.CDLL) -> NativeKernels:
    return NativeKernels(lib)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def multiply(x: Tensor, codes: Codes, group: int) -> Tensor:
    """The product as the kernels compute it, by the twin: x is quantized in the layout's groups."""
    scale, minimum = codes.full_scales()
    columns = -(-codes.shape[1] // group)

    def spread(part: Tensor) -> Tensor:
        if part.shape[1] == 1:
            return part.expand(-1, columns)
        return part.repeat_interleave(codes.group // group, dim=1)[:, :columns]

    zero = codes.zero if isinstance(codes.zero, int) else spread(codes.zero)
    if codes.outer is not None and minimum is None:
        zero, minimum = 0, -codes.zero * scale
    even = Codes(
        codes.codes, codes.bits, group, spread(scale), zero, None if minimum is None else spread(minimum)
    )
    return product(quantize_rows(x, group), even)


def make(
    native: NativeKernels,
    parts: list[Codes],
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
) -> NativeProduct:
    made = native.coded_product(parts, bias, activation, gated, BF16)
    assert isinstance(made, NativeProduct)
    return made


@EVERY_SCHEME
@pytest.mark.parametrize(("n", "k"), [(64, 256), (70, 512), (1, 96), (200, 896)])
def test_values_are_kept_to_the_last_bit(native: NativeKernels, scheme: str, n: int, k: int) -> None:
    maker, (layout, _) = SCHEMES[scheme], LAYOUTS[scheme]
    codes = maker(n, k)
    kept = packable(codes)
    assert kept is not None
    assert kept.layout == layout
    rows = make(native, [codes]).rows(torch.arange(n))
    torch.testing.assert_close(rows, codes.values(BF16), atol=0, rtol=0)


@EVERY_SCHEME
@pytest.mark.parametrize("rows", [1, 2, 7, 12, 13, 40, 250])
def test_a_product_equals_the_twins(native: NativeKernels, scheme: str, rows: int) -> None:
    maker, (_, group) = SCHEMES[scheme], LAYOUTS[scheme]
    codes, x, bias = maker(130, 1280), torch.randn(rows, 1280).to(BF16), torch.randn(130).to(BF16)
    theirs = (multiply(x, codes, group) + bias.float()).to(BF16)
    ours = make(native, [codes], bias)(x, None)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=2**-7)
    assert float((ours != theirs).float().mean()) < 1e-3  # the twin rounds twice in rare cases


@EVERY_SCHEME
def test_a_row_does_not_depend_on_the_other_rows(native: NativeKernels, scheme: str) -> None:
    codes, x = SCHEMES[scheme](192, 1152), torch.randn(300, 1152).to(BF16)
    apply = make(native, [codes], None, "silu", True)
    together = apply(x, None)
    for count in (1, 2, 5, 6, 7, 12, 13, 37, 100):
        assert torch.equal(apply(x[:count], None), together[:count])


@EVERY_SCHEME
def test_a_product_is_near_that_of_the_values(native: NativeKernels, scheme: str) -> None:
    """Rows are rounded to 8 bits, which costs 1% of the result's size."""
    codes, x = SCHEMES[scheme](64, 1024), torch.randn(20, 1024).to(BF16)
    exact = x.float() @ codes.values().T
    ours = make(native, [codes])(x, None).float()
    assert float((ours - exact).norm() / exact.norm()) < 0.012


def test_outputs_of_several_schemes_follow_each_other(native: NativeKernels) -> None:
    """Q4_K_M files hold values of attention in Q6_K, queries and keys in Q4_K. One product computes them."""
    parts = [SCHEMES[name](n, 512) for name, n in (("Q4_K", 96), ("Q4_K", 40), ("Q6_K", 70), ("Q8_0", 64))]
    bias, residual = torch.randn(270).to(BF16), torch.randn(9, 270).to(BF16)
    x = torch.randn(9, 512).to(BF16)
    whole = make(native, parts, bias, "silu")
    first, pieces = 0, []
    for part in parts:
        rows = slice(first, first + part.shape[0])
        pieces.append(make(native, [part], bias[rows], "silu")(x, residual[:, rows].contiguous()))
        first = rows.stop
    assert torch.equal(whole(x, residual), torch.cat(pieces, dim=1))
    ids = torch.tensor([[0, 100], [140, 269]])
    torch.testing.assert_close(
        whole.rows(ids), torch.cat([part.values(BF16) for part in parts])[ids], atol=0, rtol=0
    )
    assert whole.nbytes == sum(make(native, [part]).nbytes for part in parts)


def test_a_gated_product_of_two_schemes_is_left_to_the_caller(native: NativeKernels) -> None:
    parts = [SCHEMES[name](64, 512) for name in ("Q4_K", "Q6_K")]
    assert native.coded_product(parts, None, "silu", True, BF16) is None


def test_scales_that_would_change_are_not_packed() -> None:
    codes = SCHEMES["Q4_0"](8, 64)
    assert packable(replace(codes, scale=codes.scale * 1.0001)) is None
    assert packable(replace(codes, scale=codes.scale * 1e9)) is None
    assert packable(replace(codes, group=16, scale=numbers(8, 4))) is None
    large = SCHEMES["Q6_K"](8, 256)
    assert packable(replace(large, scale=large.scale * 8)) is None


def test_bytes_of_the_layouts(native: NativeKernels) -> None:
    bits = {"Q4_0": 4.75, "Q4_1": 5, "Q8_0": 8.5, "Q4_K": 4.625, "Q6_K": 9.125, "AWQ": 4.1875, "int8": 8.125}
    for scheme, size in bits.items():
        assert make(native, [SCHEMES[scheme](640, 1024)]).nbytes == 640 * 1024 * size / 8


@EVERY_SCHEME
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_torch_multiplies_by_the_values(
    scheme: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VALUES_AT_ONCE", "MULTIPLY_VALUES"):
        monkeypatch.setattr(f"fovea.kernels.codes.{name}", 2000)
    parts = [SCHEMES[scheme](n, 768) for n in (20, 10)]
    x, residual, bias = (
        torch.randn(2, 3, 768).to(dtype),
        torch.randn(2, 3, 15).to(dtype),
        torch.randn(30).to(dtype),
    )
    values = torch.cat([part.values(dtype) for part in parts])
    theirs = finish(functional.linear(x, values) + bias, "silu", True, residual)
    apply = CodedProduct(parts, bias, "silu", True)
    torch.testing.assert_close(apply(x, residual), theirs, atol=0.01, rtol=0.02)
    ids = torch.tensor([[3, 0], [29, 3]])
    torch.testing.assert_close(
        apply.rows(ids), torch.cat([part.values() for part in parts])[ids], atol=0, rtol=0
    )
    assert torch.equal(join(parts).values(dtype), values)


def test_codes_of_a_row_of_odd_width() -> None:
    codes = Codes(codes_of(3, 33, 4), 4, 32, numbers(3, 2), 8)
    by_hand = (codes.codes.float() - 8) * torch.cat(
        (codes.scale[:, :1].expand(-1, 32), codes.scale[:, 1:]), dim=1
    )
    assert torch.equal(codes.values(), by_hand)
    assert torch.equal(CodedProduct([codes], None, None, False).rows(torch.arange(3)), by_hand)


@EVERY_SCHEME
def test_rows_times_powers_of_two_are_exact(scheme: str) -> None:
    """Balanced keys of quantized checkpoints (`QueryKeyValue.balance`) need it."""
    codes = SCHEMES[scheme](6, 512)
    factors = torch.tensor([1.0, 2.0, 0.25, 1.0, 64.0, 0.5])
    scaled = codes.times(factors)
    exact = codes.values(torch.float32) * factors[:, None]
    torch.testing.assert_close(scaled.values(torch.float32), exact, atol=0, rtol=0)
    assert packable(scaled) is not None
