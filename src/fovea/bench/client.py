"""The client of the load generator: it sends requests and records when each part of an answer arrives.

All network traffic of the load generator goes through this module.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from fovea.api import sse
from fovea.bench import wire
from fovea.bench.dialect import Dialect, negotiate
from fovea.bench.sample import BenchRequest, Failure, Sample
from fovea.bench.settings import Target
from fovea.core.errors import ConfigError, Unavailable

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
        self._http = wire.open_session(target.api_key)

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
            kind = "unreachable" if wire.is_unreachable(error) else "broken stream"
            sample.failure = Failure(kind, wire.reason(error))
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
                f"{self.target.url}/models lists no model ({answer}); name one by --model",
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

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Answer:
        data, headers = (None, None) if body is None else (wire.json_body(body), JSON)
        url = self.target.url + path
        try:
            async with self._http.request(
                method, url, data=data, headers=headers, allow_redirects=False
            ) as response:
                with wire.EndOfConnection(response):
                    return Answer(response.status, await response.read())
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self.target.url} cannot be reached: {wire.reason(error)}") from error

    async def _stream(
        self, request: BenchRequest, sample: Sample, on_progress: Callable[[Sample], bool] | None
    ) -> Failure | None:
        body = wire.json_body(self.dialect.body(request, self.model))
        async with self._http.post(
            self._chat_url, data=body, headers=JSON, allow_redirects=False
        ) as response:
            with wire.EndOfConnection(response):
                return await self._read(response, sample, on_progress)

    async def _read(
        self,
        response: aiohttp.ClientResponse,
        sample: Sample,
        on_progress: Callable[[Sample], bool] | None,
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


def _error_text(body: bytes) -> str:
    text = " ".join(body.decode(errors="replace").split())
    return _message(_json(body)) or text[:MAX_TEXT] or "no further message"


def _message(body: dict[str, Any]) -> str:
    """The error message of a body: OpenAI's error envelope, FastAPI's `detail`, or a plain `message`."""
    error = body.get("error", body.get("detail", body.get("message", "")))
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or "").split())[:MAX_TEXT]
