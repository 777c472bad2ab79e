"""Settings of keys and of what they may use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from fovea.core.settings import check_settings, setting

DOCS = ("on", "off", "key")
PAGE = ("on", "off")
_ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")


def check_key(key: str) -> str:
    """Return an empty text if a key is accepted, otherwise the accepted keys in words."""
    return "" if key.strip() else "keys that are not empty"


def check_origin(origin: str) -> str:
    """Return an empty text if an origin is accepted, otherwise the accepted ones in words."""
    known = origin == "*" or _ORIGIN.fullmatch(origin)
    return "" if known else "*, or a scheme and a host in small letters, such as https://example.org:8080"


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Keys, their limits, and the logs about requests."""

    metrics_keys: tuple[str, ...] = setting(
        (), "Keys for /metrics; each opens it, beside the admin keys.", check=check_key, internal=True
    )
    keys_file: Path | None = setting(
        None, "TOML file of hashed keys with their limits; it is read again when it changes. none: no file."
    )
    max_places_per_key: int = setting(
        0,
        "Choices that a client without a limit of its own may have in flight. 0: with several keys, half of "
        "max_running, and at most as many as it leaves free for the others; with one key, no limit.",
        low=0,
        high=1_000_000,
    )
    open_metrics: bool = setting(
        False, "Whether /metrics needs no key although there are keys. For closed networks only."
    )
    docs: str = setting(
        "key",
        "Who may read /docs, /redoc and /openapi.json. key: holders of any key, or everyone if there are no "
        "keys; on: everyone; off: no one.",
        choices=DOCS,
    )
    page: str = setting(
        "on",
        "Whether / is a page to chat with the model, and /admin one that shows what the server does. Their "
        "files need no key; what they ask /v1 and /admin/live for does. off: the pages do not exist.",
        choices=PAGE,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origins of web pages that may call this server from a browser, such as https://example.org; *: all. "
        "Without any, browsers let no other site's pages read an answer.",
        check=check_origin,
    )
    access_log: str = setting(
        "false",
        "A line of JSON per request. true: to the log; a path: to that file; false: none.",
    )

    def __post_init__(self) -> None:
        check_settings(self)
