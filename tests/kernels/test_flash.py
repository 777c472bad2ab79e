"""Chunks of prompts by FlashInfer, of which a stand-in does the arithmetic. The library itself: tests/gpu."""

from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from fovea.core.errors import ConfigError
from fovea.core.sampling import SamplingParams
from fovea.engine.execute.attention_plan import AttentionPlanner
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import Sequence
from fovea.kernels import reference
from fovea.kernels.attention import AttentionPlan, Heads, prefill_each
from fovea.kernels.choose import choose
from fovea.kernels.flash import attention as flash
from fovea.kernels.torch.kernels import PLAIN
from tests.support import fake_flashinfer

CPU, HALF, DIM, SCALE = torch.device("cpu"), torch.float16, 8, 0.3
HEADS = Heads(4, 2, 64)
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="there is a card: tests/gpu runs the kernels on it"
)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(flash, "WORKSPACE_BYTES", 16)
    return fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper


@pytest.fixture
def attention(library: Any) -> flash.FlashInfer:
    return flash.FlashInfer(CPU)


def works(spans: list[tuple[int, int]], size: int, seed: int) -> tuple[list[Work], int]:
    """(first, count) of each sequence on shuffled blocks, and how many blocks there are; some are nobody's."""
    needed = [-(-(first + count) // size) for first, count in spans]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    found = []
    for (first, count), blocks in zip(spans, needed, strict=True):
        seq = Sequence(f"s{len(found)}", [0] * (first + count), SamplingParams(), 1)
        seq.blocks, order = order[:blocks], order[blocks:]
        found.append(Work(seq, first, count))
    return found, sum(needed) + 3


def planned(work: list[Work], size: int, kernels: Any = PLAIN) -> AttentionPlan:
    config: Any = SimpleNamespace(heads=2, kv_heads=2, head_dim=DIM)
    return AttentionPlanner(kernels, config, size, CPU, HALF).plan(work)


def drawn(
    work: list[Work], blocks: int, size: int, heads: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A query for every row, and a pool."""
    torch.manual_seed(0)
    rows = sum(item.count for item in work)
    return torch.randn(rows, heads[0], DIM).to(HALF), torch.randn(blocks, size, 2, heads[1], DIM).to(HALF)


def check(ours: torch.Tensor, query: torch.Tensor, kv: torch.Tensor, work: list[Work]) -> None:
    row = 0
    for item in work:
        rows = slice(row, row + item.count)
        theirs = reference.paged_attention(query[rows], kv, item.seq.blocks, item.start, SCALE)
        torch.testing.assert_close(ours[rows], theirs, atol=2e-3, rtol=2e-3)
        row += item.count


@settings(max_examples=100, deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20)), min_size=1, max_size=6),
    size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    seed=st.integers(0, 5),
)
def test_chunks_of_any_length_behind_any_context(
    spans: list[tuple[int, int]], size: int, heads: tuple[int, int], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", fake_flashinfer)
        patch.setattr(flash, "WORKSPACE_BYTES", 16)
        attention = flash.FlashInfer(CPU)
    work, blocks = works(spans, size, seed)
    query, kv = drawn(work, blocks, size, heads)
    out = torch.full_like(query, 7)
    attention(query, kv, planned(work, size).chunks, SCALE, out)
    check(out, query, kv, work)


def test_layers_share_a_plan_and_steps_do_not(attention: flash.FlashInfer) -> None:
    """The pool of a layer is a slice of a larger tensor; a step may hold as many tokens of as many as the last."""
    for seed in (1, 2):
        work, blocks = works([(5, 9), (0, 4)], 4, seed)
        query, kv = drawn(work, blocks, 4, (4, 2))
        layers, plan = torch.stack((kv, kv.flip(0), -kv)), planned(work, 4)
        for layer in layers:
            out = torch.zeros_like(query)
            attention(query, layer, plan.chunks, SCALE, out)
            check(out, query, layer, work)
        assert attention._wrapper.plans == seed


def test_a_plan_is_written_when_the_one_before_has_been_copied(
    attention: flash.FlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    plan = attention._wrapper.plan

    def noted(*given: Any, **named: Any) -> None:
        told.append("plan")
        plan(*given, **named)

    monkeypatch.setattr(attention._wrapper, "plan", noted)
    event = SimpleNamespace(synchronize=lambda: told.append("wait"), record=lambda: told.append("record"))
    monkeypatch.setattr(attention, "_copy_event", event)
    work, blocks = works([(0, 4)], 4, 0)
    query, kv = drawn(work, blocks, 4, (2, 2))
    attention(query, kv, planned(work, 4).chunks, SCALE, torch.zeros_like(query))
    assert told == ["wait", "plan", "record"]


@interpreted
def test_decodes_beside_them_are_tritons(attention: flash.FlashInfer) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from fovea.kernels.triton.kernels import TritonKernels

    kernels = TritonKernels(CPU, attention)
    work, blocks = works([(30, 1), (3, 1), (20, 11), (0, 6)], 16, 0)
    query, kv = drawn(work, blocks, 16, (4, 2))
    check(kernels.attend(query, kv, planned(work, 16, kernels), SCALE), query, kv, work)
    assert attention._wrapper.plans == 1
    alone = planned(work[:2], 16, kernels)
    check(kernels.attend(query[:2], kv, alone, SCALE), query, kv, work[:2])
    assert attention._wrapper.plans == 1


@interpreted
def test_it_is_chosen_where_it_is_installed(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    caplog.set_level(logging.INFO, "fovea.kernels")
    kernels: Any = choose("flashinfer", CPU, HALF, HEADS)
    assert isinstance(kernels._chunks, flash.FlashInfer)
    assert "attention of prompts: FlashInfer's" in caplog.text
    alone: Any = choose("triton", CPU, HALF, HEADS)
    assert alone._chunks is prefill_each


@interpreted
def test_auto_does_without_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from fovea.kernels.triton import kernels as triton_kernels

    monkeypatch.setattr(
        triton_kernels.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=4)
    )
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    caplog.set_level(logging.INFO, "fovea.kernels")
    kernels: Any = choose("auto", torch.device("cuda"), HALF, HEADS)
    assert kernels._chunks is prefill_each
    assert len(caplog.messages) == 1
    assert "torch's, over gathered copies of the KV cache; flashinfer kernels need the package" in caplog.text


def test_what_it_can_not_do_is_refused_by_name(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="bfloat16 or float16, the model runs in float32"):
        flash.load(HEADS, CPU, torch.float32)
    with pytest.raises(ConfigError, match="heads of 64, 128, 256 numbers, the model's have 80"):
        flash.load(Heads(4, 2, 80), CPU, HALF)
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package flashinfer-python, which is not installed"):
        flash.load(HEADS, CPU, HALF)


@interpreted
def test_who_asks_for_it_by_name_gets_it_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        choose("flashinfer", CPU, HALF, HEADS)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="triton kernels are for CUDA, the device is cpu"):
        choose("flashinfer", CPU, HALF, HEADS)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
def test_a_library_that_works_passes_its_trial(library: Any, dtype: torch.dtype) -> None:
    error = flash.trial_error(flash.FlashInfer(CPU), HEADS, CPU, dtype)
    assert 0 < error < flash.MAX_TRIAL_ERROR / 3
    flash.load(HEADS, CPU, dtype)


def test_a_library_that_does_not_compile_is_refused_in_its_words(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **named: Any) -> None:
        raise RuntimeError("Ninja build failed\nand the whole of its output")

    monkeypatch.setattr(library, "plan", fail)
    with pytest.raises(ConfigError, match="cannot be used: RuntimeError: Ninja build failed$"):
        flash.load(HEADS, CPU, HALF)


@pytest.mark.parametrize("wrong", ["sides", "mask", "nan"])
def test_a_library_that_answers_something_else_is_refused(
    library: Any, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    run = library.run

    def other(self: Any, q: torch.Tensor, cache: Any, *, out: torch.Tensor) -> torch.Tensor:
        self._causal = wrong != "mask"
        run(self, q, cache[::-1] if wrong == "sides" else cache, out=out)
        return out.fill_(float("nan")) if wrong == "nan" else out

    monkeypatch.setattr(library, "run", other)
    with pytest.raises(ConfigError, match="its attention differs from torch's by"):
        flash.load(HEADS, CPU, HALF)
