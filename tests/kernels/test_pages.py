"""Pages of keys and values: their layout, and rounding to 8 bits, which depends on one token alone."""

from __future__ import annotations

import ctypes

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fovea.core.errors import ConfigError
from fovea.kernels.base import Kernels
from fovea.kernels.native.border import pages_struct
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.pages import (
    FORMATS,
    FP8,
    INT8,
    KVPool,
    QuantizedKV,
    gather,
    kv_format,
    round_heads,
    store,
    token_bytes,
)
from fovea.kernels.torch_kernels import PLAIN
from tests.support.pages import numbers, stored
from tests.support.thorough import examples

pytestmark = pytest.mark.kernels

BF16 = torch.bfloat16
BLOCKS, SIZE, HEADS, DIM = 5, 4, 2, 32


def pool(kind: str, dtype: torch.dtype = BF16, layers: int = 3) -> KVPool:
    return KVPool((layers, BLOCKS, SIZE), HEADS, DIM, dtype, FORMATS.get(kind))


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
def test_pages_have_the_bytes_that_the_engine_counts_and_hold_what_is_stored(kind: str) -> None:
    kept = pool(kind)
    assert kept.block_bytes == 3 * SIZE * token_bytes(HEADS, DIM, 2, FORMATS.get(kind))
    assert kept.pages.nbytes == BLOCKS * kept.block_bytes
    rows, slots = torch.randn(6, 2, HEADS, DIM).to(BF16), torch.tensor([19, 0, 7, 4, 12, 1])
    store(kept.kv[1], rows, slots)
    found = numbers(kept.kv[1]).flatten(0, 1)
    tolerance = {"auto": 0.0, "int8": 1 / 254, "fp8": 1 / 16}[kind]
    error = (found[slots] - rows.float()).abs().amax(-1)
    assert bool((error <= (tolerance + 1e-3 * (kind != "auto")) * rows.float().abs().amax(-1)).all())
    others = [slot for slot in range(BLOCKS * SIZE) if slot not in slots.tolist()]
    assert not found[others].any()
    assert not numbers(kept.kv[0]).any()
    assert not numbers(kept.kv[2]).any()


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_eight_bits_take_at_most_53_percent(dim: int) -> None:
    for format in (INT8, FP8):
        assert token_bytes(3, dim, 2, format) <= 0.53 * token_bytes(3, dim, 2, None)


@pytest.mark.parametrize("kind", ["auto", "int8", "fp8"])
def test_parts_of_other_pages_are_those_of_the_pool(kind: str) -> None:
    """Host memory holds pages as bytes, and the first tokens of a page are copied apart."""
    kept = pool(kind)
    store(kept.kv[0], torch.randn(8, 2, HEADS, DIM).to(BF16), torch.arange(8))
    copies = kept.pages[:, 1].clone()
    for part, own in zip(kept.parts(copies), kept.parts(kept.pages), strict=True):
        assert part.shape[1] == SIZE
        assert torch.equal(part.float(), own[:, 1].float())


@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(["int8", "fp8"]),
    scale=st.floats(-30, 30),
    company=st.integers(1, 9),
    seed=st.integers(0, 1 << 16),
)
def test_a_token_has_the_same_bits_in_any_company(kind: str, scale: float, company: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    rows = torch.randn(company + 1, 2, HEADS, DIM, generator=draw) * torch.exp2(
        torch.rand(company + 1, 1, 1, 1, generator=draw) * scale
    )
    alone, together = pool(kind, torch.float32), pool(kind, torch.float32)
    slots = torch.randperm(BLOCKS * SIZE, generator=draw)[: company + 1]
    store(alone.kv[0], rows[:1], slots[:1])
    store(together.kv[0], rows, slots)
    block, offset = slots[0] // SIZE, slots[0] % SIZE
    for one, other in zip(alone.parts(alone.pages), together.parts(together.pages), strict=True):
        assert torch.equal(one[0, block, offset].float(), other[0, block, offset].float())
    error = (numbers(together.kv[0]).flatten(0, 1)[slots] - rows).abs().amax(-1)
    assert bool((error <= {"int8": 0.0045, "fp8": 0.065}[kind] * rows.abs().amax(-1)).all())


@pytest.mark.parametrize("dim", [32, 40, 80, 128])
@pytest.mark.parametrize("kind", ["normal", "tiny", "zero", "large"])
def test_the_kernels_round_as_their_twin(lib: ctypes.CDLL, dim: int, kind: str) -> None:
    """Levels and scales are equal to the last bit."""
    torch.manual_seed(dim)
    rows, heads = 7, 3
    qkv = torch.randn(rows, heads + 2 * HEADS, dim)
    qkv *= {"normal": 1.0, "tiny": 1e-36, "zero": 0.0, "large": 1e30}[kind]
    qkv[2, :, 5] *= 300
    qkv = qkv.to(BF16)
    turn = torch.ones(rows, 1, dim), torch.zeros(rows, 1, dim)
    slots = torch.randperm(BLOCKS * SIZE)[:rows]
    found = []
    sets: tuple[Kernels, ...] = NativeKernels(lib), PLAIN
    for kernels in sets:
        kept = KVPool((1, BLOCKS, SIZE), HEADS, dim, BF16, INT8)
        kernels.rotate_store(qkv.clone(), heads, *turn, None, 1e-6, kept.kv[0], slots)
        found.append(kept.pages)
    assert torch.equal(*found)
    assert bool(found[0].any()) == (kind != "zero")


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_reaches_all_who_read_it(lib: ctypes.CDLL, broken: float) -> None:
    qkv = torch.randn(2, 4, 32).to(BF16)
    qkv[1, 3, 7] = broken
    turn = torch.ones(2, 1, 32), torch.zeros(2, 1, 32)
    sets: tuple[Kernels, ...] = NativeKernels(lib), PLAIN
    for kernels in sets:
        kept = KVPool((1, 1, 2), 1, 32, BF16, INT8)
        kernels.rotate_store(qkv.clone(), 2, *turn, None, 1e-6, kept.kv[0], torch.arange(2))
        found = gather(kept.kv[0], torch.tensor([0]), torch.float32)
        assert not found[0, 1, 1].isfinite().any()
        assert bool(found[0, 0].isfinite().all())


def test_pages_of_another_layout_are_refused_before_they_are_read(lib: ctypes.CDLL) -> None:
    good = stored(torch.randn(2, 4, 2, 1, 32).to(BF16), "int8")
    assert isinstance(good, QuantizedKV)
    assert pages_struct(good, 1, 32).page == 4 * 2 * 34
    moved = QuantizedKV(good.levels, good.scales.clone())
    other: list[Tensor] = [good.levels.clone(), good.levels.view(torch.uint8)]
    for wrong in (moved, *(QuantizedKV(levels, good.scales) for levels in other)):
        with pytest.raises(ValueError, match="each with its scales behind it"):
            pages_struct(wrong, 1, 32)
    with pytest.raises(ValueError, match="int8 pages"):
        pages_struct(good, 2, 16)


def test_a_format_that_kernels_lack_is_refused_by_name() -> None:
    assert kv_format("int8", "NativeKernels", (INT8,)) is INT8
    with pytest.raises(ConfigError, match=r"kv_dtype is 'fp8'.*NativeKernels.*accepted here: auto, int8"):
        kv_format("fp8", "NativeKernels", (INT8,))


def test_levels_are_exact_in_bfloat16() -> None:
    """So a product of queries with levels loses nothing by them."""
    for format in (INT8, FP8):
        codes = torch.arange(256, dtype=torch.uint8).view(format.dtype).float()
        codes = codes[codes.isfinite()]
        assert torch.equal(codes.to(BF16).float(), codes)
    levels, scales = round_heads(torch.tensor([[-8.0, 4.0, 0.0, 1.0]]), INT8)
    assert (levels.tolist(), float(scales)) == ([[-127, 64, 0, 16]], pytest.approx(8 / 127, rel=4e-3))
