"""Products with packed weights against plain torch, in Triton's interpreter. tests/gpu has those on a GPU.

They are not tested in bfloat16, because the interpreter multiplies the bits of such numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu runs the kernels on it", allow_module_level=True)

from triton.runtime import interpreter

from fovea.kernels import float8
from fovea.kernels.activation import finish
from fovea.kernels.codes import CodedProduct, Codes, Format
from fovea.kernels.float8 import FLOAT8, FP8, Fp8Product
from fovea.kernels.quantize import INT4, INT8
from fovea.kernels.torch_kernels import PLAIN
from fovea.kernels.triton import products, quantized
from fovea.kernels.triton.kernels import TritonKernels
from fovea.kernels.triton.quantized import (
    TritonFp8Product,
    TritonGroupedProduct,
    TritonQuantizedProduct,
)
from tests.support.codes import SCHEMES, in_groups
from tests.support.host_reads import no_host_reads
from tests.support.thorough import others_slow

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
KERNELS = TritonKernels(CPU)
LEVELS = pytest.mark.parametrize("format", [INT8, INT4], ids=lambda format: format.name)
CLOSE = {torch.float32: 2e-6, torch.float16: 1.5e-3}
ODD, EVEN = (70, 150), (136, 256)
"""Shapes of weights: with sides that no tile divides, and with one that whole groups fill."""


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours.double() - theirs.double()).norm() / theirs.double().norm())


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return (torch.randn(*shape, generator=draw).to(dtype) for shape in shapes)


def rounded(weight: Tensor, format: Format | None) -> Tensor:
    """The numbers that a weight in a format stands for, in float32."""
    if format is None:
        return weight.float()
    return PLAIN.quantized_product(weight, None, None, False, format).rows(torch.arange(len(weight)))


@LEVELS
@pytest.mark.parametrize("shape", [ODD, EVEN], ids=str)
@pytest.mark.parametrize(
    ("rows", "dtype"),
    [(1, torch.float32), (5, torch.float16), (20, torch.float32), (70, torch.float16), (131, torch.float32)],
    ids=str,
)
def test_products_equal_those_of_the_rounded_weights(
    format: Format, shape: tuple[int, int], rows: int, dtype: torch.dtype
) -> None:
    """The last number of rows is one that torch multiplies, after a launch that unpacks the weight."""
    (n, k), dtype_error = shape, CLOSE[dtype]
    weight, x, bias, residual = drawn((n, k), (rows, k), (n,), (rows, n), dtype=dtype)
    product = KERNELS.quantized_product(weight, bias, None, False, format)
    assert isinstance(product, TritonQuantizedProduct)
    theirs = x.float() @ rounded(weight, format).T + bias.float()
    ours = product(x, None)
    assert ours.dtype is dtype
    assert error(ours, theirs) < dtype_error
    assert error(product(x, residual), theirs + residual.float()) < dtype_error


@LEVELS
@pytest.mark.parametrize("activation", [("silu", True), ("gelu_pytorch_tanh", False), ("gelu", True)])
def test_activations_gates_and_residuals_follow(format: Format, activation: tuple[str, bool]) -> None:
    name, gated = activation
    width = ODD[0] // 2 if gated else ODD[0]
    weight, x, bias, residual = drawn(ODD, (2, 3, ODD[1]), ODD[:1], (2, 3, width))
    ours = KERNELS.quantized_product(weight, bias, name, gated, format)(x, residual)
    plain = x @ rounded(weight, format).T + bias
    assert error(ours, finish(plain, name, gated, residual)) < 2e-6


@LEVELS
def test_large_weights_are_unpacked_in_parts(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "PLAIN_WEIGHTS", 3000)
    monkeypatch.setattr(quantized, "FUSED_ROWS", 2)
    weight, x, bias = drawn(ODD, (3, ODD[1]), ODD[:1])
    ours = KERNELS.quantized_product(weight, bias, None, False, format)(x, None)
    assert error(ours, x @ rounded(weight, format).T + bias) < 2e-6


@LEVELS
def test_the_table_is_read_by_row_and_takes_the_bits_of_its_format(format: Format) -> None:
    """int8 has 16 bits for 128 scales. int4 has 32 for scale and minimum of 32."""
    (weight,) = drawn(EVEN)
    ours = KERNELS.quantized_product(weight, None, None, False, format)
    theirs = PLAIN.quantized_product(weight, None, None, False, format)
    ids = torch.tensor([[3, 0, 69], [3, 1, 2]])
    assert torch.equal(ours.rows(ids), theirs.rows(ids))
    assert isinstance(ours, TritonQuantizedProduct)
    assert ours.nbytes * 8 == weight.numel() * {INT8: 8 + 16 / 128, INT4: 4 + 32 / 32}[format]


def codes_of(scheme: str, n: int, k: int) -> Codes:
    torch.manual_seed(0)
    return SCHEMES[scheme](n, k)


BITS = {
    "Q4_0": 4.5, "Q4_1": 5, "Q8_0": 8.5, "Q4_K": 6, "Q5_K": 10, "Q6_K": 10, "AWQ": 4.25,
    "GPTQ in groups of 64": 4.5, "one scale per output": 4.0625, "int8": 8.125,
}  # fmt: skip
"""Bits of a weight of 256 columns with its scales."""


@pytest.mark.parametrize("scheme", others_slow(list(BITS), ["Q6_K", "AWQ"]))
def test_codes_are_multiplied_without_rounding_them_again(scheme: str) -> None:
    """Q4_K and Q6_K have scales that only float32 holds."""
    for n, k in (ODD, (40, 256)):
        codes = codes_of(scheme, n, k)
        values, (bias, x, residual) = codes.values(), drawn((n,), (70, k), (70, n))
        product = KERNELS.coded_product([codes], bias, None, False, torch.float32)
        assert isinstance(product, TritonQuantizedProduct)
        assert torch.equal(product.rows(torch.arange(n)), values)
        for rows in (3, 70):
            theirs = x[:rows] @ values.T + bias + residual[:rows]
            with no_host_reads():
                ours = product(x[:rows], residual[:rows])
            assert error(ours, theirs) < 2e-6
    assert product.nbytes * 8 == n * k * BITS[scheme]


@pytest.mark.parametrize("rows", [3, 131])
def test_weights_of_several_schemes_are_joined(rows: int) -> None:
    """Two neighbours of one scheme are one weight. A gate needs all outputs."""
    parts = [codes_of(name, n, 256) for name, n in (("AWQ", 40), ("AWQ", 24), ("Q4_1", 48), ("int8", 16))]
    plain, (bias, x, residual) = (
        torch.cat([part.values() for part in parts]),
        drawn((128,), (rows, 256), (rows, 64)),
    )
    product = KERNELS.coded_product(parts, bias, "silu", True, torch.float32)
    assert isinstance(product, TritonQuantizedProduct)
    assert [weight.n for weight in product.weights] == [64, 48, 16]
    theirs = finish(x @ plain.T + bias, "silu", True, residual)
    with no_host_reads():
        ours = product(x, residual)
    assert error(ours, theirs) < 2e-6
    ids = torch.tensor([[127, 0], [63, 64]])
    assert torch.equal(product.rows(ids), plain[ids])


def test_codes_that_no_layout_holds_are_left_to_the_caller() -> None:
    odd = in_groups(4, 24, "8")(8, 48)
    both = replace(in_groups(4, 32, "minimum")(8, 64), zero=3)
    for codes in (odd, both):
        assert KERNELS.coded_product([codes], None, None, False, torch.float32) is None
    wide = in_groups(4, 48, "zeros")(8, 96)
    assert KERNELS.coded_product([wide], None, None, False, torch.float32) is not None


def test_codes_whose_trial_fails_are_multiplied_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    """The interpreter multiplies bfloat16 wrongly, as a broken compiler could."""
    product = TritonKernels(CPU).coded_product([codes_of("AWQ", 8, 256)], None, None, False, torch.bfloat16)
    assert isinstance(product, CodedProduct)
    assert "products with codes of 4 bits in groups of 128 and rows of torch.bfloat16: torch's" in caplog.text


def test_splits_of_k_fill_the_gpu_and_stay_few_for_many_rows() -> None:
    """Tiles of 64 outputs, on 132 processors: o_proj, down_proj and gate_up of a 7 B model."""
    found = [products.splits(tiles, 16, 56, 132) for tiles in (56, 56, 592)]
    assert found == [8, 8, 1]
    assert products.splits(56, 64, 56, 132) == 2
    assert products.splits(1, 16, 3, 132) == 2, "no more than there are steps, and a power of two"


@pytest.mark.parametrize("format", [None, INT8, INT4, FP8], ids=lambda f: "plain" if f is None else f.name)
@pytest.mark.parametrize(
    "counts",
    others_slow(
        [[0, 1, 0, 0, 2], [3, 0, 40, 0, 0], [0, 0, 0, 0, 0], [90, 1, 0, 130, 70]],
        [[0, 1, 0, 0, 2], [0, 0, 0, 0, 0]],
    ),
    ids=str,
)
def test_experts_are_multiplied_together(format: Format | None, counts: list[int]) -> None:
    """Some experts have no rows, the first or the last among them; some have several tiles of rows."""
    rows, (n, k) = sum(counts), ODD
    weights, x = drawn((5, n, k), (rows, k))
    plain = torch.stack([rounded(weight, format) for weight in weights])
    product = KERNELS.grouped_product(weights, "silu", True, format)
    assert isinstance(product, TritonGroupedProduct)
    numbers = torch.tensor(counts, dtype=torch.int32)
    with no_host_reads():
        ours = product(x, numbers)
    parts = [part @ weight.T for part, weight in zip(x.split(counts), plain, strict=True)]
    theirs = finish(torch.cat(parts), "silu", True, None)
    assert ours.shape == theirs.shape
    assert not rows or error(ours, theirs) < 2e-6


@pytest.mark.parametrize("format", [None, INT8, INT4, FP8], ids=lambda f: "plain" if f is None else f.name)
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", None])
def test_few_rows_are_multiplied_by_their_experts_without_being_sorted(
    format: Format | None, activation: str | None
) -> None:
    """Each row with two experts, once the same one twice. A row's result does not depend on the others."""
    n, k = ODD
    weights, x = drawn((5, n, k), (4, k))
    plain = torch.stack([rounded(weight, format) for weight in weights])
    product = KERNELS.grouped_product(weights, activation, activation is not None, format)
    assert product is not None
    chosen = torch.tensor([[4, 0], [1, 1], [0, 3], [4, 2]])
    with no_host_reads():
        ours = product.of_rows(x, chosen)
    assert ours is not None
    theirs = torch.einsum("tk,tpnk->tpn", x, plain[chosen]).flatten(0, 1)
    theirs = finish(theirs, activation, activation is not None, None)
    assert ours.shape == theirs.shape
    assert error(ours, theirs) < 2e-6
    alone = product.of_rows(x[2:3], chosen[2:3])
    assert alone is not None
    assert torch.equal(alone, ours[4:6])
    assert product.of_rows(x.repeat(20, 1), chosen.repeat(20, 1)) is None, "so many rows are sorted"


def test_a_type_for_which_the_trial_fails_is_multiplied_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    """The interpreter multiplies bfloat16 wrongly, as a broken compiler could."""
    kernels, weight = TritonKernels(CPU), torch.randn(8, 64)
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert isinstance(
                kernels.quantized_product(weight.bfloat16(), None, None, False, INT4), CodedProduct
            )
            assert isinstance(
                kernels.quantized_product(weight, None, None, False, INT4), TritonQuantizedProduct
            )
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert messages[0].startswith(
        "products with int4 weights and rows of torch.bfloat16: torch's, which are slower; Triton's differ"
    )
    assert messages[1] == (
        "products with int4 weights and rows of torch.float32: Triton's, which read the weights as they are "
        "stored"
    )


def test_an_error_of_the_compiler_is_quoted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> float:
        raise RuntimeError("no such instruction\nin line 7")

    monkeypatch.setattr(quantized, "trial_error", fail)
    assert TritonKernels(CPU).grouped_product(torch.randn(2, 8, 64), None, False, INT8) is None
    assert "experts with int8 weights" in caplog.text
    assert "Triton's failed: RuntimeError: no such instruction" in caplog.text


def test_a_trial_whose_result_is_not_a_number_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "finish", lambda y, *_: y * float("nan") if len(y) == 65 else y)
    assert TritonKernels(CPU).grouped_product(torch.randn(2, 8, 64), None, False, INT8) is None


@pytest.mark.parametrize("width", [35, 64, 3000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rows_are_rounded_to_8_bit_floats_as_by_the_twin(width: int, dtype: torch.dtype) -> None:
    (x,) = drawn((4, width), dtype=dtype)
    x[1], x[2] = x[1] * 1e4, 0
    values, scale = products.round_input(x)
    theirs, their_scale = float8.round_padded(x)
    assert (values.shape, values.dtype, values.is_contiguous()) == (theirs.shape, FLOAT8, True)
    torch.testing.assert_close(scale, their_scale)
    assert not values[2].float().any()
    # The interpreter loses the carry where a number is rounded up to a power of two.
    same = (values.float() == theirs.float()).float().mean()
    assert float(same) > 0.95
    assert float(values[1].float().abs().max()) == float8.FLOAT8_MAX


class Launches(TorchDispatchMode):
    """Counts operations of torch that compute, and launches of Triton's kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        monkeypatch.setattr(
            interpreter.GridExecutor,
            "__call__",
            lambda executor, *_args, **_kwargs: self.names.append(executor.fn.__name__),
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        views = func.is_view or "empty" in func.name() or "_unsafe_view" in func.name()
        if not views:
            self.names.append(func.name())
        return result


def test_launches_of_a_product_of_8_bit_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows were rounded by 8 operations, padded by one, and one more added the bias.

    Now one launch rounds them, and another adds the bias. Few rows are not rounded.
    """
    monkeypatch.setattr(quantized, "trial_error", lambda *_: 0.0)
    weight, bias, x = drawn((96, 64), (96,), (65, 64), dtype=torch.bfloat16)
    plain, ours = (
        each.quantized_product(weight, bias, "silu", True, FP8) for each in (PLAIN, TritonKernels(CPU))
    )
    assert isinstance(plain, Fp8Product)
    assert isinstance(ours, TritonFp8Product)
    for product in (plain, ours.rounding):
        monkeypatch.setattr(product, "_multiply", float8.multiply_on_cuda)
    found = []
    for call in (lambda: plain(x, None), lambda: ours(x, None), lambda: ours(x[:3], None)):
        with Launches(monkeypatch) as launches:
            call()
        found.append(launches.names)
    assert len(found[0]) == 13, found[0]
    assert found[1] == ["_round_rows", "aten::_scaled_mm", "aten::add.Tensor", "_gate"]
    assert found[2] == ["_multiply", "_gate"]


@pytest.mark.parametrize("shape", [ODD, EVEN], ids=str)
@pytest.mark.parametrize(("name", "gated"), [(None, False), ("silu", True)])
def test_few_rows_are_not_rounded_to_8_bit_floats(
    shape: tuple[int, int], name: str | None, gated: bool
) -> None:
    """Rows whose size is no multiple of 16 are rounded, because the weight is padded.

    The interpreter rounds them with an error that is several times too large, see above.
    """
    (n, k), width = shape, shape[0] // 2 if gated else shape[0]
    weight, bias, x, residual = drawn((n, k), (n,), (2, 3, k), (2, 3, width))
    product = KERNELS.quantized_product(weight, bias, name, gated, FP8)
    theirs = Fp8Product(weight, bias, name, gated)
    exact = finish(x @ theirs.rows(torch.arange(n)).T + bias, name, gated, residual)
    assert error(product(x, residual), exact) < (2e-6 if shape == EVEN else 0.15)
    assert isinstance(product, TritonFp8Product)
    assert product.nbytes == theirs.nbytes
    assert torch.equal(product.rows(torch.tensor([[3, 0]])), theirs.rows(torch.tensor([[3, 0]])))


@LEVELS
@pytest.mark.parametrize(("rows", "count"), [(1, 2), (32, 2), (129, 2)])
def test_launches_of_a_product_of_levels(
    format: Format, rows: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one takes k in splits, the second one adds them, the bias and the residual."""
    (n, k) = EVEN
    weight, bias, x, residual = drawn((n, k), (n,), (rows, k), (rows, n))
    product = KERNELS.quantized_product(weight, bias, None, False, format)
    with Launches(monkeypatch) as launches:
        product(x, residual)
    assert len(launches.names) == count + (rows > quantized.FUSED_ROWS), launches.names
