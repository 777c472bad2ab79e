"""Kernels, graphs, sampling and 8-bit floats on the GPU, against their naive twins. Run by `make gpu`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fovea import Engine
from fovea.core.sampling import SamplingParams
from fovea.engine.sample.sampler import Sampler
from fovea.engine.schedule.shares import find_shares, write_shares
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import StepResult
from fovea.kernels import reference
from fovea.kernels.activation import finish
from fovea.kernels.attention import AttentionPlan, Chunk, Decodes, Heads, Shares
from fovea.kernels.flash import attention as flash
from fovea.kernels.fp8 import HOPPER, Fp8Product, multiply, multiply_on_cuda, round_rows
from fovea.kernels.torch.kernels import PLAIN
from tests.support.checkpoints import write
from tests.support.engines import all_at_once, ask, picture

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
CUDA = torch.device("cuda")
BF16 = torch.bfloat16


def kernels() -> Any:
    pytest.importorskip("triton", reason="triton is not installed")
    from fovea.kernels.triton.kernels import TritonKernels

    return TritonKernels(CUDA)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [(28, 4), (32, 8), (16, 16), (14, 2)], ids=str)
def test_attention_over_pages(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Twelve contexts of different lengths, nine of which share a prefix, and a chunk of a prompt."""
    torch.manual_seed(0)
    query_heads, kv_heads = heads
    size, dim, lengths = 16, 128, np.array([1, 17, 4000, *(1030 + number for number in range(9))])
    width = int(-(-lengths.max() // size))
    tables = np.random.default_rng(0).permutation(width * 13)[: width * 12].reshape(12, width)
    tables[3:, :64] = tables[3, :64]
    shares = find_shares(tables, lengths, size, kernels().shared_rows(query_heads // kv_heads), least_rows=4)
    starts, prefixes = np.zeros(12, dtype=np.int64), np.zeros(len(shares), dtype=np.int64)
    members = np.zeros((len(shares), kernels().shared_rows(query_heads // kv_heads)), dtype=np.int64)
    write_shares(shares, size, starts, members, prefixes)
    assert starts[3:].max() == 1024
    kv = torch.randn(width * 13, size, 2, kv_heads, dim, device=CUDA).to(dtype)
    query = torch.randn(12 + 100, query_heads, dim, device=CUDA).to(dtype)
    on_gpu = [torch.from_numpy(array).to(CUDA) for array in (tables, lengths, starts, members, prefixes)]
    decodes = Decodes(0, on_gpu[0], on_gpu[1], int(lengths.max()), None, Shares(*on_gpu[2:]))
    chunk = Chunk(12, 100, 50, on_gpu[0][2, :10])
    plan = AttentionPlan(torch.zeros(0), (decodes,), (chunk,))
    ours = kernels().attend(query, kv, plan, dim**-0.5)
    tolerance = {BF16: 0.02, torch.float16: 0.004, torch.float32: 1e-4}[dtype]
    rows = [(number, 1, int(length) - 1, tables[number]) for number, length in enumerate(lengths)]
    for row, count, first, table in [*rows, (12, 100, 50, tables[2, :10])]:
        theirs = reference.paged_attention(query[row : row + count], kv, table.tolist(), first, dim**-0.5)
        torch.testing.assert_close(ours[row : row + count], theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(28, 4), (32, 8), (16, 16), (14, 2)], ids=str)
def test_prompts_by_flashinfer(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Four steps of chunks of different lengths are planned in turn, while the GPU is busy with the first."""
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    query_heads, kv_heads = heads
    attention = flash.load(Heads(*heads, 128), CUDA, dtype)
    torch.manual_seed(0)
    rng, size = np.random.default_rng(0), 16
    kv = torch.randn(512, size, 2, kv_heads, 128, device=CUDA).to(dtype)
    steps = []
    for _ in range(4):
        chunks, row = [], 0
        for blocks in rng.permutation(512).reshape(4, 128):
            count, first = int(rng.integers(2, 300)), int(rng.integers(0, 1700))
            used = -(-(first + count) // size)
            chunks.append(Chunk(row, count, first, torch.from_numpy(blocks[:used].copy()).to(CUDA)))
            row += count
        steps.append((torch.randn(row, query_heads, 128, device=CUDA).to(dtype), tuple(chunks)))
    outs = [torch.zeros_like(query) for query, _ in steps]
    busy = torch.randn(8192, 8192, device=CUDA)
    for _ in range(8):
        busy = busy @ busy
    for (query, chunks), out in zip(steps, outs, strict=True):
        for _ in range(3):
            attention(query, kv, chunks, 128**-0.5, out)
    for (query, chunks), out in zip(steps, outs, strict=True):
        for chunk in chunks:
            rows = slice(chunk.row, chunk.row + chunk.count)
            theirs = reference.paged_attention(query[rows], kv, chunk.table.tolist(), chunk.first, 128**-0.5)
            torch.testing.assert_close(out[rows], theirs, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("dim", [64, 72, 80, 128])
def test_torch_uses_flashattention_for_groups_of_patches(dim: int) -> None:
    """Fovea relies on torch's FlashAttention kernel for images. The second call allows no other kernel."""
    qkv = torch.randn(3 * 200, 3 * 16, dim, device=CUDA).to(BF16)
    outs = [torch.zeros(3 * 200, 16 * dim, device=CUDA, dtype=BF16) for _ in range(2)]
    PLAIN.attend_groups(qkv, 3, 16, slice(0, 16), outs[0])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        PLAIN.attend_groups(qkv, 3, 16, slice(0, 16), outs[1])
    torch.testing.assert_close(*outs, atol=0.02, rtol=0.02)


def test_norms_gated_silu_and_rotation() -> None:
    from fovea.kernels.triton import rows as triton_rows

    torch.manual_seed(0)
    x, delta, weight = (
        torch.randn(*shape, device=CUDA).to(BF16) for shape in ((70, 3584), (70, 3584), (3584,))
    )
    close: dict[str, float] = {"atol": 0.02, "rtol": 0.02}
    total, normal = triton_rows.add_rms_norm(x, delta, weight, 1e-6)
    torch.testing.assert_close(total, x + delta)
    torch.testing.assert_close(normal, reference.rms_norm(x + delta, weight, 1e-6), **close)
    torch.testing.assert_close(triton_rows.silu_mul(x), finish(x, "silu", True, None), **close)
    qkv, angle = (
        torch.randn(70, 36, 128, device=CUDA).to(BF16),
        torch.randn(70, 1, 64, device=CUDA).repeat(1, 1, 2),
    )
    norms = (weight[:128].contiguous(), weight[128:256].contiguous())
    pools = [torch.zeros(9, 16, 2, 4, 128, device=CUDA, dtype=BF16) for _ in range(2)]
    slots = torch.randperm(144, device=CUDA)[:70]
    queries = [
        each.rotate_store(qkv.clone(), 28, angle.cos(), angle.sin(), norms, 1e-6, pool, slots)
        for each, pool in zip((kernels(), PLAIN), pools, strict=True)
    ]
    torch.testing.assert_close(*queries, **close)
    torch.testing.assert_close(*pools, **close)


def test_graphs_change_no_answer(tmp_path: Path) -> None:
    """Ten requests at once, in float32, that end at different times.

    They run with recorded graphs, with padded batches that are not recorded, and with neither.
    """
    kernels()
    folder = str(write("qwen3_vl", tmp_path))
    prompts = [
        ask(text, picture(1, 256, 256)) for text in ("what?", "describe", "the red", "please", "is it?")
    ] * 2
    answers = []
    for graphs in ("auto", "padded", "off"):
        with Engine.from_pretrained(
            folder, dtype="float32", device="cuda", kv_cache_mib=64, max_running=10, decode_graphs=graphs
        ) as engine:
            with ThreadPoolExecutor(10) as pool, all_at_once(engine, 10):
                futures = [
                    pool.submit(
                        engine.generate, prompt, temperature=0, max_tokens=24 + 3 * i, ignore_eos=True
                    )
                    for i, prompt in enumerate(prompts)
                ]
            answers.append([future.result().token_ids for future in futures])
            padded = engine.runner._padded
            assert (padded is not None) == (graphs != "off")
            if padded is not None:
                assert all(
                    (batch._graph is not None) == (graphs == "auto") for batch in padded._batches.values()
                )
            engine.check_integrity()
    assert answers[0] == answers[1] == answers[2]


def test_a_batch_draws_the_tokens_that_its_rows_draw_alone() -> None:
    rows = torch.randn(64, 150_000, generator=torch.Generator().manual_seed(1)).mul(4).to(CUDA)
    params = [
        SamplingParams(seed=i, top_p=(1.0, 0.9, 0.5)[i % 3], top_k=(0, 40)[i % 2], temperature=0.7)
        for i in range(64)
    ]
    picks = []
    for batched in (True, False):
        sampler = Sampler(frozenset(), batched=batched)
        sequences = [Sequence(f"s{i}", [1], each, 9) for i, each in enumerate(params)]
        for seq in sequences:
            sampler.add(seq, 0)
        result = StepResult()
        sampler.sample(rows.clone(), [(seq, 0) for seq in sequences], result)
        picks.append([result.sampled[seq.id][0].token for seq in sequences])
    same = sum(ours == theirs for ours, theirs in zip(*picks, strict=True))
    assert same >= 63, "sums are added in another order, so rounding may move the border between two tokens"


@pytest.mark.parametrize("shape", [(1, 3584, 18944), (300, 1280, 3420)], ids=str)
def test_fp8_products_equal_the_twins(shape: tuple[int, int, int]) -> None:
    if torch.cuda.get_device_capability() < HOPPER:
        pytest.skip("this GPU has no such products")
    rows, k, n = shape
    torch.manual_seed(0)
    x, weight = torch.randn(rows, k, device=CUDA).to(BF16), (torch.randn(n, k, device=CUDA) * 0.02).to(BF16)
    product = Fp8Product(weight, None, None, False)
    assert product(x, None).shape == (rows, n)
    padded = round_rows(torch.nn.functional.pad(x, (0, -k % 16)))
    theirs = multiply(*padded, product.values, product.scale, BF16)
    ours = multiply_on_cuda(*padded, product.values, product.scale, BF16)
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


def test_a_quantized_model_answers_with_graphs(tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() < HOPPER:
        pytest.skip("this GPU has no such products")
    with Engine.from_pretrained("fovea-tiny", dtype="bfloat16", device="cuda", quantization="fp8") as engine:
        answer = engine.generate(ask("what?", picture(1)), temperature=0, max_tokens=8, ignore_eos=True)
    assert len(answer.token_ids[0]) == 8
