"""Weights of 8 and 4 bits: C++ against the torch twin, mostly to the last bit, and the error of rounding."""

from __future__ import annotations

import ctypes

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fovea.kernels.activation import finish
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.native.products import ACTIVATIONS, QuantizedWeight, weight_rows
from fovea.kernels.quantize import (
    FORMATS,
    INT4,
    INT8,
    Format,
    product,
    quantize,
    quantize_rows,
    quantized_product,
)
from fovea.kernels.torch_kernels import TorchKernels
from tests.support.thorough import examples

pytestmark = pytest.mark.kernels

BF16 = torch.bfloat16
EVERY_FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


@pytest.fixture(scope="module")
def native(lib: ctypes.CDLL) -> NativeKernels:
    return NativeKernels(lib)


def weights(n: int, k: int, scale: float = 0.3) -> Tensor:
    return (torch.randn(n, k) * scale).to(BF16)


def odd_weight(kind: str, n: int, k: int) -> Tensor:
    weight = weights(n, k)
    if kind == "zeros":
        weight[::2] = 0.0
        weight[1:, ::3] = -0.0
    elif kind == "one value":
        weight.fill_(-0.5)
    elif kind == "outliers":
        weight.view(-1)[::97] *= 1e4
    elif kind == "tiny":
        weight = (weight.float() * 1e-37).to(BF16)
    return weight


def share_of_unequal(ours: Tensor, theirs: Tensor) -> float:
    """Return the share of values that are not equal to the last bit."""
    return float((ours.view(torch.int16) != theirs.view(torch.int16)).float().mean())


@EVERY_FORMAT
@pytest.mark.parametrize("kind", ["normal", "zeros", "one value", "outliers", "tiny"])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (70, 2), (1, 65), (200, 896)])
def test_quantized_weights_equal_the_twins(
    lib: ctypes.CDLL, format: Format, kind: str, n: int, k: int
) -> None:
    torch.manual_seed(0)
    weight = odd_weight(kind, n, k)
    ours = weight_rows(lib, QuantizedWeight(lib, weight, None, format, gated=False), torch.arange(n))
    theirs = quantize(weight, format).values(BF16)
    if format is INT8 or kind != "outliers":
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0)
        return
    # Sums over such values depend on their order, so another of two close ranges may be taken.
    assert share_of_unequal(ours, theirs) < 0.05
    errors = [float((values.float() - weight.float()).norm()) for values in (ours, theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=0.01)


@EVERY_FORMAT
@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.sampled_from([1, 2, 5, 6, 7, 12, 13, 31, 200, 600]),
    n=st.sampled_from([1, 30, 64, 65, 130, 256]),
    k=st.sampled_from([1, 63, 64, 129, 1030, 4400]),
    bias=st.booleans(),
    seed=st.integers(0, 3),
)
def test_a_product_equals_the_twins(
    lib: ctypes.CDLL, format: Format, rows: int, n: int, k: int, bias: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, x = weights(n, k), torch.randn(rows, k).to(BF16)
    offset = torch.randn(n).to(BF16) if bias else None
    theirs = product(quantize_rows(x, format.group), quantize(weight, format))
    if offset is not None:
        theirs = theirs + offset.float()
    ours = NativeKernels(lib).quantized_product(weight, offset, None, False, format)(x, None)
    # The twin adds in double and rounds to float. In one of many millions of cases this rounds twice.
    torch.testing.assert_close(ours, theirs.to(BF16), atol=0, rtol=2**-7)
    assert share_of_unequal(ours, theirs.to(BF16)) < 1e-4


@EVERY_FORMAT
@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([1, 6, 13, 40]),
    n=st.sampled_from([2, 66, 130]),
    act=st.sampled_from([*sorted(ACTIVATIONS, key=str), ("relu", False), ("relu", True)]),
    extras=st.tuples(st.booleans(), st.booleans()),
)
def test_bias_activation_gate_and_residual_are_applied_after_the_product(
    lib: ctypes.CDLL,
    format: Format,
    rows: int,
    n: int,
    act: tuple[str | None, bool],
    extras: tuple[bool, bool],
) -> None:
    torch.manual_seed(rows + n)
    activation, gated = act
    weight, x = weights(n, 200), torch.randn(rows, 200).to(BF16)
    bias = torch.randn(n).to(BF16) if extras[0] else None
    residual = torch.randn(rows, n // 2 if gated else n).to(BF16) if extras[1] else None
    wide = product(quantize_rows(x, format.group), quantize(weight, format))
    wide = wide if bias is None else wide + bias.float()
    theirs = finish(wide, activation, gated, None if residual is None else residual.float())
    ours = NativeKernels(lib).quantized_product(weight, bias, activation, gated, format)(x, residual)
    torch.testing.assert_close(ours.float(), theirs, atol=0.02 + 0.01 * float(theirs.abs().max()), rtol=0.01)


@EVERY_FORMAT
def test_a_row_does_not_depend_on_the_other_rows(native: NativeKernels, format: Format) -> None:
    """Results are equal bit for bit, so that a request's answer does not change with the load.

    700 rows are divided among threads.
    """
    torch.manual_seed(0)
    x = torch.randn(700, 2300).to(BF16)
    apply = native.quantized_product(weights(192, 2300), None, "silu", True, format)
    together = apply(x, None)
    for count in (*range(1, 14), 100, 300):
        assert share_of_unequal(apply(x[:count], None), together[:count]) == 0
    assert share_of_unequal(apply(x[123:124], None), together[123:124]) == 0


@EVERY_FORMAT
def test_a_large_value_costs_only_its_group(native: NativeKernels, format: Format) -> None:
    """Decoders have a few huge activations. With one scale per row they would round all others to zero."""
    torch.manual_seed(0)
    weight, x = weights(64, 1024, 0.02), torch.randn(4, 1024).to(BF16)
    x[:, 3] = 0.0
    apply = native.quantized_product(weight, None, None, False, format)
    before = apply(x, None).float()
    x[:, 3] = 3000.0
    after = apply(x, None).float() - 3000.0 * apply.rows(torch.arange(64)).float()[:, 3]
    share = format.group / 1024
    assert float((after - before).norm()) <= 2 * share**0.5 * float(before.norm())


@EVERY_FORMAT
def test_nan_and_infinity_stay_visible(native: NativeKernels, format: Format) -> None:
    x, weight = torch.randn(3, 300).to(BF16), weights(70, 300)
    x[1, 200] = float("nan")
    x[2, 7] = float("inf")
    out = native.quantized_product(weight, None, None, False, format)(x, None)
    assert bool(out[0].isfinite().all())
    assert not bool(out[1:].isfinite().any())
    weight[5, 299] = float("nan")
    out = native.quantized_product(weight, None, None, False, format)(x, None)
    assert bool(out[:, 5].isnan().all())
    assert bool(out[0, :5].isfinite().all())


def test_rounding_error_of_normally_distributed_weights(lib: ctypes.CDLL) -> None:
    """int4's ranges reduce the error of fifteen steps around zero by a fifth."""
    torch.manual_seed(0)
    weight = weights(256, 1024)

    def error(values: Tensor) -> float:
        return float((values.float() - weight.float()).norm() / weight.float().norm())

    errors = {f.name: error(quantize(weight, f).values()) for f in FORMATS.values()}
    groups = weight.float().view(256, -1, INT4.group)
    step = groups.abs().amax(-1, keepdim=True) / 7
    even = error(((groups / step).round() * step).view(256, -1))
    assert errors["int8"] < 0.007
    assert errors["int4"] < 0.071
    assert errors["int4"] < 0.8 * even


@EVERY_FORMAT
def test_bytes_of_a_weight(lib: ctypes.CDLL, format: Format) -> None:
    packed = QuantizedWeight(lib, weights(640, 1024), None, format, gated=False)
    scales = {"int8": 16 / 128, "int4": 32 / 32}
    assert packed.nbytes == 640 * 1024 * (format.bits + scales[format.name]) / 8
    assert quantized_product(weights(640, 1024), None, None, False, format).nbytes == packed.nbytes


@EVERY_FORMAT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_torch_multiplies_by_the_dequantized_weight(
    format: Format, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fovea.kernels.quantize.QUANTIZE_WEIGHTS", 1000)
    monkeypatch.setattr("fovea.kernels.codes.MULTIPLY_VALUES", 1000)
    torch.manual_seed(0)
    weight, bias = torch.randn(30, 70).to(dtype), torch.randn(30).to(dtype)
    x, residual = torch.randn(2, 3, 70).to(dtype), torch.randn(2, 3, 15).to(dtype)
    plain = quantize(weight, format).values()
    theirs = finish(
        torch.nn.functional.linear(x.float(), plain, bias.float()), "silu", True, residual.float()
    )
    apply = TorchKernels().quantized_product(weight, bias, "silu", True, format)
    ours = apply(x, residual)
    assert ours.dtype is dtype
    tolerance = 1e-4 if dtype is torch.float32 else 0.3
    torch.testing.assert_close(ours.float(), theirs, atol=tolerance, rtol=0.02)
    ids = torch.tensor([[3, 0], [29, 3]])
    torch.testing.assert_close(apply.rows(ids), plain[ids], atol=0, rtol=0)


def test_torch_computes_types_that_the_kernels_lack(native: NativeKernels) -> None:
    apply = native.quantized_product(torch.randn(8, 16), None, None, False, INT8)
    assert apply(torch.randn(2, 16), None).dtype is torch.float32
