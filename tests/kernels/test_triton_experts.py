"""The choice of experts, their sum and gates of rows against torch's, in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: tests/gpu runs the kernels on it", allow_module_level=True)

from fovea.engine.layers.config import Experts
from fovea.engine.layers.experts import DenseBesideExperts, ExpertsBlock
from fovea.engine.layers.linear import Linear, use_kernels
from fovea.kernels.torch_kernels import PLAIN
from fovea.kernels.triton import experts as triton_experts
from fovea.kernels.triton.kernels import TritonKernels
from tests.support.host_reads import no_host_reads
from tests.support.thorough import others_slow

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
KERNELS = TritonKernels(CPU)
CLOSE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 0.04}
TYPES = pytest.mark.parametrize("dtype", list(CLOSE), ids=str)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=CLOSE[theirs.dtype], rtol=CLOSE[theirs.dtype])


@TYPES
@pytest.mark.parametrize(("experts", "active"), [(6, 2), (60, 8), (512, 10), (128, 1)])
@pytest.mark.parametrize("kind", ["normalized", "scaled", "factors"])
def test_the_choice_of_experts(
    experts: int, active: int, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_experts, "DOT_TILE", 16)
    torch.manual_seed(experts)
    # Different numbers, also in 16 bits, because torch chooses any of those that are equal.
    logits = torch.stack([torch.randperm(experts) for _ in range(3)]).sub(experts // 2).div(32).to(dtype)
    opening = torch.randn(3, 40).to(dtype), torch.randn(1, 40).to(dtype)
    factors = torch.rand(experts).to(dtype) if kind == "factors" else None
    options = {"normalized": kind != "scaled", "scaling": 2.5, "factors": factors, "opening": opening}
    with no_host_reads():
        ours = KERNELS.choose_experts(logits, active, **options)
    weights, chosen, opened = PLAIN.choose_experts(logits, active, **options)
    assert torch.equal(ours[1], chosen)
    close(ours[0], weights)
    assert ours[2] is not None
    assert opened is not None
    close(ours[2], opened)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_equal_and_impossible_logits_choose_experts_that_exist() -> None:
    logits = torch.zeros(3, 6)
    logits[1] = float("nan")
    logits[2, 1:] = float("-inf")
    weights, chosen, opened = KERNELS.choose_experts(logits, 2, normalized=True)
    assert opened is None
    assert chosen[0].tolist() == [0, 1]
    assert chosen[2].tolist() == [0, 1]
    assert weights[[0, 2]].tolist() == [[0.5, 0.5], [1.0, 0.0]]
    assert chosen.min() >= 0
    assert chosen.max() < 6


@TYPES
@pytest.mark.parametrize("parts", [(), ("shared",), ("shared", "opened"), ("shared", "opened", "residual")])
def test_the_sum_of_experts(parts: tuple[str, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    outputs, weights = torch.randn(3, 5, 72).to(dtype), torch.rand(3, 5).to(dtype)
    drawn = {"shared": torch.randn(3, 72), "opened": torch.rand(3, 1), "residual": torch.randn(3, 72)}
    given = {name: drawn[name].to(dtype) for name in parts}
    close(KERNELS.sum_experts(outputs, weights, **given), PLAIN.sum_experts(outputs, weights, **given))


@TYPES
def test_gates_of_rows(dtype: torch.dtype) -> None:
    x, gate = torch.randn(3, 40).to(dtype), torch.randn(3, 100).to(dtype)[:, 30:70] * 9
    close(KERNELS.open(x, gate), PLAIN.open(x, gate))


@pytest.mark.parametrize("rows", others_slow([1, 5, 90], [5]))
@pytest.mark.parametrize("kind", ["plain", "scaled", "shared", "gated", "dense"])
def test_blocks_of_experts(kind: str, rows: int) -> None:
    """Ten pairs of a row and an expert are not sorted, 180 are."""
    torch.manual_seed(0)
    config = {
        "plain": Experts(6, 2, 48, "silu"),
        "scaled": Experts(6, 2, 48, "silu", normalized=False, scaling=1.5),
        "shared": Experts(6, 2, 48, "silu", shared=32),
        "gated": Experts(6, 2, 48, "silu", shared=32, shared_gate=True),
        "dense": Experts(6, 2, 48, "gelu_pytorch_tanh", dense=32),
    }[kind]
    made = DenseBesideExperts(64, config, 1e-6) if kind == "dense" else ExpertsBlock(64, config)
    for parameter in made.parameters():
        parameter.data.normal_(std=0.1)
    x, residual = torch.randn(rows, 64), torch.randn(rows, 64)
    theirs = made(x, residual)
    use_kernels(made, KERNELS)
    for module in made.modules():
        if isinstance(module, Linear):
            module.pack(KERNELS)
    with no_host_reads():
        ours = made(x, residual)
    torch.testing.assert_close(ours, theirs, atol=2e-6, rtol=1e-5)
