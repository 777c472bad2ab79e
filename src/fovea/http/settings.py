"""Settings of connections."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from fovea.core.errors import ConfigError
from fovea.core.settings import check_settings, setting
from fovea.http.browsers import check_server_name


def _network(text: str) -> str:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return "addresses or networks, such as 10.0.0.7 or 10.0.0.0/8"
    return ""


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits on connections, headers and their times."""

    max_connections: int = setting(
        1024,
        "Open connections. Less if the process may open fewer files; the log then says how many.",
        low=1,
        high=1_000_000,
    )
    max_connections_per_address: int = setting(
        512,
        "Open connections of one client address (of a /64 network with IPv6). 0: no limit.",
        low=0,
        high=1_000_000,
    )
    keep_alive_s: float = setting(
        75.0, "Seconds that a connection may wait for its next request.", low=0.1, high=3600
    )
    header_timeout_s: float = setting(
        10.0,
        "Seconds that a client has for its TLS handshake, and for the request line and the headers.",
        low=0.1,
        high=3600,
    )
    body_timeout_s: float = setting(
        30.0,
        "Seconds that a client may be silent, or behind least_rate_kib, while it sends a body.",
        low=0.1,
        high=3600,
    )
    write_timeout_s: float = setting(
        30.0,
        "Seconds that a client may read nothing of its answer, or be behind least_rate_kib, before it is "
        "disconnected.",
        low=0.1,
        high=3600,
    )
    least_rate_kib: int = setting(
        64,
        "KiB per second that a slow client has to send of a body, or to read of an answer, in the long run.",
        low=1,
        high=1 << 20,
    )
    max_header_kib: int = setting(64, "Request line and headers, in KiB.", low=1, high=1024)
    max_headers: int = setting(100, "Headers of a request.", low=1, high=10_000)
    max_url_kib: int = setting(16, "Target of a request, with its query, in KiB.", low=1, high=1024)
    lame_duck_s: float = setting(
        5.0,
        "Seconds after SIGTERM in which the port stays open and refuses requests with 503, so that load "
        "balancers see it.",
        low=0,
        high=3600,
    )
    tls_cert: Path | None = setting(
        None, "PEM file of the TLS certificate and its chain; none: plain HTTP. It needs tls_key."
    )
    tls_key: Path | None = setting(None, "PEM file of the private key of tls_cert, without a password.")
    trusted_proxies: tuple[str, ...] = setting(
        (),
        "Addresses or networks of proxies. Their X-Forwarded-For names the client, and they may open any "
        "number of connections.",
        check=_network,
    )

    server_names: tuple[str, ...] = setting(
        (),
        "Names under which clients reach this server, such as vlm.example.com; *.example.com: all names "
        "below example.com; *: all. Without API keys, requests for other names are refused, except for "
        "localhost and IP addresses.",
        check=check_server_name,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("tls_cert", "tls_key") if self.tls_key is None else ("tls_key", "tls_cert")
            raise ConfigError(f"{given} is set and {missing} is not; TLS needs both", param=missing)
