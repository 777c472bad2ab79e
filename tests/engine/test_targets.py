"""Targets of a real engine: late requests are refused with figures, or lose detail, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fovea import Engine
from fovea.core.errors import Overloaded
from fovea.core.media import PixelBudget
from tests.support.engines import ask, assert_idle, engine, picture

BUNDLED = Path("fovea-tiny")
LARGE = picture(3, 448, 448)


@contextmanager
def slow_engine(target_s: float, **settings: object) -> Iterator[Engine]:
    """An engine that has measured a prompt and an image, and believes that images take a second per row.

    target_s: target for first tokens, in seconds, from then on.
    """
    with engine(BUNDLED, target_ttft_ms=10**6, **settings) as machine:
        machine.generate(ask("Hello", picture(20, 224, 224)), max_tokens=3, temperature=0)
        slow_down(machine)
        machine.parts.intake.gate.target_s = 0.0 if settings.get("when_late") == "wait" else target_s
        yield machine
        assert_idle(machine)


def slow_down(machine: Engine) -> None:
    machine.loop.stepper.image_times._fit.costs = [0.0, 1.0, 0.0]


def running(machine: Engine) -> Iterator[object]:
    """Start an answer that goes on, so that the engine is not idle."""
    deltas = machine.iterate(machine.request(ask("And?"), max_tokens=1000, ignore_eos=True))
    next(deltas)
    return deltas


def test_a_late_request_is_refused_with_the_figures() -> None:
    with slow_engine(20.0) as machine:
        stream = running(machine)
        with pytest.raises(Overloaded, match=r"target of 20 s: .* images to encode: 1, .* tokens") as caught:
            machine.generate(ask("Read it.", LARGE), max_tokens=2)
        assert caught.value.retry_after >= 1
        assert machine.generate(ask("Only text."), max_tokens=2).token_ids, "a short one is in time"
        stats = machine.stats()
        assert (stats["requests_refused_late"], stats["requests_degraded_late"]) == (1, 0)
        stream.close()  # type: ignore[attr-defined]


def test_a_late_request_waits_if_it_may() -> None:
    with slow_engine(20.0, when_late="wait") as machine:
        assert machine.generate(ask("Read it.", LARGE), max_tokens=2).token_ids
        assert machine.stats()["requests_refused_late"] == 0


def test_a_late_request_loses_detail_if_that_is_enough_and_says_so() -> None:
    with slow_engine(10.0**6, when_late="degrade") as machine:
        full = machine.generate(ask("Read it.", LARGE), max_tokens=2).images[0]
        slow_down(machine)
        machine.parts.intake.gate.target_s = 0.9 * full.tokens
        stream = running(machine)
        less = machine.generate(ask("Read it!", picture(4, 448, 448)), max_tokens=2).images[0]
        assert less.tokens < full.tokens
        assert "lowered so that the first token is in time" in less.reason
        assert machine.stats()["requests_degraded_late"] == 1
        slow_down(machine)
        explicit = PixelBudget("high")
        with pytest.raises(Overloaded):
            machine.generate(ask("Read it", picture(5, 448, 448), budget=explicit), max_tokens=2)
        stream.close()  # type: ignore[attr-defined]


def test_images_that_are_encoded_already_are_in_time() -> None:
    with slow_engine(10.0**6) as machine:
        machine.generate(ask("Read it.", LARGE), max_tokens=2)
        slow_down(machine)
        machine.parts.intake.gate.target_s = 20.0
        stream = running(machine)
        assert machine.generate(ask("And what else?", LARGE), max_tokens=2).token_ids
        stream.close()  # type: ignore[attr-defined]


def test_the_queue_is_empty_in_the_end_and_the_figures_are_reported() -> None:
    with engine(BUNDLED, target_itl_ms=1000, target_ttft_ms=60_000) as machine:
        answer = machine.generate(ask("Read it.", LARGE), max_tokens=20, ignore_eos=True, n=2)
        assert answer
        machine.loop.call(lambda: None)
        stats = machine.stats()
        assert stats["queued_work_seconds"] == stats["queued_encode_seconds"] == 0
        assert stats["decode_steps"] >= 18
        assert stats["late_steps"] == 0
        assert stats["target_itl_possible"] == 1
        assert stats["step_time_margin"] > 0.5
        assert_idle(machine)
