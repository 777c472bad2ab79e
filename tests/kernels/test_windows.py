"""Attention with a sliding window, and among the tokens of an image, against a naive form of both."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from torch import Tensor

from fovea.core.sampling import SamplingParams
from fovea.engine.execute.attention_plan import GroupPlanner, by_length
from fovea.engine.kv.blocks import GONE
from fovea.engine.layers.config import KVGroup
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import ImageSpan, Sequence
from fovea.kernels.attention import Heads
from fovea.kernels.base import Kernels
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.torch_kernels import TorchKernels

pytestmark = pytest.mark.kernels

BLOCK, POOL = 4, 400


@pytest.fixture(scope="module")
def native(lib: ctypes.CDLL) -> NativeKernels:
    return NativeKernels(lib)


def sequences(lengths: list[int], window: int | None, starts: list[int]) -> list[Sequence]:
    """Sequences with random blocks. Blocks that are behind the window of their first token are gone."""
    order = torch.randperm(POOL, generator=torch.Generator().manual_seed(1)).tolist()
    found = []
    for number, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        seq = Sequence(f"s{number}", [0] * length, SamplingParams(), 1)
        count = -(-length // BLOCK)
        seq.blocks, order = order[:count], order[count:]
        if window is not None:
            gone = max(0, start - window + 1) // BLOCK
            seq.window_blocks = [GONE] * gone + seq.blocks[gone:]
        found.append(seq)
    return found


def naive(
    query: Tensor, kv: Tensor, work: list[Work], window: int | None, images: bool, heads: Heads
) -> Tensor:
    """Each query by itself: keys are gathered from the sequence's blocks, then chosen one by one."""
    rows, out = iter(query.double()), []
    for item in work:
        flat = kv[torch.tensor(item.seq.blocks)].flatten(0, 1).double()
        for place in range(item.start, item.stop):
            spans = [span for span in item.seq.spans if span.start <= place < span.end] if images else []
            seen = [
                key
                for key in range(item.stop)
                if (window is None or key > place - window)
                and (key <= place or any(span.start <= key < span.end for span in spans))
            ]
            keys, values = (flat[seen, side].repeat_interleave(heads.query // heads.kv, 1) for side in (0, 1))
            scores = torch.einsum("hd,khd->hk", next(rows), keys) * heads.dim**-0.5
            out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values))
    return torch.stack(out)


def check(
    kernels: Kernels, dtype: torch.dtype, heads: Heads, window: int | None, work: list[Work], images: bool
) -> None:
    group = KVGroup((0,), window, heads)
    work = by_length(work)
    plan = GroupPlanner(kernels, group, images, BLOCK, torch.device("cpu"), dtype).plan(work)
    random = torch.Generator().manual_seed(2)
    kv = torch.randn(POOL, BLOCK, 2, heads.kv, heads.dim, generator=random).to(dtype)
    query = torch.randn(len(plan.slots), heads.query, heads.dim, generator=random).to(dtype)
    got = kernels.attend(query, kv, plan, heads.dim**-0.5)
    expected = naive(query, kv, work, window, images, heads)
    tolerance = 0.03 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)


KINDS = [("torch", torch.float32), ("native", torch.bfloat16)]


@pytest.mark.parametrize("window", [None, 1, 8, 21, 100, 1000])
def test_tritons_decodes_begin_where_the_window_does(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes of several lengths, of which some are cut into pieces, beside a chunk of a prompt."""
    pytest.importorskip("triton", reason="triton is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("there is a GPU: tests/gpu runs these kernels on it")
    from fovea.kernels.triton import decode as triton_decode
    from fovea.kernels.triton.kernels import TritonKernels

    monkeypatch.setattr(triton_decode, "LEAST_TOKENS", 64)
    monkeypatch.setattr(triton_decode, "TOKENS_PER_QUERY", 1)
    starts, lengths = [7, 130, 199, 0, 44], [8, 131, 200, 1, 49]
    work = [
        Work(seq, start, seq.length - start)
        for seq, start in zip(sequences(lengths, window, starts), starts, strict=True)
    ]
    kernels = TritonKernels(torch.device("cpu"))
    assert kernels.attends_in_place(32, window=True)
    check(kernels, torch.float32, Heads(4, 2, 32), window, work, images=False)


@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=["torch", "native"])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 21, 1000])
def test_a_window_ends_where_it_should(
    native: NativeKernels, kind: str, dtype: torch.dtype, window: int | None
) -> None:
    """Decodes of several lengths, chunks from the start and from the middle, in one step."""
    starts, lengths = [0, 30, 7, 44, 45, 0], [25, 49, 8, 45, 46, 1]
    work = [
        Work(seq, start, seq.length - start)
        for seq, start in zip(sequences(lengths, window, starts), starts, strict=True)
    ]
    kernels = native if kind == "native" else TorchKernels()
    check(kernels, dtype, Heads(4, 2, 32), window, work, images=False)


@pytest.mark.parametrize(("kind", "dtype"), KINDS, ids=["torch", "native"])
@pytest.mark.parametrize("window", [None, 6, 40])
def test_the_tokens_of_an_image_see_all_of_it(
    native: NativeKernels, kind: str, dtype: torch.dtype, window: int | None
) -> None:
    """Images longer and shorter than the window, at the ends and in the middle of a chunk."""
    starts, lengths = [0, 12], [40, 41]
    work = []
    for seq, start in zip(sequences(lengths, window, starts), starts, strict=True):
        spans = [(start, 9), (start + 13, 3), (start + 20, 8)]
        seq.spans = tuple(
            ImageSpan(number, first, count, count, "key", (1, 2, 2))
            for number, (first, count) in enumerate(spans)
        )
        work.append(Work(seq, start, 28))
    kernels = native if kind == "native" else TorchKernels()
    check(kernels, dtype, Heads(4, 1, 64), window, work, images=True)


@pytest.mark.parametrize("dim", [256, 512])
@pytest.mark.parametrize("window", [None, 10])
def test_wide_heads_on_native_kernels(native: NativeKernels, dim: int, window: int | None) -> None:
    starts, lengths = [0, 30, 50], [70, 31, 51]
    work = [
        Work(seq, start, seq.length - start)
        for seq, start in zip(sequences(lengths, window, starts), starts, strict=True)
    ]
    check(native, torch.bfloat16, Heads(2, 1, dim), window, work, images=False)


@pytest.mark.parametrize("window", [5, 24, 70])
def test_a_row_has_the_same_bits_wherever_its_chunk_begins(native: NativeKernels, window: int) -> None:
    """Tables began where the window does, so the order of a sum depended on the first token of the chunk."""
    heads, length = Heads(4, 2, 32), 150
    (seq,) = sequences([length], window, [0])
    group = KVGroup((0,), window, heads)
    planner = GroupPlanner(native, group, False, BLOCK, torch.device("cpu"), torch.bfloat16)
    random = torch.Generator().manual_seed(3)
    kv = torch.randn(POOL, BLOCK, 2, heads.kv, heads.dim, generator=random).bfloat16()
    query = torch.randn(length, heads.query, heads.dim, generator=random).bfloat16()
    whole = native.attend(query, kv, planner.plan([Work(seq, 0, length)]), 1.0)
    for size in (7, 33):
        for start in range(0, length - 1, size):
            count = min(size, length - start)
            if count > 1:
                part = query[start : start + count].contiguous()
                plan = planner.plan([Work(seq, start, count)])
                assert torch.equal(native.attend(part, kv, plan, 1.0), whole[start : start + count])
