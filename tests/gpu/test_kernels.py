"""Kernels, graphs, sampling and 8-bit floats on the GPU, against their naive twins. Run by `make gpu`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from fovea.core.sampling import SamplingParams
from fovea.engine.sample.sampler import Sampler
from fovea.engine.schedule.decode_batches import find_prefix_groups, write_prefix_groups
from fovea.engine.sequence import Sequence
from fovea.engine.step.executor import StepResult
from fovea.kernels import flash, reference
from fovea.kernels.activation import finish
from fovea.kernels.attention import AttentionPlan, Chunk, Decodes, Heads, Pieces, PrefixGroups
from fovea.kernels.float8 import FP8, Fp8Product, multiply, multiply_on_cuda, round_padded, round_rows
from fovea.kernels.pieces import cut
from fovea.kernels.quantize import INT4, INT8, Format
from fovea.kernels.spans import Spans, attend_each
from fovea.kernels.torch_kernels import PLAIN
from tests.support import fake_flashinfer, gpu
from tests.support.checkpoints import parts, write
from tests.support.codes import SCHEMES
from tests.support.engines import all_at_once, ask, picture
from tests.support.states import Shape, mix, plan_of

pytestmark = gpu.MARKS
DEVICE = gpu.DEVICE
BF16 = torch.bfloat16
GRAPHED = gpu.either(["llava", "gemma3", "gemma4", "qwen3_5", "lfm2_vl"], ["llava", "qwen3_5"])
HEADS = pytest.mark.parametrize("heads", [(28, 4), (32, 8), (16, 16), (14, 2)][: gpu.either(4, 1)], ids=str)


def kernels() -> Any:
    pytest.importorskip("triton", reason="triton is not installed")
    from fovea.kernels.triton.kernels import TritonKernels

    return TritonKernels(DEVICE)


@pytest.mark.parametrize("shape", [(16, 128, 32, 128), (16, 128, 16, 128), (2, 24, 4, 40)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_one_token_of_layers_with_a_state(shape: Shape, dtype: torch.dtype) -> None:
    """Short convolution, gated delta rule and gated norm, each in one launch, in slots of the pool."""
    plan = plan_of([(5, 5), (2, 6), (0, 0), (1, 7)], DEVICE)
    shape = gpu.either(shape, (2, *shape[1:2], 4, *shape[3:]))
    ours, theirs = (mix(each, shape, plan, 4, dtype, DEVICE) for each in (kernels(), PLAIN))
    close = 0.06 if dtype is BF16 else 2e-5
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, atol=close, rtol=close)
    assert torch.equal(mix(kernels(), shape, plan, 4, dtype, DEVICE)[4], ours[4])


@pytest.mark.parametrize("dim", [64, 72, 80, 128])
def test_attention_of_encoders_inside_spans(dim: int) -> None:
    """Pictures of three sizes, in one launch where the GPU can: rotation first, as in a tower."""
    torch.manual_seed(0)
    ours, heads, rows = kernels(), 3, 2 * 70 + 256 + 33
    dtype = torch.float32 if gpu.REHEARSAL else BF16
    qkv = torch.randn(rows, 3 * heads, dim, device=DEVICE).to(dtype)
    cos, sin = torch.rand(2, rows, 1, dim, device=DEVICE)
    spans = Spans.of(((2, 70), (1, 256), (1, 33)), DEVICE)
    expected = attend_each(PLAIN.rotate(qkv.clone(), 2 * heads, cos, sin), spans, heads)
    mine = ours.attend_spans(ours.rotate(qkv, 2 * heads, cos, sin), spans, heads)
    torch.testing.assert_close(mine.float(), expected.float(), atol=0.03, rtol=0.02)
    assert gpu.REHEARSAL or ours.spans_in_one_launch


@pytest.mark.parametrize(
    "dtype", [pytest.param(BF16, marks=gpu.NEEDS_CUDA), torch.float16, torch.float32], ids=str
)
@HEADS
def test_attention_over_pages(heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Twelve contexts of different lengths, nine of which share a prefix, and a chunk of a prompt."""
    torch.manual_seed(0)
    query_heads, kv_heads = heads
    size, dim, prefix, long = 16, 128, gpu.either(64, 16), gpu.either(4000, 300)
    lengths = np.array([1, 17, long, *(16 * prefix + 6 + number for number in range(9))])
    width = int(-(-lengths.max() // size))
    tables = np.random.default_rng(0).permutation(width * 13)[: width * 12].reshape(12, width)
    tables[3:, :prefix] = tables[3, :prefix]
    groups = find_prefix_groups(
        tables, lengths, size, kernels().shared_rows(query_heads // kv_heads), least_rows=4
    )
    starts, prefixes = np.zeros(12, dtype=np.int64), np.zeros(len(groups), dtype=np.int64)
    members = np.zeros((len(groups), kernels().shared_rows(query_heads // kv_heads)), dtype=np.int64)
    write_prefix_groups(groups, size, starts, members, prefixes)
    assert starts[3:].max() == 16 * prefix
    kv = torch.randn(width * 13, size, 2, kv_heads, dim, device=DEVICE).to(dtype)
    query = torch.randn(12 + 100, query_heads, dim, device=DEVICE).to(dtype)
    on_gpu = [torch.from_numpy(array).to(DEVICE) for array in (tables, lengths, starts, members, prefixes)]
    shared = PrefixGroups(*on_gpu[2:])
    pieces = pieces_of(Heads(query_heads, kv_heads, dim), starts, lengths, members, prefixes)
    decodes = Decodes(0, on_gpu[0], on_gpu[1], int(lengths.max()), None, shared, None, pieces)
    chunk = Chunk(12, 100, 50, on_gpu[0][2, :10])
    plan = AttentionPlan(torch.zeros(0), (decodes,), (chunk,))
    ours = kernels().attend(query, kv, plan, dim**-0.5)
    tolerance = {BF16: 0.02, torch.float16: 0.004, torch.float32: 1e-4}[dtype]
    rows = [(number, 1, int(length) - 1, tables[number]) for number, length in enumerate(lengths)]
    for row, count, first, table in [*rows, (12, 100, 50, tables[2, :10])]:
        theirs = reference.paged_attention(query[row : row + count], kv, table.tolist(), first, dim**-0.5)
        torch.testing.assert_close(ours[row : row + count], theirs, atol=tolerance, rtol=tolerance)


def pieces_of(heads: Heads, starts: Any, lengths: Any, *groups: Any) -> Pieces:
    """Cut contexts as Triton's kernels want it. groups: members and tokens of prefix groups."""
    rule = kernels().cutting(heads)
    found = cut(rule, starts, lengths, rule.room(len(lengths), int(lengths.max()), shared=True), *groups)
    arrays = {name: torch.from_numpy(array).to(DEVICE) for name, array in found.arrays().items()}
    return Pieces.of(arrays, rule, found.results)


@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        pytest.param(Heads(8, 4, 256), BF16, marks=gpu.NEEDS_CUDA),
        pytest.param(Heads(16, 2, 512), BF16, marks=gpu.NEEDS_CUDA),
        (Heads(8, 1, 512), torch.float32),
    ],
    ids=str,
)
def test_windows_and_wide_heads(heads: Heads, dtype: torch.dtype) -> None:
    """The heads of Gemma 3 and 4. Each row sees the last 1,000 tokens of its context, or all of them."""
    torch.manual_seed(0)
    size, window = 16, gpu.either(1000, 60)
    lengths = np.array([1, 17, window, window + 1, *gpu.either((1030, 9000), (75,))])
    width = int(-(-lengths.max() // size))
    tables = np.random.default_rng(0).permutation(width * len(lengths)).reshape(len(lengths), width)
    kv = torch.randn(tables.size, size, 2, heads.kv, heads.dim, device=DEVICE).to(dtype)
    query = torch.randn(len(lengths), heads.query, heads.dim, device=DEVICE).to(dtype)
    for firsts in (np.zeros_like(lengths), np.maximum(0, lengths - window)):
        on_gpu = [torch.from_numpy(array).to(DEVICE) for array in (tables, lengths, firsts)]
        pieces = pieces_of(heads, firsts, lengths)
        decodes = Decodes(0, on_gpu[0], on_gpu[1], int(lengths.max()), None, None, on_gpu[2], pieces)
        plan = AttentionPlan(torch.zeros(0), (decodes,), ())
        ours = kernels().attend(query, kv, plan, heads.dim**-0.5)
        for row, (first, length) in enumerate(zip(firsts, lengths, strict=True)):
            flat = kv[on_gpu[0][row]].flatten(0, 1)[first:length]
            theirs = reference.attention(
                query[row : row + 1], flat[:, 0], flat[:, 1], heads.dim**-0.5, int(length - first) - 1
            )
            tolerance = 0.02 if dtype is BF16 else 1e-4
            torch.testing.assert_close(ours[row : row + 1], theirs, atol=tolerance, rtol=tolerance)


@gpu.NEEDS_CUDA
def test_a_rows_attention_has_the_same_bits_beside_a_long_context() -> None:
    torch.manual_seed(0)
    heads, size = Heads(28, 4, 128), 16
    lengths = np.array([500, 30_000, 1234])
    width = int(-(-lengths.max() // size))
    tables = torch.randperm(3 * width, device=DEVICE).view(3, width)
    kv = torch.randn(3 * width, size, 2, heads.kv, heads.dim, device=DEVICE).to(BF16)
    query = torch.randn(3, heads.query, heads.dim, device=DEVICE).to(BF16)

    def attend(rows: list[int]) -> torch.Tensor:
        chosen = lengths[rows]
        pieces = pieces_of(heads, np.zeros_like(chosen), chosen)
        on_gpu = torch.from_numpy(chosen).to(DEVICE)
        decodes = Decodes(0, tables[rows], on_gpu, int(chosen.max()), None, None, None, pieces)
        attention: torch.Tensor = kernels().attend(
            query[rows], kv, AttentionPlan(torch.zeros(0), (decodes,), ()), 0.1
        )
        return attention

    together = attend([0, 1, 2])
    for row in range(3):
        assert torch.equal(attend([row])[0], together[row])


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@HEADS
def test_prompts_by_flashinfer(
    heads: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four steps of chunks of different lengths are planned in turn, while the GPU is busy with the first."""
    if gpu.REHEARSAL:
        monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    pytest.importorskip("flashinfer", reason="flashinfer-python is not installed")
    query_heads, kv_heads = heads
    attention = flash.load(Heads(*heads, 128), DEVICE, dtype)
    torch.manual_seed(0)
    rng, size = np.random.default_rng(0), 16
    kv = torch.randn(512, size, 2, kv_heads, 128, device=DEVICE).to(dtype)
    steps = []
    for _ in range(gpu.either(4, 2)):
        chunks, row = [], 0
        for blocks in rng.permutation(512).reshape(4, 128):
            most_new, most_cached = gpu.either((300, 1700), (20, 100))
            count, first = int(rng.integers(2, most_new)), int(rng.integers(0, most_cached))
            used = -(-(first + count) // size)
            chunks.append(Chunk(row, count, first, torch.from_numpy(blocks[:used].copy()).to(DEVICE)))
            row += count
        steps.append((torch.randn(row, query_heads, 128, device=DEVICE).to(dtype), tuple(chunks)))
    outs = [torch.zeros_like(query) for query, _ in steps]
    busy = torch.randn(gpu.either(8192, 64), gpu.either(8192, 64), device=DEVICE)
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
@gpu.NEEDS_CUDA
def test_torch_uses_flashattention_for_groups_of_patches(dim: int) -> None:
    """Fovea relies on torch's FlashAttention kernel for images. The second call allows no other kernel."""
    qkv = torch.randn(3 * 200, 3 * 16, dim, device=DEVICE).to(BF16)
    outs = [torch.zeros(3 * 200, 16 * dim, device=DEVICE, dtype=BF16) for _ in range(2)]
    PLAIN.attend_groups(qkv, 3, 16, slice(0, 16), outs[0])
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        PLAIN.attend_groups(qkv, 3, 16, slice(0, 16), outs[1])
    torch.testing.assert_close(*outs, atol=0.02, rtol=0.02)


def test_norms_gated_activations_and_rotation() -> None:
    from fovea.kernels.triton import rows as triton_rows

    torch.manual_seed(0)
    rows, bound = gpu.either((70, 5e-3), (9, 2e-2))  # the interpreter cuts bits off instead of rounding
    x, delta, weight = (
        torch.randn(*shape, device=DEVICE).to(BF16) for shape in ((rows, 3584), (rows, 3584), (3584,))
    )
    for inner in (None, weight):
        for centered in (False, True):
            sums = [
                each.add_norm(x, delta, inner, weight, 1e-6, centered=centered) for each in (kernels(), PLAIN)
            ]
            for ours, theirs in zip(*sums, strict=True):
                assert gpu.relative_error(ours, theirs) < bound
    for activation in ("silu", "gelu", "gelu_pytorch_tanh"):
        ours = triton_rows.gate(x, activation)
        assert gpu.relative_error(ours, finish(x, activation, True, None)) < bound
    qkv = torch.randn(rows, 36, 128, device=DEVICE).to(BF16)
    angle = torch.randn(rows, 1, 64, device=DEVICE)
    norms = (weight[:128].contiguous(), weight[128:256].contiguous())
    pools = [torch.zeros(9, 16, 2, 4, 128, device=DEVICE, dtype=BF16) for _ in range(2)]
    slots = torch.randperm(144, device=DEVICE)[:rows]
    for rotated, options in ((64, {}), (16, {"centered": True}), (64, {"value_norm": norms[0]})):
        turn = angle[..., :rotated].repeat(1, 1, 2)
        queries = [
            each.rotate_store(qkv.clone(), 28, turn.cos(), turn.sin(), norms, 1e-6, pool, slots, **options)
            for each, pool in zip((kernels(), PLAIN), pools, strict=True)
        ]
        assert gpu.relative_error(*queries) < bound
        assert gpu.relative_error(*pools) < bound


@pytest.mark.parametrize("family", GRAPHED)
def test_graphs_change_no_answer(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten requests at once, in float32, that end at different times.

    They run with recorded graphs, with padded batches that are not recorded, and with neither.
    """
    kernels()
    if family == "llava":
        monkeypatch.setattr(parts, "TEXT_LAYERS", gpu.either(parts.TEXT_LAYERS, 1))
    folder, count, side = write(family, tmp_path), gpu.either(10, 2), gpu.either(256, 64)
    texts = ["what?", "describe", "the red", "please", "is it?"] * 2
    prompts = [ask(text, picture(1, side, side)) for text in texts[:count]]
    lengths = [gpu.either(24, 2) + 3 * number for number in range(count)]
    answers = []
    for graphs in ("auto", "padded", "off"):
        with gpu.engine_of(folder, dtype="float32", max_running=count, decode_graphs=graphs) as engine:
            with ThreadPoolExecutor(count) as pool, all_at_once(engine, count):
                futures = [
                    pool.submit(engine.generate, prompt, temperature=0, max_tokens=length, ignore_eos=True)
                    for prompt, length in zip(prompts, lengths, strict=True)
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


@gpu.NEEDS_HOPPER
@pytest.mark.parametrize("architecture", ["qwen3_vl_moe", "deepseek_ocr2"])
def test_experts_are_recorded_in_bf16_and_in_float16(architecture: str, tmp_path: Path) -> None:
    """Experts once read their numbers of rows on the host, within the part that is recorded.

    torch's grouped_mm still does in float16. So Triton's product of all experts takes its place.
    """
    kernels()
    folder, answers = write(architecture, tmp_path), []
    for dtype, graphs in (("bfloat16", "auto"), ("bfloat16", "off"), ("float16", "auto")):
        with gpu.engine_of(folder, dtype=dtype, decode_graphs=graphs) as engine:
            answer = engine.generate(ask("what?", picture(1)), temperature=0, max_tokens=16, ignore_eos=True)
            assert (engine.runner._padded is not None) == (graphs == "auto")
        answers.append(answer.token_ids)
    assert answers[0] == answers[1]


def test_a_batch_draws_the_tokens_that_its_rows_draw_alone() -> None:
    rows = torch.randn(64, 150_000, generator=torch.Generator().manual_seed(1)).mul(4).to(DEVICE)
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


@gpu.NEEDS_HOPPER
@pytest.mark.parametrize("shape", [(1, 3584, 18944), (300, 1280, 3420)], ids=str)
def test_fp8_products_equal_the_twins(shape: tuple[int, int, int]) -> None:
    rows, k, n = shape
    torch.manual_seed(0)
    x, weight = (
        torch.randn(rows, k, device=DEVICE).to(BF16),
        (torch.randn(n, k, device=DEVICE) * 0.02).to(BF16),
    )
    product = Fp8Product(weight, None, None, False)
    assert product(x, None).shape == (rows, n)
    padded = round_rows(torch.nn.functional.pad(x, (0, -k % 16)))
    theirs = multiply(*padded, product.values, product.scale, BF16)
    ours = multiply_on_cuda(*padded, product.values, product.scale, BF16)
    torch.testing.assert_close(ours, theirs, atol=0.05, rtol=0.05)


@gpu.NEEDS_HOPPER
@pytest.mark.parametrize("width", [3584, 18944, 70])
def test_rows_are_rounded_to_8_bit_floats_by_one_launch(width: int) -> None:
    from fovea.kernels.triton.products import round_input

    x = torch.randn(33, width, device=DEVICE).to(BF16)
    x[1] = 0
    (values, scale), (theirs, their_scale) = round_input(x), round_padded(x)
    torch.testing.assert_close(scale, their_scale, atol=0, rtol=1e-6)
    assert float((values.float() == theirs.float()).float().mean()) > 0.999
    torch.testing.assert_close(values.float(), theirs.float(), atol=2**-9, rtol=0.13)
    weight, bias = torch.randn(96, width, device=DEVICE).to(BF16), torch.randn(96, device=DEVICE).to(BF16)
    ours, plain = (
        each.quantized_product(weight, bias, "silu", True, FP8)(x, None) for each in (kernels(), PLAIN)
    )
    assert gpu.relative_error(ours, plain) < 0.05  # 33 rows are not rounded


PACKED_TYPE = gpu.either(BF16, torch.float32)
"""The type of rows of products with packed weights. The interpreter multiplies bfloat16 wrongly."""


@pytest.mark.parametrize("format", [INT8, INT4], ids=lambda format: format.name)
@pytest.mark.parametrize("rows", gpu.either([1, 17, 128, 300], [1, 17]))
def test_products_with_packed_weights(format: Format, rows: int) -> None:
    """The sides are odd, so that no tile divides them. 300 rows are multiplied by torch."""
    torch.manual_seed(0)
    n, k = gpu.either((3422, 1282), (70, 150))
    weight, bias, x, residual = (
        torch.randn(*shape, device=DEVICE).to(PACKED_TYPE) for shape in ((n, k), (n,), (rows, k), (rows, n))
    )
    ours, theirs = (each.quantized_product(weight, bias, None, False, format) for each in (kernels(), PLAIN))
    assert type(ours).__name__ == "TritonQuantizedProduct", "the trial of Triton's products failed"
    exact = x.float() @ theirs.rows(torch.arange(n, device=DEVICE)).T + bias.float()
    assert gpu.relative_error(ours(x, None), exact) < 0.005
    assert gpu.relative_error(ours(x, residual), exact + residual.float()) < 0.005
    gated = kernels().quantized_product(weight, bias, "silu", True, format)
    assert gpu.relative_error(gated(x, None), finish(exact, "silu", True, None)) < 0.01


@pytest.mark.parametrize("scheme", gpu.either(list(SCHEMES), ["Q4_K", "AWQ"]))
@pytest.mark.parametrize("rows", gpu.either([1, 32, 64, 300], [3]))
def test_products_of_codes(scheme: str, rows: int) -> None:
    """Products of quantized checkpoints, several schemes in one product, too. A graph records each."""
    torch.manual_seed(0)
    (n, k), dtype = gpu.either((3422, 1280), (70, 160)), PACKED_TYPE
    with torch.device(DEVICE):
        parts = [SCHEMES[name](n, k) for name in (scheme, "Q4_1")]
        x, bias = torch.randn(rows, k).to(dtype), torch.randn(2 * n).to(dtype)
    values = torch.cat([part.values() for part in parts])
    exact = x.float() @ values.T + bias.float()
    for few, theirs in ((parts[:1], exact[:, :n]), (parts, exact)):
        product = kernels().coded_product(few, bias[: len(few) * n], None, False, dtype)
        assert type(product).__name__ == "TritonQuantizedProduct", "the trial of Triton's products failed"
        assert gpu.relative_error(product(x, None), theirs) < 0.005
        assert torch.equal(product.rows(torch.arange(n, device=DEVICE)), values[:n])
        if not gpu.REHEARSAL:
            _graph_seconds(partial(product, x, None))


@pytest.mark.parametrize(
    ("format", "dtype"),
    [
        (None, torch.float16),
        (INT8, PACKED_TYPE),
        (INT4, PACKED_TYPE),
        pytest.param(FP8, BF16, marks=gpu.NEEDS_HOPPER),
    ],
    ids=str,
)
@pytest.mark.parametrize("decodes", [True, False])
def test_products_of_all_experts(format: Format | None, dtype: torch.dtype, decodes: bool) -> None:
    torch.manual_seed(0)
    n, k = gpu.either((1536, 2048), (70, 150))
    counts = (
        [0, 3, 1, 0, 0, 2, 0] if decodes else gpu.either([130, 0, 500, 17, 65, 1, 0], [20, 0, 33, 0, 1, 0, 0])
    )
    weights, x = (
        torch.randn(7, n, k, device=DEVICE).to(dtype),
        torch.randn(sum(counts), k, device=DEVICE).to(dtype),
    )
    product = kernels().grouped_product(weights, None, False, format)
    assert product is not None, "the trial of Triton's products failed"
    ours = product(x, torch.tensor(counts, dtype=torch.int32, device=DEVICE))
    every, parts = torch.arange(n, device=DEVICE), []
    for weight, part in zip(weights, x.float().split(counts), strict=True):
        table = PLAIN.quantized_product(weight, None, None, False, format).rows(every) if format else weight
        parts.append(part @ table.float().T)
    assert gpu.relative_error(ours, torch.cat(parts)) < 0.005
    chosen, whole = torch.tensor([[0, 6], [3, 3], [5, 1]], device=DEVICE), []
    found = product.of_rows(x[:3], chosen)
    assert found is not None
    for row, experts in zip(x[:3], chosen.tolist(), strict=True):
        for expert in experts:
            one = weights[expert]
            table = PLAIN.quantized_product(one, None, None, False, format).rows(every) if format else one
            whole.append(row.float() @ table.float().T)
    assert gpu.relative_error(found, torch.stack(whole)) < 0.005


@pytest.mark.parametrize(("experts", "active"), [(128, 8), (512, 10), (60, 6)])
def test_the_choice_and_the_sum_of_experts(experts: int, active: int) -> None:
    """No two logits are equal, because torch may choose any of those. A shared expert has a gate, too."""
    torch.manual_seed(0)
    ours, rows, hidden = kernels(), 3, gpu.either(2048, 100)
    logits = torch.stack([torch.randperm(experts) for _ in range(rows)]).sub(experts // 2).div(32)
    x, gate = torch.randn(rows, hidden).to(DEVICE, BF16), torch.randn(1, hidden).to(DEVICE, BF16) * 0.05
    options: Any = {"normalized": True, "opening": (x, gate)}
    mine, theirs = (each.choose_experts(logits.to(DEVICE), active, **options) for each in (ours, PLAIN))
    assert torch.equal(mine[1], theirs[1])
    torch.testing.assert_close(mine[0], theirs[0], atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(mine[2], theirs[2], atol=0.01, rtol=0.01)
    outputs = torch.randn(rows, active, hidden).to(DEVICE, BF16)
    parts: Any = (outputs, mine[0].to(BF16), x, mine[2], x)
    close = {"atol": 0.04, "rtol": 0.02}
    torch.testing.assert_close(ours.sum_experts(*parts), PLAIN.sum_experts(*parts), **close)
    torch.testing.assert_close(ours.open(x, outputs[:, 0]), PLAIN.open(x, outputs[:, 0]), **close)


@gpu.NEEDS_HOPPER
def test_quantized_products_are_recorded_and_timed() -> None:
    """It prints how long products of 3584 x 18944 take against bf16. Each is recorded as a CUDA graph.

    A graph leaves out the time of launching. Different weights are used in turn, so that no cache holds them.
    """
    weights = [torch.randn(18944, 3584, device=DEVICE).to(BF16) for _ in range(2)]
    makers = {"bf16": lambda w: kernels().product(w, None, None, False)}
    for format in (FP8, INT8, INT4):
        makers[format.name] = partial(_quantized, kernels(), format)
    for scheme in ("AWQ", "Q4_K", "Q6_K", "Q8_0"):
        makers[scheme] = partial(_coded, kernels(), scheme)
    seconds: dict[tuple[int, str], float] = {}
    for name, make in makers.items():
        products = [make(weight) for weight in weights]
        for rows in (1, 32, 512):
            x = torch.randn(rows, 3584, device=DEVICE).to(BF16)
            seconds[rows, name] = _graph_seconds(lambda: [product(x, None) for product in products])  # noqa: B023
    rounding = makers["fp8"](weights[0]).rounding
    for rows in (1, 32):
        x = torch.randn(rows, 3584, device=DEVICE).to(BF16)
        seconds[rows, "fp8, rounded"] = 2 * _graph_seconds(lambda: rounding(x, None))  # noqa: B023
    for rows in (1, 32, 512):
        base = seconds[rows, "bf16"]
        others = ", ".join(
            f"{name} {second / base:.2f}x" for (count, name), second in seconds.items() if count == rows
        )
        print(f"{rows} rows, product of 3584 x 18944: {base / 2 * 1e6:.0f} us; {others}")


def _quantized(kernels: Any, format: Format, weight: torch.Tensor) -> Any:
    return kernels.quantized_product(weight, None, None, False, format)


def _coded(kernels: Any, scheme: str, weight: torch.Tensor) -> Any:
    with torch.device(DEVICE):
        codes = SCHEMES[scheme](*weight.shape)
    return kernels.coded_product([codes], None, None, False, weight.dtype)


def _graph_seconds(call: Callable[[], object]) -> float:
    """Record a call as a CUDA graph, and return the least time of a replay."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(aside):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    times = []
    for _ in range(20):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1000)
    return min(times)


@gpu.NEEDS_HOPPER
@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
def test_a_quantized_model_answers_with_graphs(quantization: str) -> None:
    with gpu.engine_of("fovea-tiny", dtype="bfloat16", quantization=quantization) as engine:
        answer = engine.generate(ask("what?", picture(1)), temperature=0, max_tokens=8, ignore_eos=True)
        assert engine.runner._padded is not None
    assert len(answer.token_ids[0]) == 8


@gpu.NEEDS_HOPPER
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_quantized_experts_are_recorded(quantization: str, tmp_path: Path) -> None:
    kernels()
    folder, answers = write("qwen3_vl_moe", tmp_path), []
    for graphs in ("auto", "off"):
        with gpu.engine_of(
            folder, dtype="bfloat16", quantization=quantization, decode_graphs=graphs
        ) as engine:
            answer = engine.generate(ask("what?", picture(1)), temperature=0, max_tokens=16, ignore_eos=True)
            assert (engine.runner._padded is not None) == (graphs == "auto")
        answers.append(answer.token_ids)
    assert answers[0] == answers[1]
