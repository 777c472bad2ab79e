"""Mixtures of experts in one call of the C++ kernels, against the same block in torch."""

from __future__ import annotations

import ctypes

import pytest
import torch

from fovea.engine.layers.config import Experts
from fovea.engine.layers.experts import ExpertsBlock
from fovea.engine.layers.linear import Linear
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.quantize import INT4, INT8, Format
from fovea.kernels.torch.kernels import TorchKernels

pytestmark = pytest.mark.kernels

BF16 = torch.bfloat16
FORMATS = pytest.mark.parametrize("format", [None, INT8, INT4], ids=["bf16", "int8", "int4"])


@pytest.fixture(scope="module")
def native(lib: ctypes.CDLL) -> NativeKernels:
    return NativeKernels(lib)


def block(
    native: NativeKernels, *, hidden: int, config: Experts, format: Format | None = None, std: float = 0.1
) -> ExpertsBlock:
    """A packed block with random weights; its experts are one call."""
    torch.manual_seed(0)
    made = ExpertsBlock(hidden, config).to(BF16)
    for module in made.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data.normal_(std=std)
        if isinstance(module, Linear):
            module.pack(native, format)
    made.use_mixture(native)
    assert made._mixture is not None
    return made


def one_by_one(made: ExpertsBlock, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """The same block with a call for each expert, and everything else in torch."""
    mixture, made._mixture = made._mixture, None
    out: torch.Tensor = made(x, residual)
    made._mixture = mixture
    return out


@FORMATS
@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize(
    ("hidden", "config"),
    [
        (64, Experts(6, 2, 48, "silu")),
        (70, Experts(5, 5, 34, "silu")),
        (128, Experts(4, 1, 40, "gelu_pytorch_tanh", shared=24)),
    ],
    ids=["six", "odd widths, all chosen", "one chosen, shared"],
)
def test_experts_in_one_call_equal_those_one_by_one(
    native: NativeKernels, hidden: int, config: Experts, rows: int, format: Format | None
) -> None:
    made = block(native, hidden=hidden, config=config, format=format)
    x, residual = torch.randn(rows, hidden).to(BF16), torch.randn(rows, hidden).to(BF16)
    for beside in (None, residual):
        # Torch rounds every weighted output and the sum to bf16, C++ the sum alone.
        torch.testing.assert_close(made(x, beside), one_by_one(made, x, beside), atol=0.06, rtol=0.02)


@FORMATS
def test_a_row_has_the_same_bits_alone_and_beside_others(
    native: NativeKernels, format: Format | None
) -> None:
    made = block(native, hidden=128, config=Experts(9, 3, 72, "silu"), format=format)
    x, residual = torch.randn(50, 128).to(BF16), torch.randn(50, 128).to(BF16)
    together = made(x, residual)
    for row in range(len(x)):
        alone = made(x[row : row + 1], residual[row : row + 1])
        assert torch.equal(alone[0].view(torch.int16), together[row].view(torch.int16))


def test_the_number_of_threads_changes_no_bit(native: NativeKernels) -> None:
    made = block(native, hidden=256, config=Experts(16, 4, 96, "silu"))
    x = torch.randn(300, 256).to(BF16)
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(made(x, None))
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])


def test_the_highest_logits_choose_and_the_first_of_equal_ones(native: NativeKernels) -> None:
    """Each expert multiplies by a number of its own, so that the output tells which experts were chosen."""
    made = block(native, hidden=64, config=Experts(8, 2, 32, "silu"))
    x = torch.randn(5, 64).to(BF16)
    outputs = []
    for expert in range(8):
        logits = torch.full((5, 8), -100.0)
        logits[:, expert] = 0.0
        outputs.append(made._mixture(x, logits.to(BF16), 1, None))
    logits = torch.tensor([0.0, 3.0, 3.0, 3.0, -1.0, float("-inf"), 1.0, 2.0]).repeat(5, 1).to(BF16)
    both = (outputs[1].float() + outputs[2].float()) / 2
    torch.testing.assert_close(made._mixture(x, logits, 2, None).float(), both, atol=0.02, rtol=0.02)


def test_numbers_that_are_no_numbers_stay_in_their_row(native: NativeKernels) -> None:
    made = block(native, hidden=64, config=Experts(6, 2, 48, "silu"))
    x = torch.randn(4, 64).to(BF16)
    expected = made(x, None)
    x[2] = float("nan")
    found = made(x, None)
    assert found[2].isnan().all()
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])


def test_no_rows_are_no_work(native: NativeKernels) -> None:
    made = block(native, hidden=64, config=Experts(6, 2, 48, "silu"))
    assert made(torch.zeros(0, 64).to(BF16), None).shape == (0, 64)


def test_products_that_are_not_cpp_have_no_such_call(native: NativeKernels) -> None:
    made = ExpertsBlock(64, Experts(3, 1, 32, "silu"))
    kernels = TorchKernels(pack=True)
    for module in made.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data.normal_(std=0.1)
        if isinstance(module, Linear):
            module.pack(kernels)
    for each in (kernels, native):
        made.use_mixture(each)
        assert made._mixture is None
    assert made(torch.randn(2, 64), None).shape == (2, 64)
