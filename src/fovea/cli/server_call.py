"""Sends a request to a running server or gateway."""

from __future__ import annotations

from fovea.core.errors import ConfigError

TIMEOUT_S = 70.0
"""Seconds without any data after which a request is given up."""


def call_server(url: str, path: str, *, method: str = "GET", key: str = "") -> tuple[int, bytes]:
    """Return the status and the body of the answer, whatever the status is.

    url: of the server. path: of the route.
    key: sent as a bearer token; "": none is sent.
    Raises ConfigError, with the reason, if there is no answer.
    """
    from http.client import HTTPException

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        return _send(method, url.rstrip("/") + path, headers)
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ConfigError(f"no server answers at {url}: {reason}", param="url") from error


def _send(method: str, url: str, headers: dict[str, str]) -> tuple[int, bytes]:
    """Send a request. Redirections are not followed: the key is for this server alone."""
    from urllib import request

    opener = request.OpenerDirector()
    for handler in (request.ProxyHandler, request.HTTPHandler, request.HTTPSHandler, request.UnknownHandler):
        opener.add_handler(handler())
    with opener.open(request.Request(url, method=method, headers=headers), timeout=TIMEOUT_S) as answer:
        return answer.status, answer.read()
