"""An experiment's part in one request: its variant, the outcome, and copies for a variant on trial.

Copies are sent in the background. Their answers are measured, and nobody sees them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fovea.core.errors import FoveaError, Overloaded
from fovea.gateway.backends.backend import stage_of
from fovea.gateway.experiments.experiments import Assignment, Experiments
from fovea.gateway.experiments.statistics import Outcome, answer_of
from fovea.gateway.generate.dispatch import Dispatcher, Job
from fovea.gateway.generate.ends import EventStream, end_of_status
from fovea.gateway.generate.upstream import BROKEN
from fovea.gateway.inspect.body import Body
from fovea.gateway.tenants.keys import Tenant
from fovea.gateway.usage.prices import NOTHING, Consumption, consumption_of, usage_of
from fovea.http.exchange import Exchange

if TYPE_CHECKING:
    from fovea.gateway.backends.fleet import Fleet
    from fovea.gateway.generate.request import Request
    from fovea.gateway.usage.prices import PriceTable

log = logging.getLogger("fovea.gateway")


def assignment_of(
    experiments: Experiments, model: str, exchange: Exchange, tenant: Tenant, body: Body
) -> Assignment | None:
    """Return the variant of a request; None if its model has no experiment.

    Raises InvalidRequest if the experiment's header names no variant.
    """
    experiment = experiments.of(model)
    if experiment is None:
        return None
    kind, _, name = experiment.sticky_by.partition(":")
    user = body.value.get("user")
    sticky = {
        "key": tenant.name,
        "user": body.text(user) if isinstance(user, str) else "",
        "header": exchange.header(name.lower().encode()),
    }.get(kind, "")
    return experiments.choose(model, exchange.header(experiment.header.lower().encode()), sticky)


def outcome_of(request: Request) -> Outcome | None:
    """Return what the end of a request says about the variant that it got; None: nothing.

    It says nothing if the client left, has sent a wrong request or has set too short a deadline, or if the
    answer came from the cache.
    """
    status = request.status
    overloaded = status == Overloaded.status
    wrong = (400 <= status < 500 and not overloaded) or request.code == "own_error"
    if request.gone or wrong or request.is_stored:
        return None
    return Outcome(
        request.services.clock() - request.started,
        request.stream_began_s,
        status >= 500 or overloaded or request.code == "stream_broken",
        request.consumption or NOTHING,
        request.price.cost,
        answer_of(request.tenant.name, request.request_id),
    )


@dataclass(eq=False)
class Shadows:
    """Sends copies in the background, as many as the experiments allow."""

    experiments: Experiments | None
    dispatcher: Dispatcher
    fleet: Fleet
    prices: PriceTable | None
    clock: Callable[[], float]
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)

    def maybe(self, assignment: Assignment | None, job: Job, model: str) -> bool:
        """Send a copy of a request if its model's experiment wants one now. Returns whether it is sent.

        assignment: of the request itself; None: its model has no experiment.
        model: the name that the client asked for.
        """
        if self.experiments is None or assignment is None:
            return False
        copy = self.experiments.shadow(model)
        if copy is None:
            return False
        try:
            ladder = [self.fleet.model(copy.model)]
        except FoveaError as error:
            log.warning("experiment %s: no copy is sent: %s", copy.experiment, error.message)
            self.experiments.drop(copy)
            return False
        task = asyncio.get_running_loop().create_task(self._send(copy, replace(job, ladder=ladder)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    async def aclose(self) -> None:
        """Cancel the copies that are in flight."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, copy: Assignment, job: Job) -> None:
        assert self.experiments is not None  # `maybe` has asked them
        started = self.clock()
        outcome: Outcome | None = None
        try:
            outcome = await self._measure(job, started)
        except FoveaError:
            outcome = Outcome(self.clock() - started, failed=True)
        finally:
            if outcome is None:
                self.experiments.drop(copy)
            else:
                self.experiments.record(copy, outcome)

    async def _measure(self, job: Job, started: float) -> Outcome:
        """Read the answer to a copy to its end."""
        won = await self.dispatcher.send(job)
        first = self.clock() - started
        events = EventStream()
        failed = won.answer.status >= 500
        end = end_of_status(won.answer.status)
        try:
            if won.answer.is_stream:
                events.feed(won.answer.first)
                async with asyncio.timeout_at(job.deadline):
                    while data := await won.answer.read():
                        events.feed(data)
                events.finish()
                failed = failed or not (events.complete or events.reasoned)
        except TimeoutError:
            failed, end = True, "total time"
        except BROKEN:
            failed, end = True, "cut"
        finally:
            won.end()
        self.dispatcher.note(won.backend, stage_of(vision=job.demand.has_images), end)
        told = events.usage() if won.answer.is_stream else usage_of(won.answer.first)
        used = consumption_of(told, Consumption(completion_tokens=events.count))
        cost = 0 if self.prices is None else self.prices.cost(won.model.name, used)
        return Outcome(self.clock() - started, first if won.answer.is_stream else None, failed, used, cost)
