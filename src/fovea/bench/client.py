"""Asks an OpenAI-compatible server and notes when what came. All network traffic of the load generator goes through here."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx

from fovea.api import sse
from fovea.bench.dialect import Dialect, negotiate
from fovea.bench.sample import Ask, Failure, Sample
from fovea.bench.settings import Target
from fovea.core.errors import ConfigError, Unavailable

SHOWN = 300
KEEPALIVE_S = 2.0
"""Less than servers keep an idle connection: one that is about to be closed is not used again."""
CONNECT_S = 10.0


class Client:
    """An async context. `model` and `dialect` are known after `connect`. running: requests that have no end yet."""

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
        # As many connections as there are requests: a client that queues them itself would hide the server's queue.
        # Proxies of the environment are not used: a run would measure them, too.
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {target.api_key}"} if target.api_key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_S),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_S
            ),
            trust_env=False,
            verify=target.url.startswith("https:"),  # else certificates would be loaded for nothing
            transport=transport,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def connect(self) -> None:
        """Find the model and what the server understands. Raises Unavailable or ConfigError saying what is wrong."""
        self.model = await self._find_model()
        self.dialect, _ = await negotiate(self._probe)

    async def ask(
        self, ask: Ask, due: float | None = None, heard: Callable[[Sample], bool] | None = None
    ) -> Sample:
        """Send a request and follow its stream. Whatever goes wrong is the sample's `failure`.

        due: when it was to be sent; now, unless said. heard: told of progress; when it returns True, the stream is left.
        """
        now = self.clock()
        sample = Sample(now if due is None else due, ask.label, ask.images, ask.max_tokens, sent=now)
        limit = self.target.timeout if ask.timeout is None else min(ask.timeout, self.target.timeout)
        self.running += 1
        try:
            async with asyncio.timeout(max(0.0, sample.scheduled + limit - now)):
                sample.failure = await self._stream(ask, sample, heard)
        except TimeoutError:
            sample.failure = Failure("timeout", f"no end within {limit:g} s")
        except httpx.TransportError as error:
            sample.failure = _transport(error)
        finally:
            self.running -= 1
        sample.ended = self.clock()
        return sample

    async def send_image(self, url: str) -> str:
        """A data URL to /v1/images; what the image is called there. Raises ConfigError."""
        body = {"url": url, "encode": self.target.images_as == "encoded"}
        answer = await self._call("POST", "/images", json=body)
        name = _json(answer.content).get("url")
        if answer.status_code != 200 or not isinstance(name, str):
            raise ConfigError(
                f"{self.target.url}/images does not take images ({_said(answer)}); accepted here: --images-as data",
                param="images_as",
            )
        return name

    async def _find_model(self) -> str:
        answer = await self._call("GET", "/models")
        if answer.status_code in (401, 403):
            raise ConfigError(
                f"the server refuses the API key ({_said(answer)}); give it by --api-key or FOVEA_API_KEY",
                param="api_key",
            )
        listed = _json(answer.content).get("data")
        served = [card["id"] for card in listed if "id" in card] if isinstance(listed, list) else []
        if not served:
            if self.target.model:
                return self.target.model
            raise ConfigError(
                f"{self.target.url}/models lists no model ({_said(answer)}); name one by --model",
                param="model",
            )
        if self.target.model and self.target.model not in served:
            raise ConfigError(
                f"the server has no model {self.target.model!r}; served: {', '.join(served)}", param="model"
            )
        return self.target.model or str(served[0])

    async def _probe(self, dialect: Dialect) -> Sample:
        self.dialect = dialect
        return await self.ask(Ask(({"role": "user", "content": "Say something."},), max_tokens=4))

    async def _call(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            return await self._http.request(method, self.target.url + path, **options)
        except httpx.TransportError as error:
            raise Unavailable(f"{self.target.url} can not be reached: {_reason(error)}") from error

    async def _stream(
        self, ask: Ask, sample: Sample, heard: Callable[[Sample], bool] | None
    ) -> Failure | None:
        url, body = f"{self.target.url}/chat/completions", self.dialect.body(ask, self.model)
        async with self._http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return Failure(f"http {response.status_code}", _words(response))
            if "text/event-stream" not in response.headers.get("content-type", ""):
                return Failure("no stream", "the server answers a request for a stream with a whole answer")
            decoder = sse.Decoder()
            async for data in response.aiter_bytes():
                at = self.clock()
                for payload in decoder.feed(data):
                    failure = note(payload, at, sample)
                    if failure is not None:
                        return failure
                if heard is not None and heard(sample):
                    return Failure("left", "the client had heard enough")
        if not sample.finish:
            return Failure("broken stream", "it ended without a finish_reason")
        return None if sample.events else Failure("empty answer", "it has no text")


def note(payload: str, at: float, sample: Sample) -> Failure | None:
    """Enter one event of the stream into the sample; or what is wrong with it."""
    if payload == "[DONE]":
        return None
    try:
        chunk = json.loads(payload)
    except ValueError:
        chunk = None
    if not isinstance(chunk, dict):
        return Failure("bad answer", f"an event is no JSON object: {payload[:SHOWN]!r}")
    if chunk.get("error"):
        return Failure("broken stream", _message(chunk))
    if isinstance(usage := chunk.get("usage"), dict):
        _note_usage(usage, sample)
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or {}
        piece = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        if piece:
            sample.events.append(at)
            sample.text.append(piece)
        sample.finish = choice.get("finish_reason") or sample.finish
    return None


def _note_usage(usage: dict[str, Any], sample: Sample) -> None:
    details = usage.get("prompt_tokens_details") or {}
    sample.tokens = usage.get("completion_tokens")
    sample.prompt_tokens = usage.get("prompt_tokens")
    sample.image_tokens = details.get("image_tokens")
    sample.cached_tokens = details.get("cached_tokens")


def _json(content: bytes) -> dict[str, Any]:
    try:
        value = json.loads(content)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _said(response: httpx.Response) -> str:
    return f"{response.status_code}: {_words(response)}"


def _words(response: httpx.Response) -> str:
    return _message(_json(response.content)) or " ".join(response.text.split())[:SHOWN] or "no more is said"


def _message(body: dict[str, Any]) -> str:
    """OpenAI's error body, or FastAPI's `detail`."""
    error = body.get("error", body.get("detail", body.get("message", "")))
    words = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(words or "").split())[:SHOWN]


def _reason(error: httpx.TransportError) -> str:
    return str(error) or type(error).__name__


def _transport(error: httpx.TransportError) -> Failure:
    unreachable = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
    return Failure("unreachable" if unreachable else "broken stream", _reason(error))
