"""Mixtures of experts in one call, of the C++ kernels and of torch, against a call for each expert."""

from __future__ import annotations

import ctypes
from functools import partial

import pytest
import torch

from fovea.engine.layers.config import Attention, DecoderConfig, Experts, LayerConfig, Rotary
from fovea.engine.layers.decoder import Decoder
from fovea.engine.layers.experts import ExpertBank, ExpertsBlock
from fovea.engine.layers.linear import Linear, use_kernels
from fovea.engine.layers.step import DecoderMemory, DecoderPlan
from fovea.kernels.activation import finish
from fovea.kernels.attention import AttentionPlan, Chunk, Decodes
from fovea.kernels.codes import Format
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.quantize import INT4, INT8
from fovea.kernels.torch_kernels import PLAIN, TorchKernels

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
    assert made.mixture is not None
    return made


def product(layer: Linear, weight: torch.Tensor, x: torch.Tensor, residual: None) -> torch.Tensor:
    return finish(torch.nn.functional.linear(x, weight), layer.activation, layer.gated, residual)


def one_by_one(made: ExpertsBlock, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """Compute the block with a call for each expert, and everything else in torch."""
    mixture, made.mixture = made.mixture, None
    out: torch.Tensor = made(x, residual)
    made.mixture = mixture
    return out


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_one_grouped_product_equals_a_product_per_expert(rows: int, dtype: torch.dtype) -> None:
    """torch's grouped_mm, which computes experts on a GPU. Some experts have no rows."""
    torch.manual_seed(rows)
    bank = ExpertBank(64, Experts(6, 2, 48, "silu")).to(dtype)
    for parameter in bank.parameters():
        parameter.data.normal_(std=0.1)
    x = torch.randn(rows, 64).to(dtype)
    weights, chosen, _ = PLAIN.choose_experts(torch.randn(rows, 6), 2, normalized=True)
    grouped = bank.mix(x, weights.to(dtype), chosen)
    for layer in (bank.gate_up, bank.down):
        layer.pack(TorchKernels())
        assert not layer.products
        layer.products = [partial(product, layer, weight) for weight in layer.weight.data]
    torch.testing.assert_close(grouped, bank.mix(x, weights.to(dtype), chosen))


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
    one, two = (block(native, hidden=64, config=Experts(8, active, 32, "silu")) for active in (1, 2))
    assert one.mixture is not None
    assert two.mixture is not None
    x = torch.randn(5, 64).to(BF16)

    def alone(expert: int) -> torch.Tensor:
        logits = torch.full((5, 8), -100.0)
        logits[:, expert] = 0.0
        assert one.mixture is not None
        return one.mixture(x, logits.to(BF16), None).float()

    logits = torch.tensor([0.0, 3.0, 3.0, 3.0, -1.0, float("-inf"), 1.0, 2.0]).repeat(5, 1).to(BF16)
    found = two.mixture(x, logits, None).float()
    torch.testing.assert_close(found, (alone(1) + alone(2)) / 2, atol=0.02, rtol=0.02)


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
        assert made.mixture is None
    assert made(torch.randn(2, 64), None).shape == (2, 64)


@FORMATS
def test_layers_with_experts_in_one_call_equal_those_one_by_one(
    native: NativeKernels, format: Format | None
) -> None:
    """A prompt, of which two rows are read, and then decodes of two sequences."""
    attention = Attention(heads=2, kv_heads=1, head_dim=32, scale=0.2, qk_norm=True)
    config = DecoderConfig(
        vocab_size=8,
        hidden=64,
        layers=(LayerConfig(attention, Experts(6, 2, 48, "silu")),) * 3,
        rotaries=(Rotary((1.0,) * 16),),
        eps=1e-6,
        tied=False,
        max_positions=64,
    )
    torch.manual_seed(0)
    decoder = Decoder(config).to(BF16)
    for module in decoder.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data.normal_(std=0.2)
        if isinstance(module, Linear):
            module.pack(native, format)
    use_kernels(decoder, native)
    decoder.use_stack(native)
    stack = decoder._stack
    assert stack is not None
    x, table = torch.randn(12, 64).to(BF16), torch.arange(4)
    prompt = AttentionPlan(torch.arange(10), (), (Chunk(0, 10, 0, table),))
    group = Decodes(0, table.expand(2, 4).contiguous(), torch.tensor([11, 12]), 12, None)
    decodes = AttentionPlan(torch.tensor([10, 11]), (group,), ())
    found = []
    for each in (stack, None):
        decoder._stack = each
        memory = DecoderMemory.allocate(config, (4,), 4, 0, BF16, torch.device("cpu"))
        read = torch.tensor([3, 9])
        first = decoder(x[:10], torch.arange(10), memory, DecoderPlan((prompt,)), read=read)
        second = decoder(x[10:], torch.tensor([10, 11]), memory, DecoderPlan((decodes,)))
        found.append(torch.cat((first, second)))
    assert torch.equal(found[0], found[1])
