"""The seam through which all HTTP requests of the checks go."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

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
