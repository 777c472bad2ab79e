"""Answers the lines of a batch by engines over HTTP: one URL, of a gateway, of a cluster, or of one engine.

A request is sent again when the reason lies with the engines and not with the line. What happens then:

    200                         the answer
    429, 503, no connection     sent again after a pause; when no request of this worker has got an answer for
                                `patience_s`, the run stops. Nothing is written for the line
    500, 502, 504, cut off,     sent again, ATTEMPTS times in all; then the line is an error
    no answer in time
    401, 403, 404               the run stops: the key, the URL or the model is wrong, for every line
    other statuses              the line is an error, with the engine's message
"""

from __future__ import annotations

import asyncio
import base64
import json
import mimetypes
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

from fovea.api.questions import ImageOpener, Stopped, answer_body, answer_line, image_names, map_images
from fovea.bench.client import is_unreachable, reason
from fovea.core.errors import EngineError, FoveaError, InvalidRequest
from fovea.core.media import PixelBudget
from fovea.core.sampling import SamplingParams

ATTEMPTS = 5
LONGEST_PAUSE_S = 30.0
FIRST_PAUSE_S = 0.5
BUSY, REFUSED, FAILED = (429, 503), (401, 403, 404), (500, 502, 504)
OWN_FIELDS = ("messages", "model", "stream", "stream_options")
"""Fields of a request that `params` of a line cannot set."""
READERS = 64
"""Most images that are read at the same time."""


class Reply(NamedTuple):
    """An answer over HTTP. retry_after: seconds that it asks to wait, or None."""

    status: int
    body: bytes
    retry_after: float | None = None


class Unreachable(Exception):
    """There was no whole answer. connected: whether the request had reached a server."""

    def __init__(self, message: str, *, connected: bool) -> None:
        super().__init__(message)
        self.connected = connected


Send = Callable[[str, bytes | None], Awaitable[Reply]]
"""Sends a body to a path, by POST, or by GET if it is None. Raises Unreachable."""


@dataclass(frozen=True)
class HttpOptions:
    """How requests are made of lines. It travels to workers.

    url: base URL. key: bearer token; None: none is sent.
    model: name of the model; None: the first one that the server lists.
    params: fields of every request, with their names over HTTP.
    detail: level of every image; "auto" is not sent.
    prompt: the question of lines that have none.
    in_flight: most requests of a worker at the same time.
    timeout_s: seconds for one request.
    patience_s: seconds without any answer after which the run stops.
    """

    url: str
    key: str | None = None
    model: str | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    detail: str = "auto"
    prompt: str | None = None
    in_flight: int = 64
    timeout_s: float = 600.0
    patience_s: float = 600.0


def http_params(sampling: Mapping[str, Any], budget: PixelBudget) -> dict[str, Any]:
    """Return fields of a chat request for parameters of the command line.

    sampling: values of SamplingParams. budget: of the images; its detail level is not among the fields.
    """
    SamplingParams(**sampling)
    fields = {name: value for name, value in sampling.items() if name != "format"}
    form = sampling.get("format")
    if form is not None:
        parsed = form.definition if form.kind in ("regex", "grammar") else json.loads(form.definition)
        fields["structured_outputs"] = {form.kind: parsed}
    if budget.max_pixels is not None:
        fields["max_pixels"] = budget.max_pixels
    return fields


class HttpRunner:
    """Turns lines of questions into lines of answers, with engines over HTTP.

    images: returns the bytes of an image for its name in a line. Raises InvalidImage.
    send: the only way to the network. clock, sleep: time, which tests replace.
    """

    def __init__(
        self,
        options: HttpOptions,
        images: Callable[[str], bytes],
        send: Send,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._options = options
        self._images = images
        self._send = send
        self._clock = clock
        self._sleep = sleep
        self._places = asyncio.Semaphore(options.in_flight)
        self._threads = ThreadPoolExecutor(min(options.in_flight, READERS))
        self._model = options.model
        self._model_lock = asyncio.Lock()
        self._answered_at = clock()

    async def answer(self, number: int, line: bytes) -> dict[str, Any]:
        """Return the answer to a line, or its error. Raises Stopped if no engine answers."""
        async with self._places:
            return await answer_line(number, line, self._options.prompt, self._ask)

    async def _ask(self, value: dict[str, Any]) -> dict[str, Any]:
        model = await self._find_model()
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._threads, self._body, value, model)
        text = await self._post("/v1/chat/completions", body)
        try:
            answer = json.loads(text)
            choices = sorted(answer["choices"], key=lambda choice: choice.get("index", 0))
            texts = [choice["message"]["content"] for choice in choices]
            return answer_body(
                texts, [choice.get("finish_reason") for choice in choices], answer.get("usage")
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise EngineError("the engine's answer is not a chat completion") from error

    def _body(self, value: Mapping[str, Any], model: str) -> bytes:
        params = value.get("params", {})
        wrong = next((name for name in OWN_FIELDS if name in params), None)
        if wrong is not None:
            raise InvalidRequest(f"params.{wrong} cannot be set in a batch", param="params")
        opener = ImageOpener(self._images)
        if "messages" in value:
            messages = map_images(value["messages"], lambda name: self._image(name, opener.open(name)))
        else:
            parts = [self._image(name, opener.open(name)) for name in image_names(value)]
            messages = [{"role": "user", "content": [*parts, {"type": "text", "text": value["question"]}]}]
        request = {**self._options.params, **params, "model": model, "messages": messages}
        return json.dumps(request).encode()

    def _image(self, name: str, data: bytes) -> dict[str, Any]:
        kind = mimetypes.guess_type(name)[0] or "image/png"
        image = {"url": f"data:{kind};base64,{base64.b64encode(data).decode()}"}
        if self._options.detail != "auto":
            image["detail"] = self._options.detail
        return {"type": "image_url", "image_url": image}

    async def _find_model(self) -> str:
        if self._model is None:
            async with self._model_lock:
                if self._model is None:
                    self._model = await self._first_model()
        return self._model

    async def _first_model(self) -> str:
        try:
            return str(json.loads(await self._post("/v1/models", None))["data"][0]["id"])
        except (FoveaError, ValueError, TypeError, LookupError) as error:
            reason = error.message if isinstance(error, FoveaError) else "its list of models has another form"
            raise Stopped(
                f"{self._options.url} names no model: {reason}; --model can name it instead"
            ) from error

    async def _post(self, path: str, body: bytes | None) -> bytes:
        """Send a request until it is answered. Raises Stopped, or FoveaError for an error of the line."""
        failures, pause = 0, FIRST_PAUSE_S
        while True:
            try:
                reply = await self._send(path, body)
            except Unreachable as error:
                status, cause, wait = 0, str(error), None
                failures += error.connected
            else:
                status, cause, wait = reply.status, _message(reply), reply.retry_after
                failures += status in FAILED
                if status == 200:
                    self._answered_at = self._clock()
                    return reply.body
                if status in REFUSED:
                    raise Stopped(f"{self._options.url} answers {status}: {cause}")
                if status not in BUSY and status not in FAILED:
                    self._answered_at = self._clock()
                    raise _line_error(reply)
            if failures >= ATTEMPTS:
                raise EngineError(f"{ATTEMPTS} attempts failed, the last one: {cause}")
            self._check_patience(cause)
            await self._sleep(pause if wait is None else min(wait, LONGEST_PAUSE_S))
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _check_patience(self, cause: str) -> None:
        silent_s = self._clock() - self._answered_at
        if silent_s > self._options.patience_s:
            raise Stopped(f"{self._options.url} has answered no request for {silent_s:.0f} s: {cause}")


def _error(reply: Reply) -> dict[str, Any]:
    """Return the error in a body; an empty one if it has another form."""
    try:
        error = json.loads(reply.body)["error"]
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}
    return error if isinstance(error, dict) else {"message": str(error)}


def _message(reply: Reply) -> str:
    message = _error(reply).get("message")
    return str(message) if message else f"status {reply.status} without a message"


def _line_error(reply: Reply) -> FoveaError:
    """Return a refusal as the error of the line, with the engine's words and names."""
    found = _error(reply)
    error = InvalidRequest(_message(reply), param=found.get("param"), code=found.get("code"))
    if isinstance(found.get("type"), str):
        error.kind = found["type"]
    return error


class HttpClient:
    """Sends requests to one base URL, by aiohttp. For one event loop."""

    def __init__(self, options: HttpOptions) -> None:
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if options.key:
            headers["Authorization"] = f"Bearer {options.key}"
        self._url = options.url.rstrip("/").removesuffix("/v1")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=options.timeout_s, connect=10.0),
        )

    async def send(self, path: str, body: bytes | None) -> Reply:
        """Send a request, see `Send`. Redirections are not followed: the key is for this server alone."""
        method = "GET" if body is None else "POST"
        try:
            async with self._session.request(
                method, self._url + path, data=body, allow_redirects=False
            ) as response:
                return Reply(
                    response.status, await response.read(), _seconds(response.headers.get("retry-after"))
                )
        except aiohttp.ClientError as error:
            raise Unreachable(reason(error), connected=not is_unreachable(error)) from error
        except TimeoutError as error:
            raise Unreachable("no answer in time", connected=True) from error
        except OSError as error:
            raise Unreachable(str(error), connected=False) from error

    async def close(self) -> None:
        await self._session.close()


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else max(0.0, float(text))
    except ValueError:
        return None  # a date, which no engine sends
