"""Questions to a server that speaks OpenAI's API.

`Web` is the one place through which all HTTP requests of the checks go.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client.parser import text_string_to_metric_families

from fovea.core.errors import EngineError

MAX_BODY = 16 * 1024 * 1024
"""Bytes of an answer that are read. The rest is left out."""


class NoAnswer(Exception):
    """No complete answer came: the connection was refused, ended early, or timed out. The message says why.

    timed_out: whether it was for the time.
    """

    def __init__(self, message: str, *, timed_out: bool = False) -> None:
        super().__init__(message)
        self.timed_out = timed_out


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer. Names of headers are in small letters."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def json(self) -> Any:
        """The body as JSON; None if it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def message(self) -> str:
        """The error message of the body, else the beginning of its text, in one line."""
        value = self.json
        error = value.get("error", value.get("detail", "")) if isinstance(value, dict) else ""
        text = error.get("message", "") if isinstance(error, dict) else error
        return " ".join(str(text or self.body[:200].decode(errors="replace")).split())[:200]


class Web(Protocol):
    """Sends requests and returns whole answers."""

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        timeout: float = 60.0,
        on_data: Callable[[], None] | None = None,
    ) -> Answer:
        """Send a request and read the whole answer. Redirections are not followed.

        body: a JSON value; None: no body.
        timeout: seconds without any data after which the request is given up.
        on_data: called for the headers, and for each piece of the body.
        Raises NoAnswer.
        """
        ...


class HttpWeb:
    """The real network. Proxies of the environment are not used, because servers are near."""

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
        timeout: float = 60.0,
        on_data: Callable[[], None] | None = None,
    ) -> Answer:
        """Send a request; see `Web.request`."""
        import httpx

        try:
            with (
                httpx.Client(trust_env=False, timeout=timeout) as client,
                client.stream(method, url, headers=headers, json=body) as answer,
            ):
                parts, size = [], 0
                if on_data is not None:
                    on_data()
                for part in answer.iter_bytes():
                    if on_data is not None:
                        on_data()
                    size += len(part)
                    if size <= MAX_BODY:
                        parts.append(part)
                return Answer(answer.status_code, b"".join(parts), {**answer.headers})
        except httpx.TimeoutException as error:
            raise NoAnswer(f"no data for {timeout:g} s", timed_out=True) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise NoAnswer(str(error) or type(error).__name__) from error


FEW_TOKENS = 8
"""Tokens of the small requests that may be sent to a live server."""


class Server:
    """A server with its keys.

    url: without a path and without a slash at its end.
    api_key, admin_key, metrics_key: keys of the three roles; empty: none is sent.
    """

    def __init__(
        self, url: str, web: Web, *, api_key: str = "", admin_key: str = "", metrics_key: str = ""
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.web = web
        self.api_key = api_key
        self.admin_key = admin_key or api_key
        self.metrics_key = metrics_key or self.admin_key
        self._card: Mapping[str, Any] | None = None

    def get(self, path: str, key: str | None = None) -> Answer:
        """Return the answer of a path. key: sent as a bearer token; None: the key of API calls.

        Raises NoAnswer.
        """
        return self.web.request("GET", self.url + path, headers=bearer(self.api_key if key is None else key))

    def card(self) -> Mapping[str, Any]:
        """Return what /v1/models tells about the first model. Raises EngineError if it lists none."""
        if self._card is None:
            answer = self.get("/v1/models")
            value = answer.json
            cards = value.get("data") if isinstance(value, dict) else None
            if not isinstance(cards, list) or not cards or not isinstance(cards[0], dict):
                raise EngineError(f"/v1/models lists no model: {answer.status} {answer.message}")
            self._card = cards[0]
        return self._card

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images. Servers that do not tell what it takes are taken to accept them."""
        modalities = self.card().get("input_modalities")
        return not isinstance(modalities, list) or "image" in modalities

    @property
    def is_fovea(self) -> bool:
        """Whether /v1/models says that the server is Fovea."""
        return self.card().get("owned_by") == "fovea"

    def ask(
        self,
        text: str,
        images: Sequence[str] = (),
        *,
        patience: float = 120.0,
        key: str | None = None,
        on_data: Callable[[], None] | None = None,
        **fields: Any,
    ) -> Answer:
        """Send one question to /v1/chat/completions.

        images: their URLs. fields: further fields of the body. key: None: the key of API calls.
        patience: seconds without any data after which the request is given up.
        Raises NoAnswer and EngineError.
        """
        content: Any = text
        if images:
            content = [{"type": "image_url", "image_url": {"url": url}} for url in images]
            content.append({"type": "text", "text": text})
        body = {
            "model": self.card().get("id"),
            "messages": [{"role": "user", "content": content}],
            "max_tokens": FEW_TOKENS,
            "temperature": 0,
        }
        return self.web.request(
            "POST",
            f"{self.url}/v1/chat/completions",
            headers=bearer(self.api_key if key is None else key),
            body=body | fields,
            timeout=patience,
            on_data=on_data,
        )

    def metrics(self) -> dict[str, float]:
        """Return the values of /metrics by name, summed over labels. Raises EngineError without any."""
        answer = self.get("/metrics", self.metrics_key)
        if answer.status != 200:
            raise EngineError(f"/metrics answers {answer.status} {answer.message}")
        return {name: sum(values.values()) for name, values in _samples(answer).items()}

    def stages(self) -> dict[str, float]:
        """Return the seconds that requests have spent in each stage, by the names of the stages."""
        samples = _samples(self.get("/metrics", self.metrics_key)).get("fovea:stage_seconds_sum", {})
        return {dict(labels).get("stage", ""): value for labels, value in samples.items()}

    def caches(self) -> Mapping[str, Mapping[str, float]] | None:
        """Return the figures of each cache of /admin/caches; None: the server does not tell them."""
        try:
            value = self.get("/admin/caches", self.admin_key).json
        except NoAnswer:
            return None
        stages = value.get("stages") if isinstance(value, dict) else None
        return stages if isinstance(stages, dict) else None

    def lives(self) -> bool:
        """Tell whether the server answers a request about its health with 200."""
        try:
            status = self.get("/health").status
            return (self.get("/v1/models").status if status == 404 else status) == 200
        except NoAnswer:
            return False


def bearer(key: str) -> dict[str, str]:
    """Return the headers that carry a key; none for an empty key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def answer_text(answer: Answer) -> str | None:
    """Return the text of a whole chat completion; None if the answer is none."""
    value = answer.json
    try:
        text = value["choices"][0]["message"]["content"]
    except (TypeError, KeyError, IndexError):
        return None
    return text if isinstance(text, str) else None


def usage(answer: Answer) -> Mapping[str, Any]:
    """Return the usage of a chat completion with the details of the prompt in one mapping."""
    value = answer.json
    found = value.get("usage") if isinstance(value, dict) else None
    if not isinstance(found, dict):
        return {}
    details = found.get("prompt_tokens_details")
    return found | (details if isinstance(details, dict) else {})


def _samples(answer: Answer) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    try:
        families = list(text_string_to_metric_families(answer.body.decode(errors="replace")))
    except ValueError as error:
        raise EngineError(f"/metrics is not in Prometheus' format: {error}") from error
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in families:
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found
