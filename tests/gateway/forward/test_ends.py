"""The table of ends: only a backend's own fault counts against it. docs/gateway.md shows the table."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.gateway.backends.backend import CONNECT, TEXT
from fovea.gateway.generate.ends import (
    ENDS,
    FAULT,
    GOOD,
    NEUTRAL,
    UNREACHABLE,
    EventStream,
    end_of_status,
    is_own_error,
)
from fovea.gateway.generate.upstream import AttemptFailed
from tests.gateway.forward.test_dispatch import Setup
from tests.gateway.samples import run

PAGE = (Path(__file__).resolve().parents[3] / "docs/gateway.md").read_text(encoding="utf-8")


@given(st.integers(200, 599), st.sampled_from(["", "engine", "request", "x"]), st.booleans())
def test_a_status_that_a_client_can_cause_says_nothing_about_a_backend(
    status: int, scope: str, links: bool
) -> None:
    """Only the 4xx about the gateway's own key are a fault; 408, the client's deadline, is passed on."""
    name = end_of_status(status, scope=scope, links=links)
    end = ENDS[name]
    assert (end.verdict == FAULT) == (
        not links and (status in (401, 407) or (status >= 500 and status not in (501, 503, 505, 529)))
    )
    assert end.pauses == (status in (429, 503, 529) and scope != "request")
    assert end.retried or end.verdict in (GOOD, NEUTRAL)
    assert (name == "deadline") == (status == 408)
    assert not ENDS["deadline"].retried


@pytest.mark.parametrize("reason", ["connect", "timeout", "status", "broken", "stream error"])
@pytest.mark.parametrize("links", [False, True])
def test_every_failed_attempt_has_an_end_that_is_retried(reason: str, links: bool) -> None:
    end = AttemptFailed("x", reason, status=500 * (reason == "status")).end(links=links)
    assert ENDS[end].retried


@given(st.lists(st.sampled_from(sorted(ENDS)), max_size=40), st.integers(1, 4))
def test_a_breaker_opens_by_faults_alone(ends: list[str], most: int) -> None:
    """Whatever clients do in between, a breaker opens exactly after so many faults without an answer."""

    async def scenario() -> None:
        setup = Setup({}, breaker_failures=most)
        backend, faults = setup.backend("a"), 0
        for name in ends:
            setup.dispatcher.note(backend, TEXT, name)
            verdict = ENDS[name].verdict
            faults = 0 if verdict == GOOD else faults + (verdict == FAULT)
            assert backend.breakers[TEXT].failures == faults
            assert backend.breakers[TEXT].allows(0.0) == (faults < most)
        unreachable = sum(ENDS[name].verdict == UNREACHABLE for name in ends)
        assert backend.breakers[CONNECT].failures == unreachable
        assert backend.busy_until == 0.0

    run(scenario())


@given(st.lists(st.sampled_from([408, 400, 404, 422, (429, 9.0)]), min_size=1, max_size=12), st.data())
def test_requests_of_a_client_never_close_a_backend_to_others(
    statuses: list[Any], data: st.DataObject
) -> None:
    """Eight requests with `timeout: 0.001` once opened the breakers of all backends."""
    given_statuses = [one for one in statuses if not isinstance(one, tuple)] or [408]

    async def scenario() -> None:
        setup = Setup({name: [(0.0, data.draw(st.sampled_from(given_statuses)))] for name in "abcd"})
        for _ in range(8):
            won = await setup.dispatcher.send(setup.job())
            setup.dispatcher.note(won.backend, TEXT, end_of_status(won.answer.status))
            won.end()
        assert len(setup.upstream.asked) == 8
        assert all(one.accepts(0.0, vision=False) for one in setup.fleet)

    run(scenario())


@pytest.mark.parametrize(
    ("error", "own"),
    [
        ({"type": "timeout_error", "code": "deadline_exceeded"}, True),
        ({"type": "timeout_error", "code": "upstream_timeout"}, False),
        ({"type": "BadRequestError", "code": 400}, True),
        ({"type": "InternalServerError", "code": 500}, False),
        ({"code": 408}, True),
        ({"code": 401}, False),
        ({"code": True}, False),
        ({"type": "rate_limit_error", "code": "overloaded"}, True),
        ({"type": "invalid_request_error", "code": "format_failed"}, True),
        ({"type": "server_error", "code": "engine_error"}, False),
        ("out of memory", False),
        (None, False),
    ],
)
def test_error_events_about_the_request_are_told_from_failures(error: Any, own: bool) -> None:
    assert is_own_error(error) is own
    if error is not None:
        for event in ({"error": error}, {"type": "error", "error": error}):
            stream = EventStream()
            stream.feed(b"data: " + json.dumps(event).encode() + b"\n\n")
            assert (stream.failed, stream.own) == (True, own)


def test_the_page_shows_the_table() -> None:
    """Each row: names of ends, meaning, breaker, retried, charged."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `")]
    shown = {name: cells[2:] for cells in rows if len(cells) == 5 for name in re.findall("`(.+?)`", cells[0])}
    breakers = {
        GOOD: "success",
        NEUTRAL: "nothing",
        FAULT: "failure",
        UNREACHABLE: "failure of `connect`",
    }
    charged = {
        "nothing": "nothing",
        "used": "prompt and generated tokens",
        "most": "prompt and longest answer",
    }
    wanted = {
        name: [
            breakers[end.verdict] + (", a pause" if end.pauses else ""),
            "yes" if end.retried else "no",
            charged[end.charged],
        ]
        for name, end in ENDS.items()
    }
    assert shown == wanted
