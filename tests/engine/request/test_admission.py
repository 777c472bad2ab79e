"""Admission by number of choices and by tokens of KV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.errors import InvalidRequest, Overloaded
from fovea.engine.job import Event
from fovea.engine.request.admission import (
    ASSUMED_ANSWER_TOKENS,
    Admission,
    RequestSize,
    leave_at_end,
    request_size,
)


def admission(max_in_flight: int = 4, tokens: int = 1000, *, refuse: bool = True) -> Admission:
    return Admission(max_in_flight, tokens, 1 << 20, refuse=refuse)


def test_a_size_counts_the_prompt_once_and_every_answer() -> None:
    assert request_size(100, 64, 10, 3) == RequestSize(100, 64, 30)
    assert request_size(100, 64, None, 2).tokens == 100 + 2 * ASSUMED_ANSWER_TOKENS


def test_a_full_queue_is_overloaded_and_a_request_that_never_fits_is_invalid() -> None:
    crowd = admission()
    ticket = crowd.enter(3)
    with pytest.raises(Overloaded, match="3 choices are running or waiting; at most 4 may") as large:
        crowd.enter(2)
    crowd.enter(1)
    with pytest.raises(Overloaded) as full:
        crowd.enter(1)
    assert (large.value.scope, full.value.scope) == ("request", "engine"), "one more had room, and then none"
    with pytest.raises(InvalidRequest, match="5 choices are requested; at most 4"):
        crowd.enter(5)
    ticket.leave()
    crowd.check(3)


def test_without_a_bound_every_request_is_admitted() -> None:
    crowd = Admission(0, 10, 1, refuse=False)
    for _ in range(100):
        crowd.enter(1000)


def test_a_refusal_names_its_numbers() -> None:
    crowd = admission()
    crowd.enter(1).commit(RequestSize(600, 512, 100))
    with pytest.raises(Overloaded) as caught:
        crowd.enter(1).commit(RequestSize(300, 256, 10))
    message = caught.value.message
    for number in (
        "310.0 MiB",
        "300 tokens",
        "256 of them visual",
        "10 of answers",
        "700.0 MiB of 1000.0 MiB",
    ):
        assert number in message


def test_a_request_alone_is_never_refused() -> None:
    """A prompt that cannot fit at all is refused elsewhere, by its length. A large request runs alone."""
    crowd = admission()
    crowd.enter(1).commit(RequestSize(900, 0, 500))
    assert crowd.load == pytest.approx(1.4)


def test_without_refusal_requests_wait_for_kv() -> None:
    crowd = admission(refuse=False)
    for _ in range(4):
        crowd.enter(1).commit(RequestSize(900, 0, 0))
    assert crowd.load == pytest.approx(3.6)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 400), st.booleans()), max_size=30))
def test_a_ticket_that_leaves_gives_back_what_it_counted(steps: list[tuple[int, int, bool]]) -> None:
    crowd, inside = admission(max_in_flight=8), []
    for answers, tokens, leaves in steps:
        try:
            ticket = crowd.enter(answers)
        except Overloaded:
            continue
        try:
            ticket.commit(RequestSize(tokens, 0, 0))
        except Overloaded:
            ticket.leave()
            continue
        inside.append(ticket)
        if leaves:
            gone = inside.pop(0)
            gone.leave()
            gone.leave()
        assert crowd.in_flight == sum(ticket.choices for ticket in inside) <= 8
        total = sum(ticket.tokens for ticket in inside)
        assert len(inside) == 1 or total <= 1000
    for ticket in inside:
        ticket.leave()
    assert (crowd.in_flight, crowd.load) == (0, 0.0)


def test_places_are_free_after_the_last_event_of_the_last_choice() -> None:
    """A client that did not read its stream kept its places after the answer had ended, for as long as it
    liked: 320 such clients shut everybody else out.
    """
    crowd = admission()
    ticket = crowd.enter(2)
    ticket.commit(RequestSize(10, 0, 4))
    seen: list[Event] = []
    deliver = leave_at_end(ticket, seen.append)
    deliver(Event(0))
    deliver(Event(0, finish_reason="stop"))
    assert crowd.in_flight == 2
    deliver(Event(1, finish_reason="length"))
    assert (crowd.in_flight, crowd.load, len(seen)) == (0, 0.0, 3)
    ticket.leave()
    assert crowd.in_flight == 0


def test_places_are_free_even_if_the_client_cannot_be_reached() -> None:
    crowd = admission()

    def broken(event: Event) -> None:
        raise RuntimeError("the event loop is closed")

    deliver = leave_at_end(crowd.enter(1), broken)
    with pytest.raises(RuntimeError):
        deliver(Event(0, finish_reason="stop"))
    assert crowd.in_flight == 0
