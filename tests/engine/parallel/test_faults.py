"""Processes that cannot load, stop or die: nobody waits for ever, and the error names the rank."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fovea.core.errors import CheckpointError, EngineError, Unavailable
from fovea.engine.layers.step import DecoderMemory
from fovea.engine.parallel import driver
from fovea.engine.parallel.messages import pack, unpack
from fovea.engine.parallel.worker import Start
from tests.engine.parallel.support import GREEDY, PROMPTS, group_of, one, start


def memory() -> DecoderMemory:
    return DecoderMemory((), (), ())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).view(3, 2),
        torch.arange(6).view(3, 2).T,
        torch.arange(9)[::9],
        torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.5, 6.0]]).bfloat16()[:, 1],
        torch.tensor(5),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.tensor([0.25, 0.5, 1.5, 3.0]).to(torch.float8_e4m3fn),
    ],
    ids=["rows", "columns", "one in nine", "bf16 column", "number", "empty", "bool", "fp8"],
)
def test_tensors_arrive_as_they_were_sent(tensor: torch.Tensor) -> None:
    name, (there, others) = unpack(pack("x", (tensor, {"a": [tensor]}), {}), torch.device("cpu"), _none)
    assert name == "x"
    for each in (there, others["a"][0]):
        assert (each.dtype, each.shape) == (tensor.dtype, tensor.shape)
        assert each.reshape(-1).tolist() == tensor.reshape(-1).tolist()


def _none(number: int) -> DecoderMemory:
    raise AssertionError("no memory was sent")


def test_a_memory_is_sent_by_its_number() -> None:
    mine, run, theirs = memory(), memory(), {0: memory(), 7: memory()}
    data = pack("x", (mine, run), {id(run): 7})
    assert len(data) < 200
    _, (first, second) = unpack(data, torch.device("cpu"), theirs.__getitem__)
    assert first is theirs[0]
    assert second is theirs[7]


@pytest.mark.slow
def test_a_process_that_cannot_load_says_why(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = driver._start

    def elsewhere(given: Start) -> Any:
        return begin(replace(given, model="/nowhere"))

    monkeypatch.setattr(driver, "_start", elsewhere)
    with pytest.raises(CheckpointError, match="rank 1: '/nowhere' is neither a folder"):
        start(qwen)


@pytest.mark.slow
def test_a_process_that_ends_while_it_loads_is_named(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = driver._start

    def killed(given: Start) -> Any:
        process = begin(given)
        process.kill()
        return process

    monkeypatch.setattr(driver, "_start", killed)
    with pytest.raises(EngineError, match="rank 1 has ended .SIGKILL."):
        start(qwen)


@pytest.mark.slow
@pytest.mark.parametrize("idle", [True, False], ids=["idle", "in a step"])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)], ids=str)
def test_a_process_that_is_stopped_ends_the_engine(
    qwen: Path, idle: bool, grid: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    with start(qwen, *grid, parallel_timeout_s=2) as machine:
        assert one(machine, PROMPTS["text"])
        [worker] = group_of(machine).processes
        os.kill(worker.pid, signal.SIGSTOP)
        if not idle:
            with pytest.raises((EngineError, Unavailable)):
                machine.generate(PROMPTS["picture"], **GREEDY)
        end = time.monotonic() + 20
        while machine.status == "ready" and time.monotonic() < end:
            time.sleep(0.05)
        assert machine.status == "stopped"
        with pytest.raises(Unavailable):
            machine.generate(PROMPTS["text"], **GREEDY)
    assert "rank 1 has not answered for 2 s" in caplog.text
    assert worker.poll() is not None, "a worker that is stopped is killed"


@pytest.mark.slow
def test_an_error_in_the_middle_of_a_step_ends_the_engine(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are in the middle of the same step, so the next one would add up wrong numbers."""
    with start(qwen, parallel_timeout_s=5) as machine:
        group, calls = group_of(machine), []
        add = group.add

        def failing(part: torch.Tensor) -> torch.Tensor:
            calls.append(part)
            if len(calls) == 2:
                raise RuntimeError("a kernel failed")
            return add(part)

        monkeypatch.setattr(group, "add", failing)
        with pytest.raises((EngineError, Unavailable)):
            machine.generate(PROMPTS["text"], **GREEDY)
        end = time.monotonic() + 20
        while machine.status == "ready" and time.monotonic() < end:
            with pytest.raises((EngineError, Unavailable)):
                machine.generate(PROMPTS["text"], **GREEDY)
        assert machine.status == "stopped"
