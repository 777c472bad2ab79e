"""The HTTP client of the load generator: it sends requests and records when each part of an answer arrives.

All network traffic of the load generator goes through this module.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from fovea.api import sse
from fovea.bench.dialect import Dialect, negotiate
from fovea.bench.sample import BenchRequest, Failure, Sample
from fovea.bench.settings import Target
from fovea.core.errors import ConfigError, Unavailable

MAX_TEXT = 300
"""Characters of a server's message that are kept in a failure."""
KEEPALIVE_S = 2.0
"""Seconds for which an idle connection is reused.

Servers keep theirs longer, so none is closed while we reuse it.
"""
CONNECT_S = 10.0


class Client:
    """A connection to one server, as an async context manager.

    model, dialect: the model's name and the fields that the server accepts; valid after `connect`.
    running: number of requests that have not ended.
    """

    def __init__(
        self,
        target: Target,
        *,
        clock: Callable[[], float] = time.perf_counter,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.target = target
        self.clock = clock
        self.model = target.model or ""
        self.dialect = Dialect()
        self.running = 0
        # The number of connections is not limited: a client that queues requests itself would hide the
        # server's queue. Proxies from the environment are ignored, because a run would measure them as well.
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {target.api_key}"} if target.api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S
            ),
            trust_env=False,
            verify=target.url.startswith("https:"),  # without TLS, loading certificates would be wasted time
            transport=transport,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

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
        except TimeoutError:
            sample.failure = Failure("timeout", f"no end within {limit:g} s")
        except httpx.TransportError as error:
            sample.failure = _transport_failure(error)
        finally:
            self.running -= 1
        sample.ended_at = self.clock()
        return sample

    async def send_image(self, url: str) -> str:
        """Upload an image to /v1/images and return the URL that names it in later requests.

        url: a data URL. Raises ConfigError if the server does not store the image.
        """
        body = {"url": url, "encode": self.target.images_as == "encoded"}
        answer = await self._call("POST", "/images", json=body)
        name = _json(answer.content).get("url")
        if answer.status_code != 200 or not isinstance(name, str):
            raise ConfigError(
                f"{self.target.url}/images does not take images ({_describe(answer)}); "
                "accepted here: --images-as data",
                param="images_as",
            )
        return name

    async def _find_model(self) -> str:
        answer = await self._call("GET", "/models")
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"the server refuses the API key ({_describe(answer)}); "
                "give it by --api-key or FOVEA_API_KEY",
                param="api_key",
            )
        cards = _json(answer.content).get("data")
        cards = cards if isinstance(cards, list) else []
        served = [card["id"] for card in cards if isinstance(card, dict) and "id" in card]
        if not served:
            if self.target.model:
                return self.target.model
            raise ConfigError(
                f"{self.target.url}/models lists no model ({_describe(answer)}); name one by --model",
                param="model",
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

    async def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return await self._http.request(method, self.target.url + path, **options)
        except httpx.TransportError as error:
            raise Unavailable(f"{self.target.url} cannot be reached: {_reason(error)}") from error

    async def _stream(
        self, request: BenchRequest, sample: Sample, on_progress: Callable[[Sample], bool] | None
    ) -> Failure | None:
        url, body = f"{self.target.url}/chat/completions", self.dialect.body(request, self.model)
        async with self._http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return Failure(f"http {response.status_code}", _error_text(response))
            if "text/event-stream" not in response.headers.get("content-type", ""):
                return Failure("no stream", "the server answers a request for a stream with a whole answer")
            decoder = sse.Decoder()
            async for data in response.aiter_bytes():
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
        return Failure("bad answer", f"an event is no JSON object: {payload[:MAX_TEXT]!r}")
    if chunk.get("error"):
        return Failure("broken stream", _message(chunk))
    if isinstance(usage := chunk.get("usage"), dict):
        _record_usage(usage, sample)
    if isinstance(images := _object(chunk.get("fovea")).get("images"), list):
        sample.unreduced_tokens = sum(_unreduced(_object(image)) for image in images)
    choices = chunk.get("choices") or []
    for choice in choices if isinstance(choices, list) else [choices]:
        if not isinstance(choice, dict):
            return Failure("bad answer", f"a choice is no JSON object: {payload[:MAX_TEXT]!r}")
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


def _describe(response: httpx.Response) -> str:
    return f"{response.status_code}: {_error_text(response)}"


def _error_text(response: httpx.Response) -> str:
    return (
        _message(_json(response.content))
        or " ".join(response.text.split())[:MAX_TEXT]
        or "no further message"
    )


def _message(body: dict[str, Any]) -> str:
    """The error message of a body: OpenAI's error envelope, FastAPI's `detail`, or a plain `message`."""
    error = body.get("error", body.get("detail", body.get("message", "")))
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or "").split())[:MAX_TEXT]


def _reason(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def _transport_failure(error: httpx.TransportError) -> Failure:
    unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    return Failure("unreachable" if unreachable else "broken stream", _reason(error))
