"""Sends a request until a backend answers: retries, hedges, and the models to fall back to.

The governing rule: everything here happens before the first byte has reached the client. After it, an answer
is never continued by another backend, because text would be repeated or contradicted.

    for each model of the ladder              primary, then its fallbacks
        up to max_attempts backends           each at most once; retries within a budget
            the first byte, or a failure      with hedging: of the faster of two
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fovea.api.errors import clip
from fovea.core.errors import DeadlineExceeded, EngineError, FoveaError, Overloaded, Unavailable
from fovea.gateway.backends.backend import CONNECT, Backend, Load, stage_of
from fovea.gateway.backends.route import Choice, Router
from fovea.gateway.breaker import RetryBudget
from fovea.gateway.config import ModelConfig
from fovea.gateway.generate.ends import ENDS, GOOD, NEUTRAL, NOTHING, UNREACHABLE, end_of_status
from fovea.gateway.generate.upstream import Answer, AttemptFailed, Outgoing, Upstream
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.metrics import Metrics
from fovea.gateway.settings import ResilienceSettings
from fovea.gateway.translate.chat_reader import valid_text

log = logging.getLogger("fovea.gateway")
LONGEST_REASON = 300
USUAL_PAUSE_S = 1.0
"""Seconds for which an overloaded backend that names none gets no requests."""


class BadGateway(EngineError):
    """No backend gave an answer that can be passed on."""

    status = 502
    default_code = "upstream_failed"


class GatewayTimeout(EngineError):
    """No backend answered in time."""

    status = 504
    kind = "timeout_error"
    default_code = "upstream_timeout"


@dataclass(slots=True)
class Job:
    """One request to be sent.

    ladder: the models that may answer, the wanted one first.
    render: returns the request for a backend and a model.
    load_of: returns the outstanding work of the request in a model.
    deadline: time of the event loop's clock at which the request ends.
    attempts: backends that were asked.
    failures: (backend, reason, time) of attempts that failed.
    work: the models that were given the request, without attempts that cost nothing.
    """

    demand: Demand
    ladder: Sequence[ModelConfig]
    render: Callable[[Backend, ModelConfig], Outgoing]
    load_of: Callable[[ModelConfig], Load]
    deadline: float
    attempts: int = 0
    failures: list[tuple[str, str, float]] = field(default_factory=list)
    work: list[ModelConfig] = field(default_factory=list)


@dataclass(slots=True)
class Won:
    """An answer that has begun.

    backend, model, reason: where it comes from, and why from there.
    first_byte_s: seconds from sending to the first byte.
    """

    answer: Answer
    backend: Backend
    model: ModelConfig
    reason: str
    first_byte_s: float
    load: Load = field(repr=False)
    ended: bool = False

    def end(self) -> None:
        """Close the answer and count its work no longer. May be called twice."""
        if not self.ended:
            self.ended = True
            self.answer.close()
            self.backend.end(self.load, begun=True)


@dataclass(eq=False)
class Dispatcher:
    """Sends requests to backends."""

    router: Router
    upstream: Upstream
    settings: ResilienceSettings
    clock: Callable[[], float]
    metrics: Metrics
    budget: RetryBudget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = RetryBudget(self.settings.retry_share)

    async def send(self, job: Job) -> Won:
        """Return the first answer of a backend.

        Raises Overloaded, Unavailable, BadGateway, GatewayTimeout or DeadlineExceeded with the reason of the
        last failure.
        """
        self.budget.count_request()
        error: FoveaError | None = None
        for place, model in enumerate(job.ladder):
            if error is not None:
                if _is_over(job):
                    break
                self.metrics.count("retries", "fallback")
            try:
                return await self._with_model(job, model, fallback=place > 0)
            except (Overloaded, Unavailable, BadGateway, GatewayTimeout) as failure:
                error = failure
        assert error is not None  # a ladder has at least one model
        raise error

    async def _with_model(self, job: Job, model: ModelConfig, *, fallback: bool) -> Won:
        """Return an answer of one model. Raises the error of its last backend."""
        tried: list[str] = []
        failure: AttemptFailed | None = None
        if _is_over(job):
            raise DeadlineExceeded("the request took longer than total_s", code="total_timeout")
        while len(tried) < self.settings.max_attempts and not (failure is not None and _is_over(job)):
            choice = self._next(job, model, tried, failure, fallback=fallback)
            if choice is None:
                break
            tried.append(choice.backend.name)
            try:
                if self.settings.hedge_after_s:
                    return await self._hedged(job, model, choice, tried)
                return await self._attempt(job, model, choice)
            except AttemptFailed as failed:
                failure = failed
        if failure is None:
            raise self.router.unavailable(model, job.demand)
        raise _as_error(failure, len(tried))

    def _next(
        self,
        job: Job,
        model: ModelConfig,
        tried: Sequence[str],
        failure: AttemptFailed | None,
        *,
        fallback: bool,
    ) -> Choice | None:
        """Choose the next backend of a model; None: there is none, or too many retries were made.

        failure: of the backend before. One that was not even connected to has cost nothing, so the retry does
            not count: when a backend dies, all of its requests may go elsewhere.
        """
        choice = self.router.choose(model, job.demand, job.load_of(model), tried)
        if choice is None or (failure is not None and failure.connected and not self.budget.take()):
            return None
        if failure is not None:
            self.metrics.count("retries", "retry")
        words = ["fallback"] * fallback + ["retry"] * (failure is not None)
        return choice._replace(reason=", ".join([*words, choice.reason]))

    async def _hedged(self, job: Job, model: ModelConfig, choice: Choice, tried: list[str]) -> Won:
        """Send the request to one backend, and to a second one, too, if the first byte takes long."""
        first = asyncio.ensure_future(self._attempt(job, model, choice))
        running = {first}
        try:
            done, _ = await asyncio.wait(running, timeout=self.settings.hedge_after_s)
            if not done and (other := self._second(job, model, tried)) is not None:
                tried.append(other.backend.name)
                running.add(asyncio.ensure_future(self._attempt(job, model, other)))
            failure: AttemptFailed | None = None
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    running.discard(task)  # the others are ended below, also those that are done, too
                    try:
                        return task.result()
                    except AttemptFailed as failed:
                        failure = failed
            assert failure is not None  # every task has failed
            raise failure
        finally:
            for task in running:
                task.add_done_callback(_end_loser)
                task.cancel()

    def _second(self, job: Job, model: ModelConfig, tried: Sequence[str]) -> Choice | None:
        choice = self.router.choose(model, job.demand, job.load_of(model), tried)
        if choice is None or not self.budget.take():
            return None
        self.metrics.count("retries", "hedge")
        return choice._replace(reason=f"hedge, {choice.reason}")

    async def _attempt(self, job: Job, model: ModelConfig, choice: Choice) -> Won:
        """Send the request to one backend. Raises AttemptFailed."""
        backend, vision, load = choice.backend, job.demand.has_images, job.load_of(model)
        outgoing = job.render(backend, model)
        job.attempts += 1
        job.work.append(model)
        started = self.clock()
        backend.begin(load, started, vision=vision)
        answer: Answer | None = None
        try:
            answer = await self.upstream.open(
                backend, outgoing, stream=job.demand.stream, deadline=job.deadline
            )
        except AttemptFailed as failure:
            job.failures.append((backend.name, failure.reason, self.clock()))
            self.metrics.count("attempts", backend.name, failure.reason)
            log.warning("%s: %s", outgoing.headers.get("x-request-id", ""), failure.message)
            end = failure.end(links=job.demand.has_links)
            # A complete answer that takes too long says something about the request, if others were answered
            # meanwhile. Otherwise a client that asks for endless answers would open all breakers.
            if end == "late" and not job.demand.stream and backend.answered_at > started:
                end = "long request"
            if ENDS[end].charged == NOTHING:
                job.work.remove(model)
            if failure.status:
                backend.breakers[CONNECT].succeed()
            if ENDS[end].pauses:
                backend.busy_until = self.clock() + (failure.retry_after or USUAL_PAUSE_S)
            self.note(backend, stage_of(vision=vision), end)
            raise
        finally:
            if answer is None:
                backend.end(load)
                for stage in (CONNECT, stage_of(vision=vision)):
                    backend.breakers[stage].release()
        backend.answered_at = now = self.clock()
        seconds = now - started
        backend.breakers[CONNECT].succeed()
        if ENDS[end_of_status(answer.status)].verdict == GOOD:
            backend.breakers[stage_of(vision=vision)].begin_stream()
        if answer.is_stream:
            backend.note_first_byte(seconds)
        backend.begin_answer(load)
        return Won(answer, backend, model, choice.reason, seconds, load)

    def note(self, backend: Backend, stage: str, end: str) -> None:
        """Let the breakers of a backend know how an attempt, or an answer that had begun, has ended.

        stage: of the request. end: a name of `ends.ENDS`.
        """
        verdict = ENDS[end].verdict
        stage = CONNECT if verdict == UNREACHABLE else stage
        breaker = backend.breakers[stage]
        if verdict == GOOD:
            breaker.succeed()
        elif verdict == NEUTRAL:
            breaker.release()
        elif breaker.fail(self.clock()):
            self.metrics.count("breaker_opened", backend.name, stage)
            log.error("backend %s: the circuit breaker of %s has opened", backend.name, stage)


def _is_over(job: Job) -> bool:
    """Whether the time for all attempts is over."""
    return asyncio.get_running_loop().time() >= job.deadline


def _end_loser(task: asyncio.Future[Won]) -> None:
    """End the answer of the slower backend, if it has begun in the meantime."""
    if not task.cancelled() and task.exception() is None:
        task.result().end()


def _as_error(failure: AttemptFailed, attempts: int) -> FoveaError:
    """The error for the client after the last attempt."""
    tries = f" ({attempts} backends were asked)" if attempts > 1 else ""
    end, pause_s = failure.end(links=False), failure.retry_after or 1.0
    if end == "engine busy":
        message = f"the backends of this model are busy{tries}"
        return Overloaded(message, retry_after=pause_s, code="backends_busy")
    if end == "no room":
        message = f"the backends of this model have no room for this request{tries}{_reason(failure)}"
        if failure.status == 429:
            return Overloaded(message, retry_after=pause_s, code="backends_busy", scope="request")
        return Unavailable(message, code="backends_busy", scope="request")
    if failure.reason == "timeout":
        return GatewayTimeout(f"{failure.message}{tries}")
    return BadGateway(f"{failure.message}{tries}")


def _reason(failure: AttemptFailed) -> str:
    """The backend's own words for a refusal, which are about the request; "": it has none."""
    try:
        message = json.loads(failure.body)["error"]["message"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    return f": {clip(valid_text(message), LONGEST_REASON)}" if isinstance(message, str) else ""
