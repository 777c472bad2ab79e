"""Settings of the server."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fovea.core.errors import ConfigError
from fovea.core.settings import build_settings, check_settings, setting
from fovea.http.settings import HttpSettings
from fovea.media.limits import MediaLimits
from fovea.observe.logs import LogSettings
from fovea.observe.tracer import TraceSettings

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


@dataclass(frozen=True, slots=True)
class BodySettings:
    """Limits on request bodies."""

    max_body_mib: int = setting(64, "Largest request body, data URLs included.", low=1, high=4096)
    strict_requests: bool = setting(
        False,
        "Refuse requests with unknown fields. Otherwise these are ignored and named in the answer's header "
        "x-fovea-ignored-fields.",
    )
    max_bodies_mib: int = setting(
        256,
        "MiB of all request bodies together that are arriving, or whose images are not read yet.",
        low=1,
        high=1 << 20,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        if self.max_bodies_mib < self.max_body_mib:
            raise ConfigError(
                f"max_bodies_mib is {self.max_bodies_mib}; accepted: at least max_body_mib "
                f"({self.max_body_mib})",
                param="max_bodies_mib",
            )


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The folder of files and batches, its size, and the speed of batches."""

    batch_dir: Path | None = setting(
        None,
        "Folder for /v1/files and /v1/batches. Batches that have not ended go on when the server starts "
        "again. none: both are refused.",
    )
    batch_store_mib: int = setting(
        1024, "Ceiling of all files and results of batches, in MiB.", low=1, high=1 << 20
    )
    batch_file_mib: int = setting(200, "Largest file that is accepted, in MiB.", low=1, high=1 << 20)
    batch_parallel: int = setting(
        4, "Requests of batches that are answered at a time, in all.", low=1, high=1024
    )

    def __post_init__(self) -> None:
        check_settings(self)


MIB = 1024 * 1024
SCOPES = ("shared", "key")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Keys, caches and limits of the HTTP server."""

    api_keys: tuple[str, ...] = setting(
        (), "Keys for /v1; each opens it. Without keys, /v1 is open to all.", check=check_key, internal=True
    )
    admin_keys: tuple[str, ...] = setting(
        (),
        "Keys for /admin; each opens it. Without any, the api_keys open it.",
        check=check_key,
        internal=True,
    )
    role: str = setting("all", "The engine's role.", internal=True)
    peer_key: str = setting("", "Secret of the engines for which this one works.", internal=True)
    cache_scope: str = setting(
        "shared",
        "shared: requests with the same cache_salt share all caches; "
        "key: only requests of one client share them, which is one API key, or all keys of one name in the "
        "keys file.",
        choices=SCOPES,
    )
    drain_seconds: float = setting(
        30.0, "Seconds that running requests have to finish after SIGTERM.", low=0, high=3600
    )
    request_timeout: float = setting(
        600.0, "Timeout of requests that name none, in seconds. 0: none.", low=0, high=86400
    )
    max_renders: int = setting(
        64,
        "Renders (/v1/.../render) that load their images, wait or run at one time, in all; with several "
        "keys, one has half of them at most. 0: renders are refused.",
        low=0,
        high=1_000_000,
    )
    fetch_cache_mib: int = setting(
        128, "Ceiling of the cache of downloaded images and videos, in MiB. 0: no cache.", low=0, high=1 << 20
    )
    fetch_ttl: float = setting(
        3600.0,
        "Longest life of a download in the cache, in seconds; the headers of its host may shorten it.",
        low=1,
        high=2592000,
    )
    decoded_cache_mib: int = setting(
        256, "Ceiling of the cache of decoded images, in MiB. 0: no cache.", low=0, high=1 << 20
    )
    decoded_ttl: float = setting(
        0.0, "Longest life of a decoded image in the cache, in seconds. 0: no limit.", low=0, high=2592000
    )
    image_store_mib: int = setting(
        256,
        "Ceiling of images sent ahead to /v1/images, decoded, in MiB. 0: none are accepted.",
        low=0,
        high=1 << 20,
    )
    image_ttl: float = setting(3600.0, "Life of an image sent ahead, in seconds.", low=1, high=2592000)
    response_store_mib: int = setting(
        64,
        "Ceiling of answers of /v1/responses that are kept to be continued, in MiB. 0: none are kept.",
        low=0,
        high=1 << 20,
    )
    http: HttpSettings = field(default_factory=HttpSettings)
    access: AccessSettings = field(default_factory=AccessSettings)
    bodies: BodySettings = field(default_factory=BodySettings)
    batches: BatchSettings = field(default_factory=BatchSettings)
    logs: LogSettings = field(default_factory=LogSettings)
    traces: TraceSettings = field(default_factory=TraceSettings)
    media: MediaLimits = field(default_factory=MediaLimits)

    @classmethod
    def of(cls, **settings: Any) -> ServerSettings:
        """Settings from flat names: `ServerSettings.of(max_body_mib=8, max_images=4)`. Raises ConfigError."""
        return build_settings(cls, settings)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.cache_scope == "key" and not self.api_keys and self.access.keys_file is None:
            raise ConfigError(
                "cache_scope is 'key', which separates the caches of API keys, and there are no keys",
                param="cache_scope",
            )
