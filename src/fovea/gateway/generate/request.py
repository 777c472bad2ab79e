"""One request for an answer: the steps from its body to its last byte.

    key -> body -> images -> model -> experiment -> cached answer? -> limits -> turn -> backend -> answer

What a step has taken (a reservation, a turn, a backend's place) is given back at the end, whatever has
happened. What the tenant pays is reserved before the request is sent, and settled when it has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from fovea.api.unknown import HEADER, header
from fovea.core.errors import DeadlineExceeded, FoveaError, InvalidRequest, Overloaded, Unavailable
from fovea.gateway.backends.backend import Load, stage_of
from fovea.gateway.cache.cache import Hit
from fovea.gateway.config import ModelConfig
from fovea.gateway.exchange import Exchange
from fovea.gateway.experiments.experiments import Assignment
from fovea.gateway.fair_queue import Turn
from fovea.gateway.generate.dispatch import BadGateway, GatewayTimeout, Job, Won
from fovea.gateway.generate.ends import ENDS, MOST, USED
from fovea.gateway.generate.experiment import assignment_of, outcome_of
from fovea.gateway.generate.outgoing import PATHS, Renderer, check_headers, client_header, headers_of
from fovea.gateway.generate.records import CACHE, FORWARD, INSPECT, LIMITS, QUEUE, RECEIVE
from fovea.gateway.generate.relay import Relay, ShuttingDown, Stored
from fovea.gateway.generate.usage import consumption_of
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.inspect.fields import (
    check_fields,
    check_pictures,
    check_priority,
    media_parts,
    separate_uuids,
)
from fovea.gateway.inspect.images import RequestImage
from fovea.gateway.services import Services
from fovea.gateway.tenants.accounts import Reservation
from fovea.gateway.tenants.keys import EVERYONE, Tenant
from fovea.gateway.translate import ChatTranslation, to_chat
from fovea.gateway.usage.prices import Amounts, Consumption, Price
from fovea.http.bodies import Claim
from fovea.http.refusals import ClientGone

NOTHING = Consumption()
FREE = Price(0)


class Bill:
    """The bill of one request.

    consumption: tokens that it has used.
    price: what they cost.
    """

    __slots__ = ("_demand", "_reservation", "_services", "_tenant", "consumption", "price")

    def __init__(self, services: Services, tenant: Tenant, demand: Demand) -> None:
        self._services = services
        self._tenant = tenant
        self._demand = demand
        self._reservation: Reservation | None = None
        self.consumption = NOTHING
        self.price = FREE

    async def reserve(self, model: str) -> None:
        """Take the most that the request may use from the tenant's limits. Raises Overloaded."""
        demand = self._demand
        expected = self._estimate(demand.answer_tokens)
        cost = 0 if self._services.prices is None else self._services.prices.cost(model, expected)
        await self._take(Amounts(1, demand.text_tokens, demand.visual_tokens, cost))

    async def take_stored(self, model: str, usage: Mapping[str, Any] | None) -> None:
        """Take a request that is answered from the cache: it counts as a request, and costs what it costs.

        usage: of the stored answer. Raises Overloaded.
        """
        self.consumption = consumption_of(usage, self._estimate(0))
        self._price(model, stored=True)
        if self._reservation is None:  # an older answer stands in for backends, for which there is one
            await self._take(Amounts(1, 0, 0, self.price.cost))

    def use(self, model: str, usage: Mapping[str, Any] | None, generated: int, *, whole: bool = True) -> None:
        """Note what the request has used.

        usage: what the backend says of it; None: nothing. generated: tokens of the answer that were seen.
        whole: whether the answer has reached its end. Before it, usage may tell less than was seen.
        """
        self.consumption = used = consumption_of(usage, self._estimate(generated))
        if not whole and generated > used.completion_tokens:
            self.consumption = used._replace(completion_tokens=generated, estimated=True)
        self._price(model)

    def use_most(self, model: str, *, free: bool = False) -> None:
        """Note the most that the request may have used: nobody has seen what was generated.

        free: it costs no money, because the time of the gateway was over, and its client got nothing.
        """
        self.consumption = self._estimate(self._demand.answer_tokens)._replace(estimated=True)
        if free:
            self.price = FREE._replace(estimated=True)
        else:
            self._price(model)

    async def settle(self, *, answered: bool, stored: bool) -> None:
        """Replace what was reserved by what was used. A request on which no backend has worked costs nothing.

        answered: whether a backend has answered it, or has worked on it until it was given up.
        stored: whether the answer came from the cache, so that no tokens were used.
        """
        if self._reservation is None:
            return
        used = Amounts()
        if stored:
            used = Amounts(1, 0, 0, self.price.cost)
        elif answered:
            tokens = self.consumption
            used = Amounts(1, tokens.text_tokens, tokens.visual_tokens, self.price.cost)
        await self._services.accounts.settle(self._reservation, used)

    async def _take(self, amounts: Amounts) -> None:
        tenant = self._tenant
        self._reservation = await self._services.accounts.reserve(tenant.name, tenant.limits, amounts)

    def _estimate(self, completion: int) -> Consumption:
        demand = self._demand
        prompt = demand.prompt_tokens + demand.visual_tokens
        return Consumption(prompt, demand.visual_tokens, 0, completion, len(demand.images))

    def _price(self, model: str, *, stored: bool = False) -> None:
        if self._services.prices is not None:
            self.price = self._services.prices.price(model, self.consumption, cached_response=stored)
        else:
            self.price = FREE._replace(estimated=self.consumption.estimated)


log = logging.getLogger("fovea.gateway")
CLIENT_GONE = 499
"""Status in metrics and logs if the client left. It is never sent."""
TIMEOUTS = ("upstream_timeout", "total_timeout")
"""Codes of errors after which a backend has worked for nothing."""
NO_ANSWER = (Overloaded, Unavailable, BadGateway, GatewayTimeout, DeadlineExceeded)
"""Errors after which an old answer from the cache is better than none."""


class Request:
    """One request for an answer.

    tenant, demand, model, won, bill: known as the request proceeds.
    asked: name of the model that the client asked for, without aliases; "": none that is known.
    stored: its part of the response cache.
    code: code of the error that ended it; "": none.
    gone: whether its client has left.
    started, first_byte_s, waited_s: when it arrived, and seconds to the first byte of a stream and in the
        queue.
    attempts: backends that were asked.
    trace: the times of its stages.
    """

    def __init__(self, services: Services, exchange: Exchange, api: str) -> None:
        """api: "chat", "completions", "messages" or "responses"."""
        self.services = services
        self.exchange = exchange
        self.api = api
        self.tenant: Tenant = EVERYONE
        self.demand: Demand | None = None
        self.model: ModelConfig | None = None
        self.won: Won | None = None
        self.bill: Bill | None = None
        self.stored = Stored()
        self.code = ""
        self.started = services.clock()
        self.first_byte_s: float | None = None
        self.waited_s = 0.0
        self.attempts = 0
        self.asked = ""
        self.trace = services.tracking.begin(exchange, self.started)
        self._assignment: Assignment | None = None
        self._translation: ChatTranslation | None = None
        self._turn: Turn | None = None
        self._passed: Relay | None = None
        self._claim: Claim | None = None
        self._cut = ""
        self._work: list[str] = []
        self.gone = False
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Serve the request. Errors become answers; nothing is raised for a client that has left."""
        self._task = asyncio.current_task()
        self.services.running.add(self)
        try:
            await self._receive()
        except ClientGone:
            self.code = "client_gone"
        except asyncio.CancelledError:
            if not (self.gone or self._cut):
                raise
            if self.gone:
                self.code = "client_gone"
            else:
                await self._fail(ShuttingDown(f"{self._cut}; the request was not answered"))
        except FoveaError as error:
            await self._fail(error)
        finally:
            self.services.running.discard(self)
            await self._finish()

    def cut(self, reason: str) -> None:
        """End the request, because the gateway ends."""
        self._cut = reason
        if self._task is not None:
            self._task.cancel()

    async def _receive(self) -> None:
        services, exchange = self.services, self.exchange
        self.tenant = services.tenants.authenticate(exchange.authorization)
        waiting = asyncio.timeout(None)
        with services.bodies.claim(self.tenant.name, lambda: waiting.reschedule(0)) as claim:
            try:
                async with waiting:
                    body = await exchange.body(services.bodies, claim)
                    self._claim = claim
            except TimeoutError:
                raise services.bodies.overloaded() from None
            watch = asyncio.ensure_future(exchange.disconnected())
            watch.add_done_callback(self._on_gone)
            try:
                await self._serve(body)
            finally:
                watch.remove_done_callback(self._on_gone)
                watch.cancel()

    def _on_gone(self, _: object) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()

    async def _serve(self, body: Body) -> None:
        """Answer a request whose body has arrived."""
        services, trace = self.services, self.trace
        trace.mark(RECEIVE, services.clock())
        asked = body.value.get("model")
        model = services.fleet.model(asked if isinstance(asked, str) else "")
        self.asked = model.name
        if not self.tenant.limits.allows(model.name):
            self.tenant.check_model(str(asked or model.name))
        check_fields(body.value, self.api)
        check_headers(self.exchange.headers)
        check_priority(body.value, self.tenant.name, self.tenant.limits.priority)
        parts = list(media_parts(body.value))
        check_pictures(body, self.api)
        separate_uuids(body, parts, self.tenant.name)
        images = await services.inspector.inspect(body, parts) if parts else []
        services.metrics.count("images", by=len(images))
        self.model = model = self._assigned(body, model)
        body = self._translated(body, model)
        demand = self.demand = Demand(self.api, body, images, self.exchange.header(b"x-session-id"))
        demand.visual_tokens = services.visual.count(model, images)
        most = self.tenant.limits.max_visual_tokens
        if most and demand.visual_tokens > most:
            raise InvalidRequest(
                f"the request's images have {demand.visual_tokens} visual tokens together; key "
                f"{self.tenant.name!r} may use at most {most} (max_visual_tokens)",
                code="key_limit_exceeded",
            )
        limits = self.tenant.limits
        if limits.bounds_answers:
            value = demand.with_answer_limit(
                body.value, self._sent_as, limits.answer_tokens, limits.most_text
            )
            body = body.with_value(value)
        self.bill = bill = Bill(services, self.tenant, demand)
        trace.mark(INSPECT, services.clock())
        hit = await self._find(body, model, images)
        trace.mark(CACHE, services.clock())
        if hit is None:
            await bill.reserve(model.name)
            trace.mark(LIMITS, services.clock())
            try:
                await self._from_backend(body, model, images, bill)
                return
            except NO_ANSWER:
                hit = None if self.exchange.status else await self.stored.stale()
                if hit is None:
                    raise
                self.exchange.extra["x-fovea-fallback"] = f"{model.name} -> cache"
        await self._send_stored(hit, model, bill)

    def _assigned(self, body: Body, model: ModelConfig) -> ModelConfig:
        """Return the model that the experiment of this model assigns, if there is one."""
        experiments = self.services.experiments
        if experiments is None:
            return model
        self._assignment = assigned = assignment_of(experiments, model.name, self.exchange, self.tenant, body)
        if assigned is None:
            return model
        self.exchange.extra["x-fovea-experiment"] = f"{assigned.experiment}={assigned.variant}"
        return self.services.fleet.model(assigned.model)

    def _translated(self, body: Body, model: ModelConfig) -> Body:
        """Return the body of a chat request, if the backends of the model lack the API that was called."""
        if self.api not in ("messages", "responses"):
            return body
        backends = self.services.fleet.serving(model)
        if backends and all(self.api in backend.config.apis for backend in backends):
            return body
        self._translation = to_chat(
            self.api,  # type: ignore[arg-type]
            body.value,
            body.text,
            head=body.head,
        )
        if self._translation.ignored:
            self.exchange.extra[HEADER] = header(self._translation.ignored)
        return body.with_value(self._translation.body)

    async def _find(self, body: Body, model: ModelConfig, images: list[RequestImage]) -> Hit | None:
        """Return the cached answer to this request, if there is one."""
        services, cache = self.services, self.services.cache
        api = self._sent_as
        if cache is None or not self.tenant.limits.response_cache or api not in ("chat", "completions"):
            return None
        return await self.stored.find(
            cache, self.exchange, self.tenant, model, body, images, PATHS[api],
            every=services.settings.cache_all,
        )  # fmt: skip

    async def _send_stored(self, hit: Hit, model: ModelConfig, bill: Bill) -> None:
        """Send an answer from the cache."""
        await bill.take_stored(model.name, json.loads(hit.entry.body).get("usage"))
        self.exchange.extra["x-fovea-backend"] = "cache"
        self.exchange.extra["x-fovea-model"] = model.name
        self.exchange.extra["x-fovea-cache"] = self.stored.result
        await self._relay().stored(hit)

    @property
    def _sent_as(self) -> str:
        """The API as which the request is sent to backends."""
        return self.api if self._translation is None else "chat"

    def _relay(self) -> Relay:
        return Relay(self.exchange, self.api, self._translation, self.services.silence)

    async def _from_backend(
        self, body: Body, model: ModelConfig, images: list[RequestImage], bill: Bill
    ) -> None:
        """Wait for a turn, and pass on the answer of a backend."""
        services, demand = self.services, self.demand
        assert demand is not None  # set by `_serve`
        loop = asyncio.get_running_loop()
        deadline = loop.time() + services.settings.timeouts.total_s
        renderer = Renderer(
            body,
            self._sent_as,
            self.exchange.headers,
            self.exchange.request_id,
            {**self.trace.headers(), **client_header(self.tenant.name)},
        )
        queue = services.queues.of(model)
        renderer.degraded = services.queues.degrade(model) if images else ""
        waited = services.clock()
        self._turn = await queue.acquire(
            self.tenant.name,
            weight=self.tenant.limits.weight,
            priority=self.tenant.limits.priority,
            cost=demand.text_tokens + demand.visual_tokens,
            deadline_s=deadline,
        )
        now = services.clock()
        self.waited_s = now - waited
        self.trace.mark(QUEUE, now)
        ladder = [model, *(services.fleet.model(name) for name in model.fallback)]
        job = Job(demand, ladder, renderer, lambda each: self._load(each, images), deadline)
        copied = services.shadows.maybe(self._assignment, job, self.asked)
        try:
            self.won = won = await services.dispatcher.send(job)
        finally:
            self.attempts, self.trace.failures = job.attempts, job.failures
            self._work = [each.name for each in job.work]
        if not copied and self._claim is not None:
            # No other backend gets the request any more, and its answer may take minutes.
            renderer.drop()
            self._claim.release()
        if won.answer.is_stream:
            self.first_byte_s = services.clock() - self.started
        log.debug("%s goes to %s: %s", self.exchange.request_id, won.backend.name, won.reason)
        self.exchange.extra |= headers_of(won, model, job.attempts, renderer.degraded, self.stored.result)
        services.metrics.count("degraded", by="x-fovea-degraded" in self.exchange.extra)
        services.learn(won.answer.headers, images)
        relay = self._passed = self._relay()
        # An answer about smaller images must not be given later, when there is room for the whole ones.
        with self.stored.record(wanted=won.model is model and not renderer.degraded) as recorder:
            await relay.pass_on(won, recorder, renderer.adds_usage, deadline, services.settings.timeouts)
        if relay.broken:
            self.code = "own_error" if relay.end == "own error" else "stream_broken"
        services.dispatcher.note(won.backend, stage_of(vision=demand.has_images), relay.end)

    def _load(self, model: ModelConfig, images: list[RequestImage]) -> Load:
        assert self.demand is not None
        if model is self.model:
            return Load(self.demand.text_tokens, self.demand.visual_tokens)
        return Load(self.demand.text_tokens, self.services.visual.count(model, images))

    async def _fail(self, error: FoveaError) -> None:
        """Send an error, or nothing if an answer has begun already (its relay has ended it then)."""
        self.code = error.code
        self.services.metrics.count("refused", error.code)
        if not self.exchange.status:
            with suppress(ClientGone):
                await self.exchange.refuse(error, self._translation)

    async def _finish(self) -> None:
        """Give everything back that the request has taken, and record it."""
        services, won, bill = self.services, self.won, self.bill
        if self.attempts:
            self.trace.mark(FORWARD, services.clock())
        elif self.code:
            self.trace.fail(services.clock())
        if won is not None:
            won.end()
        if bill is not None:
            self._charge(bill)
        if self._turn is not None and self.model is not None:
            used = None if bill is None else bill.consumption.text_tokens + bill.consumption.visual_tokens
            services.queues.of(self.model).release(self._turn, used)
        self.stored.end()
        if bill is not None:
            stored = self.stored.result in ("hit", "stale")
            await bill.settle(answered=won is not None or self._unanswered_work, stored=stored)
        outcome = outcome_of(self)
        if self._assignment is not None and services.experiments is not None and outcome is not None:
            services.experiments.record(self._assignment, outcome)
            end = "failed" if outcome.failed else "answered"
            services.metrics.count(
                "experiment_requests", self._assignment.experiment, self._assignment.variant, end
            )
        services.book.enter(self)
        services.tracking.finish(self, services.clock())

    def _charge(self, bill: Bill) -> None:
        """Note in the bill what a backend was given, by the table of ends."""
        relay, demand = self._passed, self.demand
        assert demand is not None  # it is known before there is a bill
        if self.won is not None and relay is not None:
            model, billed = self.won.model.name, ENDS[relay.end].billed
            if billed == USED or (billed == MOST and relay.usage is not None):
                bill.use(model, relay.usage, relay.generated, whole=relay.end == "answered")
            elif billed == MOST:
                bill.use_most(model)
        elif self._unanswered_work:
            left = "left stream" if demand.stream else "left"
            if self.gone and ENDS[left].billed == USED:
                bill.use(self._work[-1], None, 0)  # its first token would have been sent
            else:
                bill.use_most(self._work[-1], free=not self.gone)

    @property
    def _unanswered_work(self) -> bool:
        """Whether a backend has worked without an answer, because the client left or the time was over.

        This work counts. Otherwise a client could exceed its limits: by leaving every request just before its
        answer.
        """
        return self.won is None and bool(self._work) and (self.gone or self.code in TIMEOUTS)

    @property
    def status(self) -> int:
        """The status of the answer, or CLIENT_GONE."""
        return CLIENT_GONE if self.code == "client_gone" else self.exchange.status
