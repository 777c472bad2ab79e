"""Records every request that has ended: in the metrics, the usage records and the audit log."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from fovea.access.keys import digest, fingerprint
from fovea.gateway.amounts import Consumption
from fovea.gateway.metrics import Metrics
from fovea.gateway.usage.audit import AuditedImage, AuditLog, AuditRecord
from fovea.gateway.usage.log import UsageLog
from fovea.gateway.usage.prices import Price
from fovea.gateway.usage.record import ServedFrom, UsageRecord

if TYPE_CHECKING:
    from fovea.gateway.generate.generation import Generation

MILLION = 1_000_000
NOTHING = Consumption()
FREE = Price(0)


class Book:
    """The records of one worker.

    usage: None: no usage is recorded.
    """

    def __init__(
        self,
        metrics: Metrics,
        usage: UsageLog | None,
        audit: AuditLog,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._usage = usage
        self._audit = audit
        self._now = now

    def close(self) -> None:
        """Write what is left."""
        if self._usage is not None:
            self._usage.close()
        self._audit.close()

    def enter(self, request: Generation) -> None:
        """Record a request that has ended."""
        metrics, bill = self._metrics, request.bill
        used, price = (NOTHING, FREE) if bill is None else (bill.consumption, bill.price)
        seconds = request.services.clock() - request.started
        model = metrics.models(request.model.name if request.model is not None else "unknown")
        tenant = metrics.tenants(request.tenant.name)
        metrics.count("requests", request.api, model, tenant, str(request.status))
        context = request.trace.context
        trace_id = "" if context is None else context.trace_id
        metrics.observe("request_seconds", seconds, model, trace_id=trace_id)
        if request.waited_s:
            metrics.observe("waiting_seconds", request.waited_s, model)
        if request.stored.result:
            metrics.count("cache", request.stored.result)
        if request.won is not None:
            metrics.count("attempts", request.won.backend.name, "answered")
            metrics.count("routes", request.won.reason)
            backend = request.won.backend.name
            metrics.observe("first_byte_seconds", request.won.first_byte_s, backend, trace_id=trace_id)
        for kind, count in (
            ("prompt", used.prompt_tokens),
            ("visual", used.visual_tokens),
            ("cached", used.cached_tokens),
            ("completion", used.completion_tokens),
        ):
            if count:
                metrics.count("tokens", tenant, kind, by=count)
        if price.cost:
            metrics.count("cost", tenant, by=price.cost / MILLION)
        if self._usage is not None and request.model is not None:
            self._usage.add(self._record(request, used, price, seconds))
        if self._audit.on:
            self._audit.write(self._line(request, used, price, seconds))

    def _record(self, request: Generation, used: Consumption, price: Price, seconds: float) -> UsageRecord:
        assert request.model is not None
        served: ServedFrom = "backend"
        if request.stored.result in ("hit", "stale"):
            served = "response_cache"
        elif request.won is not None and request.won.reason.startswith(("retry", "fallback")):
            served = "fallback"
        return UsageRecord(
            self._now(),
            request.tenant.name,
            request.model.name if request.won is None else request.won.model.name,
            "" if request.won is None else request.won.backend.name,
            served,
            (request.status >= 400 and not request.gone) or request.code in ("stream_broken", "own_error"),
            used,
            price,
            seconds,
        )

    def _line(self, request: Generation, used: Consumption, price: Price, seconds: float) -> AuditRecord:
        demand, won = request.demand, request.won
        key = request.exchange.authorization.partition(b" ")[2].strip()
        return AuditRecord(
            self._now(),
            request.exchange.request_id,
            request.tenant.name,
            fingerprint(digest(key)) if key and request.tenant.name else "",
            request.asked,
            won.model.name if won is not None else "",
            won.backend.name if won is not None else "",
            won.reason if won is not None else "",
            request.status,
            used,
            price,
            [
                AuditedImage(image.width, image.height, image.identity)
                for image in (demand.images if demand is not None else ())
            ],
            request.stored.result,
            max(0, request.attempts - 1),
            seconds,
        )
