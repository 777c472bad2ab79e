"""The request as one backend gets it, and the headers that tell the client which backend answered.

What is written for a backend: the model's name there, fewer visual tokens under load, and a question for
usage.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from fovea.core.errors import InvalidRequest
from fovea.core.names import KEY_HEADER
from fovea.gateway.backends.backend import Backend
from fovea.gateway.config import ModelConfig
from fovea.gateway.generate.dispatch import Won
from fovea.gateway.generate.upstream import Outgoing
from fovea.gateway.inspect.body import Body
from fovea.gateway.inspect.demand import Demand
from fovea.gateway.inspect.fields import media_parts

PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}
PASSED_ON = (
    b"traceparent", b"tracestate", b"x-session-id", KEY_HEADER.encode(), b"anthropic-version",
    b"anthropic-beta",
)  # fmt: skip
"""Headers of a client's request that are passed on to the backend. Keys are never passed on."""
LONGEST_HEADER = 1024
"""Most bytes of a header that is passed on. Some engines refuse requests with more than 8 KiB of headers."""
DEGRADED_PIXELS = {"medium": 512 * 512, "low": 256 * 256}
"""Pixels of an image for backends that know no detail levels."""
OWN_HEADERS = frozenset(
    f"x-fovea-{name}"
    for name in ("backend", "route", "model", "attempts", "fallback", "degraded", "cache", "experiment")
)
"""Headers that only the gateway itself may set."""
MOST_BYTES = 8192
"""Bytes of names and values that are passed on of a backend's headers, all together."""
MOST_HEADERS = 16
"""Headers of a backend's answer that are passed on at most. Proxies in front of the gateway have limits."""


def check_headers(headers: Mapping[bytes, bytes]) -> None:
    """Raise InvalidRequest if a header that backends get has more than LONGEST_HEADER bytes."""
    for name in PASSED_ON:
        if len(headers.get(name, b"")) > LONGEST_HEADER:
            raise InvalidRequest(
                f"the header {name.decode()} has {len(headers[name])} bytes; "
                f"accepted: at most {LONGEST_HEADER} bytes",
                param=name.decode(),
                code="header_too_long",
            )


def client_header(tenant: str) -> dict[str, str]:
    """Return the header by which an engine tells tenants apart, so that they take turns.

    They share the gateway's key. It is a hash, because an engine need not know who they are.
    """
    digest = hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()
    return {"x-fovea-client": digest} if tenant else {}


def key_header(demand: Demand, headers: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return the header with the routing key of a request: of its image, its session, or its beginning.

    It is a hash, because clients choose parts of a key. A client that has set the header itself keeps it.
    """
    if KEY_HEADER.encode() in headers:
        return {}
    _, key = next(demand.keys())
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return {KEY_HEADER: digest}


class Renderer:
    """Writes one request for any backend.

    degraded: the detail level to which images without one of their own are lowered; "": none.
    adds_usage: whether the gateway asks for the usage event, for which the client did not ask.
    """

    def __init__(
        self,
        body: Body,
        api: str,
        headers: Mapping[bytes, bytes],
        request_id: str,
        own: Mapping[str, str] | None = None,
    ) -> None:
        """api: the API as which the request is sent. headers: of the client's request.

        own: headers of the gateway, which replace those of the client.
        """
        self._body = body
        self._api = api
        self._headers = {
            "content-type": "application/json",
            "x-request-id": request_id,
            **{name.decode(): headers[name].decode("latin-1") for name in PASSED_ON if name in headers},
            **(own or {}),
        }
        self.degraded = ""
        options = body.value.get("stream_options")
        asks = isinstance(options, dict) and options.get("include_usage") is True
        streams = body.value.get("stream") is True and api in ("chat", "completions")
        self.adds_usage = streams and not asks
        self._done: dict[tuple[str, str], Outgoing] = {}

    def __call__(self, backend: Backend, model: ModelConfig) -> Outgoing:
        """Return the request for a backend and a model."""
        key = (model.served or model.name, backend.degrade if self.degraded else "")
        if key not in self._done:
            self._done[key] = self._write(*key)
        return self._done[key]

    def drop(self) -> None:
        """Forget the body. No further backend gets the request."""
        self._done.clear()
        self._body.drop()

    def _write(self, name: str, degrade: str) -> Outgoing:
        value: dict[str, Any] = {**self._body.value, "model": name}
        if self.adds_usage:
            options = value.get("stream_options")
            value["stream_options"] = {
                **(options if isinstance(options, dict) else {}),
                "include_usage": True,
            }
        if degrade == "max-pixels":
            known = value.get("mm_processor_kwargs")
            limits = {"max_pixels": DEGRADED_PIXELS[self.degraded]}
            value["mm_processor_kwargs"] = {**limits, **(known if isinstance(known, dict) else {})}
        elif degrade == "detail":
            value = lowered(value, self.degraded)
        pieces = tuple(self._body.with_value(value).pieces())
        return Outgoing(PATHS[self._api], pieces, self._headers)


def lowered(value: dict[str, Any], detail: str) -> dict[str, Any]:
    """Return a body whose images ask for a lower detail level, unless they name their own level or limits."""
    changed: dict[int, dict[str, Any]] = {}
    for part in media_parts(value, check=False):
        own = part.owner if part.key == "url" else part.part
        if part.is_video or part.bare or any(own.get(name) for name in ("min_pixels", "max_pixels")):
            continue
        if own.get("detail") not in (None, "auto") or "visual_tokens" in value:
            continue
        if part.owner is part.part.get("image_url"):
            changed[id(part.owner)] = {**part.owner, "detail": detail}
        elif part.part.get("type") == "input_image":
            changed[id(part.part)] = {**part.part, "detail": detail}
    copied: dict[str, Any] = _replace(value, changed)
    return copied


def _replace(node: Any, changed: Mapping[int, dict[str, Any]]) -> Any:
    """Return a value with some of its objects replaced. Others are shared, not copied, where possible."""
    if isinstance(node, dict):
        if id(node) in changed:
            return changed[id(node)]
        return {name: _replace(entry, changed) for name, entry in node.items()}
    if isinstance(node, list):
        return [_replace(entry, changed) for entry in node]
    return node


def headers_of(won: Won, wanted: ModelConfig, attempts: int, degraded: str, cache: str) -> dict[str, str]:
    """Return the headers of a backend's answer, those of the backend that are passed on among them.

    wanted: the model that the client asked for. attempts: backends that were asked.
    degraded: the detail level to which images were lowered; "": they were not.
    cache: result of the response cache; "": it had no part.
    """
    passed: dict[str, str] = {}
    room = MOST_BYTES
    for name, value in won.answer.headers:
        if name.startswith("x-fovea-") and name not in OWN_HEADERS and len(name) + len(value) <= room:
            passed[name] = value
            room -= len(name) + len(value)
        if len(passed) == MOST_HEADERS:
            break
    own = {
        "x-fovea-backend": won.backend.name,
        "x-fovea-route": won.reason,
        "x-fovea-model": won.model.name,
        "x-fovea-attempts": str(attempts) if attempts > 1 else "",
        "x-fovea-fallback": f"{wanted.name} -> {won.model.name}" if won.model is not wanted else "",
        "x-fovea-degraded": f"detail={degraded}" if degraded and won.backend.degrade != "off" else "",
        "x-fovea-cache": cache,
    }
    return passed | {name: value for name, value in own.items() if value}
