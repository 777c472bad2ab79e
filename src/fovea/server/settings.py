"""All settings of the server. Frozen after construction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fovea.core.errors import ConfigError
from fovea.core.settings import build_settings, check_settings, setting
from fovea.http.settings import HttpSettings
from fovea.media.limits import MediaLimits
from fovea.observe.log_settings import LogSettings
from fovea.observe.tracing.settings import TraceSettings
from fovea.server.access.settings import AccessSettings, check_key
from fovea.server.batches.settings import BatchSettings
from fovea.server.bodies.settings import BodySettings

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
