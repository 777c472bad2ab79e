"""Passes an answer on to the client: from a backend or the cache, complete or as a stream, or translated.

A stream whose backend sends nothing more is ended. A timer for each piece of each stream would cost more than
the piece. So a stream notes since when it waits for its backend, and one task looks at all streams a few
times a second. A client that reads slowly is not the backend's fault: while the gateway waits for the client,
the stream is not silent.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fovea.api.errors import error_body
from fovea.core.errors import EngineError, FoveaError
from fovea.gateway.cache.cache import Hit, Recorder
from fovea.gateway.generate.dispatch import BadGateway, GatewayTimeout, Won
from fovea.gateway.generate.ends import DONE, EventStream, end_of_status, error_event
from fovea.gateway.generate.upstream import BROKEN, reason_of
from fovea.gateway.translate.chat_reader import BackendError
from fovea.gateway.translate.translation import ChatTranslation, StreamTranslator
from fovea.gateway.usage.prices import answer_tokens
from fovea.http.exchange import Exchange

TICK_S = 0.25
STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
_BROKEN = frozenset(("cut", "silent", "unfinished", "error event", "own error", "total time"))
"""Ends of streams that their clients see as errors."""


class Relay:
    """Passes one answer on.

    end: name of its end in the table `ends.ENDS`.
    usage: what the backend has told of the tokens, also of a stream that was cut off; None: nothing.
    generated: tokens of the answer as far as they were seen, by its events or its text.
    """

    def __init__(
        self, exchange: Exchange, api: str, translation: ChatTranslation | None, silence: SilenceWatch
    ) -> None:
        """api: of the client. translation: None if the backend has the same API."""
        self._sent_as = api if translation is None else "chat"
        self._silence = silence
        self._exchange = exchange
        self._api = api
        self._translation = translation
        self.end = "left"
        self.usage: Mapping[str, Any] | None = None
        self.generated = 0

    @property
    def broken(self) -> bool:
        """Whether a stream has ended with an error after its beginning."""
        return self.end in _BROKEN

    async def stored(self, hit: Hit) -> None:
        """Send an answer from the cache."""
        payload, headers, extra = hit.payload(), hit.headers(), self._exchange.extra
        extra.update(
            {name: value for name, value in headers.items() if name != "content-type" and name not in extra}
        )
        if headers["content-type"].startswith("text/event-stream"):
            translator = self._translator()
            data = payload if translator is None else translator.feed(payload) + translator.close()
            await self._exchange.start(200, STREAM_HEADERS)
            await self._exchange.write(data, more=False)
            return
        await self.complete(200, payload)

    async def complete(self, status: int, body: bytes, recorder: Recorder | None = None) -> None:
        """Send a complete answer. recorder: takes it for the cache."""
        if recorder is not None:
            recorder.feed(body)
            recorder.finish(status)
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            value = None
        self.end = end_of_status(status)
        if isinstance(value, dict):
            usage = value.get("usage")
            self.usage = usage if isinstance(usage, dict) else None
            self.generated = answer_tokens(value)
        if self._translation is not None:
            try:
                body = json.dumps(self._translation.answer(status, value)).encode()
            except BackendError as error:
                self.end = "unreadable"
                await self._exchange.refuse(error)
                return
        elif value is None and status == 200:
            self.end = "unreadable"
            await self._exchange.refuse(BadGateway("the backend's answer is not JSON"))
            return
        await self._exchange.reply(status, body)

    async def stream(self, won: Won, recorder: Recorder | None, strip_usage: bool, deadline: float) -> None:
        """Send a backend's stream. After an error or a silence it ends with an error event, and without
        [DONE].

        strip_usage: leave out the event of usage. deadline: of the whole request.
        """
        events, translator = EventStream(self._sent_as, strip_usage=strip_usage), self._translator()
        loop = asyncio.get_running_loop()
        answer, data = won.answer, won.answer.first
        self.end = "left stream"
        await self._exchange.start(200, STREAM_HEADERS)
        failure: FoveaError | None = None
        end = "answered"
        read, send, feed, now = answer.read, self._exchange.send, events.feed, loop.time
        keep = recorder.feed if recorder is not None and recorder.active else None
        try:
            async with self._silence.watch(deadline) as silence:
                while data:
                    if keep is not None:
                        keep(data)
                    passed = feed(data)
                    if translator is not None:
                        passed = translator.feed(passed)
                    if passed:
                        await send({"type": "http.response.body", "body": passed, "more_body": True})
                    silence.since = now()
                    data = await read()
                    silence.since = math.inf
        except TimeoutError:
            reason = (
                "sent nothing more in time (idle_s)"
                if loop.time() < deadline
                else "was not done in time (total_s)"
            )
            failure = GatewayTimeout(f"{won.backend.name} {reason}; the answer is not complete")
            end = "silent" if loop.time() < deadline else "total time"
        except BROKEN as error:
            failure = BadGateway(
                f"{won.backend.name} broke off: {reason_of(error)}; the answer is not complete"
            )
            end = "cut"
        except asyncio.CancelledError:
            failure = ShuttingDown("the gateway is shutting down; the answer is not complete")
            await self._write_end(events, translator, failure)
            raise
        finally:
            self.generated, self.usage = events.count, events.usage()
        self.end = await self._write_end(events, translator, failure, end)
        if recorder is not None:
            recorder.finish(200 if events.complete and not self.broken else 502)

    async def _write_end(
        self,
        events: EventStream,
        translator: StreamTranslator | None,
        failure: FoveaError | None,
        end: str = "answered",
    ) -> str:
        """Send the end of a stream: what is left of it, or an error event. Returns the name of its end.

        end: name of the end as far as the connection shows it.
        """
        rest = events.finish()
        self.generated, self.usage = events.count, events.usage()
        if failure is None and not (events.complete or events.reasoned or events.failed):
            failure, end = BadGateway("the backend ended the stream before its last event"), "unfinished"
        if events.failed:
            end = "own error" if events.own else "error event"
        if translator is not None:
            rest = translator.feed(rest) + translator.close(None if failure is None else failure.message)
            if translator.failed and end == "answered":
                end = "error event"
        elif failure is not None:
            rest = error_event(self._api, error_body(failure))
        elif end == "answered" and not events.complete and self._sent_as in ("chat", "completions"):
            rest += DONE  # some engines only close the stream, and clients wait for this sign
        await self._exchange.write(rest, more=False)
        return end

    def _translator(self) -> StreamTranslator | None:
        return None if self._translation is None else self._translation.translator()


class Silence:
    """The silence of one stream.

    since: time since which it waits for its backend; infinite: it does not.
    """

    __slots__ = ("_deadline", "_idle_s", "_limit", "since")

    def __init__(self, idle_s: float, deadline: float, limit: asyncio.Timeout) -> None:
        self.since = math.inf
        self._idle_s = idle_s
        self._deadline = deadline
        self._limit = limit

    def check(self, now: float) -> None:
        """End the stream if it has been silent for too long, or if its time is over."""
        if now - self.since > self._idle_s or (now > self._deadline and self.since < math.inf):
            self._limit.reschedule(now)
            self.since = math.inf


class SilenceWatch:
    """Watches the streams of one worker.

    clock: the event loop's clock in seconds.
    idle_s: longest silence.
    """

    def __init__(self, clock: Callable[[], float], idle_s: float) -> None:
        self._clock = clock
        self._idle_s = idle_s
        self._streams: set[Silence] = set()
        self._task: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def watch(self, deadline: float) -> AsyncIterator[Silence]:
        """Watch a stream until the block ends. A stream that is ended raises TimeoutError from the block.

        deadline: time of the clock at which the stream is ended in any case.
        """
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())
        async with asyncio.timeout(None) as limit:
            silence = Silence(self._idle_s, deadline, limit)
            self._streams.add(silence)
            try:
                yield silence
            finally:
                self._streams.discard(silence)

    async def aclose(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._clock()
            for stream in tuple(self._streams):
                stream.check(now)


class ShuttingDown(EngineError):
    """The gateway ends before the answer does."""

    status = 503
    default_code = "shutting_down"
