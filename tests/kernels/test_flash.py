"""Attention of prompts by FlashInfer, computed by a fake of the library. tests/gpu uses the real one."""

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
from fovea.engine.execute.attention_plan import GroupPlanner
from fovea.engine.layers.config import KVGroup
from fovea.engine.schedule.plan import Work
from fovea.engine.sequence import Sequence
from fovea.kernels import flash, reference
from fovea.kernels.attention import AttentionPlan, Heads, prefill_each
from fovea.kernels.choose import choose
from fovea.kernels.spans import attend_each
from fovea.kernels.torch_kernels import PLAIN
from tests.support import fake_flashinfer
from tests.support.thorough import examples

CPU, HALF, DIM, SCALE = torch.device("cpu"), torch.float16, 8, 0.3
HEADS = Heads(4, 2, 64)
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="there is a GPU: tests/gpu runs the kernels on it"
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
    """Return the work of sequences with shuffled blocks, and the number of blocks. Some blocks have no owner.

    spans: (first, count) of each sequence.
    """
    needed = [-(-(first + count) // size) for first, count in spans]
    order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).tolist()
    work = []
    for (first, count), blocks in zip(spans, needed, strict=True):
        seq = Sequence(f"s{len(work)}", [0] * (first + count), SamplingParams(), 1)
        seq.blocks, order = order[:blocks], order[blocks:]
        work.append(Work(seq, first, count))
    return work, sum(needed) + 3


def plan_of(work: list[Work], size: int, kernels: Any = PLAIN) -> AttentionPlan:
    group = KVGroup((0,), None, Heads(2, 2, DIM))
    return GroupPlanner(kernels, group, False, size, CPU, HALF).plan(work)


def random_tensors(
    work: list[Work], blocks: int, size: int, heads: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random queries for all rows, and a random KV pool."""
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


@settings(max_examples=examples(100), deadline=None)
@given(
    spans=st.lists(st.tuples(st.integers(0, 40), st.integers(2, 20)), min_size=1, max_size=6),
    size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    seed=st.integers(0, 5),
)
def test_chunks_of_any_length_after_any_context(
    spans: list[tuple[int, int]], size: int, heads: tuple[int, int], seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", fake_flashinfer)
        patch.setattr(flash, "WORKSPACE_BYTES", 16)
        attention = flash.FlashInfer(CPU)
    work, blocks = works(spans, size, seed)
    query, kv = random_tensors(work, blocks, size, heads)
    out = torch.full_like(query, 7)
    attention(query, kv, plan_of(work, size).chunks, SCALE, out)
    check(out, query, kv, work)


def test_layers_share_a_plan_and_steps_do_not(attention: flash.FlashInfer) -> None:
    """The pool of a layer is a slice of a larger tensor. Both steps have chunks of the same sizes."""
    for seed in (1, 2):
        work, blocks = works([(5, 9), (0, 4)], 4, seed)
        query, kv = random_tensors(work, blocks, 4, (4, 2))
        layers, plan = torch.stack((kv, kv.flip(0), -kv)), plan_of(work, 4)
        for layer in layers:
            out = torch.zeros_like(query)
            attention(query, layer, plan.chunks, SCALE, out)
            check(out, query, layer, work)
        assert attention._wrapper.plans == seed


def test_a_plan_waits_for_the_copy_of_the_previous_plan(
    attention: flash.FlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    plan = attention._wrapper.plan

    def record_plan(*args: Any, **kwargs: Any) -> None:
        events.append("plan")
        plan(*args, **kwargs)

    monkeypatch.setattr(attention._wrapper, "plan", record_plan)
    event = SimpleNamespace(synchronize=lambda: events.append("wait"), record=lambda: events.append("record"))
    monkeypatch.setattr(attention, "_copy_event", event)
    work, blocks = works([(0, 4)], 4, 0)
    query, kv = random_tensors(work, blocks, 4, (2, 2))
    attention(query, kv, plan_of(work, 4).chunks, SCALE, torch.zeros_like(query))
    assert events == ["wait", "plan", "record"]


@interpreted
def test_decodes_of_the_same_step_are_computed_by_triton(attention: flash.FlashInfer) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from fovea.kernels.triton.kernels import TritonKernels

    kernels = TritonKernels(CPU, attention)
    work, blocks = works([(30, 1), (3, 1), (20, 11), (0, 6)], 16, 0)
    query, kv = random_tensors(work, blocks, 16, (4, 2))
    check(kernels.attend(query, kv, plan_of(work, 16, kernels), SCALE), query, kv, work)
    assert attention._wrapper.plans == 1
    without_chunks = plan_of(work[:2], 16, kernels)
    check(kernels.attend(query[:2], kv, without_chunks, SCALE), query, kv, work[:2])
    assert attention._wrapper.plans == 1


@interpreted
def test_flashinfer_is_chosen_if_it_is_installed(library: Any, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    caplog.set_level(logging.INFO, "fovea.kernels")
    kernels: Any = choose("flashinfer", CPU, HALF, HEADS)
    assert isinstance(kernels._chunks, flash.FlashInfer)
    assert "attention of prompts: FlashInfer's" in caplog.text
    triton_alone: Any = choose("triton", CPU, HALF, HEADS)
    assert triton_alone._chunks is prefill_each


GPU = SimpleNamespace(multi_processor_count=4, major=9, minor=0)


@interpreted
def test_auto_uses_torch_without_flashinfer_and_logs_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from fovea.kernels.triton import kernels as triton_kernels

    monkeypatch.setattr(triton_kernels.torch.cuda, "get_device_properties", lambda _: GPU)
    monkeypatch.setattr(triton_kernels, "load_spans", lambda device: attend_each)
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    caplog.set_level(logging.INFO, "fovea.kernels")
    kernels: Any = choose("auto", torch.device("cuda"), HALF, HEADS)
    assert kernels._chunks is prefill_each
    assert len(caplog.messages) == 1
    assert "torch's, over gathered copies of the KV cache; flashinfer kernels need the package" in caplog.text


def test_types_and_heads_that_flashinfer_lacks_are_refused_by_name(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="bfloat16 or float16, the model runs in float32"):
        flash.load(HEADS, CPU, torch.float32)
    with pytest.raises(ConfigError, match="heads of 64, 128, 256 numbers, the model's have 80"):
        flash.load(Heads(4, 2, 80), CPU, HALF)
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package flashinfer-python, which is not installed"):
        flash.load(HEADS, CPU, HALF)


@interpreted
def test_kernels_requested_by_name_are_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(flash, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="not installed"):
        choose("flashinfer", CPU, HALF, HEADS)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="triton kernels are for CUDA, the device is cpu"):
        choose("flashinfer", CPU, HALF, HEADS)


@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
def test_a_correct_library_passes_the_trial(library: Any, dtype: torch.dtype) -> None:
    error = flash.trial_error(flash.FlashInfer(CPU), HEADS, CPU, dtype)
    assert 0 < error < flash.MAX_TRIAL_ERROR / 3
    flash.load(HEADS, CPU, dtype)


def test_a_library_that_does_not_compile_is_refused_with_its_error(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("Ninja build failed\nand all of its output")

    monkeypatch.setattr(library, "plan", fail)
    with pytest.raises(ConfigError, match="cannot be used: RuntimeError: Ninja build failed$"):
        flash.load(HEADS, CPU, HALF)


@pytest.mark.parametrize("wrong", ["sides", "mask", "nan"])
def test_a_library_with_wrong_results_is_refused(
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
