"""Checks every request before its route runs, and before its body is read: key, limits, draining.

It also counts and measures requests, writes the access log and the audit log, and adds headers to responses.
It is plain ASGI middleware, so that bodies are not read here, and a stream passes through unchanged.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from fovea.core.errors import FoveaError, Unavailable
from fovea.observe.trail import Trail
from fovea.server.access import is_limited, is_measured, is_poll
from fovea.server.batch_runner import CALLER
from fovea.server.errors import refusal
from fovea.server.exchange import Exchange
from fovea.server.state import ServerState

CLIENT_GONE = 499
"""Status in metrics and logs if a client disconnected before the answer began. It is never sent."""


class Guard:
    """ASGI middleware that checks every request before its route runs.

    Refuses a wrong key with 401, pages of other sites with 403 if there are no keys, a client beyond a limit
    per minute with 429, and a POST to a server that is loading or draining with 503.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self.app = app
        self.state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        exchange = Exchange(scope, scope.get(CALLER))
        trail = self.state.tracking.begin(exchange.headers)
        scope.setdefault("state", {}).update(caller=exchange.caller, trail=trail)
        receive, send = exchange.received(receive), exchange.sent(send)
        failed, reason = True, "forbidden"
        try:
            self._check(scope, exchange)
            await self.app(scope, receive, send)
            failed = False
        except FoveaError as error:
            if exchange.status is not None:
                raise
            failed, reason = False, error.code
            await refusal(error, self.state.metrics, scope["path"])(scope, receive, send)
        finally:
            reason = scope["state"].get("forbidden", reason)
            self._record(scope, exchange, trail, reason, unanswered=500 if failed else CLIENT_GONE)

    def _check(self, scope: Scope, exchange: Exchange) -> None:
        path, headers = scope["path"], exchange.headers
        if CALLER not in scope:  # the caller of a call from within was checked before
            self.state.access.refuse_other_sites(scope)
            key = headers.get(b"authorization", b"")
            if not key and b"x-api-key" in headers:  # Anthropic's clients send it so
                key = b"Bearer " + headers[b"x-api-key"]
            self.state.access.authenticate(path, key, exchange.caller)
        reason = self.state.unavailable() if scope["method"] == "POST" else None
        if reason is not None:
            raise Unavailable(reason)
        if is_limited(path) and not is_poll(
            scope["method"], path
        ):  # not before: a server that is loading uses up no limits
            exchange.caller.client.count_request()

    def _record(self, scope: Scope, exchange: Exchange, trail: Trail, reason: str, unanswered: int) -> None:
        """Count, trace and log a request that has ended."""
        state, path, caller = self.state, scope["path"], exchange.caller
        status = unanswered if exchange.status is None else exchange.status
        if is_measured(path):
            route = getattr(scope.get("route"), "path", "unknown")
            if scope["method"] == "POST":
                state.tracking.finish(trail, exchange.ended(route, status))
            state.metrics.observe_request(route, status, exchange.seconds, trail.recorded_id)
        if is_limited(path) and not is_poll(scope["method"], path):
            caller.client.totals.count_end(refused=status >= 400 and status != CLIENT_GONE)
        if status in (401, 403):
            state.metrics.count_denial(reason)
            state.access.audit.refused(
                status, reason, exchange.address, path, caller.fingerprint, caller.request_id
            )
        if state.access.log.on:
            state.access.log.write(exchange.line(status, trail.trace_id))
