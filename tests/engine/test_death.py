"""An engine whose device is dead stops, and every client hears of it: no request waits for ever."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fovea.core.errors import EngineError, Unavailable
from fovea.core.types import ChatPrompt, GenerationRequest, Message, TextPart
from fovea.engine.config import EngineConfig
from fovea.engine.request.prepare import Preparer
from fovea.engine.simulate.serving import SimulatedEngine
from fovea.engine.step.loop import FATAL_FAILURES
from fovea.planner.cost import CostModel
from tests.support.engines import ask, engine, picture

SECRET = "CUDA error at /srv/models/secret.cu"


def dead(*_: object) -> Any:
    raise RuntimeError(SECRET)


def test_every_request_gets_an_error_also_one_in_preparation(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine(qwen) as machine, ThreadPoolExecutor(8) as pool:
        monkeypatch.setattr(machine.runner, "execute", dead)
        thread, build = machine.loop._thread, Preparer.build

        def slow(self: Preparer, request: GenerationRequest, *rest: Any) -> Any:
            if "slow" in str(request.prompt):
                thread.join(60)
            return build(self, request, *rest)

        monkeypatch.setattr(Preparer, "build", slow)

        def outcome(prompt: ChatPrompt) -> Exception | None:
            try:
                machine.generate(prompt, temperature=0, max_tokens=8)
            except (EngineError, Unavailable) as error:
                return error
            return None

        with caplog.at_level(logging.CRITICAL, "fovea.engine"):
            late = pool.submit(outcome, ask("a slow one", picture(1)))
            errors = []
            while machine.status == "ready":
                errors += pool.map(outcome, [ask(f"{i}", picture(i)) for i in range(6)])
            thread.join(60)
        errors.append(late.result(timeout=60))
        assert isinstance(errors[-1], Unavailable)
        assert all(errors), "a request ended without an answer and without an error"
        assert not any("secret" in str(error) for error in errors)
        assert machine.status == "stopped"
        assert not machine.loop.alive
        with pytest.raises(Unavailable, match="the engine has stopped"):
            machine.generate(ask("too late"))
        assert machine.unfinished == 0


async def test_streams_of_a_dead_simulated_engine_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine = SimulatedEngine(EngineConfig(), CostModel())
    monkeypatch.setattr(machine.loop.stepper.executor, "execute", dead)

    async def outcome(number: int) -> Exception | None:
        prompt = ChatPrompt((Message("user", (TextPart(f"{number}"),)),))
        try:
            async for _ in machine.stream(GenerationRequest(f"r{number}", prompt)):
                pass
        except (EngineError, Unavailable) as error:
            return error
        return None

    with caplog.at_level(logging.CRITICAL, "fovea.engine"):
        errors = await asyncio.gather(*map(outcome, range(3 * FATAL_FAILURES)))
        await asyncio.to_thread(machine.loop._thread.join, 60)
    assert machine.status == "stopped"
    assert all(errors)
    assert not any("secret" in str(error) for error in errors)
    assert any("stopped unexpectedly" in str(error) for error in errors), "it died while requests waited"
    with pytest.raises(Unavailable):
        machine.check_room(1)


def test_a_healthy_engine_survives_a_run_of_failed_steps(
    qwen: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests that make steps fail look like a dead device, until a probe shows that it is alive."""
    with engine(qwen) as machine:
        truth = machine.generate(ask("hello"), temperature=0, max_tokens=8).token_ids
        forward = machine.runner._forward

        def broken(work: list[Any], rows: list[int]) -> Any:
            if any(item.seq.sampling.seed == 13 for item in work):
                raise RuntimeError(SECRET)
            return forward(work, rows)

        monkeypatch.setattr(machine.runner, "_forward", broken)
        with caplog.at_level(logging.CRITICAL, "fovea.engine"):
            for _ in range(2 * FATAL_FAILURES + 1):
                with pytest.raises(EngineError, match="failed inside the engine"):
                    machine.generate(ask("hello"), seed=13, max_tokens=4)
        assert machine.stats()["failed_steps"] == 2 * FATAL_FAILURES + 1
        assert machine.status == "ready"
        assert machine.generate(ask("hello"), temperature=0, max_tokens=8).token_ids == truth
        machine.check_integrity()
