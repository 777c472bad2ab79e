"""The C++ kernels against their naive twins, at shapes that are prone to errors."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fovea.core.errors import ConfigError
from fovea.engine.vision.calls import attend_slices
from fovea.engine.vision.encoding import run_to_end
from fovea.kernels import reference
from fovea.kernels.activation import finish
from fovea.kernels.attention import AttentionPlan, Chunk, Decodes, Heads, PrefixGroups
from fovea.kernels.choose import choose
from fovea.kernels.native import build
from fovea.kernels.native.border import pages_struct
from fovea.kernels.native.instruction_sets import InstructionSet, chosen, has_bf16_units
from fovea.kernels.native.kernels import NativeKernels
from fovea.kernels.native.products import ACTIVATIONS, PackedWeight, weight_rows
from fovea.kernels.torch_kernels import TorchKernels
from tests.support.pages import KINDS, numbers, stored
from tests.support.programs import need_compiler
from tests.support.thorough import examples

pytestmark = pytest.mark.kernels

BF16 = torch.bfloat16
HEADS = Heads(4, 2, 64)


@pytest.fixture(scope="module")
def native(lib: ctypes.CDLL) -> NativeKernels:
    return NativeKernels(lib)


def weights(n: int, k: int, scale: float = 0.02) -> Tensor:
    return (torch.randn(n, k) * scale).to(BF16)


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int16)


ODD = ["normal", "zeros", "specials", "one value", "all exponents", "tiny"]


def odd_weight(kind: str, n: int, k: int) -> Tensor:
    """Return weights that are difficult for the exponent codes."""
    weight = weights(n, k)
    if kind == "zeros":
        weight[::2] = 0.0
        weight[1, ::3] = -0.0
    elif kind == "specials":
        flat = weight.view(-1)
        flat[3], flat[10], flat[n * k - 1] = 3e38, 1e-30, -2e-20
    elif kind == "one value":
        weight.fill_(-0.5)
    elif kind == "all exponents":
        all_bits = (torch.arange(n * k) % 65536).to(torch.int32).to(torch.int16)
        weight = all_bits.view(BF16).view(n, k).clone()
        weight[~torch.isfinite(weight)] = 1.0
    elif kind == "tiny":
        weight = (weight.float() * 1e-37).to(BF16)
    return weight


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(("n", "k"), [(64, 32), (70, 2), (1, 64), (200, 896)])
def test_packing_is_lossless(native: NativeKernels, kind: str, n: int, k: int) -> None:
    torch.manual_seed(0)
    if n * k < 20:
        kind = "normal"
    weight = odd_weight(kind, max(n, 2), k)[:n] if n > 1 else weights(n, k)
    packed = PackedWeight(native.library, weight, None, gated=False)
    torch.testing.assert_close(
        bits(weight_rows(native.library, packed, torch.arange(n))), bits(weight), atol=0, rtol=0
    )


def test_ordinary_weights_take_twelve_bits_and_unusual_ones_stay_plain(native: NativeKernels) -> None:
    torch.manual_seed(0)
    usual = PackedWeight(native.library, weights(640, 896), None, gated=False)
    assert usual.table is not None
    assert usual.nbytes <= 640 * 896 * 1.51
    unusual = PackedWeight(native.library, odd_weight("all exponents", 640, 896), None, gated=False)
    assert unusual.table is None
    assert unusual.nbytes == 640 * 896 * 2


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.sampled_from([1, 2, 5, 6, 7, 8, 12, 13, 31, 200]),
    n=st.sampled_from([2, 30, 64, 65, 130, 256]),
    k=st.sampled_from([2, 30, 64, 1030]),
    act=st.sampled_from(sorted(ACTIVATIONS, key=str)),
    extras=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 3),
)
def test_a_product_equals_the_plain_one(
    lib: ctypes.CDLL,
    rows: int,
    n: int,
    k: int,
    act: tuple[str | None, bool],
    extras: tuple[bool, bool],
    seed: int,
) -> None:
    torch.manual_seed(seed)
    activation, gated = act
    n += n % 2 if gated else 0
    weight, x = weights(n, k, 0.3), torch.randn(rows, k).to(BF16)
    bias = torch.randn(n).to(BF16) if extras[0] else None
    residual = torch.randn(rows, n // 2 if gated else n).to(BF16) if extras[1] else None
    product = NativeKernels(lib).product(weight, bias, activation, gated)
    assert product is not None
    wide = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    theirs = finish(wide, activation, gated, None if residual is None else residual.float())
    ours = product(x, residual)
    assert ours.dtype is BF16
    # The result is rounded, and so is the value before the residual is added: each by 2^-8 of its size.
    torch.testing.assert_close(ours.float(), theirs, atol=0.02 + 0.01 * float(theirs.abs().max()), rtol=0.01)


@pytest.mark.parametrize("kind", ODD)
def test_products_with_unusual_weights(native: NativeKernels, kind: str) -> None:
    torch.manual_seed(0)
    weight = odd_weight(kind, 96, 64).clamp(-1e30, 1e30)
    x = torch.randn(9, 64).to(BF16)
    product = native.product(weight, None, None, False)
    assert product is not None
    theirs = x.double() @ weight.double().T
    scale = x.double().abs() @ weight.double().abs().T
    error = (product(x, None).double() - theirs).abs()
    # The instruction treats denormal weights as zeros: up to 64 of them times x.
    assert bool((error <= 0.005 * scale + 64 * 2**-126 * 5).all())


@pytest.mark.parametrize(
    ("size", "k", "act", "gated"),
    [(1.0, 1200, "silu", True), (1.0, 1202, None, False), (1e-36, 1202, None, False)],
)
def test_a_row_does_not_depend_on_the_other_rows(
    native: NativeKernels, size: float, k: int, act: str | None, gated: bool
) -> None:
    """Results are equal bit for bit, so that a request's answer does not change with the load.

    Different instructions multiply a single row, several rows, and an odd last pair of k. They must add and
    round alike. With a size of 1e-36 some products are subnormal, which some instructions turn into zero.
    """
    torch.manual_seed(0)
    product = native.product(weights(192, k), None, act, gated)
    assert product is not None
    x = (torch.randn(300, k) * size).to(BF16)
    together = product(x, None)
    assert bool(together.any())
    for count in (*range(1, 14), 100):
        torch.testing.assert_close(bits(product(x[:count], None)), bits(together[:count]), atol=0, rtol=0)


@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 64), (2, 100), (400, 72)])
def test_rms_norm_rounds_like_its_twin(native: NativeKernels, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(shape) * 5).to(BF16), torch.randn(shape[-1]).to(BF16)
    ours, theirs = native.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=2**-7)
    assert float((ours != theirs).float().mean()) < 0.01


@pytest.mark.parametrize("dim", [32, 64, 80, 128])
@pytest.mark.parametrize("has_norms", [True, False])
def test_rotation_and_store(native: NativeKernels, dim: int, has_norms: bool) -> None:
    torch.manual_seed(0)
    rows, heads, kv_heads = 5, 6, 2
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(BF16)
    angles = (torch.rand(rows, 1, dim // 2) * 9).repeat(1, 1, 2)
    norms = (torch.rand(dim).to(BF16), torch.rand(dim).to(BF16)) if has_norms else None
    slots = torch.tensor([7, 0, 31, 12, 13])
    results = []
    for kernels in (native, TorchKernels()):
        kv = torch.zeros(4, 8, 2, kv_heads, dim, dtype=BF16)
        query = kernels.rotate_store(qkv.clone(), heads, angles.cos(), angles.sin(), norms, 1e-6, kv, slots)
        results.append((query.clone(), kv))
    (ours, our_kv), (theirs, their_kv) = results
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)
    torch.testing.assert_close(our_kv, their_kv, atol=0.02, rtol=0.02)
    assert bool((our_kv.abs().sum((2, 3, 4)).view(-1) > 0).sum() == rows)


def test_rotation_in_place_does_not_change_the_other_heads(native: NativeKernels) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 6, 64).to(BF16)
    angles = (torch.rand(9, 1, 32) * 9).repeat(1, 1, 2)
    ours, theirs = (
        kernels.rotate(x.clone(), 4, angles.cos(), angles.sin()) for kernels in (native, TorchKernels())
    )
    torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)
    assert torch.equal(ours[:, 4:], x[:, 4:])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=5),
    block=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 4), (14, 2), (6, 1), (20, 1), (9, 3)]),
    dim=st.sampled_from([32, 64, 96, 128]),
    kind=st.sampled_from(KINDS),
)
def test_attention_over_pages(
    lib: ctypes.CDLL, lengths: list[int], block: int, heads: tuple[int, int], dim: int, kind: str
) -> None:
    torch.manual_seed(sum(lengths))
    query_heads, kv_heads = heads
    width = -(-max(lengths) // block)
    blocks = width * len(lengths) + 2
    kv = stored(torch.randn(blocks, block, 2, kv_heads, dim).to(BF16), kind)
    tables = torch.randperm(blocks)[: width * len(lengths)].view(len(lengths), width)
    # As in a step, the queries are part of rows that hold keys and values, too.
    query = torch.randn(len(lengths), query_heads + 2 * kv_heads, dim).to(BF16)[:, :query_heads]
    group = Decodes(0, tables, torch.tensor(lengths), max(lengths), None)
    plan = AttentionPlan(torch.zeros(len(lengths), dtype=torch.int64), (group,), ())
    ours = NativeKernels(lib).attend(query, kv, plan, dim**-0.5)
    for row, length in enumerate(lengths):
        theirs = reference.paged_attention(
            query[row : row + 1].float(), numbers(kv), tables[row].tolist(), length - 1, dim**-0.5
        )
        torch.testing.assert_close(ours[row : row + 1].float(), theirs, atol=0.02, rtol=0.02)


@settings(max_examples=40, deadline=None)
@given(
    families=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    shared=st.integers(1, 40),
    own=st.integers(1, 30),
    block=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 4), (14, 2), (6, 1), (20, 1), (9, 3)]),
    dim=st.sampled_from([32, 96, 128]),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 99),
)
def test_reading_shared_blocks_once_changes_no_bit(
    lib: ctypes.CDLL,
    families: list[int],
    shared: int,
    own: int,
    block: int,
    heads: tuple[int, int],
    dim: int,
    kind: str,
    seed: int,
) -> None:
    generator = torch.manual_seed(seed)
    query_heads, kv_heads = heads
    rows, width = sum(families), shared + own
    blocks = torch.randperm(rows * width + 2)
    tables = blocks[: rows * width].view(rows, width)
    lengths = torch.randint(shared * block + 1, width * block + 1, (rows,), generator=generator)
    order, members, begin = torch.randperm(rows), torch.full((len(families), 8), -1), 0
    for number, count in enumerate(families):
        family = order[begin : begin + count].sort().values
        tables[family, :shared] = tables[family[0], :shared].clone()
        members[number, :count] = family
        begin += count
    kv = stored(torch.randn(len(blocks), block, 2, kv_heads, dim).to(BF16), kind)
    query = torch.randn(rows, query_heads, dim).to(BF16)
    starts = torch.full((rows,), shared * block)
    all_groups = PrefixGroups(starts, members, torch.full((len(families),), shared * block))

    def attend(groups: PrefixGroups | None) -> Tensor:
        group = Decodes(0, tables, lengths, int(lengths.max()), None, groups)
        plan = AttentionPlan(torch.zeros(rows, dtype=torch.int64), (group,), ())
        return NativeKernels(lib).attend(query, kv, plan, dim**-0.5)

    assert torch.equal(bits(attend(all_groups)), bits(attend(None)))


def test_torch_computes_types_and_shapes_that_the_kernels_lack(native: NativeKernels) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 16), torch.randn(16)
    torch.testing.assert_close(native.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    odd = native.product(weights(8, 7), None, None, False)
    # Without instructions for bf16, torch has no packed product either, and the caller uses the plain weight.
    assert (odd is not None) == has_bf16_units()
    assert odd is None or odd(torch.randn(2, 7).to(BF16), None).shape == (2, 8)
    relu = native.product(weights(8, 6), None, "relu", False)
    assert relu is not None
    assert bool((relu(torch.randn(50, 6).to(BF16), None) >= 0).all())


def test_unavailable_kernels_are_refused_by_name_and_auto_takes_the_next_best(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if chosen() is None:
        pytest.skip("this machine has no instruction set of the kernels")
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    build._load.cache_clear()
    try:
        assert type(choose("auto", torch.device("cpu"), BF16, HEADS)) is TorchKernels
        assert "the CPU kernels cannot be used" in caplog.text
        with pytest.raises(ConfigError, match="cannot run: they could not be compiled: "):
            choose("native", torch.device("cpu"), BF16, HEADS)
        with pytest.raises(ConfigError, match="runs in float32; start with --dtype bfloat16"):
            choose("native", torch.device("cpu"), torch.float32, HEADS)
    finally:
        build._load.cache_clear()
    assert not list(tmp_path.rglob("*.so"))


def test_a_complete_build_is_used_again_and_a_truncated_one_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This builds two short sources. Building the kernels takes seconds, and the fixture has done it."""
    need_compiler()
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in ("one", "two"):
        (sources / f"{name}.cpp").write_text(f'extern "C" int {name}() {{ return 1; }}\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "HIGHWAY", sources)
    plain = InstructionSet("plain", "any", "", frozenset(), ())
    output = build.cached_library(plain)
    assert output.parent == tmp_path / "fovea"
    assert output.with_suffix(".sha256").exists()
    output.write_bytes(output.read_bytes()[:3000])
    assert build.cached_library(plain) == output
    assert output.stat().st_size > 3000, (
        "a truncated library was accepted as complete; loading it would end the process"
    )
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("the library was compiled again"))
    assert build.cached_library(plain) == output


@settings(max_examples=40, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 80)), min_size=1, max_size=3),
    block=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 4), (6, 2)]),
    dim=st.sampled_from([32, 64, 96, 128]),
    kind=st.sampled_from(KINDS),
)
def test_attention_of_chunks(
    lib: ctypes.CDLL, spans: list[tuple[int, int]], block: int, heads: tuple[int, int], dim: int, kind: str
) -> None:
    torch.manual_seed(sum(map(sum, spans)))
    query_heads, kv_heads = heads
    needed = [-(-(first + count) // block) for first, count in spans]
    kv = stored(torch.randn(sum(needed) + 2, block, 2, kv_heads, dim).to(BF16), kind)
    order = torch.randperm(kv.shape[0])
    rows = sum(count for _, count in spans)
    query = torch.randn(rows, query_heads + 2 * kv_heads, dim).to(BF16)[:, :query_heads]
    chunks, tables, row = [], order.split([*needed, 2])[:-1], 0
    for (first, count), table in zip(spans, tables, strict=True):
        chunks.append(Chunk(row, count, first, table.contiguous()))
        row += count
    plan = AttentionPlan(torch.zeros(rows, dtype=torch.int64), (), tuple(chunks))
    ours = NativeKernels(lib).attend(query, kv, plan, dim**-0.5)
    for chunk in chunks:
        own_rows = slice(chunk.row, chunk.row + chunk.count)
        theirs = reference.paged_attention(
            query[own_rows].float(), numbers(kv), chunk.table.tolist(), chunk.first, dim**-0.5
        )
        torch.testing.assert_close(ours[own_rows].float(), theirs, atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    "runs", [[(1, 1)], [(3, 64), (2, 65)], [(1, 200)], [(2, 7), (1, 130), (4, 4)]], ids=str
)
@pytest.mark.parametrize("dim", [8, 64, 72, 80, 128])
def test_attention_within_groups(native: NativeKernels, runs: list[tuple[int, int]], dim: int) -> None:
    torch.manual_seed(0)
    heads, rows = 3, sum(groups * count for groups, count in runs)
    qkv = torch.randn(rows, 3 * heads, dim).to(BF16)
    theirs = run_to_end(attend_slices(TorchKernels(), qkv.float(), runs, heads))
    ours = run_to_end(attend_slices(native, qkv, runs, heads))
    torch.testing.assert_close(ours.float(), theirs, atol=0.03, rtol=0.03)
    whole = torch.nn.functional.scaled_dot_product_attention(
        *qkv[: runs[0][0] * runs[0][1]]
        .float()
        .view(runs[0][0], runs[0][1], 3, heads, dim)
        .permute(2, 0, 3, 1, 4)
    )
    torch.testing.assert_close(
        theirs[: runs[0][0] * runs[0][1]],
        whole.transpose(1, 2).reshape(-1, heads * dim),
        atol=1e-4,
        rtol=1e-4,
    )


@settings(max_examples=examples(40), deadline=None)
@given(
    length=st.integers(2, 200),
    cuts=st.lists(st.integers(1, 199), max_size=4),
    window=st.sampled_from([None, 1, 7, 33, 64]),
    heads=st.sampled_from([(4, 4), (6, 2), (20, 1)]),
    dim=st.sampled_from([32, 64, 96]),
    block=st.sampled_from([4, 16]),
    kind=st.sampled_from(KINDS),
)
def test_a_row_of_attention_has_one_order_of_additions(
    lib: ctypes.CDLL,
    length: int,
    cuts: list[int],
    window: int | None,
    heads: tuple[int, int],
    dim: int,
    block: int,
    kind: str,
) -> None:
    """A row has the same bits in any chunk and as a decode.

    The kernel of decodes once added weights in another order. So the last row of a prompt had other bits when
    it was computed alone, behind cached tokens or at the end of a step.
    """
    torch.manual_seed(length)
    kv = stored(torch.randn(-(-length // block), block, 2, heads[1], dim).to(BF16), kind)
    query = 3 * torch.randn(length, heads[0], dim).to(BF16)
    table = torch.randperm(kv.shape[0])
    ends = torch.arange(length) + 1
    firsts = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)

    def attend(plan: AttentionPlan, rows: slice) -> Tensor:
        return NativeKernels(lib).attend(query[rows].contiguous(), kv, plan, 0.3)

    def chunk(first: int, last: int) -> Tensor:
        limits = None if window is None else torch.stack((firsts, ends), 1)[first:last].contiguous()
        plan = AttentionPlan(table, (), (Chunk(0, last - first, first, table, limits),))
        return attend(plan, slice(first, last))

    whole = chunk(0, length)
    borders = sorted({0, length, *(cut for cut in cuts if cut < length)})
    pieces = torch.cat([chunk(first, last) for first, last in itertools.pairwise(borders)])
    assert torch.equal(bits(pieces), bits(whole))
    tables = table.expand(length, -1).contiguous()
    decodes = Decodes(0, tables, ends, length, None, None, None if window is None else firsts)
    assert torch.equal(bits(attend(AttentionPlan(table, (decodes,), ()), slice(None))), bits(whole))


def test_nan_stays_nan(native: NativeKernels) -> None:
    """A clamp in the exponential once turned NaN into a number, so a broken model answered without error."""
    kv = torch.randn(2, 16, 2, 1, 64).to(BF16)
    query = torch.randn(1, 2, 64).to(BF16)
    query[0, 0, 3] = float("nan")
    table = torch.tensor([[0, 1]])
    decode = AttentionPlan(table[0], (Decodes(0, table, torch.tensor([20]), 20, None),), ())
    chunk = AttentionPlan(table[0], (), (Chunk(0, 1, 19, table[0]),))
    for plan in (decode, chunk):
        out = native.attend(query, kv, plan, 0.125)
        assert bool(out[0, 0].isnan().all())
        assert bool(out[0, 1].isfinite().all())


def test_without_a_home_folder_the_build_uses_a_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    folder = build.cache_folder()
    assert folder.is_dir()
    folder.rmdir()


def test_heads_that_the_kernels_lack_get_masks(native: NativeKernels) -> None:
    """Such heads once went to torch without groups and masks. Short contexts then read behind their end."""
    assert [dim for dim in (16, 64, 80, 256, 512, 544) if native.attends_in_place(dim)] == [64, 256, 512]


class MallocInfo(ctypes.Structure):
    """The C library's account of its memory: `struct mallinfo2` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
                     "fordblks", "keepcost")
    ]  # fmt: skip


def test_memory_of_a_long_context_is_freed(lib: ctypes.CDLL) -> None:
    """Each thread once kept its packed keys and values as large as its longest context had made them."""
    dim, block, longest, short = 64, 16, 1 << 19, 64
    kv = torch.randn(1, block, 2, 1, dim).to(BF16)
    table = torch.zeros(longest // block, dtype=torch.int64)
    query, out = torch.randn(1, 1, dim).to(BF16), torch.empty(1, 1, dim, dtype=BF16)
    pages = ctypes.byref(pages_struct(kv, 1, dim))

    def attend(keys: int) -> list[int]:
        """Run one attention, and return the memory by the system's account and by the C library's, in MiB."""
        lib.fovea_chunk_attention(
            query.data_ptr(), dim, 1, keys - 1, 1, 1, dim, pages, table.data_ptr(), None,
            dim**-0.5, out.data_ptr(), 1,
        )  # fmt: skip
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        accounts = [resident]
        if (account := getattr(ctypes.CDLL(None), "mallinfo2", None)) is not None:
            account.restype = MallocInfo
            told = account()
            accounts.append(told.uordblks + told.hblkhd)
        return [number >> 20 for number in accounts]

    attend(short)
    before = out.clone()
    high, low = attend(longest), attend(short)
    # One account is enough: the system's changes for other reasons, too, and some C libraries have none.
    assert any(after < most - 100 for most, after in zip(high, low, strict=True)), (high, low)
    assert torch.equal(out, before)
