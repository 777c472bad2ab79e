"""The Triton kernels against their naive twins, in Triton's interpreter. tests/gpu runs them on a GPU.

Kernels with products are not tested in bfloat16, because the interpreter multiplies the bits of such numbers
(triton-lang/triton issue 11584).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":  # see tests/conftest.py
    pytest.skip("there is a GPU: tests/gpu runs the kernels on it", allow_module_level=True)

from fovea.core.errors import ConfigError
from fovea.core.sampling import SamplingParams
from fovea.engine.execute import attention_plan
from fovea.engine.execute.attention_plan import GroupPlanner
from fovea.engine.layers.config import KVGroup
from fovea.engine.schedule import decode_batches
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import Sequence
from fovea.kernels import reference
from fovea.kernels.activation import ACTIVATIONS, finish
from fovea.kernels.attention import Chunk, Heads
from fovea.kernels.choose import choose
from fovea.kernels.pages import FORMATS, KVPool
from fovea.kernels.torch_kernels import PLAIN
from fovea.kernels.triton import decode as triton_decode
from fovea.kernels.triton import rows as triton_rows
from fovea.kernels.triton.kernels import TritonKernels
from tests.support.pages import numbers, stored

HOPPER_SHARED_BYTES = 227 * 1024
"""Shared memory that a Hopper GPU gives to one program at most."""
CPU = torch.device("cpu")
HEADS = Heads(4, 2, 24)
KERNELS = TritonKernels(CPU)
CLOSE = {torch.float32: (1e-5, 1e-5), torch.float16: (2e-3, 2e-3), torch.bfloat16: (0.02, 0.02)}
TYPES = pytest.mark.parametrize("dtype", list(CLOSE), ids=str)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    atol, rtol = CLOSE[theirs.dtype]
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


@TYPES
def test_norms(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 40).to(dtype) * 5, torch.randn(40).to(dtype)
    close(triton_rows.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    centered = triton_rows.rms_norm(x, weight, 1e-5, centered=True)
    close(centered, reference.centered_rms_norm(x, weight, 1e-5))
    heads = torch.randn(2, 3, 40).to(dtype)
    close(triton_rows.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5))


@TYPES
@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize(
    "parts",
    [("outer",), ("inner",), ("inner", "outer"), ("inner", "factor"), ("gate", "outer")],
    ids="+".join,
)
def test_sums_with_norms_before_and_after_them(
    dtype: torch.dtype, centered: bool, parts: tuple[str, ...]
) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(3, 40).to(dtype) * 5 for _ in range(2))
    sizes = {"inner": 40, "outer": 40, "factor": 1, "gate": 1}
    given = {name: torch.randn(size).to(dtype) for name, size in sizes.items() if name in parts}
    options = {"inner": None, "outer": None, **given, "eps": 1e-5, "centered": centered}
    ours, theirs = KERNELS.add_norm(x, y, **options), PLAIN.add_norm(x, y, **options)
    for mine, other in zip(ours, theirs, strict=True):
        close(mine, other)


@TYPES
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activations(activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_rows, "GATE_TILE", 16)
    x = torch.randn(3, 2 * 40, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, :8] *= 100  # the exponentials of these are infinite
    close(triton_rows.gate(x, activation), finish(x, activation, True, None))


@pytest.mark.parametrize("shape", [(7, 12), (2, 3, 12)], ids=str)
def test_rows_of_an_odd_size_lie_at_multiples_of_16_bytes(shape: tuple[int, ...]) -> None:
    """Qwen2.5-VL's tower has MLPs of 3,420 numbers. cuBLAS multiplied such rows with its slow kernels."""
    x = torch.randn(*shape)
    first, second = torch.randn(2 * 5, 12), torch.randn(12, 5)
    bias = torch.randn(12)
    up, down = KERNELS.product(first, None, "silu", True), KERNELS.product(second, bias, None, False)
    assert up is not None
    assert down is not None
    inner = up(x, None)
    assert inner.shape == (*shape[:-1], 5)
    assert inner.stride(-2) % 8 == 0
    expected = PLAIN.product(first, None, "silu", True)
    assert expected is None
    plain = torch.nn.functional.silu(x @ first[:5].T) * (x @ first[5:].T)
    close(inner, plain)
    close(down(inner, x), plain @ second.T + bias + x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "dim", "rotated"), [(6, 16, 16), (9, 20, 20), (3, 12, 8)])
def test_heads_are_rotated_in_place(dtype: torch.dtype, heads: int, dim: int, rotated: int) -> None:
    """All but the last third of the heads, which are values; and only the first numbers of each head."""
    x = torch.randn(5, heads, dim).to(dtype)
    cos, sin = torch.randn(2, 5, 1, rotated)
    expected = PLAIN.rotate(x.clone(), 2 * heads // 3, cos, sin)
    assert KERNELS.rotate(x, 2 * heads // 3, cos, sin) is x
    close(x, expected)


@TYPES
@pytest.mark.parametrize("norms", [True, False])
def test_queries_and_keys_are_rotated_and_keys_and_values_are_stored(dtype: torch.dtype, norms: bool) -> None:
    torch.manual_seed(0)
    heads, kv_heads, dim = 3, 2, 24
    qkv = torch.randn(4, heads + 2 * kv_heads, dim).to(dtype)
    angle = torch.randn(4, 1, dim // 2).repeat(1, 1, 2)
    weights = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if norms else None
    slots = torch.tensor([9, 2, 0, 5])
    pools = [torch.zeros(3, 4, 2, kv_heads, dim, dtype=dtype) for _ in range(2)]
    arguments = [(qkv.clone(), heads, angle.cos(), angle.sin(), weights, 1e-6, pool, slots) for pool in pools]
    close(KERNELS.rotate_store(*arguments[0]), PLAIN.rotate_store(*arguments[1]))
    close(pools[0], pools[1])


@TYPES
@pytest.mark.parametrize("kind", ["centered", "values have a norm", "values are keys", "only queries"])
def test_other_kinds_of_heads(dtype: torch.dtype, kind: str) -> None:
    """Ten of 24 numbers are rotated. The rows are a part of longer ones, as beside the gates of Qwen3.5."""
    torch.manual_seed(0)
    heads, kv_heads, dim, rotary = 3, 2, 24, 10
    only, shared = kind == "only queries", kind == "values are keys"
    present = heads + (0 if only else kv_heads if shared else 2 * kv_heads)
    rows = torch.randn(4, present * dim + 7).to(dtype)
    angle = torch.randn(4, 1, rotary // 2).repeat(1, 1, 2)
    weights = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype))
    options = {
        "centered": kind == "centered",
        "value_norm": torch.ones(dim, dtype=dtype) if shared or "norm" in kind else None,
    }
    slots, found = torch.tensor([9, 2, 0, 5]), []
    for kernels in (KERNELS, PLAIN):
        kv = torch.zeros(3, 4, 2, kv_heads, dim, dtype=dtype)
        qkv = rows.clone()[:, :-7].view(4, present, dim)
        store = (None, None) if only else (kv, slots)
        query = kernels.rotate_store(qkv, heads, angle.cos(), angle.sin(), weights, 1e-6, *store, **options)
        found.append((query, kv))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])
    assert bool(found[1][1].any()) != only


def planner(heads: int, kv_heads: int, dim: int, size: int) -> GroupPlanner:
    group = KVGroup((0,), None, Heads(heads, kv_heads, dim))
    return GroupPlanner(KERNELS, group, False, size, CPU, torch.float32)


def item(number: int, blocks: list[int], first: int, count: int) -> Work:
    seq = Sequence(f"s{number}", [0] * (first + count), SamplingParams(), 1)
    seq.blocks = blocks
    return Work(seq, first, count)


def check(
    work: list[Work],
    heads: tuple[int, int],
    dim: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    kind: str = "auto",
) -> attention_plan.AttentionPlan:
    query_heads, kv_heads = heads
    torch.manual_seed(0)
    blocks = 1 + max(max(each.seq.blocks) for each in work)
    kv = stored(torch.randn(blocks, size, 2, kv_heads, dim).to(dtype), kind)
    query = torch.randn(sum(each.count for each in work), query_heads, dim).to(dtype)
    plan = planner(query_heads, kv_heads, dim, size).plan(work)
    ours, row = KERNELS.attend(query, kv, plan, 0.3), 0
    for each in work:
        rows = query[row : row + each.count]
        close(
            ours[row : row + each.count],
            reference.paged_attention(rows, numbers(kv).to(dtype), each.seq.blocks, each.start, 0.3),
        )
        row += each.count
    return plan


@pytest.mark.parametrize(
    ("heads", "dtype", "kind"),
    [
        ((6, 2), torch.float32, "int8"),
        ((7, 1), torch.float16, "auto"),
        pytest.param((4, 4), torch.float32, "auto", marks=pytest.mark.slow),
        pytest.param((7, 1), torch.float32, "fp8", marks=pytest.mark.slow),
        pytest.param((4, 4), torch.float16, "int8", marks=pytest.mark.slow),
        pytest.param((6, 2), torch.float16, "auto", marks=pytest.mark.slow),
        pytest.param((6, 2), torch.float32, "auto", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_decodes_of_any_length(heads: tuple[int, int], dtype: torch.dtype, kind: str) -> None:
    """The lengths are one token, the end of a tile, one token more, and several splits.

    Blocks are in random order, and the step also has a chunk of a prompt.
    """
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    work = []
    for number, stop in enumerate([1, 16, 64, 65, 200, 330]):
        used = -(-stop // 16)
        work.append(item(number, order[:used], stop - 1, 1))
        order = order[used:]
    plan = check([*work, item(9, order[:2], 3, 20)], heads, 24, 16, dtype, kind)
    assert plan.decodes[0].shared is None


@pytest.mark.parametrize("heads", [pytest.param((4, 4), marks=pytest.mark.slow), (6, 2), (7, 1)], ids=str)
def test_a_shared_prefix_is_read_once_and_changes_nothing(
    heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of rows share a prefix, and one row shares none.

    The test replaces the common blocks in the tables of all members but the first. The result must not
    change, because only the first member's table is read for them.
    """
    first, second = list(range(20)), list(range(20, 30))
    work = [item(0, [50, 51], 20, 1)]
    work += [item(1 + n, [*second, 30 + n], 161 + n, 1) for n in range(2)]
    work += [item(3 + n, [*first, 40 + n], 321 + 3 * n, 1) for n in range(3)]
    monkeypatch.setattr(
        attention_plan,
        "find_prefix_groups",
        lambda *args, **_: decode_batches.find_prefix_groups(*args, least_rows=2, least_tokens=32),
    )
    plan = check(work, heads, 16, 16)
    shared = plan.decodes[0].shared
    assert shared is not None
    assert shared.starts.tolist() == [0, 160, 160, 320, 320, 320]
    assert sorted(shared.lengths.tolist()) == [160, 320]
    query, kv = torch.randn(6, heads[0], 16), torch.randn(52, 16, 2, heads[1], 16)
    before = KERNELS.attend(query, kv, plan, 0.3)
    plan.decodes[0].tables[2, :10] = 51
    plan.decodes[0].tables[4:, :20] = 51
    torch.testing.assert_close(KERNELS.attend(query, kv, plan, 0.3), before, atol=0, rtol=0)


@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_pages_in_eight_bits_hold_what_their_twin_stores(kind: str) -> None:
    """Levels and scales are equal to the last bit, also those of a head that is zero.

    The interpreter does not round 8-bit floats to the nearest.
    """
    torch.manual_seed(0)
    qkv = torch.randn(5, 3 + 2 * 2, 24).to(torch.float16) * torch.tensor([1, 30, 1e-3, 1, 1])[:, None, None]
    qkv[3, 4:] = 0
    turn, slots = (torch.ones(5, 1, 24), torch.zeros(5, 1, 24)), torch.tensor([9, 2, 0, 5, 11])
    found = []
    for kernels in (KERNELS, PLAIN):
        pool = KVPool((1, 3, 4), 2, 24, torch.float16, FORMATS[kind])
        kernels.rotate_store(qkv.clone().half(), 3, *turn, None, 1e-6, pool.kv[0], slots)
        found.append(numbers(pool.kv[0]))
    torch.testing.assert_close(*found, atol=0, rtol=0 if kind == "int8" else 0.13)
    assert bool(found[0].any())


@pytest.mark.parametrize("window", [None, pytest.param(33, marks=pytest.mark.slow)])
def test_chunks_in_eight_bits_can_be_cut_anywhere(window: int | None) -> None:
    """Bits are not compared here: numpy adds in another order for other rows of a product."""
    torch.manual_seed(0)
    length, table = 90, torch.tensor([3, 0, 5, 2, 4, 1])
    kv = stored(torch.randn(6, 16, 2, 2, 24), "int8")
    query, ends = torch.randn(length, 4, 24), torch.arange(length) + 1
    limits = None if window is None else torch.stack(((ends - window).clamp(min=0), ends), 1)

    def part(first: int, last: int) -> torch.Tensor:
        own = None if limits is None else limits[first:last].contiguous()
        chunk = Chunk(0, last - first, first, table, own)
        return KERNELS.attend(query[first:last], kv, attention_plan.AttentionPlan(table, (), (chunk,)), 0.3)

    whole = part(0, length)
    close(torch.cat([part(0, 17), part(17, 80), part(80, length)]), whole)
    chunk = Chunk(0, length, 0, table, limits)
    close(whole, PLAIN.attend(query, kv, attention_plan.AttentionPlan(table, (), (chunk,)), 0.3))


def test_more_rows_than_fit_into_a_group_and_groups_that_are_padding() -> None:
    """Graphs are replayed with room for more prefix groups than a step has."""
    rows = triton_decode.shared_rows(6)
    work = [item(n, [*range(17), 20 + n], 273, 1) for n in range(rows + 2)]
    plan = check(work, (6, 1), 16, 16)
    (group,) = plan.decodes
    assert group.shared is not None
    assert len(group.shared.members) == 1
    assert group.shared.starts.tolist() == [272] * rows + [0, 0]
    query, kv = torch.randn(rows + 2, 6, 16), torch.randn(40, 16, 2, 1, 16)
    before = KERNELS.attend(query, kv, plan, 0.3)
    padded = attention_plan.PrefixGroups(
        group.shared.starts,
        torch.cat((group.shared.members, torch.full((2, rows), -1))),
        torch.cat((group.shared.lengths, torch.zeros(2, dtype=torch.long))),
    )
    more = replace(group, shared=padded)
    again = attention_plan.AttentionPlan(plan.slots, (more,), ())
    torch.testing.assert_close(KERNELS.attend(query, kv, again, 0.3), before, atol=0, rtol=0)


def test_a_rows_result_has_the_same_bits_whichever_rows_are_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Contexts were once cut into fewer parts in larger batches."""
    monkeypatch.setattr(triton_decode, "LEAST_TOKENS", 64)
    monkeypatch.setattr(triton_decode, "TOKENS_PER_QUERY", 1)
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)).tolist()
    work = [item(0, order[:25], 390, 1), item(1, order[25:30], 70, 1), item(2, order[30:50], 310, 1)]
    torch.manual_seed(0)
    kv, query = torch.randn(60, 16, 2, 2, 24), torch.randn(3, 6, 24)
    plans = planner(6, 2, 24, 16)
    together = KERNELS.attend(query, kv, plans.plan(work), 0.3)
    for row, each in enumerate(work):
        alone = plans.plan([each])
        pieces = alone.decodes[0].pieces
        assert pieces is not None
        assert len(pieces.own) == -(-each.stop // 64)
        assert torch.equal(KERNELS.attend(query[row : row + 1], kv, alone, 0.3)[0], together[row])


def test_fewer_programs_than_pieces_compute_several_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_decode, "LEAST_TOKENS", 64)
    monkeypatch.setattr(triton_decode, "TOKENS_PER_QUERY", 1)
    work = [item(row, list(range(10 * row, 10 * row + 10)), 150 + row, 1) for row in range(3)]
    torch.manual_seed(0)
    kv, query = torch.randn(30, 16, 2, 2, 24), torch.randn(3, 6, 24)
    plan = planner(6, 2, 24, 16).plan(work)
    many = KERNELS.attend(query, kv, plan, 0.3)
    monkeypatch.setattr(triton_decode, "programs", lambda *_: 2)
    assert torch.equal(KERNELS.attend(query, kv, plan, 0.3), many)


def test_triton_without_a_gpu_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(choose("triton", CPU, torch.float32, HEADS), TritonKernels)
    second = torch.device("cuda", 1)
    with pytest.raises(
        ConfigError,
        match="first visible GPU only, the device is cuda:1; choose the GPU with CUDA_VISIBLE_DEVICES",
    ):
        choose("triton", second, torch.float32, HEADS)
    assert type(choose("auto", second, torch.float32, HEADS)) is type(PLAIN)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="triton kernels are for CUDA, the device is cpu"):
        choose("triton", CPU, torch.float32, HEADS)
    monkeypatch.setattr("fovea.kernels.choose.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="need the package triton, which is not installed"):
        choose("triton", CPU, torch.float32, HEADS)
    assert type(choose("auto", torch.device("cuda"), torch.float32, HEADS)) is type(PLAIN)


@pytest.mark.slow
def test_every_launch_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    """The compiler refuses some code that the interpreter accepts. Compiling needs no GPU.

    It runs in a new process, because in one that has imported Triton for its interpreter nothing compiles.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_triton"],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    launches = json.loads(process.stdout)
    kernels = ["_add_norm", "_gate", "_rotate_store", "_own_pieces", "_merge", "_shared_pieces", "_chunk"]
    kernels += ["_multiply", "_chosen", "_add_splits", "_unpack", "_round_rows"]
    kernels += ["_conv", "_delta", "_gated_norm", "_choose", "_sum", "_open"]
    assert list(dict.fromkeys(launch["kernel"] for launch in launches)) == kernels
    assert {launch["type"] for launch in launches if launch["kernel"] == "_own_pieces"} == {"*bf16", "*fp32"}
    assert max(launch["shared_bytes"] for launch in launches) <= HOPPER_SHARED_BYTES
    norm = launches[0]
    odd = [launch for launch in launches if launch["kernel"] == "_own_pieces"][-1]
    assert norm["hints"] == ["x", "y", "inner", "outer", "factor", "gate", "total", "out", "width"]
    assert norm["wide"] > 0, "without the hints no row is read 16 bytes at a time"
    assert odd["ones"] == ["kv_heads"]
    assert "dim" not in odd["hints"]
