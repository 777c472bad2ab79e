"""One HTTP request and its answer, over ASGI: what the server and the gateway have in common.

    arrive -> check -> receive the body -> work -> answer -> record

`Exchange.run` is the only place in which a request ends: with its answer, with an error, because its client
has left, or because the process ends. After the body has arrived, a watch on the connection cancels the work
as soon as the client leaves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from fovea.access.log import request_id
from fovea.api.cutter import Cutter
from fovea.api.errors import DEFECT, error_body, error_headers
from fovea.core.errors import EngineError, FoveaError, Unavailable
from fovea.core.json_text import dump
from fovea.http.bodies import (
    BodyBudget,
    BodyMemory,
    Message,
    Receive,
    Scope,
    Send,
    check_body_headers,
    receive_body,
)
from fovea.http.refusals import ClientGone, MethodNotAllowed

T = TypeVar("T")
CLIENT_GONE = 499
"""Status in metrics and logs if a client disconnected before the answer began. It is never sent."""
NO_BODY = (204, 304)
"""Statuses of answers that have no body, not even an empty one."""
ANTHROPIC = "/v1/messages"
"""Routes of Anthropic's API begin so. Its clients expect other names in headers and errors."""
log = logging.getLogger("fovea.server")


class Exchange:
    """One request and its answer.

    defect: message to the client if the code fails.

    headers: of the request, names in lower case; of several with one name, the first.
    request_id: from x-request-id, or new.
    status: status of the answer; 0: none was sent yet.
    extra: further headers of the answer.
    code: code of the error that ended the request; "client_gone"; "": none.
    gone: whether the client has left.
    started: when it arrived, on its clock.
    first_byte_s: seconds until the answer began; None: it has not.
    bytes_in, bytes_out: of the bodies.
    memory: the memory of its body; None: none has arrived.
    send: ASGI's own; `start`, `write` and `reply` use it.
    """

    defect = DEFECT

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        self.request_id = request_id(self.headers.get(b"x-request-id", b""))
        self.status = 0
        self.extra: dict[str, str] = {}
        self.code = ""
        self.gone = False
        self.started = clock()
        self._clock = clock
        self.first_byte_s: float | None = None
        self.bytes_in = 0
        self.bytes_out = 0
        self.body_memory: BodyMemory | None = None
        self._receive = receive
        self.send = send
        self._task: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._cut = ""

    @property
    def authorization(self) -> bytes:
        """The header with the key, also if it came in x-api-key, as Anthropic's clients send it."""
        given = self.headers.get(b"authorization", b"")
        other = b"" if given else self.headers.get(b"x-api-key", b"")
        return b"Bearer " + other if other else given

    @property
    def address(self) -> str:
        """Address of the client, without its port."""
        client = self.scope.get("client")
        return str(client[0]) if client else "-"

    @property
    def query(self) -> dict[str, str]:
        """The parameters after the path; of several with one name, the last."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    def header(self, name: bytes) -> str:
        """A header of the request; "" if it has none."""
        return self.headers.get(name, b"").decode("latin-1")

    # Life

    async def run(self, answer: Callable[[], Awaitable[None]]) -> None:
        """Answer the request, whatever happens. Errors become answers.

        answer: sends the answer. It is cancelled if the client leaves after the body has arrived, or if `cut`
            is called.
        Raises only a defect after which the answer that had begun is not complete: the connection then has to
        be closed, so that the client sees that.
        """
        self._task = asyncio.current_task()
        try:
            await answer()
        except ClientGone:
            self.code = "client_gone"
        except asyncio.CancelledError:
            if not self._was_stopped():
                raise
            if self._cut:
                await self.fail(self.stopped(f"{self._cut}; the request was not answered"))
        except FoveaError as error:
            await self.fail(error)
        except Exception as error:
            log.error("%s %r failed", self.method, self.path[:200], exc_info=error)
            if self.status:
                raise
            await self.fail(EngineError(self.defect))
        finally:
            if self._watch is not None:
                self._watch.remove_done_callback(self._on_gone)
                self._watch.cancel()
            if self.body_memory is not None:
                self.body_memory.end()
            await self.finish()

    async def fail(self, error: FoveaError) -> None:
        """End the request with an error, which is sent unless an answer has begun."""
        self.code = error.code
        if not self.status:
            with suppress(ClientGone):
                await self.refuse(error)

    async def finish(self) -> None:
        """Give back what the request has taken, and record it. It is called once, at the end."""

    def cut(self, reason: str) -> None:
        """End the request with an error, because the process ends. Streams get the error as their last event.

        reason: says so, such as "the server is shutting down".
        """
        self._cut = reason
        if self._task is not None:
            self._task.cancel()

    def stopped(self, reason: str) -> FoveaError:
        """Return the error for a request that `cut` ends."""
        return Unavailable(reason)

    @property
    def cut_error(self) -> FoveaError | None:
        """The error for a stream that `cut` ends; None: `cut` was not called."""
        return self.stopped(self._cut) if self._cut and not self.gone else None

    def watch(self) -> None:
        """Cancel the work when the client leaves. To be called once the whole body has arrived."""
        if self._watch is None and self._task is not None:
            self._watch = asyncio.ensure_future(self._disconnected())
            self._watch.add_done_callback(self._on_gone)

    async def _disconnected(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    def _on_gone(self, _: object) -> None:
        self.gone = True
        if self._task is not None:
            self._task.cancel()

    def _was_stopped(self) -> bool:
        """Tell whether the request was cancelled by its own means, and take the cancellation back."""
        if not (self.gone or self._cut):
            return False
        if self.gone:
            self.code = "client_gone"
            self._cut = ""
        if self._task is not None:
            self._task.uncancel()
        return True

    # The body

    async def receive(self) -> Message:
        """Return the next part of the body. Raises ClientGone."""
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        self.bytes_in += len(message.get("body", b""))
        return message

    async def receive_within(
        self, budget: BodyBudget, owner: str, read: Callable[[BodyMemory], Awaitable[T]]
    ) -> T:
        """Receive a body within the memory that all bodies may take, and watch the connection from then on.

        owner: the client. read: receives it and counts its bytes.
        Raises Overloaded if the body has to give way to others, and what `read` raises.
        """
        waiting = asyncio.timeout(None)
        self.body_memory = memory = budget.begin(owner, lambda: waiting.reschedule(0))
        try:
            async with waiting:
                value = await read(memory)
        except TimeoutError:
            raise budget.overloaded() from None
        memory.arrived()
        self.watch()
        return value

    async def receive_json(self, budget: BodyBudget, owner: str) -> Cutter:
        """Receive a body that has to be JSON, cut into its values.

        Raises PayloadTooLarge, InvalidRequest, Overloaded, and ClientGone.
        """
        check_body_headers(
            self.header(b"content-encoding"),
            self.header(b"content-type"),
            self.header(b"content-length"),
            budget.largest,
        )
        return await self.receive_within(
            budget, owner, lambda memory: receive_body(self.receive, memory, budget)
        )

    # The answer

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send the status and the headers."""
        self.status = status
        self.first_byte_s = self._clock() - self.started
        merged = {**headers, **self.extra, "x-request-id": self.request_id}
        if self.path.startswith(ANTHROPIC):
            merged["request-id"] = self.request_id
        pairs = [(name.encode("latin-1"), _latin(value)) for name, value in merged.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send bytes of the body. more: whether further ones follow."""
        self.bytes_out += len(data)
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def reply(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete answer. headers: the type is JSON unless they name another one."""
        usual = {"content-type": "application/json"}
        if status not in NO_BODY:
            usual["content-length"] = str(len(body))
        await self.start(status, {**usual, **(headers or {})})
        await self.write(body, more=False)

    async def reply_json(
        self, value: Any, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a complete answer of JSON."""
        await self.reply(status, dump(value).encode(), headers)

    async def refuse(self, error: FoveaError) -> None:
        """Send an error."""
        headers = error_headers(error)
        if isinstance(error, MethodNotAllowed):
            headers["allow"] = ", ".join(error.allow)
        await self.reply_json(self.refusal(error), error.status, headers)

    def refusal(self, error: FoveaError) -> dict[str, Any]:
        """The body of an error, in the form of the API that was called."""
        kind = {"type": "error"} if self.path.startswith(ANTHROPIC) else {}
        return {**kind, **error_body(error)}


def _latin(value: str) -> bytes:
    """Encode a header's value. What it cannot hold, line ends above all, becomes "?"."""
    return value.replace("\r", "?").replace("\n", "?").encode("latin-1", "replace")
