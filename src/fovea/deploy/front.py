"""The proxy in front of a deployment, for NGINX, HAProxy and Envoy, and the public paths of all targets.

All three keep the same rules:

- Only the paths below are public. /admin, /metrics and everything else answers 404. Istio and the Gateway API
  pass the same paths on.
- With TLS, plain HTTP is answered with the address under HTTPS, and clients may use HTTP/2.
- Answers are passed on byte by byte, without a buffer and without a cache.
- A request is sent to another server if no byte of it was sent, or if the server refused it with 503, which
  Fovea does while it stops, before it works on a request. It is never sent again after that, because it may
  cost money twice.
- A proxy waits longer than the server's own limit, so that clients get the server's error.
- Errors of the proxy itself have OpenAI's form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from fovea.deploy.machine import Server
from fovea.deploy.spec import DeploySpec, whole_number
from fovea.deploy.target import CERTIFICATES

EXACT = ("/", "/health", "/ping", "/ready", "/version", "/tokenize", "/detokenize")
FOLDERS = ("/v1", "/ui")
"""Public paths: EXACT, and each of FOLDERS with everything below it. "/" and /ui/ are the chat page."""

CERTIFICATE, PRIVATE_KEY = f"{CERTIFICATES}/tls.crt", f"{CERTIFICATES}/tls.key"
PATIENCE_S = 10
"""Seconds that a proxy waits longer than the servers' own limit."""
CONNECT_S = 2
"""Seconds to connect to a server."""
KEEP_ALIVE_S = 60
"""Seconds for which an idle connection to a server is kept: less than `keep_alive_s`, 75, of the servers."""
HEADER_KIB, URL_KIB, HEADERS = 64, 16, 100
"""Largest head of a request, largest target, most headers: the defaults of Fovea."""
HEADER_S, BODY_S, WRITE_S = 10, 30, 30
"""Seconds in which the head of a request must arrive, and between two parts of a body or an answer."""
CONNECTIONS_PER_ADDRESS = 512


def is_public(path: str) -> bool:
    """Tell whether clients may reach a path."""
    return path in EXACT or any(path == each or path.startswith(f"{each}/") for each in FOLDERS)


ERRORS: dict[int, tuple[str, str, str]] = {
    400: ("invalid_request_error", "malformed_http", "this is not a valid HTTP request"),
    404: ("invalid_request_error", "unknown_url", "there is no such path at this address"),
    408: ("invalid_request_error", "body_timeout", "the request did not arrive in time"),
    413: ("invalid_request_error", "payload_too_large", "the request is larger than {body} MiB"),
    429: ("rate_limit_error", "too_many_connections", "this address has too many requests in flight"),
    431: (
        "invalid_request_error",
        "headers_too_large",
        "the headers are larger than {header} KiB, or the path is larger than {url} KiB",
    ),
    502: ("api_error", "bad_gateway", "the server ended before it answered; the request may be sent again"),
    503: ("api_error", "unavailable", "no server accepts requests; try again later"),
    504: ("api_error", "timeout", "the server did not answer in time"),
}
"""Errors of the proxy itself: type, code and message, by status."""


@dataclass(frozen=True, slots=True)
class Front:
    """A proxy.

    servers: gateways or engines behind it.
    address: address that it listens on; "": all.
    port: port that it listens on.
    public_port: port that clients use.
    redirect: port on which plain HTTP is sent to HTTPS; 0: none.
    ipv6: whether it listens on IPv6, too, if it listens on all addresses.
    host: name under which clients reach it.
    body_mib: largest body, in MiB.
    answer_s: seconds after which servers cut an answer.
    per_address: most requests of one client address at a time; 0: no limit.
    own_proxies: addresses and networks of the operator's proxies, which have no such limit: each brings the
        requests of many clients.
    tls: whether it ends TLS.
    """

    servers: tuple[Server, ...]
    address: str
    port: int
    public_port: int
    redirect: int
    ipv6: bool
    host: str
    body_mib: int
    answer_s: int
    per_address: int
    own_proxies: tuple[str, ...]
    tls: bool

    def listens(self, port: int) -> list[str]:
        """Return the addresses with a port, an IPv6 address in brackets."""
        if self.address:
            return [f"{self.address}:{port}"]
        return [f"0.0.0.0:{port}", *([f"[::]:{port}"] if self.ipv6 else [])]

    @property
    def https_port(self) -> str:
        """The port as a part of a URL of HTTPS."""
        return "" if self.public_port == 443 else f":{self.public_port}"

    @property
    def read_s(self) -> int:
        """Seconds that the proxy waits for the next byte of an answer."""
        return self.answer_s + PATIENCE_S

    @property
    def errors(self) -> dict[int, str]:
        """The bodies of the proxy's own errors, by status."""
        limits = {"body": self.body_mib, "header": HEADER_KIB, "url": URL_KIB}
        return {
            status: json.dumps(
                {"error": {"message": message.format(**limits), "type": kind, "param": None, "code": code}}
            )
            for status, (kind, code, message) in ERRORS.items()
        }


def redirects(spec: DeploySpec) -> bool:
    """Tell whether a spec wants plain HTTP to be sent to HTTPS."""
    return spec.tls and bool(spec.redirect_port)


def front_of(
    spec: DeploySpec,
    servers: Sequence[Server],
    *,
    address: str = "",
    port: int | None = None,
    redirect: int | None = None,
) -> Front:
    """Return the proxy of a spec.

    servers: the servers behind it.
    port, redirect: ports that it listens on; None: the spec's.
    """
    own = spec.gateway.settings if spec.gateway is not None else spec.pools[0].settings
    return Front(
        servers=tuple(servers),
        address=address,
        port=spec.public_port if port is None else port,
        public_port=spec.public_port,
        redirect=(spec.redirect_port if redirect is None else redirect) if redirects(spec) else 0,
        ipv6=spec.ipv6,
        host=spec.host,
        body_mib=spec.max_body_mib,
        answer_s=spec.max_answer_s,
        per_address=whole_number(own, "max_connections_per_address", CONNECTIONS_PER_ADDRESS),
        own_proxies=tuple(spec.trusted_proxies),
        tls=spec.tls,
    )
