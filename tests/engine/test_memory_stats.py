"""Tests of the figures that real engines report about states, checkpoints and sliding windows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fovea.observe.table import FIGURES
from fovea.server.routes.admin import cache_figures
from tests.support.engines import ask, assert_idle, engine, picture

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}


def test_a_model_with_states_and_one_with_windows_report_their_memory(
    hybrid: Path, checkpoint: Callable[[str], Path]
) -> None:
    prompt = ask("What is in the image?", picture(1))
    with engine(hybrid, state_spacing=8, max_running=2) as machine:
        machine.generate(prompt, **GREEDY)
        assert_idle(machine)
        stats = machine.stats()
        memory = machine.runner.memory
        assert set(stats) <= FIGURES
        assert stats["state_slots_total"] == 2 * 9, "a state and eight checkpoints per running sequence"
        assert stats["state_slots_used"] == 0
        assert stats["state_checkpoints"] > 4
        assert stats["state_checkpoint_bytes"] == stats["state_checkpoints"] * memory.state_nbytes
        layers = [tensor for layer in memory.states for tensor in layer]
        assert stats["state_capacity_bytes"] == sum(tensor.nbytes for tensor in layers)
        assert "window_blocks_total" not in stats
        assert stats["image_encode_seconds_le_inf"] == stats["image_project_seconds_le_inf"] == 1
        assert 0 < stats["image_project_seconds_sum"] < stats["image_encode_seconds_sum"]
        assert stats["step_tokens_le_inf"] == stats["step_sequences_sum"] == GREEDY["max_tokens"]
        assert stats["step_tokens_sum"] == stats["computed_tokens"]
        assert cache_figures(stats)["states"]["bytes"] == stats["state_checkpoint_bytes"]
        assert "kv_windows" not in cache_figures(stats)
        machine.clear_caches("kv")
        assert machine.stats()["state_checkpoints"] == 0

    with engine(checkpoint("gemma3"), block_size=4, max_step_tokens=32) as machine:
        machine.generate(prompt, **GREEDY)
        assert_idle(machine)
        stats = machine.stats()
        kv, windows = machine.runner.memory.kv
        assert set(stats) <= FIGURES
        assert stats["window_blocks_total"] == windows.pages.shape[1]
        assert stats["window_blocks_used"] == 0
        assert stats["window_blocks_returned"] > 0
        assert "state_slots_total" not in stats
        caches = cache_figures(stats)
        assert caches["kv"]["capacity_bytes"] == kv.pages.nbytes
        assert caches["kv_windows"]["capacity_bytes"] == windows.pages.nbytes
        assert 0 < caches["kv_windows"]["bytes"] <= windows.pages.nbytes
        assert "states" not in caches
