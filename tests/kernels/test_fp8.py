"""8-bit floats: arithmetic of the twin, arguments of the GPU's product, and devices that are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fovea.core.errors import ConfigError
from fovea.engine.config import EngineConfig
from fovea.engine.load import load_model
from fovea.kernels.choose import described
from fovea.kernels.float8 import (
    FLOAT8,
    FLOAT8_MAX,
    FP8,
    Fp8Product,
    multiply,
    multiply_on_cuda,
    round_rows,
)
from fovea.kernels.torch_kernels import PLAIN

pytestmark = pytest.mark.kernels

BF16 = torch.bfloat16


def test_a_row_is_rounded_to_3_bits_of_fraction_whatever_its_size() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 256) * torch.tensor([1e-6, 1.0, 1e3, 1e9, 0.0])[:, None]
    values, scale = round_rows(x)
    assert (values.dtype, scale.shape) == (FLOAT8, (5, 1))
    assert float(values[:4].float().abs().amax(1).min()) == FLOAT8_MAX
    back = values.float() * scale
    # Half a step of 3 bits, and below the smallest normal number (2**-6) half of a fixed step.
    assert bool(((back - x).abs() <= x.abs() / 16 + scale * 2**-10).all())
    assert not back[4].any()


@pytest.mark.parametrize("shape", [(48, 64), (21, 35)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_product_is_near_the_plain_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """(21, 35) has sides that the GPU's product does not accept, so the weight is padded."""
    torch.manual_seed(0)
    n, k = shape
    weight, x = (torch.randn(n, k) * 0.05).to(dtype), torch.randn(2, 3, k).to(dtype)
    bias, residual = torch.randn(n).to(dtype), torch.randn(2, 3, n).to(dtype)
    product = PLAIN.quantized_product(weight, bias, None, False, FP8)
    assert isinstance(product, Fp8Product)
    ours = product(x, residual)
    plain = torch.nn.functional.linear(x, weight)
    error = (
        ours - residual - bias - plain
    ).float().square().mean().sqrt() / plain.float().square().mean().sqrt()
    assert (ours.shape, ours.dtype) == ((2, 3, n), dtype)
    assert 0.001 < float(error) < 0.06
    rows = product.rows(torch.tensor([[3, 0]]))
    assert rows.shape == (1, 2, k)
    torch.testing.assert_close(rows[0], weight[[3, 0]].float(), atol=0.02, rtol=0.07)


def test_the_gate_is_applied_after_the_product() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(32, 16) * 0.1, torch.randn(4, 16)
    plain = Fp8Product(weight, None, None, False)(x, None)
    gated = Fp8Product(weight, None, "silu", True)(x, None)
    torch.testing.assert_close(gated, torch.nn.functional.silu(plain[:, :16]) * plain[:, 16:])


def test_a_weight_takes_half_the_memory_of_bf16() -> None:
    assert Fp8Product(torch.zeros(64, 512, dtype=BF16), None, None, False).nbytes == 64 * (512 + 4)


@pytest.mark.parametrize("shape", [(48, 64), (21, 35)], ids=str)
def test_the_gpus_product_gets_valid_arguments(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layouts and sizes are those that torch._scaled_mm documents for one scale per row."""
    n, k = shape
    calls: list[SimpleNamespace] = []

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, **rest: object) -> torch.Tensor:
        calls.append(SimpleNamespace(a=a, b=b, **rest))
        return torch.zeros(a.shape[0], b.shape[1], dtype=BF16)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    product = Fp8Product(torch.ones(n, k, dtype=BF16), None, None, False)
    monkeypatch.setattr(product, "_multiply", multiply_on_cuda)
    assert product(torch.ones(3, k, dtype=BF16), None).shape == (3, n)
    (call,) = calls
    assert call.a.dtype is call.b.dtype is FLOAT8
    assert call.a.is_contiguous()
    assert call.b.T.is_contiguous()
    assert all(side % 16 == 0 for side in call.b.shape)
    assert (call.scale_a.shape, call.scale_b.shape) == ((3, 1), (1, call.b.shape[1]))
    assert call.scale_a.dtype is call.scale_b.dtype is torch.float32
    assert call.out_dtype is BF16


def test_torchs_product_equals_the_twin() -> None:
    """This runs on the CPU, where torch has the same operator."""
    torch.manual_seed(0)
    x, weight = round_rows(torch.randn(5, 64)), round_rows(torch.randn(32, 64))
    theirs = multiply_on_cuda(*x, *weight, BF16)
    torch.testing.assert_close(multiply(*x, *weight, BF16), theirs, atol=0.02, rtol=0.02)


def test_other_devices_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError,
        match="fp8 needs compute capability 9.0; the device cpu is a CPU; accepted here: none, int8, int4",
    ):
        load_model("fovea-tiny", EngineConfig.of(device="cpu", quantization="fp8"))
    cuda, config = torch.device("cuda"), EngineConfig.of(quantization="fp8")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ConfigError, match="needs compute capability 9.0; A GPU has 8.9; accepted here: none"):
        config.check_on(described("auto", cuda, BF16), "bfloat16")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    config.check_on(described("auto", cuda, BF16), "bfloat16")
    with pytest.raises(ConfigError, match="fp8 needs bfloat16; the model runs in float32"):
        config.check_on(described("auto", cuda, torch.float32), "float32")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(ConfigError, match="A GPU is a GPU of AMD; accepted here: none"):
        config.check_on(described("auto", cuda, BF16), "bfloat16")
