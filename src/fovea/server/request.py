"""One HTTP request to the server, from its head to the last byte of its answer.

There is one object per request. It knows who calls, holds what the request has taken (memory of its body,
places in the queue), and gives everything back in `finish`, whatever has happened.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from fovea.access.bucket import TokenBucket
from fovea.api.errors import DEFECT, error_body, error_headers
from fovea.api.explain import explained
from fovea.core.errors import DeadlineExceeded, EngineError, FoveaError, Unavailable
from fovea.core.json_text import dump
from fovea.core.progress import Loaded
from fovea.http.bodies import Message, Receive, Scope, Send
from fovea.http.exchange import CLIENT_GONE, Exchange
from fovea.observe.request_spans import RequestEnd
from fovea.server.access import is_limited, is_measured, is_poll
from fovea.server.clients import Caller
from fovea.server.state import ServerState

T = TypeVar("T")
Q = TypeVar("Q", bound=BaseModel)
LONGEST_PATH = 200
LONGEST_CLIENT = 64
"""Bytes of a client's name that tell it from others."""
EVENTS = "text/event-stream"


class CacheScope(NamedTuple):
    """The part of the caches that a request may use.

    tenant: the client that owns it; "" if all clients share the caches.
    salt: tenant and the request's own `cache_salt`. Only requests with equal salts share entries.
    """

    tenant: str
    salt: str


class Request(Exchange):
    """One request and its answer.

    state: the server.
    caller: who sent it; its key is checked in `check`.
    speaks_for: the tenant for whom a gateway sends the request, from the header x-fovea-client; "": none.
    route: path of its route, without parameters; "unknown": there is none.
    timeline: its times, for traces and the log of slow requests.
    prompt_tokens, completion_tokens: tokens that it has used so far.
    begun: whether the engine has got a part of it already.
    """

    def __init__(
        self, state: ServerState, scope: Scope, receive: Receive, send: Send, caller: Caller | None = None
    ) -> None:
        """caller: of a request from within, such as a line of a batch; None: it is found out by the key."""
        super().__init__(scope, receive, send)
        self.state = state
        self.caller = caller or Caller()
        self.speaks_for = self.headers.get(b"x-fovea-client", b"")[:LONGEST_CLIENT].decode("latin-1")
        self.route = "unknown"
        self.timeline = state.tracking.begin(self.headers)
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.begun = False
        self._from_within = caller is not None
        self._reserved = 0
        self._streams = False
        self._counted = is_limited(self.path) and not is_poll(self.method, self.path)

    @property
    def party(self) -> tuple[str, str]:
        """The client that takes turns with others: the key, and the tenant for whom a gateway uses it."""
        return self.caller.owner, self.speaks_for

    # Before the body

    def check(self) -> None:
        """Check the key, the limits per minute, and whether the server accepts requests.

        Raises Unauthorized, Forbidden, Unavailable and Overloaded.
        """
        access = self.state.access
        if not self._from_within:
            access.refuse_other_sites(self.scope)
            access.authenticate(self.path, self.authorization, self.caller)
        reason = self.state.unavailable() if self.method == "POST" else None
        if reason is not None:
            raise Unavailable(reason)
        if self._counted:  # not before: a server that is loading uses up no limits
            self.caller.client.count_request()

    def parameters(self, model: type[Q]) -> Q:
        """Return the parameters of the query. Raises InvalidRequest."""
        with explained():
            return model.model_validate(self.query)

    # Limits

    def reserve(self, choices: int, priority: int | None = None) -> None:
        """Admit the request: reserve places for its choices, until they are handed over or it ends.

        priority: its own; None: nothing is generated. Raises InvalidRequest if the client may not use it, and
            what `Places.take` raises.
        """
        if priority is not None:
            self.caller.client.check_priority(priority)
        self.state.places.take(self.caller.client, choices)
        self._reserved += choices

    def hand_over(self, choices: int) -> None:
        """Give up reserved places, because the engine counts them from now on."""
        self.begun = True
        count = min(choices, self._reserved)
        self._reserved -= count
        self.state.places.hand_over(count)

    def deadline(self, requested: float | None = None) -> Deadline:
        """Start the request's timeout.

        requested: its own one in seconds; None: the server's. Raises InvalidRequest if it is longer than the
        client's key allows.
        """
        return Deadline(self.caller.client.timeout(requested, self.state.settings.request_timeout))

    def cache_scope(self, salt: str | None = None) -> CacheScope:
        """The part of the caches that it may use. salt: the field `cache_salt` of its body."""
        tenant, salt = self.caller.tenant, salt or ""
        return CacheScope(tenant, f"{tenant}:{salt}" if tenant else salt)

    # The answer

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        if self.body_memory is not None:
            self.body_memory.release()
        self._streams = headers.get("content-type", "").startswith(EVENTS)
        client = self.caller.client
        for noun, bucket in (("requests", client.requests), ("tokens", client.tokens)):
            if bucket is not None:
                self.extra |= _limit_headers(noun, bucket)
        await super().start(status, headers)

    async def refuse(self, error: FoveaError) -> None:
        self.state.metrics.count_refusal(error.code)
        await super().refuse(error)

    async def refuse_probe(self, error: FoveaError, loaded: Loaded | None = None) -> None:
        """Send an error that the metrics do not count, because a probe asks for it every second.

        loaded: how far the model is; the body has it as `loading`.
        """
        body = self.refusal(error)
        if loaded is not None:
            body["loading"] = {
                "loaded_bytes": loaded.done, "total_bytes": loaded.total, "percent": loaded.percent,
            }  # fmt: skip
        await self.reply_json(body, error.status, error_headers(error))

    def refusal(self, error: FoveaError) -> dict[str, Any]:
        """The body of an error.

        It tells the tokens of a request that its deadline has ended, for gateways that charge for them.
        """
        body = super().refusal(error)
        if isinstance(error, DeadlineExceeded) and self.prompt_tokens:
            prompt, completion = self.prompt_tokens, self.completion_tokens
            total = prompt + completion
            body["usage"] = {
                "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total,
            }  # fmt: skip
        return body

    # The end

    async def finish(self) -> None:
        """Give back the places, and count, trace and log the request."""
        state, caller, path = self.state, self.caller, self.path
        state.places.give_up(caller.client, self._reserved)
        status = self.status or (CLIENT_GONE if self.code == "client_gone" else 500)
        ended = time.perf_counter()
        if is_measured(path):
            if self.method == "POST":
                end = RequestEnd(
                    ended, self.request_id, self.method, self.route, status, caller.client.name, self._streams
                )
                state.tracking.finish(self.timeline, end)
            state.metrics.observe_request(self.route, status, ended - self.started, self.timeline.recorded_id)
        if self._counted:
            caller.client.totals.count_end(refused=status >= 400 and status != CLIENT_GONE)
        if status in (401, 403):
            reason = self.code or "forbidden"
            state.metrics.count_denial(reason)
            state.access.audit.refused(
                status, reason, self.address, path, caller.fingerprint, self.request_id
            )
        if state.access.log.on:
            state.access.log.write(self._line(status, ended - self.started))

    def _line(self, status: int, seconds: float) -> dict[str, Any]:
        """The values of a line in the access log. The path has no query string, which may hold secrets."""
        trace_id, first = self.timeline.trace_id, self.first_byte_s
        return {
            "time": datetime.fromtimestamp(self.timeline.wall, UTC).isoformat(timespec="milliseconds"),
            "id": self.request_id,
            **({"trace_id": trace_id} if trace_id else {}),
            "client": self.address,
            "key": self.caller.client.name,
            "method": self.method[:16],
            "path": self.path[:LONGEST_PATH],
            "status": status,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "ms": round(1000 * seconds, 1),
            "first_byte_ms": None if first is None else round(1000 * first, 1),
        }


class Deadline:
    """The deadline of a request, counted from now. It covers loading the images and videos, and the engine.

    seconds: None: no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._ends = None if seconds is None else time.monotonic() + seconds

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline; 0 after it; None: no limit."""
        return None if self._ends is None else max(0.0, self._ends - time.monotonic())

    async def limit(self, work: Awaitable[T], step: str = "its images and videos were loaded") -> T:
        """Await `work` and return its result.

        step: completes "the timeout ran out while ...", for the error.
        Raises DeadlineExceeded at the deadline.
        """
        try:
            async with asyncio.timeout(self.remaining):
                return await work
        except TimeoutError:
            raise DeadlineExceeded(f"the request's timeout ran out while {step}", param="timeout") from None


class Reply(NamedTuple):
    """The answer to a request from within.

    retry_after: seconds of the header Retry-After; None: there is none.
    prompt_tokens, completion_tokens: that it has used.
    """

    status: int
    body: bytes
    request_id: str
    retry_after: float | None
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Inside:
    """The two ends of a request from within, such as a line of a batch: its body and its answer.

    scope, receive, send: for `Request`.
    """

    def __init__(self, path: str, body: bytes, request_id: str, speaks_for: str = "") -> None:
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"x-request-id", request_id.encode()),
                (b"x-fovea-client", speaks_for.encode("latin-1")),
            ],
            "client": None,
            "server": None,
        }
        self._requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._status = 500
        self._headers: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []

    async def receive(self) -> Message:
        if self._requests:
            return self._requests.pop()
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # never leaves

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], dict(message["headers"])
        else:
            self._parts.append(message.get("body", b""))

    def reply(self, prompt_tokens: int, completion_tokens: int) -> Reply:
        """Return the answer; status 500 if there is none. The tokens are those of its request."""
        if not self._headers:
            self._parts = [dump(error_body(EngineError(DEFECT))).encode()]
        wait = self._headers.get(b"retry-after", b"").decode()
        request_id = self._headers.get(b"x-request-id", b"").decode()
        return Reply(
            self._status, b"".join(self._parts), request_id, float(wait) if wait.isdecimal() else None,
            prompt_tokens, completion_tokens,
        )  # fmt: skip


def _limit_headers(noun: str, bucket: TokenBucket) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{noun}": str(bucket.per_minute),
        f"x-ratelimit-remaining-{noun}": str(bucket.remaining),
        f"x-ratelimit-reset-{noun}": duration(bucket.reset_s),
    }


def duration(seconds: float) -> str:
    """Write a duration as OpenAI does in its headers: 20ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{round(1000 * seconds)}ms"
    if seconds < 60:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s"
