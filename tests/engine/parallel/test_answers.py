"""Several processes give the tokens of one: in every family, with every cache, in batches and in chunks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fovea import Engine
from fovea.core.errors import CheckpointError, ConfigError, EngineError, Unavailable
from tests.engine.parallel.support import GREEDY, LONG, PROMPTS, Tokens, group_of, one, start, together
from tests.support.checkpoints import ARCHITECTURES, write
from tests.support.checkpoints.text import write_text
from tests.support.draft_layers import draft_always, eagle3
from tests.support.engines import SETTINGS, ask, assert_idle, engine, picture
from tests.support.gguf_files import quantized, write_model
from tests.support.quantized import SCHEMES, quantize_folder

EVERYTHING: dict[str, Any] = {
    "block_size": 4,
    "kv_blocks": 64,
    "kv_host_mib": 1,
    "kv_dtype": "int8",
    "max_step_tokens": 48,
    "speculate": "prompt,answers",
}
"""A pool too small for all prompts at once, short chunks, blocks in host memory, KV in 8 bits, drafts."""


def test_two_processes_answer_as_one_and_notice_when_one_dies(
    qwen: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [*PROMPTS, "two", "text", "again", "two"]
    with engine(qwen, **EVERYTHING) as machine:
        expected = [one(machine, PROMPTS[name], max_tokens=32) for name in names]
        kept = machine.generate(LONG, kv_keep="snap:0.25", **GREEDY)
        assert kept.usage.dropped > 0
    with start(qwen, **EVERYTHING) as machine:
        assert together(machine, names, max_tokens=32) == expected
        stats = machine.stats()
        assert stats["draft_tokens"] > 0
        assert stats["preemptions"] > 0, "the pool was too large for a preemption"
        assert machine.generate(PROMPTS["two"], **GREEDY).usage.cached > 0
        assert one(machine, LONG, kv_keep="snap:0.25") == kept.token_ids[0]
        machine.clear_caches("kv")
        assert one(machine, PROMPTS["two"], max_tokens=32) == expected[-1]
        assert_idle(machine)

        [worker] = group_of(machine).processes
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises((EngineError, Unavailable)):
            machine.generate(PROMPTS["text"], **{**GREEDY, "max_tokens": 200})
        wait_until_stopped(machine)
    assert "rank 1 has ended (SIGKILL)" in caplog.text


def wait_until_stopped(machine: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while machine.status == "ready" and time.monotonic() < end:
        time.sleep(0.02)
    assert machine.status == "stopped"


def test_stages_compute_different_parts_of_a_step_at_the_same_time(hybrid: Path) -> None:
    """The driver begins another part before the result of the one before has come."""
    with engine(hybrid) as machine:
        expected = {name: one(machine, prompt) for name, prompt in PROMPTS.items()}
    with start(hybrid, 1, 2) as machine:
        group = group_of(machine)
        assert one(machine, PROMPTS["text"]) == expected["text"]
        assert group.overlapped == 0, "one sequence has nothing that could overlap"
        names = [*PROMPTS]
        assert together(machine, names) == [expected[name] for name in names]
        assert group.overlapped >= GREEDY["max_tokens"] - 1, "most steps should have had two parts"
        assert_idle(machine)


def test_a_grid_that_the_model_cannot_have_is_refused_before_it_is_loaded(qwen: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel is 3, and the heads of layer 0 .* accepted"):
        start(qwen, 3)
    with pytest.raises(ConfigError, match="compile is for one process"):
        start(qwen, 2, compile="default", kernels="torch")
    with pytest.raises(ConfigError, match="device is cuda:1, .* accepted with several processes: auto"):
        start(qwen, 2, device="cuda:1")


GRIDS = {"2x1": (2, 1), "1x2": (1, 2), "2x2": (2, 2), "4x1": (4, 1)}
UNDIVIDED = {"4x1": ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "mllama", "minicpmv4_6", "gemma4")}
"""Tiny models that have not enough heads."""


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_in_every_grid(architecture: str, grid: str, checkpoint: Callable[[str], Path]) -> None:
    folder = checkpoint(architecture)
    names = [*PROMPTS]
    with engine(folder) as machine:
        expected = together(machine, names)
    if architecture in UNDIVIDED.get(grid, ()):
        with pytest.raises(ConfigError, match="heads of layer"):
            start(folder, *GRIDS[grid])
        return
    with start(folder, *GRIDS[grid]) as machine:
        assert together(machine, names) == expected
        assert together(machine, names) == expected
        assert_idle(machine)


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["2x1", "4x1"])
@pytest.mark.parametrize("method", ["relevance:0.5", "fastv:0.5", "dart_k:0.5"])
def test_methods_that_look_with_layers_of_the_decoder(
    method: str, grid: str, checkpoint: Callable[[str], Path]
) -> None:
    folder = checkpoint("qwen3_vl")
    prompts = [ask("where is the red circle?", picture(4, 224, 192)), ask("and here?", picture(5, 192, 224))]
    with engine(folder, visual_tokens=method) as machine:
        expected = [one(machine, prompt) for prompt in prompts]
    with start(folder, *GRIDS[grid], visual_tokens=method) as machine:
        assert [one(machine, prompt) for prompt in prompts] == expected


@pytest.mark.slow
def test_stages_do_not_look_and_say_so(
    checkpoint: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with start(checkpoint("qwen3_vl"), 1, 2, visual_tokens="relevance:0.5") as machine:
        for seed in (4, 5):
            assert one(machine, ask("where is the red circle?", picture(seed, 224, 192)))
    assert caplog.text.count("views are chosen without the question's look") == 1
    with start(checkpoint("qwen3_vl"), 1, 2, visual_tokens="fastv:0.5") as machine:
        with pytest.raises(Exception, match="pipeline_parallel is 2"):
            one(machine, ask("where?", picture(4, 224, 192)))
        assert one(machine, PROMPTS["text"])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_vl", "mistral3", "qwen3_vl_moe", "qwen3_5"])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_shares_of_weights_are_quantized(
    architecture: str, quantization: str, checkpoint: Callable[[str], Path]
) -> None:
    """Scales of maps that are divided by input are those of a share, so tokens may differ."""
    with start(checkpoint(architecture), quantization=quantization) as machine:
        first: list[Tokens] = together(machine, [*PROMPTS])
        assert together(machine, [*PROMPTS]) == first
        assert machine.info.quantization == quantization


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["2x1", "1x2"])
def test_a_draft_layer_reads_the_states_of_all_processes(
    grid: str, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer itself is whole, and in the driver. With stages, states of other ones are brought to it."""
    layer = eagle3(qwen, eagle_aux_hidden_state_layer_ids=[1, 2, 3]).write(tmp_path)
    names = [*PROMPTS, *PROMPTS]
    with engine(qwen) as machine:
        expected = together(machine, names)
    with start(qwen, *GRIDS[grid], speculate="layer", draft_layer=str(layer)) as machine:
        draft_always(machine, monkeypatch)
        assert together(machine, names) == expected
        assert machine.runner.speculates, "the drafter has failed"
        assert machine.stats()["draft_tokens"] > 0
        assert_idle(machine)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w8a16", "fp8-blocks"])
def test_weights_that_are_stored_quantized(scheme: str, tmp_path: Path) -> None:
    folder = quantize_folder(write("qwen3_vl", tmp_path / "plain"), tmp_path / "quantized", SCHEMES[scheme])
    with engine(folder, kernels="torch") as machine:
        expected = together(machine, [*PROMPTS])
    with start(folder, kernels="torch") as machine:
        assert together(machine, [*PROMPTS]) == expected


def test_codes_whose_groups_would_be_divided_are_refused(tmp_path: Path) -> None:
    folder = quantize_folder(write("qwen3_vl", tmp_path / "plain"), tmp_path / "quantized", SCHEMES["awq"])
    with pytest.raises(CheckpointError, match="down_proj.weight cannot be divided .* groups of 16"):
        start(folder, kernels="torch")


@pytest.mark.slow
def test_a_gguf_file(tmp_path: Path) -> None:
    path = write_model(write_text("llama", tmp_path / "plain"), tmp_path / "model.gguf", quantized("Q8_0"))
    with Engine.from_pretrained(str(path), **SETTINGS) as machine:
        expected = one(machine, PROMPTS["text"])
    with start(path) as machine:
        assert one(machine, PROMPTS["text"]) == expected
