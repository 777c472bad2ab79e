"""Tests of a client's limits and of the charge for a generation, without a server."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from fovea.access.log import request_id
from fovea.api.errors import error_headers
from fovea.core.errors import DeadlineExceeded, InvalidRequest, Overloaded
from fovea.core.sampling import SamplingParams
from fovea.core.types import ChatPrompt, Delta, GenerationRequest, Message, TextPart, TokenPrompt, Usage
from fovea.server.clients import Caller, Client, Limits
from fovea.server.generation import Charge
from fovea.server.request import Request
from tests.core.test_ledger import Clock


def client(clock: Clock | None = None, **limits: Any) -> Client:
    return Client("alice", Limits(**limits), clock or Clock())


def test_requests_beyond_the_rate_name_the_limit_and_the_wait() -> None:
    clock = Clock()
    alice = client(clock, requests_per_minute=2)
    alice.count_request()
    alice.count_request()
    with pytest.raises(
        Overloaded, match=r"key 'alice' may use 2 requests per minute \(requests_per_min"
    ) as error:
        alice.count_request()
    assert (error.value.code, error.value.retry_after) == ("rate_limit_exceeded", 30.0)
    clock.now += error.value.retry_after
    alice.count_request()


def test_a_debt_of_tokens_refuses_requests_before_their_bodies_are_read() -> None:
    clock = Clock()
    alice = client(clock, tokens_per_minute=60, requests_per_minute=5)
    alice.settle_tokens(alice.hold_tokens(20), 90)
    with pytest.raises(Overloaded, match="60 tokens per minute") as error:
        alice.count_request()
    assert error.value.retry_after == 50.0, "the debt, and tokens for a request like the latest one"
    assert alice.requests is not None
    assert alice.requests.remaining == 5, "a refused request uses up no other limit"
    clock.now += error.value.retry_after
    alice.count_request()
    assert alice.hold_tokens(20) == 20


@pytest.mark.parametrize(
    ("limits", "choices", "message"),
    [
        ({"max_n": 4}, 5, r"5 choices are requested; key 'alice' may request at most 4 at once \(max_n\)"),
        ({"places": 3}, 4, r"key 'alice' may have at most 3 in flight \(places\)"),
    ],
)
def test_choices_that_are_never_accepted(limits: dict[str, int], choices: int, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        client(**limits).check_choices(choices)


def test_places_of_one_client() -> None:
    alice = client(places=3)
    alice.places = 2
    alice.check_choices(1)
    with pytest.raises(Overloaded, match=r"has 2 choices in flight and requests 2 more; accepted: at most 3"):
        alice.check_choices(2)
    other = client()
    other.places = 2
    with pytest.raises(Overloaded, match="max_places_per_key"):
        other.check_choices(1, usual_places=2)


def test_priority_is_refused_and_not_changed() -> None:
    alice = client(min_priority=0)
    alice.check_priority(0)
    with pytest.raises(
        InvalidRequest, match="priority is -1; key 'alice' may use 0 and larger numbers"
    ) as error:
        alice.check_priority(-1)
    assert (error.value.param, error.value.code) == ("priority", "key_limit_exceeded")


def test_timeouts() -> None:
    alice = client(max_timeout_s=30)
    given = [(5, 600), (None, 600), (None, 0), (30, 9)]
    assert [alice.timeout(own, usual) for own, usual in given] == [5, 30, 30, 30]
    with pytest.raises(InvalidRequest, match="timeout is 31 s; key 'alice' may use at most 30 s"):
        alice.timeout(31, 600)
    assert [client().timeout(None, 600), client().timeout(None, 0)] == [600, None]


def generation(**sampling: Any) -> GenerationRequest:
    prompt = ChatPrompt((Message("user", (TextPart("four" * 10),)),))
    return GenerationRequest("id", prompt, SamplingParams(**sampling))


def request_from(client: Client) -> Request:
    """The part of a request that a charge needs."""
    return cast("Request", SimpleNamespace(caller=Caller(client), prompt_tokens=0, completion_tokens=0))


def charged(alice: Client, request: GenerationRequest, *deltas: Delta) -> tuple[int, int]:
    """The tokens that are gone while the request runs, and at its end."""
    assert alice.tokens is not None
    before = alice.tokens.remaining
    charge = Charge(request_from(alice), request)
    held = before - alice.tokens.remaining
    for delta in deltas:
        charge.add(delta)
    charge.settle()
    return held, before - alice.tokens.remaining


def test_the_estimate_is_replaced_by_the_usage() -> None:
    alice = client(tokens_per_minute=1000)
    deltas = [
        Delta(0, "a", (1, 2)),
        Delta(0, "b", (3,), finish_reason="stop", usage=Usage(300, 3, image=250)),
    ]
    assert charged(alice, generation(max_tokens=50, n=2), *deltas) == (110, 303)
    assert charged(alice, generation(), *deltas) == (10, 303)


def test_a_client_that_leaves_before_the_end_pays_the_estimate() -> None:
    """Otherwise a client could read a stream up to its last token, leave, and pay nothing."""
    alice = client(tokens_per_minute=1000)
    assert charged(alice, generation(max_tokens=50), Delta(0, "a", (1,))) == (60, 60)
    assert charged(alice, generation(), *[Delta(0, "a", (1, 2))] * 20) == (10, 50)
    tokens = GenerationRequest("id", TokenPrompt((1,) * 70), SamplingParams(max_tokens=5))
    assert charged(alice, tokens) == (75, 75)


def test_a_request_that_the_engine_refuses_costs_nothing() -> None:
    """A client that retries against a full server would lose its tokens to the refusals."""
    alice = client(tokens_per_minute=1000)
    assert alice.tokens is not None
    errors = (Overloaded("full", retry_after=1), InvalidRequest("no"), DeadlineExceeded("late"))
    left = []
    for error in errors:
        charge = Charge(request_from(alice), generation(max_tokens=50))
        charge.refuse(error)
        charge.settle()
        left.append(alice.tokens.remaining)
    assert left == [1000, 1000, 940], "a request whose timeout ran out may have computed everything"


def test_the_sum_of_estimates_cannot_exceed_the_limit() -> None:
    """Ten requests at once, each of nearly the whole limit: one begins, and the others are refused."""
    alice = client(tokens_per_minute=100)
    Charge(request_from(alice), generation(max_tokens=80))
    for _ in range(9):
        with pytest.raises(Overloaded, match="tokens_per_minute"):
            Charge(request_from(alice), generation(max_tokens=80))


def test_other_limits_from_now_on_keep_what_was_used() -> None:
    alice = client(requests_per_minute=4)
    alice.count_request()
    alice.change_limits(Limits(requests_per_minute=40, tokens_per_minute=10))
    assert alice.requests is not None
    assert alice.tokens is not None
    assert (alice.requests.remaining, alice.tokens.remaining) == (30, 10)
    alice.change_limits(Limits())
    assert (alice.requests, alice.tokens) == (None, None)


@pytest.mark.parametrize("sent", [b"abc-1.2_3", b"00-trace:span", b"x" * 128])
def test_a_harmless_request_id_is_used(sent: bytes) -> None:
    assert request_id(sent) == sent.decode()


@pytest.mark.parametrize("sent", [b"", b"x" * 129, b"a b", b"a\nb", b'a"', "ä".encode(), b"%0a", b"a\n"])
def test_any_other_request_id_is_replaced(sent: bytes) -> None:
    """Log injection: an id with a line break would forge a line."""
    assert len(request_id(sent)) == 32


def test_a_refusal_says_whether_smaller_requests_would_be_accepted() -> None:
    """A gateway pauses the whole server after a 429, unless it is about one request alone."""
    alice = client(requests_per_minute=1, tokens_per_minute=100, places=4)
    alice.hold_tokens(60)
    alice.places = 3

    def scope(refused: Callable[[], object]) -> str:
        with pytest.raises(Overloaded) as caught:
            refused()
        headers = error_headers(caught.value)
        assert headers["x-fovea-scope"] == caught.value.scope
        return headers["x-fovea-scope"]

    assert scope(lambda: alice.hold_tokens(50)) == "request"
    assert scope(lambda: alice.check_choices(2)) == "request"
    alice.places = 4
    assert scope(lambda: alice.check_choices(1)) == "engine"
    alice.count_request()
    assert scope(alice.count_request) == "engine"
    alice.hold_tokens(40)
    assert scope(alice.count_request) == "engine"
