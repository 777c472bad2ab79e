"""The memory of a GPU is divided after a run of the largest step, here on a stand-in for that memory."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea import Engine
from fovea.core.errors import ConfigError
from fovea.engine import assemble
from fovea.engine.config import MIB, EngineConfig
from fovea.engine.execute import memory_profile
from fovea.engine.execute.device_memory import Usage, device_memory
from fovea.engine.execute.memory_profile import MemoryParts
from fovea.engine.execute.runner import Runner
from fovea.observe.table import FIGURES
from tests.support.checkpoints import ARCHITECTURES
from tests.support.engines import SETTINGS, ask, assert_idle, engine, picture, shared_model
from tests.support.programs import need_kernels
from tests.support.thorough import others_slow

ROW, PATCH = 16 << 10, 1 << 10
"""Bytes that a row of a step, and a patch of an image, take on the stand-in."""
SMALL: dict[str, Any] = {
    "kv_blocks": 0, "max_running": 4, "max_step_tokens": 64, "embed_cache_mib": 4, "region_cache_mib": 1,
}  # fmt: skip


@dataclass
class FakeMemory:
    """A device on which weights, other processes, libraries and steps take memory of a known size.

    rows, patches: the largest step and image that were computed.
    """

    total: int = 512 * MIB
    others: int = 40 * MIB
    weights: int = 10 * MIB
    libraries: int = 0
    rows: list[int] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    longest: int = 0
    patches: int = 0

    def usage(self) -> Usage:
        gc.collect()
        return Usage(self.total, self.others + self.libraries + self.weights, self.weights)

    def begin_peak(self) -> int:
        self.libraries = 3 * MIB  # as if the first kernels of the runner were loaded
        return self.weights + 2 * MIB

    def peak(self) -> int:
        return self.weights + 2 * MIB + max(self.rows) * ROW + self.patches * PATCH


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    """A stand-in that sees the steps and images of the profile run. Its images are small."""
    fake, forward = FakeMemory(), Runner._forward

    def note(runner: Runner, work: list[Any], rows: list[int]) -> Any:
        fake.rows.append(sum(item.count for item in work))
        fake.decodes.append(len(rows))
        fake.longest = max(fake.longest, *(item.stop for item in work))
        return forward(runner, work, rows)

    def noted(device: torch.device) -> FakeMemory:
        monkeypatch.setattr(Runner, "_forward", note)
        return fake

    measure = memory_profile.measure

    def measured(*arguments: Any) -> MemoryParts:
        parts = measure(*arguments)
        monkeypatch.setattr(Runner, "_forward", forward)
        return parts

    monkeypatch.setattr(assemble, "device_memory", noted)
    monkeypatch.setattr(assemble, "measure", measured)
    monkeypatch.setattr(memory_profile, "SIDES", (256,))
    monkeypatch.setattr(memory_profile, "LEAST_HEADROOM", 16 * MIB)
    return fake


def test_the_pool_gets_what_the_largest_step_leaves(
    qwen: Path, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The pool took 80% of the free memory, whether steps of 16,384 tokens or of 64 were allowed."""
    model = shared_model(qwen).model
    encode = model.encode_slices

    def note(image: Any) -> Any:
        memory.patches = max(memory.patches, image.arrays["pixel_values"].shape[0])
        return encode(image)

    monkeypatch.setattr(model, "encode_slices", note)
    with caplog.at_level(logging.INFO, "fovea.engine"), engine(qwen, **SMALL) as machine:
        stats = machine.stats()
        assert set(stats) <= FIGURES
        plan = memory_profile.largest_plan(machine.parts.preparer.builder.processor, 256)
        assert plan is not None
        assert memory.patches == plan.grid[1] * plan.grid[2]
        assert max(memory.rows) == 64, "a step of max_step_tokens"
        assert memory.decodes == [4, 4], "max_running rows sample, with and without a chunk of a prompt"
        assert memory.longest == machine.info.max_context, "the chunk is at the end of the longest context"
        step = 64 * ROW + memory.patches * PATCH
        room = (512 - 40 - 10 - 3 - 5 - 16) * MIB - step
        block = machine.runner.block_bytes
        assert stats["kv_blocks_total"] == min(room // block, 4 * -(-machine.info.max_context // 16))
        assert stats["memory_step_bytes"] == step
        assert stats["memory_kv_bytes"] == stats["kv_blocks_total"] * block
        parts = [
            "others",
            "weights",
            "libraries",
            "step",
            "graphs",
            "outputs",
            "copies",
            "headroom",
            "kv",
            "spare",
        ]
        assert sum(stats[f"memory_{name}_bytes"] for name in parts) == stats["memory_total_bytes"]
        machine.generate(ask("what is it?", picture(1)), temperature=0, max_tokens=4)
        assert_idle(machine)
    assert "512 = 40 other processes and CUDA + 10 weights + 3 libraries + " in caplog.text
    assert " largest step + 0 CUDA graphs + 5 encoder outputs + 0 copies + 16 headroom + " in caplog.text


def test_recorded_graphs_are_a_part(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory outlives a step. A runner's graphs are gone when it is."""
    need_kernels()
    pad, runners = Runner.pad_decodes, []

    def record(runner: Runner, padding: Any) -> None:
        pad(runner, padding)
        if padding is not None:
            runners.append(weakref.ref(runner))
            weakref.finalize(runner, setattr, memory, "weights", memory.weights)
            memory.weights += 7 * MIB

    monkeypatch.setattr(Runner, "pad_decodes", record)
    settings = {**SMALL, "device": "cpu", "threads": 1, "dtype": "bfloat16", "decode_graphs": "padded"}
    with Engine.from_pretrained("fovea-tiny", **settings) as machine:
        assert machine.stats()["memory_graphs_bytes"] == 7 * MIB
        assert machine.stats()["memory_weights_bytes"] == 10 * MIB
        assert machine.stats()["memory_libraries_bytes"] == 3 * MIB
        assert len(runners) == 2
        assert runners[1]() is machine.runner


def test_other_processes_and_larger_steps_leave_less(qwen: Path, memory: FakeMemory) -> None:
    """On a GPU that others use, only the rest of its memory is divided."""
    memory.total = 100 * MIB
    sizes = {}
    for name, others, tokens in (("few", 10, 64), ("shared", 50, 64), ("large", 10, 1024)):
        memory.others = others * MIB
        memory.rows.clear()
        with engine(qwen, **{**SMALL, "max_step_tokens": tokens, "max_running": 64}) as machine:
            sizes[name] = machine.runner.moves._pools[0].pages.nbytes
    block = sizes["few"] - sizes["shared"] - 40 * MIB
    assert abs(block) <= 2 * machine.runner.block_bytes
    assert sizes["few"] - sizes["large"] >= (1024 - 64) * ROW - 2 * machine.runner.block_bytes


def test_a_configured_pool_is_reported_with_what_does_not_fit(
    qwen: Path, memory: FakeMemory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.total = 100 * MIB
    with caplog.at_level(logging.INFO, "fovea.engine"):
        with engine(qwen, **SMALL, kv_cache_mib=8) as machine:
            assert machine.stats()["memory_kv_bytes"] <= 8 * MIB
            assert machine.stats()["memory_spare_bytes"] > 0
        assert "will be tried again in halves" not in caplog.text
        memory.total = 80 * MIB
        with engine(qwen, **SMALL, kv_cache_mib=8) as machine:
            assert machine.stats()["memory_spare_bytes"] < 0
    assert "beside the largest step 5 MiB are left: large steps will be tried again in halves" in caplog.text


def test_a_gpu_without_room_for_a_pool_is_refused(
    qwen: Path, memory: FakeMemory, caplog: pytest.LogCaptureFixture
) -> None:
    memory.total = 70 * MIB
    with (
        caplog.at_level(logging.INFO, "fovea.engine"),
        pytest.raises(ConfigError, match="free memory allows 0 MiB, which hold no block of"),
    ):
        engine(qwen, **SMALL)
    assert "+ 0 KV and states - 5 that are missing" in caplog.text


def test_a_step_that_does_not_fit_is_refused_at_the_start(
    qwen: Path, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, the first large prompt of a client was the one to find this out."""

    def full(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Runner, "_compute", full)
    with pytest.raises(ConfigError, match=r"64 tokens \(max_step_tokens\), 4 sequences \(max_running\)"):
        engine(qwen, **SMALL)


def test_the_largest_image_that_fits_is_measured(
    qwen: Path, memory: FakeMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = shared_model(qwen).model
    encode, sizes = model.encode_slices, []

    def limited(image: Any) -> Any:
        sizes.append(image.plan.width)
        if image.plan.width > 128:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(image)

    monkeypatch.setattr(model, "encode_slices", limited)
    monkeypatch.setattr(memory_profile, "SIDES", (256, 128, 64))
    with caplog.at_level(logging.WARNING, "fovea.engine"), engine(qwen, **SMALL) as machine:
        assert sizes == [256, 256, 128], "the large one was also tried alone"
        assert_idle(machine)
    assert "an image of 256 x 256 pixels" in caplog.text


@pytest.mark.parametrize(
    "architecture",
    others_slow(sorted(ARCHITECTURES), ["gemma3", "llava", "mllama", "qwen2_5_vl", "qwen3_5"]),
)
def test_every_family_is_measured(
    architecture: str, checkpoint: Callable[[str], Path], memory: FakeMemory
) -> None:
    """Models with states, windows, cross-attention or whole images have their own plans of steps."""
    with engine(checkpoint(architecture), **SMALL, max_context=512) as machine:
        whole = machine.runner.model.decoder.config.whole_images
        assert max(memory.rows) == min(512, 64 + whole)
        assert machine.stats()["memory_step_bytes"] > 0
        assert_idle(machine)


def test_a_cpu_is_not_measured(qwen: Path) -> None:
    assert device_memory(torch.device("cpu")) is None
    with engine(qwen) as machine:
        assert not any(name.startswith("memory_total") for name in machine.stats())
    assert SETTINGS["kv_blocks"]
    assert EngineConfig().kv.kv_blocks == 0
