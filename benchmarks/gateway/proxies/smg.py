"""SMG, the model gateway that was SGLang's router."""

from __future__ import annotations

import importlib.metadata

from proxies.base import PEERS, Proxy, Start, peers_bin


def _command(start: Start) -> list[str]:
    return [
        str(peers_bin("smg")), "launch", "--host", "127.0.0.1", "--port", str(start.port),
        "--worker-urls", *start.backends, "--policy", "cache_aware",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", str(start.spare_port), "--log-level", "warn",
    ]  # fmt: skip


def _version() -> str:
    peers_bin("smg")
    packages = [str(path) for path in PEERS.glob("lib/python3*/site-packages")]
    return next(d.version for d in importlib.metadata.distributions(name="smg", path=packages))


PROXY = Proxy("smg", "SMG", _command, _version, "policy cache_aware, logs warnings only")
