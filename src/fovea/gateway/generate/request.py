"""One request for an answer: the steps from its body to its last byte.

    key -> body -> images -> model -> experiment -> cached answer? -> limits -> slot -> backend -> answer

What a step has taken (a reservation, a queue slot, a place at a backend) is given back in `_finish`, whatever
has happened. What the tenant pays is reserved before the request is sent, and settled when it has ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from fovea.api.unknown import HEADER, header
from fovea.core.errors import (
    DeadlineExceeded,
    EngineError,
    FoveaError,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from fovea.gateway.backends.backend import Load, stage_of
from fovea.gateway.backends.fleet import Drains, Fleet
from fovea.gateway.cache.cache import Hit, Recorder, ResponseCache
from fovea.gateway.cache.key import MEDIA_MARK, Plan
from fovea.gateway.config import ModelConfig
from fovea.gateway.experiments.experiments import Assignment, Experiments
from fovea.gateway.fair_queue import QueueSlot
from fovea.gateway.generate.dispatch import BadGateway, Dispatcher, GatewayTimeout, Job, Won
from fovea.gateway.generate.ends import ENDS, MOST, USED
from fovea.gateway.generate.experiment import Shadows, assignment_of, outcome_of
from fovea.gateway.generate.outgoing import (
    PATHS,
    Renderer,
    check_headers,
    client_header,
    headers_of,
    key_header,
)
from fovea.gateway.generate.records import Records, Trace
from fovea.gateway.generate.relay import Relay, ShuttingDown, SilenceWatch
from fovea.gateway.generate.upstream import Upstream
from fovea.gateway.inspect import fields
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.demand import Demand, VisualCounter
from fovea.gateway.inspect.images import ImageInspector, KnownImages, RequestImage
from fovea.gateway.metrics import Metrics
from fovea.gateway.queues import Queues
from fovea.gateway.settings import GatewaySettings
from fovea.gateway.tenants.accounts import Accounts, Reservation
from fovea.gateway.tenants.keys import EVERYONE, Tenant, Tenants
from fovea.gateway.translate.translation import ChatTranslation, to_chat
from fovea.gateway.usage.prices import FREE, NOTHING, Amounts, Consumption, Price, PriceTable, consumption_of
from fovea.http.bodies import BodyBudget, Receive, Scope, Send
from fovea.http.browsers import Browsers
from fovea.http.exchange import CLIENT_GONE, Exchange

log = logging.getLogger("fovea.gateway")
TIMEOUTS = ("upstream_timeout", "total_timeout")
"""Codes of errors after which a backend has worked for nothing."""
NO_ANSWER = (Overloaded, Unavailable, BadGateway, GatewayTimeout, DeadlineExceeded)
"""Errors after which an old answer from the cache is better than none."""
CACHE_ANYWAY = b"x-fovea-cache"
"""Header of a request: "on" caches its answer although it is not deterministic."""


@dataclass(slots=True)
class Services:
    """Everything that the requests of one worker share. None: the gateway has no such part.

    running: requests for answers that have not ended.
    draining: whether the gateway is shutting down.
    began: seconds of the epoch at which the worker began.
    """

    settings: GatewaySettings
    clock: Callable[[], float]
    metrics: Metrics
    fleet: Fleet
    upstream: Upstream
    dispatcher: Dispatcher
    inspector: ImageInspector
    known: KnownImages
    visual: VisualCounter
    queues: Queues
    bodies: BodyBudget
    browsers: Browsers
    tenants: Tenants
    accounts: Accounts
    prices: PriceTable | None
    cache: ResponseCache | None
    experiments: Experiments | None
    shadows: Shadows
    drains: Drains
    silence: SilenceWatch
    records: Records
    running: set[Request] = field(default_factory=set)
    draining: bool = False
    began: float = field(default_factory=time.time)


class GatewayExchange(Exchange):
    """One request to the gateway, of whatever kind, and its answer."""

    defect = "the gateway failed on this request; see its log"

    def __init__(self, services: Services, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(scope, receive, send, services.clock)
        self.services = services

    async def fail(self, error: FoveaError) -> None:
        self.services.metrics.count("refused", "internal_error" if type(error) is EngineError else error.code)
        await super().fail(error)

    def stopped(self, reason: str) -> FoveaError:
        return ShuttingDown(reason)


class Request(GatewayExchange):
    """One request for an answer.

    tenant, demand, model, won: known as the request proceeds.
    asked: name of the model that the client asked for, without aliases; "": none that is known.
    cached: "hit", "miss", "stale", "bypass", or "" if the response cache has no part in it.
    consumption, price: tokens that it has used, and what they cost; None: it ended before it could use any.
    stream_began_s, waited_s: seconds to the first byte of a stream, and in the queue.
    attempts: backends that were asked.
    trace: the times of its stages.
    """

    def __init__(self, services: Services, scope: Scope, receive: Receive, send: Send, api: str) -> None:
        """api: "chat", "completions", "messages" or "responses"."""
        super().__init__(services, scope, receive, send)
        self.api = api
        self.tenant: Tenant = EVERYONE
        self.demand: Demand | None = None
        self.model: ModelConfig | None = None
        self.won: Won | None = None
        self.consumption: Consumption | None = None
        self.price: Price = FREE
        self.asked = self.cached = ""
        self.stream_began_s: float | None = None
        self.waited_s = 0.0
        self.attempts = 0
        self.trace = Trace(services.records.tracer, self.headers, self.started)
        self._assignment: Assignment | None = None
        self._translation: ChatTranslation | None = None
        self._plan: Plan | None = None
        self._reservation: Reservation | None = None
        self._slot: QueueSlot | None = None
        self._relay: Relay | None = None
        self._work: list[str] = []

    @property
    def outcome(self) -> int:
        """The status for metrics and logs: that of the answer, or CLIENT_GONE."""
        return CLIENT_GONE if self.code == "client_gone" else self.status

    @property
    def is_stored(self) -> bool:
        """Whether the answer came from the response cache."""
        return self.cached in ("hit", "stale")

    async def answer(self) -> None:
        """Check the key, receive the body, and answer. Raises FoveaError."""
        services = self.services
        self.tenant = services.tenants.authenticate(self.authorization)
        await self._serve(Body.parse(await self.receive_json(services.bodies, self.tenant.name)))

    def refusal(self, error: FoveaError) -> dict[str, Any]:
        """The body of an error, with the names of fields that the client has used."""
        return super().refusal(error) if self._translation is None else self._translation.refusal(error)

    async def _serve(self, body: Body) -> None:
        """Answer a request whose body has arrived."""
        services, trace = self.services, self.trace
        trace.mark("receive", services.clock())
        model, images = await self._inspect(body)
        self.model = model = self._assigned(body, model)
        body = self._translated(body, model)
        demand = self.demand = Demand(body, images, self.header(b"x-session-id"))
        body = self._bounded(body, model, demand)
        self.consumption = NOTHING
        trace.mark("inspect", services.clock())
        hit = await self._find(body, model, images)
        trace.mark("cache", services.clock())
        if hit is None:
            expected = self._estimate(demand, demand.answer_tokens)
            cost = 0 if services.prices is None else services.prices.cost(model.name, expected)
            await self._reserve(Amounts(1, demand.text_tokens, demand.visual_tokens, cost))
            trace.mark("limits", services.clock())
            try:
                await self._from_backend(body, model, demand)
                return
            except NO_ANSWER:
                hit = None if self.status else await self._find_stale()
                if hit is None:
                    raise
                self.extra["x-fovea-fallback"] = f"{model.name} -> cache"
        await self._send_stored(hit, model, demand)

    async def _inspect(self, body: Body) -> tuple[ModelConfig, list[RequestImage]]:
        """Check a request. Returns the model that it asks for, and its images and videos."""
        services, limits = self.services, self.tenant.limits
        asked = body.value.get("model")
        model = services.fleet.model(asked if isinstance(asked, str) else "")
        self.asked = model.name
        if not limits.allows(model.name):
            self.tenant.check_model(str(asked or model.name))
        fields.check_fields(body.value, self.api)
        check_headers(self.headers)
        fields.check_priority(body.value, self.tenant.name, limits.priority)
        parts = list(fields.media_parts(body.value))
        fields.check_pictures(body, self.api)
        fields.separate_uuids(body, parts, self.tenant.name)
        images = await services.inspector.inspect(body, parts) if parts else []
        services.metrics.count("images", by=len(images))
        return model, images

    def _assigned(self, body: Body, model: ModelConfig) -> ModelConfig:
        """Return the model that the experiment of this model assigns, if there is one."""
        experiments = self.services.experiments
        if experiments is None:
            return model
        self._assignment = assigned = assignment_of(experiments, model.name, self, self.tenant, body)
        if assigned is None:
            return model
        self.extra["x-fovea-experiment"] = f"{assigned.experiment}={assigned.variant}"
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
            self.extra[HEADER] = header(self._translation.ignored)
        return body.with_value(self._translation.body)

    @property
    def _sent_as(self) -> str:
        """The API as which the request is sent to backends."""
        return self.api if self._translation is None else "chat"

    def _bounded(self, body: Body, model: ModelConfig, demand: Demand) -> Body:
        """Count the visual tokens. Returns a body that bounds its answer if the tenant's limits need that."""
        limits = self.tenant.limits
        demand.visual_tokens = self.services.visual.count(model, demand.images)
        most = limits.max_visual_tokens
        if most and demand.visual_tokens > most:
            raise InvalidRequest(
                f"the request's images have {demand.visual_tokens} visual tokens together; key "
                f"{self.tenant.name!r} may use at most {most} (max_visual_tokens)",
                code="key_limit_exceeded",
            )
        if not limits.bounds_answers:
            return body
        return body.with_value(
            demand.with_answer_limit(body.value, self._sent_as, limits.answer_tokens, limits.most_text)
        )

    async def _find(self, body: Body, model: ModelConfig, images: list[RequestImage]) -> Hit | None:
        """Return the cached answer to this request, if there is one.

        An image that only its engine has read has no identity for the cache: what is behind its URL may have
        changed since.
        """
        cache, tenant, value = self.services.cache, self.tenant, body.value
        if cache is None or not tenant.limits.response_cache or self._sent_as not in ("chat", "completions"):
            return None
        asked = self.services.settings.cache_all or self.header(CACHE_ANYWAY).lower() == "on"
        if asked or value.get("temperature") == 0:  # others are not cached, so their texts are not needed
            value = body.resolved({image.part.url: f"{MEDIA_MARK}{n}" for n, image in enumerate(images)})
        self._plan = plan = cache.plan(
            value,
            [image.identity if not image.name else "" for image in images],
            tenant=tenant.scope,
            model_version=f"{model.served or model.name}\n{model.version}",
            path=PATHS[self._sent_as],
            cache_control=self.header(b"cache-control") or None,
            asked=asked,
        )
        hit = await cache.lookup(plan)
        self.cached = "hit" if hit is not None else "miss" if plan.key else "bypass"
        return hit

    async def _find_stale(self) -> Hit | None:
        """Return an older answer to the request, or None."""
        if self.services.cache is None or self._plan is None:
            return None
        hit = await self.services.cache.stale(self._plan)
        if hit is not None:
            self.cached = "stale"
        return hit

    async def _send_stored(self, hit: Hit, model: ModelConfig, demand: Demand) -> None:
        """Send an answer from the cache. It counts as a request, and costs what it costs."""
        usage = json.loads(hit.entry.body).get("usage")
        self._use(model.name, consumption_of(usage, self._estimate(demand, 0)), stored=True)
        if self._reservation is None:  # an older answer stands in for backends, for which there is one
            await self._reserve(Amounts(1, 0, 0, self.price.cost))
        self.extra["x-fovea-backend"] = "cache"
        self.extra["x-fovea-model"] = model.name
        self.extra["x-fovea-cache"] = self.cached
        await Relay(self, self.api, self._translation, self.services.silence).stored(hit)

    async def _from_backend(self, body: Body, model: ModelConfig, demand: Demand) -> None:
        """Wait for a queue slot, and pass on the answer of a backend."""
        services, images = self.services, demand.images
        deadline = asyncio.get_running_loop().time() + services.settings.timeouts.total_s
        own = {**self.trace.headers(), **client_header(self.tenant.name), **key_header(demand, self.headers)}
        renderer = Renderer(body, self._sent_as, self.headers, self.request_id, own)
        renderer.degraded = services.queues.degrade(model) if images else ""
        await self._wait(model, demand, deadline)
        ladder = [model, *(services.fleet.model(name) for name in model.fallback)]
        job = Job(demand, ladder, renderer, lambda each: self._load(each, demand), deadline)
        copied = services.shadows.maybe(self._assignment, job, self.asked)
        try:
            self.won = won = await services.dispatcher.send(job)
        finally:
            self.attempts, self.trace.failures = job.attempts, job.failures
            self._work = [each.name for each in job.work]
        if not copied and self.body_memory is not None:
            # No other backend gets the request any more, and its answer may take minutes.
            renderer.drop()
            self.body_memory.release()
        if won.answer.is_stream:
            self.stream_began_s = services.clock() - self.started
        log.debug("%s goes to %s: %s", self.request_id, won.backend.name, won.reason)
        self.extra |= headers_of(won, model, job.attempts, renderer.degraded, self.cached)
        services.metrics.count("degraded", by="x-fovea-degraded" in self.extra)
        services.known.learn_from(won.answer.headers, images)
        relay = self._relay = Relay(self, self.api, self._translation, services.silence)
        # An answer about smaller images must not be given later, when there is room for the whole ones.
        with self._recorder(wanted=won.model is model and not renderer.degraded) as recorder:
            if won.answer.is_stream:
                await relay.stream(won, recorder, renderer.adds_usage, deadline)
            else:
                await relay.complete(won.answer.status, won.answer.first, recorder)
        if relay.broken:
            self.code = "own_error" if relay.end == "own error" else "stream_broken"
        services.dispatcher.note(won.backend, stage_of(vision=demand.has_images), relay.end)

    def _recorder(self, *, wanted: bool) -> AbstractContextManager[Recorder | None]:
        """Return the recorder of the answer for the cache, if it is wanted there."""
        cache, plan = self.services.cache, self._plan
        return nullcontext() if cache is None or plan is None or not wanted else cache.record(plan)

    async def _wait(self, model: ModelConfig, demand: Demand, deadline: float) -> None:
        """Wait in the fair queue until a backend has room."""
        services, limits = self.services, self.tenant.limits
        began = services.clock()
        self._slot = await services.queues.of(model).acquire(
            self.tenant.name,
            weight=limits.weight,
            priority=limits.priority,
            cost=demand.text_tokens + demand.visual_tokens,
            deadline_s=deadline,
        )
        now = services.clock()
        self.waited_s = now - began
        self.trace.mark("queue", now)

    def _load(self, model: ModelConfig, demand: Demand) -> Load:
        """Return the outstanding work of the request in a model."""
        if model is self.model:
            return Load(demand.text_tokens, demand.visual_tokens)
        return Load(demand.text_tokens, self.services.visual.count(model, demand.images))

    async def finish(self) -> None:
        """Give everything back that the request has taken, and record it."""
        services, won, used = self.services, self.won, None
        if self.attempts:
            self.trace.mark("forward", services.clock())
        elif self.code:
            self.trace.fail(services.clock())
        if won is not None:
            won.end()
        if self.demand is not None and self.consumption is not None:
            self._charge(self.demand)
            used = self.consumption.text_tokens + self.consumption.visual_tokens
        if self._slot is not None and self.model is not None:
            services.queues.of(self.model).release(self._slot, used)
        if services.cache is not None and self._plan is not None:
            services.cache.abandon(self._plan)
        if self._reservation is not None:
            await services.accounts.settle(self._reservation, self._settled())
        outcome = outcome_of(self)
        if self._assignment is not None and services.experiments is not None and outcome is not None:
            services.experiments.record(self._assignment, outcome)
            end = "failed" if outcome.failed else "answered"
            services.metrics.count(
                "experiment_requests", self._assignment.experiment, self._assignment.variant, end
            )
        services.records.enter(self, services.clock())

    async def _reserve(self, amounts: Amounts) -> None:
        """Take amounts from the tenant's limits. Raises Overloaded, InvalidRequest and Unavailable."""
        tenant = self.tenant
        try:
            self._reservation = await self.services.accounts.reserve(tenant.name, tenant.limits, amounts)
        except Unavailable as error:
            if error.__cause__ is not None:  # the tenant gets the id alone, by which this line is found
                log.warning("request %s of %s: %s", self.request_id, tenant.name, error.__cause__)
            raise Unavailable(f"{error.message} (request {self.request_id})", code=error.code) from error

    def _charge(self, demand: Demand) -> None:
        """Note the consumption of backends, by the table of ends."""
        relay = self._relay
        if self.won is not None and relay is not None:
            model, charged = self.won.model.name, ENDS[relay.end].charged
            if charged == USED or (charged == MOST and relay.usage is not None):
                self._use_told(model, demand, relay)
            elif charged == MOST:
                self._use_most(model, demand)
        elif self._unanswered_work:
            left = "left stream" if demand.stream else "left"
            if self.gone and ENDS[left].charged == USED:
                self._use_told(self._work[-1], demand, None)  # its first token would have been sent
            else:
                self._use_most(self._work[-1], demand)
                if not self.gone:  # the time of the gateway was over, and the client got nothing
                    self.price = FREE._replace(estimated=True)

    @property
    def _unanswered_work(self) -> bool:
        """Whether a backend has worked without an answer, because the client left or the time was over.

        This work counts. Otherwise a client could exceed its limits: by leaving every request just before its
        answer.
        """
        return self.won is None and bool(self._work) and (self.gone or self.code in TIMEOUTS)

    def _settled(self) -> Amounts:
        """Return what replaces the reserved amounts.

        A request on which no backend has worked costs nothing.
        """
        if self.is_stored:
            return Amounts(1, 0, 0, self.price.cost)
        if self.won is None and not self._unanswered_work:
            return Amounts()
        used = self.consumption or NOTHING
        return Amounts(1, used.text_tokens, used.visual_tokens, self.price.cost)

    def _use_told(self, model: str, demand: Demand, relay: Relay | None) -> None:
        """Note what a backend says it has used. relay: has passed its answer on; None: it has sent nothing.

        Before the end of an answer, usage may tell less than was seen.
        """
        usage, generated = (None, 0) if relay is None else (relay.usage, relay.generated)
        used = consumption_of(usage, self._estimate(demand, generated))
        if relay is not None and relay.end != "answered" and generated > used.completion_tokens:
            used = used._replace(completion_tokens=generated, estimated=True)
        self._use(model, used)

    def _use_most(self, model: str, demand: Demand) -> None:
        """Note the most that the request may have used: nobody has seen what was generated."""
        self._use(model, self._estimate(demand, demand.answer_tokens)._replace(estimated=True))

    def _use(self, model: str, used: Consumption, *, stored: bool = False) -> None:
        """Note a consumption and its price. stored: the answer came from the cache."""
        prices = self.services.prices
        self.consumption = used
        self.price = FREE._replace(estimated=used.estimated)
        if prices is not None:
            self.price = prices.price(model, used, cached_response=stored)

    def _estimate(self, demand: Demand, completion: int) -> Consumption:
        prompt = demand.prompt_tokens + demand.visual_tokens
        return Consumption(prompt, demand.visual_tokens, 0, completion, len(demand.images))
