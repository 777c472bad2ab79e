"""The client of the load generator: it sends requests and records when each part of an answer arrives.

All network traffic of the load generator goes through this module. The library is aiohttp. Its parser is
compiled, so one process can send several times the load that it can send by a client in pure Python
(benchmarks/load_generator.py). Servers differ in the optional fields of OpenAI's chat API that they accept:
`Dialect` holds those of one server.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import aiohttp
from aiohttp.http_exceptions import ContentEncodingError

from fovea.api import sse
from fovea.bench.measure import BenchRequest, Failure, Sample
from fovea.bench.settings import Target
from fovea.core.errors import ConfigError, Unavailable

KEEPALIVE_S = 2.0
"""Seconds for which an idle connection is reused.

Servers keep theirs longer, so none is closed while we reuse it.
"""
CONNECT_S = 10.0
"""Seconds in which a connection must be open, its name looked up and its TLS agreed."""
MAX_HEADER = 2**16
"""Bytes that one header line of an answer may have."""
LARGE_BODY = 2**20
"""Bytes from which a body is written in pieces, so that other streams are read in between."""


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """Open a session, in the event loop that runs. api_key: sent with every request.

    The number of connections is not limited: a client that queues requests itself would hide the server's
    queue. Proxies from the environment are ignored, because a run would measure them as well. The server is
    asked not to compress its answers, because that would delay events and cost time here.
    """
    headers = {"Accept-Encoding": "identity"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_S),
        trust_env=False,
        max_line_size=MAX_HEADER,
        max_field_size=MAX_HEADER,
    )


def json_body(value: Mapping[str, Any]) -> bytes | io.BytesIO:
    """Write a JSON body in the form that the session sends without blocking the event loop.

    Half a surrogate pair, which a server's answer may end with, has no UTF-8 and is sent as "?".
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    body = text.encode(errors="replace")
    return body if len(body) < LARGE_BODY else io.BytesIO(body)


class EndOfConnection:
    """Ends the reading of an answer when its connection is closed, as a context manager around the reading.

    aiohttp 3.14 does that itself, except where its compiled parser refuses a chunk of the answer: it closes
    the connection then, and the reader waits for the rest without end.
    """

    __slots__ = ("_closed", "_content")

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content
        connection = response.connection  # None if the whole answer is here already
        protocol = None if connection is None else connection.protocol
        self._closed = None if protocol is None else protocol.closed

    def __enter__(self) -> None:
        if self._closed is not None:
            self._closed.add_done_callback(self._end)
            # Once per connection; this may not be its first request.
            self._closed.remove_done_callback(_retrieve)
            self._closed.add_done_callback(_retrieve)

    def __exit__(self, *_: object) -> None:
        if self._closed is not None:
            self._closed.remove_done_callback(self._end)

    def _end(self, _: object) -> None:
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(aiohttp.ClientConnectionError("a chunk of the answer is not HTTP"))


def _retrieve(closed: asyncio.Future[None]) -> None:
    """Retrieve the error by which a connection ended; asyncio logs errors that no code retrieves."""
    if not closed.cancelled():
        closed.exception()


def is_unreachable(error: aiohttp.ClientError) -> bool:
    """Whether the request failed before it had a connection."""
    unreachable = aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL
    return isinstance(error, unreachable)


def reason(error: aiohttp.ClientError) -> str:
    """Say in one sentence why a request failed, without the library's own terms."""
    match error:
        case aiohttp.ClientConnectorError():
            return _system_reason(error.os_error)
        case aiohttp.ConnectionTimeoutError():
            return f"no connection within {CONNECT_S:g} s"
        case aiohttp.ServerDisconnectedError():
            return "Server disconnected without sending a response."
        case aiohttp.ClientPayloadError() if isinstance(error.__cause__, ContentEncodingError):
            return f"the answer cannot be decoded: {error.__cause__.message}"
        case aiohttp.ClientPayloadError():
            return "peer closed connection without sending complete message body"
        case aiohttp.ClientResponseError():
            return f"the answer is not HTTP: {' '.join(error.message.split())}"
        case OSError():
            return _system_reason(error)
    return str(error) or type(error).__name__


def _system_reason(error: OSError) -> str:
    """The system's words, such as "Connection refused", or the words of TLS or of the name service."""
    if isinstance(error, ssl.SSLError):
        return str(error)
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__


REFUSALS = ("http 400", "http 422", "http 500", "http 501")
"""Failure kinds with which servers answer a request that has an unknown field."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The optional fields that are sent to a server.

    usage: send stream_options.include_usage.
    ignore_eos: send this extension of vLLM, SGLang, llama.cpp and Fovea, so that answers have the requested
        length.
    length: the name of the field that holds the requested length.
    greedy: send temperature 0.
    """

    usage: bool = True
    ignore_eos: bool = True
    length: str = "max_tokens"
    greedy: bool = True

    def body(self, request: BenchRequest, model: str) -> dict[str, Any]:
        """The JSON body of a request, in this dialect."""
        body: dict[str, Any] = {"model": model, "messages": list(request.messages), "stream": True}
        body[self.length] = request.max_tokens
        if self.usage:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.greedy:
            body["temperature"] = 0
        if request.priority:
            body["priority"] = request.priority
        if request.salt:
            body["cache_salt"] = request.salt
        return body

    def without(self, refusal: str) -> Self | None:
        """A smaller dialect to try after a refusal, or None if no optional field is left.

        It omits the field that the refusal's text names. If the text names none, it omits the first one left.
        """
        smaller = {
            "stream_options": replace(self, usage=False),
            "ignore_eos": replace(self, ignore_eos=False),
            "max_tokens": replace(self, length="max_completion_tokens"),
            "temperature": replace(self, greedy=False),
        }
        candidates = {name: dialect for name, dialect in smaller.items() if dialect != self}
        matches = [dialect for name, dialect in candidates.items() if name in refusal]
        return next(iter(matches or candidates.values()), None)

    @property
    def notes(self) -> list[str]:
        """One sentence per omitted field, for the reader of the results."""
        notes = []
        if not self.usage:
            notes.append("the server does not know stream_options: tokens are counted by events")
        if not self.ignore_eos:
            notes.append("the server does not know ignore_eos: answers may end before their length")
        if not self.greedy:
            notes.append("the server refuses temperature 0: it samples answers with its own default")
        return notes


async def negotiate(probe: Callable[[Dialect], Awaitable[Sample]]) -> tuple[Dialect, Sample]:
    """Find the dialect with the most fields that the server accepts. Return it with the sample of that probe.

    probe: sends one short request in the given dialect.
    Raises ConfigError with the server's first refusal if it accepts no dialect.
    """
    dialect = Dialect()
    first_refusal = ""
    while True:
        sample = await probe(dialect)
        failure = sample.failure
        if failure is None or failure.kind == "empty answer":
            return dialect, sample
        # The first refusal is about the full request; later ones are only about what is left of it.
        first_refusal = first_refusal or f"{failure.kind}: {failure.text}"
        smaller = dialect.without(failure.text) if failure.kind in REFUSALS else None
        if smaller is None:
            raise ConfigError(f"the server does not answer a first short question: {first_refusal}")
        dialect = smaller


MAX_TEXT = 300
"""Characters of a server's message that are kept in a failure."""
JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer of the server: its HTTP status and its body."""

    status: int
    body: bytes

    def __str__(self) -> str:
        return f"{self.status}: {_error_text(self.body)}"


class Client:
    """A connection to one server, as an async context manager. Create it in a running event loop.

    model, dialect: the model's name and the fields that the server accepts; valid after `connect`.
    running: number of requests that have not ended.
    """

    def __init__(self, target: Target, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.target = target
        self.clock = clock
        self.model = target.model or ""
        self.dialect = Dialect()
        self.running = 0
        self._chat_url = f"{target.url}/chat/completions"
        self._http = open_session(target.api_key)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def connect(self) -> None:
        """Find the model and the dialect of the server.

        Raises Unavailable if the server cannot be reached, ConfigError if it refuses the key, the model or
        the requests.
        """
        self.model = await self._find_model()
        self.dialect, _ = await negotiate(self._probe)

    async def send(
        self,
        request: BenchRequest,
        due: float | None = None,
        on_progress: Callable[[Sample], bool] | None = None,
    ) -> Sample:
        """Send a request and measure its stream. Errors are not raised: they become the sample's `failure`.

        due: the time on `clock` at which the request was to be sent; None: now.
        on_progress: called after every read from the stream; if it returns True, the client closes the
            stream.
        """
        now = self.clock()
        sample = Sample(
            now if due is None else due, request.label, request.images, request.max_tokens, sent_at=now
        )
        limit = self.target.timeout if request.timeout is None else min(request.timeout, self.target.timeout)
        self.running += 1
        try:
            async with asyncio.timeout(max(0.0, sample.due_at + limit - now)):
                sample.failure = await self._stream(request, sample, on_progress)
        except aiohttp.ClientError as error:  # one of them, for connections, is also a TimeoutError
            kind = "unreachable" if is_unreachable(error) else "broken stream"
            sample.failure = Failure(kind, reason(error))
        except TimeoutError:
            sample.failure = Failure("timeout", f"no end within {limit:g} s")
        finally:
            self.running -= 1
        sample.ended_at = self.clock()
        return sample

    async def send_image(self, url: str) -> str:
        """Upload an image to /v1/images and return the URL that names it in later requests.

        url: a data URL. Raises ConfigError if the server does not store the image.
        """
        body = {"url": url, "encode": self.target.images_as == "encoded"}
        answer = await self._call("POST", "/images", body)
        name = _json(answer.body).get("url")
        if answer.status != 200 or not isinstance(name, str):
            raise ConfigError(
                f"{self.target.url}/images does not take images ({answer}); accepted here: --images-as data",
                param="images_as",
            )
        return name

    async def _find_model(self) -> str:
        answer = await self._call("GET", "/models")
        if answer.status in (401, 403):
            raise ConfigError(
                f"the server refuses the API key ({answer}); give it by --api-key or FOVEA_API_KEY",
                param="api_key",
            )
        cards = _json(answer.body).get("data")
        cards = cards if isinstance(cards, list) else []
        served = [card["id"] for card in cards if isinstance(card, dict) and "id" in card]
        if not served:
            if self.target.model:
                return self.target.model
            raise ConfigError(
                f"{self.target.url}/models lists no model ({answer}); name one by --model", param="model"
            )
        if self.target.model and self.target.model not in served:
            raise ConfigError(
                f"the server has no model {self.target.model!r}; served: {', '.join(served)}", param="model"
            )
        return self.target.model or str(served[0])

    async def _probe(self, dialect: Dialect) -> Sample:
        self.dialect = dialect
        request = BenchRequest(({"role": "user", "content": "Say something."},), max_tokens=4)
        return await self.send(request)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        data, headers = (None, None) if body is None else (json_body(body), JSON)
        url = self.target.url + path
        try:
            async with self._http.request(
                method, url, data=data, headers=headers, allow_redirects=False
            ) as response:
                with EndOfConnection(response):
                    return Answer(response.status, await response.read())
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self.target.url} cannot be reached: {reason(error)}") from error

    async def _stream(
        self, request: BenchRequest, sample: Sample, on_progress: Callable[[Sample], bool] | None
    ) -> Failure | None:
        body = json_body(self.dialect.body(request, self.model))
        async with self._http.post(
            self._chat_url, data=body, headers=JSON, allow_redirects=False
        ) as response:
            with EndOfConnection(response):
                return await self._read(response, sample, on_progress)

    async def _read(
        self, response: aiohttp.ClientResponse, sample: Sample, on_progress: Callable[[Sample], bool] | None
    ) -> Failure | None:
        if response.status != 200:
            return Failure(f"http {response.status}", _error_text(await response.read()))
        if "text/event-stream" not in response.headers.get("Content-Type", ""):
            return Failure("no stream", "the server answers a request for a stream with a whole answer")
        decoder = sse.Decoder()
        async for data in response.content.iter_any():
            at = self.clock()
            for payload in decoder.feed(data):
                failure = record_event(payload, at, sample)
                if failure is not None:
                    return failure
            if on_progress is not None and on_progress(sample):
                return Failure("left", "the client closed the stream on purpose")
        if not sample.finish_reason:
            return Failure("broken stream", "it ended without a finish_reason")
        return None if sample.events else Failure("empty answer", "it has no text")


def record_event(payload: str, at: float, sample: Sample) -> Failure | None:
    """Add one event of the stream to the sample. Return a Failure if the event is wrong, else None.

    payload: the event's data. at: when it arrived.
    """
    if payload == "[DONE]":
        return None
    try:
        chunk = json.loads(payload)
    except (ValueError, RecursionError):
        chunk = None
    if not isinstance(chunk, dict):
        return Failure("bad answer", f"an event is not a JSON object: {payload[:MAX_TEXT]!r}")
    if chunk.get("error"):
        return Failure("broken stream", _message(chunk))
    if isinstance(usage := chunk.get("usage"), dict):
        _record_usage(usage, sample)
    if isinstance(images := _object(chunk.get("fovea")).get("images"), list):
        sample.unreduced_tokens = sum(_unreduced(_object(image)) for image in images)
    choices = chunk.get("choices") or []
    for choice in choices if isinstance(choices, list) else [choices]:
        if not isinstance(choice, dict):
            return Failure("bad answer", f"a choice is not a JSON object: {payload[:MAX_TEXT]!r}")
        delta = _object(choice.get("delta"))
        piece = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if isinstance(piece, str) and piece:
            sample.events.append(at)
            sample.text_pieces.append(piece)
        sample.finish_reason = str(choice.get("finish_reason") or sample.finish_reason)
    return None


def _record_usage(usage: dict[str, Any], sample: Sample) -> None:
    details = _object(usage.get("prompt_tokens_details"))
    sample.tokens = _count(usage.get("completion_tokens"))
    sample.prompt_tokens = _count(usage.get("prompt_tokens"))
    sample.image_tokens = _count(details.get("image_tokens"))
    sample.cached_tokens = _count(details.get("cached_tokens"))


def _unreduced(image: dict[str, Any]) -> int:
    """Visual tokens that an image of this size has if none is left out, as Fovea reports it."""
    return _count(image.get("of")) or _count(image.get("visual_tokens")) or 0


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _json(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return _object(value)


def _error_text(body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())
    return _message(_json(body)) or text[:MAX_TEXT] or "no further message"


def _message(body: dict[str, Any]) -> str:
    """The error message of a body: OpenAI's error envelope, FastAPI's `detail`, or a plain `message`."""
    error = body.get("error", body.get("detail", body.get("message", "")))
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or "").split())[:MAX_TEXT]
