"""Requests are sent until a backend answers, and whatever happens nothing stays counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fovea.core.errors import DeadlineExceeded, FoveaError, Overloaded, Unavailable
from fovea.gateway.backends.backend import CONNECT, TEXT, VISION, Backend, Load
from fovea.gateway.backends.fleet import Fleet
from fovea.gateway.backends.route import Router
from fovea.gateway.breaker import RetryBudget
from fovea.gateway.config import BackendConfig, ModelConfig
from fovea.gateway.generate.dispatch import (
    BadGateway,
    Dispatcher,
    GatewayTimeout,
    Job,
    Won,
)
from fovea.gateway.generate.upstream import Answer, AttemptFailed, Outgoing
from fovea.gateway.settings import ResilienceSettings, RouteSettings
from tests.gateway.samples import MODEL, demand, fleet, run

TEXTS, IMAGES = demand("x"), demand("x", "image")


class FakeAnswer(Answer):
    """An answer that notes that it was closed."""

    def __init__(self, status: int, *, is_stream: bool) -> None:
        super().__init__(status, (), is_stream, b"first", self._end, self._close)
        self.closed = 0

    async def _end(self) -> bytes:
        return b""

    def _close(self) -> None:
        self.closed += 1


class FakeUpstream:
    """Answers as a script says: for each backend, what its next attempts do.

    script: (seconds, outcome) by backend; the last one is repeated. An outcome is a status, "connect",
    "broken", "hang", "defect", or (status, retry_after).
    asked: names of the backends that were asked, in order.
    answers: all answers that were given.
    """

    def __init__(self, script: Mapping[str, Sequence[tuple[float, Any]]]) -> None:
        self.script = {name: list(steps) for name, steps in script.items()}
        self.asked: list[str] = []
        self.answers: list[FakeAnswer] = []

    async def open(
        self, backend: Backend, outgoing: Outgoing, *, stream: bool, deadline: float
    ) -> FakeAnswer:
        self.asked.append(backend.name)
        steps = self.script.get(backend.name, [(0.0, 200)])
        seconds, outcome = steps.pop(0) if len(steps) > 1 else steps[0]
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.sleep(1e6 if outcome == "hang" else seconds)
        except TimeoutError:
            raise AttemptFailed(f"{backend.name} gave no answer in time", "timeout") from None
        return self._outcome(outcome, stream)

    def _outcome(self, outcome: Any, stream: bool) -> FakeAnswer:
        if outcome == "defect":
            raise ValueError("a defect")
        if outcome == "connect":
            raise AttemptFailed("cannot be connected to", "connect", connected=False)
        if outcome == "broken":
            raise AttemptFailed("broke off", "broken")
        status, retry_after = outcome if isinstance(outcome, tuple) else (outcome, 0.0)
        if status in (429, 500, 502, 503, 504, 529):
            raise AttemptFailed(f"answered {status}", "status", status=status, retry_after=retry_after)
        self.answers.append(FakeAnswer(status, is_stream=stream))
        return self.answers[-1]


class Notes:
    """The metrics that a dispatcher counts in."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.opened: list[tuple[str, ...]] = []
        self.kinds: Counter[str] = Counter()

    def count(self, name: str, *labels: str) -> None:
        if name == "retries":
            self.kinds[labels[0]] += 1
        elif name == "breaker_opened":
            self.opened.append(labels)
        else:
            self.failed.append(labels[0])


class Setup:
    """A dispatcher with its fleet: backends a, b, c serve "m", and d serves "n"."""

    def __init__(self, script: Mapping[str, Sequence[tuple[float, Any]]], **settings: Any) -> None:
        self.settings = ResilienceSettings(**settings)
        configs = [BackendConfig(f"http://{name}:1", name, ("n" if name == "d" else "m",)) for name in "abcd"]
        self.fleet: Fleet = fleet(configs, self.settings)
        self.upstream = FakeUpstream(script)
        self.notes = Notes()

        def clock() -> float:
            return asyncio.get_running_loop().time()

        router = Router(self.fleet, RouteSettings(policy="round-robin"), clock)
        self.dispatcher = Dispatcher(router, self.upstream, self.settings, clock, self.notes)  # type: ignore[arg-type]

    def job(self, *ladder: ModelConfig, images: bool = False, deadline: float = 100.0) -> Job:
        def render(backend: Backend, model: ModelConfig) -> Outgoing:
            return Outgoing("/v1/chat/completions", [model.name.encode()], {})

        wanted = IMAGES if images else TEXTS
        return Job(wanted, ladder or (MODEL,), render, lambda model: Load(100, 50 * images), deadline)

    def backend(self, name: str) -> Backend:
        found = self.fleet.get(name)
        assert found is not None
        return found

    def idle(self) -> bool:
        """Whether nothing is outstanding, and every answer was closed once."""
        counts = [(one.requests, one.text, one.visual, one.begun, one.begun_text) for one in self.fleet]
        return counts == [(0, 0, 0, 0, 0)] * 4 and all(answer.closed == 1 for answer in self.upstream.answers)


def sent(setup: Setup, job: Job) -> Won:
    """Send one request to its end. The answer has ended then."""

    async def scenario() -> Won:
        won = await setup.dispatcher.send(job)
        assert won.backend.requests == won.backend.begun == 1
        won.end()
        won.end()
        await asyncio.sleep(0)
        return won

    return run(scenario())


def refusal(setup: Setup, job: Job) -> FoveaError:
    async def scenario() -> FoveaError:
        with pytest.raises(FoveaError) as caught:
            await setup.dispatcher.send(job)
        await asyncio.sleep(0)
        return caught.value

    return run(scenario())


def every(*steps: tuple[float, Any]) -> dict[str, list[tuple[float, Any]]]:
    return {name: list(steps) for name in "abcd"}


def test_an_answer_at_once() -> None:
    setup = Setup({})
    job = setup.job()
    won = sent(setup, job)
    assert (won.answer.status, won.backend.name, job.attempts) == (200, setup.upstream.asked[0], 1)
    assert setup.idle()
    assert not setup.notes.kinds


@pytest.mark.parametrize("outcome", ["connect", "broken", 500, 502, 504, 529, 429, 503])
def test_another_backend_is_asked_after_a_failure(outcome: Any) -> None:
    setup = Setup({name: [(0.0, outcome)] for name in "ab"})
    job = setup.job()
    won = sent(setup, job)
    assert won.backend.name == "c"
    assert setup.upstream.asked == ["a", "b", "c"]
    assert won.reason == "retry, round-robin"
    assert setup.notes.kinds == {"retry": 2}
    assert job.attempts == 3
    assert setup.idle()


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 408, 413, 422, 501])
def test_an_answer_that_others_would_repeat_is_passed_on(status: int) -> None:
    setup = Setup(every((0.0, status)))
    assert sent(setup, setup.job()).answer.status == status
    assert len(setup.upstream.asked) == 1
    assert all(breaker.failures == 0 for one in setup.fleet for breaker in one.breakers.values())


def test_no_backend_is_asked_twice() -> None:
    setup = Setup(every((0.0, 500)), max_attempts=16)
    error = refusal(setup, setup.job())
    assert sorted(setup.upstream.asked) == ["a", "b", "c"]
    assert isinstance(error, BadGateway)
    assert "3 backends were asked" in error.message
    assert setup.idle()


def test_attempts_are_bounded() -> None:
    setup = Setup(every((0.0, 500)), max_attempts=2)
    refusal(setup, setup.job())
    assert len(setup.upstream.asked) == 2


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        ("connect", BadGateway),
        ("broken", BadGateway),
        (500, BadGateway),
        (429, Overloaded),
        (503, Overloaded),
    ],
)
def test_the_error_tells_the_last_failure(outcome: Any, kind: type[FoveaError]) -> None:
    setup = Setup(every((0.0, outcome)))
    assert isinstance(refusal(setup, setup.job()), kind)


def test_an_overloaded_backend_gets_a_pause() -> None:
    setup = Setup({"a": [(0.0, (429, 7.0))], "b": [(0.0, (503, 0.0))]})
    sent(setup, setup.job())
    assert (setup.backend("a").busy_until, setup.backend("b").busy_until) == (7.0, 1.0)
    assert all(breaker.failures == 0 for breaker in setup.backend("a").breakers.values())
    full = Setup(every((0.0, (429, 9.0))))
    error = refusal(full, full.job())
    assert isinstance(error, Overloaded)
    assert (error.retry_after, error.code) == (9.0, "backends_busy")
    again = refusal(full, full.job())  # nobody is asked, but all have only asked for a pause
    assert isinstance(again, Overloaded)
    assert (again.retry_after, again.code) == (9.0, "backends_busy")


def test_retries_come_from_a_budget() -> None:
    setup = Setup(every((0.0, 500)), breaker_failures=1000, retry_share=0.1)
    for _ in range(100):
        refusal(setup, setup.job())
    retries = len(setup.upstream.asked) - 100
    assert RetryBudget.AT_ONCE <= retries <= RetryBudget.AT_ONCE + 0.1 * 100
    none = Setup(every((0.0, 500)), retry_share=0.0)
    refusal(none, none.job())
    assert len(none.upstream.asked) == 1


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=200))
def test_the_budget_is_a_share_of_the_requests(share: float, steps: list[bool]) -> None:
    budget, requests, taken = RetryBudget(share), 0, 0
    for request in steps:
        if request:
            budget.count_request()
            requests += 1
        else:
            taken += budget.take()
    assert taken <= (RetryBudget.AT_ONCE if share else 0) + share * requests + 1e-6


def test_the_ladder_is_gone_down_in_order() -> None:
    other, last = ModelConfig("none"), ModelConfig("n")
    setup = Setup({name: [(0.0, 500)] for name in "abc"})
    won = sent(setup, setup.job(MODEL, other, last))
    assert (won.model, won.backend.name, won.reason) == (last, "d", "fallback, only")
    assert setup.upstream.asked == ["a", "b", "c", "d"]
    assert setup.notes.kinds == {"retry": 2, "fallback": 2}
    assert setup.idle()
    assert sent(setup, setup.job(last, MODEL)).reason == "only"


def test_a_request_of_the_client_is_no_reason_to_fall_back() -> None:
    setup = Setup({name: [(0.0, 400)] for name in "abc"})
    assert sent(setup, setup.job(MODEL, ModelConfig("n"))).answer.status == 400
    assert len(setup.upstream.asked) == 1


def test_no_backend_at_all() -> None:
    setup = Setup({})
    for one in setup.fleet:
        one.draining = True
    error = refusal(setup, setup.job(MODEL, ModelConfig("n")))
    assert isinstance(error, Unavailable)
    assert "d: draining" in error.message
    assert not setup.upstream.asked


def test_a_deadline_ends_attempts_and_ladder() -> None:
    setup = Setup(every((0.0, "hang")))
    error = refusal(setup, setup.job(deadline=10.0))
    assert isinstance(error, DeadlineExceeded | GatewayTimeout)
    assert len(setup.upstream.asked) == 1
    assert setup.idle()
    late = Setup({})

    async def scenario() -> None:
        await asyncio.sleep(11.0)
        with pytest.raises(DeadlineExceeded):
            await late.dispatcher.send(late.job(deadline=10.0))

    run(scenario())
    assert not late.upstream.asked


@pytest.mark.parametrize(
    ("outcome", "images", "stage"),
    [("connect", True, CONNECT), ("broken", True, VISION), (500, False, TEXT), ("hang", False, TEXT)],
)
def test_a_failure_counts_for_its_stage(outcome: Any, images: bool, stage: str) -> None:
    setup = Setup({"d": [(0.0, outcome)]}, breaker_failures=1)
    refusal(setup, setup.job(ModelConfig("n"), images=images, deadline=5.0))
    opened = {name for name, breaker in setup.backend("d").breakers.items() if breaker.failures}
    assert opened == {stage}
    assert setup.notes.opened == [("d", stage)]
    assert setup.notes.failed == ["d"]


def test_an_error_of_a_backend_shows_that_it_can_be_connected_to() -> None:
    setup = Setup({"d": [(0.0, "connect")] * 4 + [(0.0, 500), (0.0, "connect")]})
    for _ in range(6):
        refusal(setup, setup.job(ModelConfig("n")))
    assert setup.backend("d").breakers[CONNECT].failures == 1
    assert setup.notes.opened == []


def test_the_first_byte_of_streams_is_measured() -> None:
    setup = Setup(every((2.0, 200)))
    job = setup.job()
    assert sent(setup, job).first_byte_s == 2.0
    assert all(not one.first_bytes for one in setup.fleet)  # a complete answer has no first byte
    setup = Setup(every((2.0, 200)))
    job = setup.job()
    job.demand = demand("x", stream=True)
    assert list(sent(setup, job).backend.first_bytes) == [2.0]


def test_a_second_backend_is_asked_if_the_first_is_slow() -> None:
    setup = Setup({"a": [(9.0, 200)], "b": [(1.0, 200)]}, hedge_after_s=2.0)
    job = setup.job()
    won = sent(setup, job)
    assert (won.backend.name, won.reason, won.first_byte_s) == ("b", "hedge, round-robin", 1.0)
    assert setup.notes.kinds == {"hedge": 1}
    assert setup.upstream.asked == ["a", "b"]
    assert job.attempts == 2
    assert setup.idle()


def test_a_fast_backend_needs_no_second_one() -> None:
    setup = Setup({"a": [(1.0, 200)]}, hedge_after_s=2.0)
    assert sent(setup, setup.job()).backend.name == "a"
    assert setup.upstream.asked == ["a"]


@pytest.mark.parametrize("first", [500, "broken", "connect", 200])
@pytest.mark.parametrize("second", [500, 200, "defect"])
def test_both_answer_in_the_same_moment(first: Any, second: Any) -> None:
    setup = Setup({"a": [(5.0, first)], "b": [(3.0, second)], "c": [(0.0, 200)]}, hedge_after_s=2.0)

    async def scenario() -> None:
        try:
            won = await setup.dispatcher.send(setup.job())
        except ValueError:
            pass  # the defect is not hidden
        else:
            won.end()
        await asyncio.sleep(50)

    run(scenario())
    assert setup.idle()


def test_a_hedge_whose_second_fails_waits_for_the_first() -> None:
    setup = Setup({"a": [(9.0, 200)], "b": [(1.0, 500)]}, hedge_after_s=2.0)
    assert sent(setup, setup.job()).backend.name == "a"
    assert setup.idle()


def test_a_hedge_needs_budget_and_another_backend() -> None:
    poor = Setup({"a": [(9.0, 200)]}, hedge_after_s=2.0, retry_share=0.0)
    assert sent(poor, poor.job()).backend.name == "a"
    assert poor.upstream.asked == ["a"]
    alone = Setup({"d": [(9.0, 200)]}, hedge_after_s=2.0)
    assert sent(alone, alone.job(ModelConfig("n"))).backend.name == "d"
    assert alone.upstream.asked == ["d"]


def test_a_cancelled_probe_makes_room_for_another_one() -> None:
    setup = Setup({"d": [(0.0, 500), (50.0, 200), (0.0, 200)]}, breaker_failures=1, breaker_open_s=30.0)

    async def scenario() -> None:
        job = setup.job(ModelConfig("n"))
        with pytest.raises(BadGateway):
            await setup.dispatcher.send(job)
        await asyncio.sleep(30.0)
        probe = asyncio.create_task(setup.dispatcher.send(job))
        await asyncio.sleep(1.0)
        with pytest.raises(Unavailable):
            await setup.dispatcher.send(job)
        probe.cancel()
        await asyncio.wait([probe])
        (await setup.dispatcher.send(job)).end()

    run(scenario())
    assert setup.idle()


OUTCOMES = st.tuples(
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]),
    st.sampled_from([200, 200, 200, 400, 500, 429, (503, 2.0), "connect", "broken", "hang", "defect"]),
)
SCRIPTS = st.fixed_dictionaries({name: st.lists(OUTCOMES, min_size=1, max_size=5) for name in "abcd"})
REQUESTS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 2.5]),  # when it is sent
        st.none() | st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0]),  # after which it is cancelled
        st.booleans(),  # images
        st.booleans(),  # a fallback
    ),
    min_size=1,
    max_size=8,
)


@given(SCRIPTS, REQUESTS, st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, 4))
def test_nothing_stays_outstanding(
    script: dict[str, list[tuple[float, Any]]],
    requests: list[tuple[float, float | None, bool, bool]],
    hedge: float,
    attempts: int,
) -> None:
    """With any failures and cancellations, at the end no request is counted and every answer is closed."""
    setup = Setup(script, hedge_after_s=hedge, max_attempts=attempts, breaker_failures=3)

    async def one(start: float, images: bool, fallback: bool) -> None:
        await asyncio.sleep(start)
        ladder = (MODEL, ModelConfig("n")) if fallback else (MODEL,)
        job, asked = setup.job(*ladder, images=images, deadline=start + 6.0), len(setup.upstream.asked)
        try:
            won = await setup.dispatcher.send(job)
        except (FoveaError, ValueError):
            return
        try:
            assert won.backend.requests > 0
            await asyncio.sleep(1.0)
        finally:
            won.end()
        assert len(setup.upstream.asked) > asked

    async def scenario() -> None:
        tasks = []
        for start, cancel, images, fallback in requests:
            task = asyncio.create_task(one(start, images, fallback))
            tasks.append(task)
            if cancel is not None:
                asyncio.get_running_loop().call_later(start + cancel, task.cancel)
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(each is None or isinstance(each, asyncio.CancelledError) for each in done)
        await asyncio.sleep(50.0)  # losers of hedges end a moment later

    run(scenario())
    assert setup.idle()
    bound = 2 * attempts if hedge else attempts
    assert len(setup.upstream.asked) <= len(requests) * (bound + 1 + bool(hedge))


def test_rendering_may_fail_before_anything_is_counted() -> None:
    setup = Setup({})
    job = setup.job()
    broken: Callable[..., Outgoing] = {}.__getitem__  # type: ignore[assignment]
    job.render = broken

    async def scenario() -> None:
        with pytest.raises(TypeError):
            await setup.dispatcher.send(job)

    run(scenario())
    assert setup.idle()
